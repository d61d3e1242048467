"""Read the domains of text that sequences are cut from: those that ship with the project, and a user's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from edge_runtime.errors import UsageError

SHIPPED = ("technical", "chat", "narrative", "legal", "records", "languages")
USER = "user"  # the domain of the user's own file
MAX_FILE_BYTES = 16 * 2**20  # far beyond what three sets can use; guards against the wrong file
_CHAT_FORM = (
    'write one JSON object a line: {"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}; roles are system, user and assistant'
)


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation: perhaps a system message, then user and assistant in turn; the assistant has the last word."""

    turns: tuple[Turn, ...]
    where: str  # file and line, for errors


@dataclass(frozen=True, slots=True)
class Domain:
    """Text of one kind: running text, or conversations."""

    name: str
    source: str  # for errors
    content: str | tuple[Chat, ...]


class _ChatLine(msgspec.Struct):
    messages: list[Turn]


def shipped_domains() -> tuple[Domain, ...]:
    """Return the texts of this folder in the order of SHIPPED."""
    return tuple(_shipped(name) for name in SHIPPED)


def user_domain(path: Path) -> Domain:
    """Read the user's own text: conversations from a .jsonl file, running text from any other.

    Raises UsageError naming file, line and remedy: missing, empty, too large, not UTF-8, not the form of a chat.
    """
    text = _read(path)
    return Domain(USER, str(path), parse_chats(text, str(path)) if path.suffix.lower() == ".jsonl" else text)


def parse_chats(text: str, source: str) -> tuple[Chat, ...]:
    """Read one conversation from each line that is not blank. Raises UsageError naming the line."""
    # Not splitlines(): U+2028 and its like may stand inside a JSON string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return tuple(_parse_chat(line, f"{source}, line {number}") for number, line in lines)


def _shipped(name: str) -> Domain:
    path = Path(__file__).with_name(f"{name}.jsonl" if name == "chat" else f"{name}.txt")
    text = path.read_text(encoding="utf-8")
    return Domain(name, path.name, parse_chats(text, path.name) if path.suffix == ".jsonl" else text)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(
                f"{path} has more than {MAX_FILE_BYTES >> 20} MiB", remedy="give an excerpt: 100 kB are plenty"
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror or error}", remedy="give a readable file of your own text"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", remedy="save it as UTF-8 text") from error
    if not text.strip():
        raise UsageError(f"{path} is empty", remedy="fill it with text such as the model will meet")
    return text.replace("\r\n", "\n")


def _parse_chat(line: str, where: str) -> Chat:
    try:
        turns = msgspec.json.decode(line, type=_ChatLine).messages
    except msgspec.MsgspecError as error:
        raise UsageError(f"{where}: {error}", remedy=_CHAT_FORM) from error
    fault = _fault(turns)
    if fault:
        raise UsageError(f"{where}: {fault}", remedy=_CHAT_FORM)
    return Chat(tuple(turns), where)


def _fault(turns: list[Turn]) -> str:
    """Return what is wrong with the order of a conversation, "" if nothing is."""
    start = 1 if turns and turns[0].role == "system" else 0
    for i, turn in enumerate(turns[start:]):
        expected = "assistant" if i % 2 else "user"
        if turn.role != expected:
            return f"message {start + i + 1} is from {turn.role}, {expected} is expected there"
        if not turn.content.strip():
            return f"message {start + i + 1} is empty"
    if len(turns) - start < 2 or turns[-1].role != "assistant":
        return "the last message must be the assistant's answer"
    return ""
