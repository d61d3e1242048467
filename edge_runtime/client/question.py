"""Turn what a user asks into a request. Bounds of numbers are the device's to check: its refusal names the field."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from edge_runtime.errors import RequestError, UsageError
from edge_runtime.messages import ChatMessage, Request, ServiceClass

Prompt = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an answer is drawn, where it ends, and how the device treats the request.

    `temperature` 0..2, 0 takes the likeliest token each time; `top_p` above 0 to 1, the share of probability that is
    drawn from; `top_k` 0..1000, the tokens that are drawn from, 0 is all; `seed` makes an answer repeatable; `stop` up
    to 4 strings, the answer ends before the first that appears; `metadata` comes back in the answer; `request_id` None
    means a new one. The same id with the same content is one request, however often it is sent.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    service_class: ServiceClass = "standard"
    metadata: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What the model reads: the turns of a conversation, or a text that is continued as it is. One of them is None."""

    messages: list[ChatMessage] | None
    prompt: str | None


def make_question(prompt: Prompt, system: str | None, *, raw: bool) -> Question:
    """Read the user's prompt: a str is one turn of the user, or with `raw` the very text that is continued.

    Raises UsageError when `raw` is combined with turns or a system message, RequestError for a malformed turn.
    """
    if raw and (system is not None or not isinstance(prompt, str)):
        raise UsageError(
            "a raw prompt is continued as it is, without the model's chat template: it has no turns and no system "
            "message",
            remedy="give only a text, or leave raw out",
        )
    if raw and isinstance(prompt, str):
        return Question(None, prompt)
    turns = [ChatMessage("user", prompt)] if isinstance(prompt, str) else _turns(prompt)
    return Question([ChatMessage("system", system), *turns] if system is not None else turns, None)


def make_request(
    question: Question, options: Options, *, model: str, max_tokens: int, timeout_s: float, stream: bool
) -> Request:
    """Put a request together; its id is new unless the options name one."""
    return Request(
        id=options.request_id or secrets.token_hex(8),
        model=model,
        messages=question.messages,
        prompt=question.prompt,
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=options.stop if isinstance(options.stop, str) else list(options.stop),
        stream=stream,
        timeout_ms=round(timeout_s * 1000),
        service_class=options.service_class,
        metadata=dict(options.metadata),
    )


def _turns(prompt: Sequence[Mapping[str, str]]) -> list[ChatMessage]:
    try:
        return msgspec.convert(list(prompt), list[ChatMessage])
    except msgspec.ValidationError as error:
        raise RequestError("invalid_request", f"messages: {error}", param="$.messages") from error
