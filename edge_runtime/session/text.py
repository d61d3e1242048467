"""Turn prompts and conversations into ids and ids into text, by the files of an engine folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from edge_runtime.errors import EngineRefusedError, RequestError
from edge_runtime.session import detokenizer
from edge_runtime.session.chat import ChatTemplate, Message
from edge_runtime.session.control_tokens import REASONING_TAGS, ControlTokens
from edge_runtime.session.generation import GenerationSettings, parse_generation
from edge_runtime.session.token_bytes import TokenTable

REASONING_TAIL = 16  # ids looked at for an opened reasoning block: "<think>" and white space, a byte an id at worst
REBUILD = "build the engine again with `edge-runtime build`"


class TextCodec:
    """Text of one model. Not for use from two threads at once.

    What a user types stays text: "<|im_end|>" in a prompt or message becomes the ids of its characters, and only the
    template's own markers become control ids.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, settings: GenerationSettings) -> None:
        """Take over `tokenizer`; `load` is the usual way here."""
        self.bos_id = settings.bos_id
        self.known_ids = settings.known_ids
        self._add_bos = settings.add_bos
        self._template = template
        end = tokenizer.token_to_id(settings.eos_token) if settings.eos_token else None
        self.eos_ids = frozenset(settings.eos_ids) | ({end} if end is not None else set())
        self._control = ControlTokens(tokenizer, self.eos_ids | ({self.bos_id} if self.bos_id is not None else set()))
        self._table = TokenTable(tokenizer, self._control.ids)
        self.strips_first_space = self._table.strips_first_space

    @classmethod
    def load(cls, folder: Path, now: Callable[[], datetime] = datetime.now) -> TextCodec:
        """Read tokenizer.json, generation.json and, where there is one, chat_template.jinja.

        `now` is the wall clock for templates that write today's date.

        Raises:
            EngineRefusedError: a file is missing or broken.
        """
        settings = _read_generation(folder / "generation.json")
        template = _read_template(folder / "chat_template.jinja", settings, now)
        path = folder / "tokenizer.json"
        tokenizer = _read_tokenizer(path)
        try:
            return cls(tokenizer, template, settings)
        except ValueError as error:
            raise EngineRefusedError(f"{path}: {error}", remedy=REBUILD) from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, with one BOS in front where the model wants it."""
        return self._with_bos(self._control.encode_plain(text))

    def encode_chat(self, messages: Sequence[Message], options: Mapping[str, object] | None = None) -> list[int]:
        """Return the ids of a conversation rendered by the chat template, the assistant's opener included.

        Raises:
            RequestError: as `render_chat`.
        """
        options = options or {}
        template = self._chat_template()
        typed = [text for message in messages for key, text in message.items() if key != "role"]
        disguise = self._control.disguise(typed)
        if disguise is None:
            return self._with_bos(self._control.encode(template.render(messages, options)))
        covered = [
            {key: text if key == "role" else disguise.cover(text) for key, text in message.items()}
            for message in messages
        ]
        return self._with_bos(self._control.encode_disguised(template.render(covered, options), disguise))

    def render_chat(self, messages: Sequence[Message], options: Mapping[str, object] | None = None) -> str:
        """Return the conversation as the chat template writes it; `options` are its variables (enable_thinking ...).

        Raises:
            RequestError: `invalid_request`: the model has no template, or its template refuses the messages.
        """
        return self._chat_template().render(messages, options or {})

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends inside a reasoning block: the output then begins with reasoning, without a tag."""
        tail: list[int] = []
        for token in reversed(prompt_ids[-REASONING_TAIL:]):
            if token in self._control.ids:
                break
            tail.insert(0, token)
        return self.decode(tail).rstrip().endswith(REASONING_TAGS[0])

    def stop_ids(self, stops: Iterable[str]) -> frozenset[int]:
        """Return the ids of those stops that are a control token's text: such text never appears in the output."""
        return frozenset(token for stop in stops if (token := self._control.id_of(stop)) is not None)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; control tokens and padding give none, broken UTF-8 gives U+FFFD."""
        return detokenizer.decode(self, ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes one id adds to the text; they may begin or end inside a character."""
        return self._table.token_bytes(token)

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Put BOS in front unless a template has done so; the text never holds one that was typed."""
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            message = "this model has no chat template: send `prompt` instead of `messages`"
            raise RequestError("invalid_request", message, param="$.messages")
        return self._template


def check_ids(ids: Iterable[int], vocab: int) -> None:
    """Refuse prompt ids outside 0..V-1: the embedding has no row for them.

    Raises:
        RequestError: `invalid_request` with the first such id.
    """
    for i, token in enumerate(ids):
        if not 0 <= token < vocab:
            message = f"prompt id {token} at position {i} is out of range: allowed are 0 to {vocab - 1}"
            raise RequestError("invalid_request", message, param="$.prompt")


def _read_generation(path: Path) -> GenerationSettings:
    try:
        return parse_generation(_read(path))
    except ValueError as error:
        raise EngineRefusedError(f"{path}: {error}", remedy=REBUILD) from error


def _read_template(path: Path, settings: GenerationSettings, now: Callable[[], datetime]) -> ChatTemplate | None:
    if not path.exists():
        return None
    names = {"bos_token": settings.bos_token, "eos_token": settings.eos_token}
    try:
        source = _read(path).decode()
        return ChatTemplate(source, {name: text for name, text in names.items() if text is not None}, now)
    except TemplateSyntaxError as error:
        raise EngineRefusedError(f"{path}, line {error.lineno}: {error.message}", remedy=REBUILD) from error
    except UnicodeDecodeError as error:
        raise EngineRefusedError(f"{path}: not UTF-8 at byte {error.start}", remedy=REBUILD) from error


def _read_tokenizer(path: Path) -> Tokenizer:
    data = _read(path)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise EngineRefusedError(f"{path}: not a tokenizer: {error}", remedy=REBUILD) from error
    tokenizer.no_truncation()  # a file may carry the limits of a training run
    tokenizer.no_padding()
    return tokenizer


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineRefusedError(f"{path}: {error.strerror or error}", remedy=REBUILD) from error
