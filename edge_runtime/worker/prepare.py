"""Turn a submitted request into a sequence, or refuse it before the engine does any work. No slots, no frames."""

from __future__ import annotations

from edge_runtime.errors import RequestError
from edge_runtime.manifest import Manifest
from edge_runtime.serving.sequence import Sequence
from edge_runtime.session.detokenizer import Detokenizer
from edge_runtime.session.sampling import Sampler, SamplingParams
from edge_runtime.session.stops import StopFilter, check_stops
from edge_runtime.session.text import TextCodec
from edge_runtime.worker.frames import Submit


def prepare(submit: Submit, codec: TextCodec | None, manifest: Manifest) -> Sequence:
    """Return the sequence of a request.

    Raises:
        RequestError: `context_length_exceeded` when prompt and `max_tokens` do not fit a slot together,
            `invalid_request` for what the model, its template or the sampler refuses.
    """
    if codec is None:
        raise RequestError(
            "invalid_request",
            f"model {manifest.model.name} has no tokenizer in its engine folder and can't take text; "
            "build the engine again from a checkpoint with a tokenizer",
            param=_input_field(submit),
        )
    sampler = _sampler(submit, manifest)
    stops = check_stops(submit.stop)
    prompt = _prompt_ids(submit, codec)
    _check_fit(len(prompt), submit, manifest.geometry.capacity)
    sampler.observe(prompt)
    return Sequence(
        key=submit.key,
        prompt=prompt,
        sampler=sampler,
        detokenizer=Detokenizer(codec),
        stops=StopFilter(stops),
        stop_ids=codec.eos_ids | codec.stop_ids(stops),
        max_tokens=submit.max_tokens,
        capacity=manifest.geometry.capacity,
    )


def _sampler(submit: Submit, manifest: Manifest) -> Sampler:
    params = SamplingParams(temperature=submit.temperature, top_k=submit.top_k, top_p=submit.top_p, seed=submit.seed)
    return Sampler(params, manifest.model.known_ids, manifest.geometry.vocab)


def _prompt_ids(submit: Submit, codec: TextCodec) -> list[int]:
    if submit.messages is not None:
        ids = codec.encode_chat(submit.messages)
    elif submit.prompt is not None:
        ids = codec.encode(submit.prompt)
    else:
        raise RequestError("invalid_request", "neither messages nor prompt is given; send one", param="$.messages")
    if not ids:
        raise RequestError("invalid_request", "the prompt gives no tokens; send some text", param=_input_field(submit))
    return ids


def _check_fit(num_prompt: int, submit: Submit, capacity: int) -> None:
    """Refuse what can't end well: the prompt is never cut, and an answer is never promised more rows than there are."""
    if submit.max_tokens < 1:
        raise RequestError(
            "invalid_request", f"max_tokens is {submit.max_tokens}: at least 1 is needed", param="$.max_tokens"
        )
    if num_prompt + 1 > capacity:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens, the context holds {capacity} and one is needed for the answer; "
            f"shorten the prompt to {capacity - 1} tokens",
            param=_input_field(submit),
        )
    if num_prompt + submit.max_tokens > capacity:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens and max_tokens is {submit.max_tokens}, together more than the context "
            f"of {capacity}; lower max_tokens to {capacity - num_prompt} or shorten the prompt",
            param="$.max_tokens",
        )


def _input_field(submit: Submit) -> str:
    return "$.prompt" if submit.messages is None else "$.messages"
