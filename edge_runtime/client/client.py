"""Be a client of one device: connect, ask, cancel, look at its status."""

from __future__ import annotations

import secrets
from types import TracebackType

from edge_runtime.client.answer import Answer
from edge_runtime.client.answer_stream import AnswerStream
from edge_runtime.client.link import Link
from edge_runtime.client.question import Options, Prompt, Question, make_question, make_request
from edge_runtime.messages import Info, Status
from edge_runtime.supervisor.mqtt import MqttSettings, Subscription, tls_context
from edge_runtime.topics import DEFAULT_PREFIX, DeviceTopics

DEFAULT_MAX_TOKENS = 128
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_OPTIONS = Options()
SESSION_S = 60  # the broker keeps answers for this long while the connection is away


class Client:
    """A connection to one device, for one tenant. A context manager.

    `model` None means the one that the device serves. Raises EdgeError when the broker can't be reached at the first
    attempt, or within `connect_timeout_s`, and ConfigError for certificates that can't be used.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1883,
        device: str = "local",
        tenant: str = "default",
        *,
        model: str | None = None,
        username: str = "",
        password: str | None = None,
        tls: bool = False,
        ca_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        prefix: str = DEFAULT_PREFIX,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        name = f"c-{secrets.token_hex(8)}"
        topics = DeviceTopics(prefix, device)
        settings = MqttSettings(
            host=host,
            port=port,
            client_id=f"edge-client-{name}",
            subscriptions=(
                Subscription(topics.result(tenant, name)),
                Subscription(topics.status, retained=True),
                Subscription(topics.info, retained=True),
            ),
            username=username,
            password=password,
            tls=tls_context(ca_file, cert_file, key_file) if tls else None,
            expiry_s=SESSION_S,
        )
        self._link = Link(settings, topics, tenant, name)

    def connect(self) -> None:
        """Connect to the broker. Raises EdgeError."""
        self._link.connect(self._connect_timeout_s)

    def close(self) -> None:
        """Disconnect. What is open stays open at the device."""
        self._link.close()

    def ask(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        max_tokens: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        options: Options = DEFAULT_OPTIONS,
    ) -> Answer:
        """Return the whole answer to a user's message, or to a conversation of `{role, content}` turns.

        `system` is a message in front of it; `raw` sends a text without the model's chat template, to be continued as
        it is. `max_tokens` None means 128, or less where the device allows less. `timeout_s` is for the whole answer;
        at most 600.

        Raises RequestError when the device refuses or fails the request, with `partial` when text had been generated;
        EdgeError when the device is offline; UsageError for arguments that contradict each other.
        """
        question = make_question(prompt, system, raw=raw)
        return self._send(question, options, max_tokens, timeout_s, stream=False).wait()

    def stream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        max_tokens: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        options: Options = DEFAULT_OPTIONS,
    ) -> AnswerStream:
        """Send a request and return the pieces of its answer as they come; arguments and errors as of `ask`."""
        question = make_question(prompt, system, raw=raw)
        return self._send(question, options, max_tokens, timeout_s, stream=True)

    def cancel(self, request_id: str) -> None:
        """Stop a request of this tenant; its answer ends as `cancelled`, with the text so far."""
        self._link.send_cancel(request_id)

    def status(self) -> Status:
        """Return the device's latest status. Raises EdgeError when there has never been one."""
        return self._link.require(lambda: self._link.status)

    def info(self) -> Info:
        """Return the facts about device, engine and limits. Raises EdgeError when there are none."""
        return self._link.require(lambda: self._link.info)

    def __enter__(self) -> Client:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(
        self, question: Question, options: Options, max_tokens: int | None, timeout_s: float, *, stream: bool
    ) -> AnswerStream:
        request = make_request(
            question,
            options,
            model=self._model or self.info().model,
            max_tokens=self._default_max_tokens() if max_tokens is None else max_tokens,
            timeout_s=timeout_s,
            stream=stream,
        )
        return AnswerStream(self._link, request, timeout_s)

    def _default_max_tokens(self) -> int:
        limits = self._link.info.limits if self._link.info else {}
        return min(DEFAULT_MAX_TOKENS, limits.get("max_tokens", DEFAULT_MAX_TOKENS))
