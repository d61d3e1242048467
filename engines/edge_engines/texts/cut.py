"""Cut a domain's text into full sequences of token ids, each with the prefix that the model meets in service."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_engines.texts.domains import Chat, Domain, Turn
from edge_runtime.errors import RequestError, UsageError

EncodeText = Callable[[str], list[int]]  # a raw prompt's ids, with BOS in front where the model wants it
EncodeChat = Callable[[Sequence[dict[str, str]]], list[int]]  # a conversation's ids, the assistant's opener included


def cut(domain: Domain, lengths: Sequence[int], encode: EncodeText, chat: EncodeChat | None) -> list[list[int]]:
    """Return sequences of exactly `lengths` ids, in order and without common text; fewer when the text runs out.

    Raises UsageError when the chat template refuses a conversation.
    """
    if isinstance(domain.content, str):
        return _cut_text(domain.content, lengths, encode)
    return _cut_chats(domain.content, lengths, encode, chat)


def _cut_text(text: str, lengths: Sequence[int], encode: EncodeText) -> list[list[int]]:
    prefix = encode("")
    stream = encode(text)[len(prefix) :]
    pieces: list[list[int]] = []
    start = 0
    for length in lengths:
        stop = start + length - len(prefix)
        if stop > len(stream):
            break
        pieces.append(prefix + stream[start:stop])
        start = stop
    return pieces


def _cut_chats(
    chats: Sequence[Chat], lengths: Sequence[int], encode: EncodeText, chat: EncodeChat | None
) -> list[list[int]]:
    """Each sequence is one conversation, cut at its length: whole chats are appended as further turns until it is full.

    What is cut off is not used again, so each sequence begins with a chat of its own.
    """
    pieces: list[list[int]] = []
    following = iter(chats)
    for length in lengths:
        turns: list[Turn] = []
        ids: list[int] = []
        while len(ids) < length:
            added = next(following, None)
            if added is None:
                return pieces
            # A system message is allowed at the start only, so those of appended chats are left out.
            turns += [turn for turn in added.turns if not (turns and turn.role == "system")]
            ids = _encode_turns(turns, added.where, encode, chat)
        pieces.append(ids[:length])
    return pieces


def _encode_turns(turns: Sequence[Turn], where: str, encode: EncodeText, chat: EncodeChat | None) -> list[int]:
    """Return the ids of a conversation up to its last answer, which follows the assistant's opener as in service."""
    if chat is None:
        return encode("".join(f"{turn.role.capitalize()}: {turn.content}\n\n" for turn in turns))
    try:
        asked = chat([{"role": turn.role, "content": turn.content} for turn in turns[:-1]])
    except RequestError as error:
        raise UsageError(
            f"{where}: {error.message}", remedy="write the chat as this model's template wants it"
        ) from error
    return asked + encode(turns[-1].content)[len(encode("")) :]
