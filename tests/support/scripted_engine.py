"""Build a whole engine without a model: one token id per byte of text, over scripted logits.

"é" takes two tokens; `END` ends an answer. A chat is its messages, one per line. Left to itself the model answers with
lower-case letters and spaces that depend on everything before them, for ever.
"""

from __future__ import annotations

from datetime import datetime

from tokenizers import AddedToken, Tokenizer, decoders, models

from edge_runtime.backends import Backend
from edge_runtime.backends.scripted import Script, ScriptedBackend, answer_script, hash_script, scripted_manifest
from edge_runtime.manifest import Manifest
from edge_runtime.session.chat import ChatTemplate
from edge_runtime.session.generation import GenerationSettings
from edge_runtime.session.session import Session
from edge_runtime.session.text import TextCodec
from edge_runtime.worker.engine import Engine

END = 256
VOCAB = 257
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BABBLE = hash_script(b"abcdefghijklmnopqrstuvwxyz    ")


def byte_codec() -> TextCodec:
    """Return a codec whose ids are the bytes of UTF-8 text; `END`, written "<|end|>", is its only control token."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    settings = GenerationSettings((END,), None, None, "<|end|>", add_bos=False, known_ids=VOCAB)
    return TextCodec(tokenizer, ChatTemplate(CHAT, {}, datetime.now), settings)


def byte_manifest(*, capacity: int = 512, max_batch: int = 2, has_text: bool = True) -> Manifest:
    """Return the manifest that goes with `byte_codec`."""
    return scripted_manifest(vocab=VOCAB, capacity=capacity, max_batch=max_batch, has_text=has_text)


def answers(script: dict[str, str | bytes | list[int]], otherwise: Script = BABBLE) -> Script:
    """Return a script that continues each prompt with its answer: text, bytes or ids."""
    ids = {
        tuple(prompt.encode()): list(answer.encode() if isinstance(answer, str) else answer)
        for prompt, answer in script.items()
    }
    return answer_script(ids, otherwise)


def solo_answer(prompt: str, num_tokens: int, script: Script = BABBLE) -> str:
    """Return what the model says to `prompt` in `num_tokens` greedy tokens, by the script alone."""
    import numpy as np

    history = list(prompt.encode())
    for _ in range(num_tokens):
        history.append(script(np.array(history, np.int64)))
    return bytes(history[len(prompt.encode()) :]).decode()


def scripted_engine(backend: Backend | None = None, *, codec: TextCodec | None = None) -> Engine:
    """Return a loaded engine over `backend`, which belongs to this thread."""
    backend = backend or ScriptedBackend(byte_manifest(), BABBLE)
    text = codec or (byte_codec() if backend.manifest.model.has_text else None)
    return Engine(Session(backend), text, "0" * 64, {"read": 0.0, "load": 0.0})
