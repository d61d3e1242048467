"""Render a conversation with the model's own chat template, as transformers does. No tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_runtime.errors import RequestError

MAX_RENDERED_CHARS = 2**20  # four times the largest request (256 KiB), room for what the template adds
MAX_RANGE_STEPS = 100_000  # of all range() loops of one rendering together
# What a template may raise on messages it was not written for; jinja2 passes Python's own errors through.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Message = Mapping[str, str]


class ChatTemplate:
    """A compiled chat template.

    Raises:
        jinja2.TemplateSyntaxError: `source` is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Compile `source`; `special_tokens` are variables such as bos_token, `now` is the wall clock in local time."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], options: Mapping[str, object]) -> str:
        """Return the prompt with the assistant's opener; `options` such as enable_thinking become variables.

        Raises:
            RequestError: `invalid_request`: no messages, or the template refuses them, or the result is too long.
        """
        if not messages:
            raise _refusal("messages is empty: send at least one message")
        variables = {
            **options,
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "range": _BoundedRange(),
        }
        try:
            return self._join(variables)
        except TEMPLATE_ERRORS as error:
            raise _refusal(f"the model's chat template refuses these messages: {error}") from error

    def _join(self, variables: Mapping[str, object]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > MAX_RENDERED_CHARS:
                raise _refusal(f"the messages render to more than {MAX_RENDERED_CHARS} characters: send less text")
            parts.append(part)
        return "".join(parts)


class _BoundedRange:
    """range() with one budget for a whole rendering, so that nested loops end too."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_STEPS

    def __call__(self, *args: int) -> range:
        steps = range(*args)
        self._left -= len(steps)
        if self._left < 0:
            raise OverflowError(f"its loops take more than {MAX_RANGE_STEPS} steps")
        return steps


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is its content and nothing more."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as templates expect it: jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _refusal(message: str) -> RequestError:
    return RequestError("invalid_request", message, param="$.messages")
