"""`edge-runtime ask`: ask a device over MQTT and print the answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from edge_runtime.client import Answer, Client
from edge_runtime.config import MqttConfig, read_password
from edge_runtime.errors import UsageError

FROM_STDIN = "-"
CUT = {
    "length": "the answer was cut at its token limit; raise it with --max-tokens",
    "deadline": "the answer was cut at its deadline; raise it with --timeout",
    "cancelled": "the answer was cancelled",
}


def ask(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='The question; "-" reads it from stdin.')],
    *,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print answer, usage and timings as one JSON object.")] = False,
    system: Annotated[str | None, typer.Option(help="System message in front of the question.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; 128 unless the device has less.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of probability that is drawn from.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, max=1000, help="Tokens that are drawn from; 0 is all.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the draws; the answer can be had again.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; up to 4 times.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, max=600, help="Seconds for the whole answer.")] = 60.0,
    host: Annotated[str, typer.Option(help="Broker's host.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Broker's port.")] = 1883,
    device: Annotated[str, typer.Option(help="Name of the device.")] = "local",
    tenant: Annotated[str, typer.Option(help="Tenant to ask for.")] = "default",
    model: Annotated[str | None, typer.Option(help="Model; the device's own when not given.")] = None,
    username: Annotated[str, typer.Option(help="Broker user.")] = "",
    password_file: Annotated[str, typer.Option(help="File with the password; else EDGE_MQTT_PASSWORD.")] = "",
    tls_ca: Annotated[Path | None, typer.Option(help="Use TLS and trust this CA file.")] = None,
) -> None:
    """Ask a device and print its answer as it comes. Ctrl-C cancels the request on the device.

    Examples:

      edge-runtime ask "What is the capital of France?"

      git diff | edge-runtime ask - --system "Summarise this."

      edge-runtime ask "Invent a name." --temperature 0.8 --seed 7 --json
    """
    text = _read_prompt(prompt)
    roles = [("system", system)] if system else []
    messages = [{"role": role, "content": content} for role, content in [*roles, ("user", text)]]
    password = read_password(MqttConfig(username=username, password_file=password_file))
    with Client(
        host, port, device, tenant, model=model, username=username, password=password,
        tls=tls_ca is not None, ca_file=str(tls_ca or ""),
    ) as client:  # fmt: skip
        answers = client.stream(
            messages, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
            stop=stop or (), timeout_s=timeout,
        )  # fmt: skip
        try:
            for piece in answers:
                if stream and not json:
                    typer.echo(piece, nl=False)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            answers.cancel()
            raise
    _finish(answers.answer, is_shown=stream and not json, as_json=json)


def _read_prompt(prompt: str) -> str:
    # The newline that ends a line of stdin is no part of the question: small models answer differently with it.
    text = sys.stdin.read().removesuffix("\n") if prompt == FROM_STDIN else prompt
    if not text.strip():
        raise UsageError("the question is empty", remedy='give a text, or "-" and a text on stdin')
    return text


def _finish(answer: Answer, *, is_shown: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(answer))
        return
    typer.echo("" if is_shown else answer.text)
    if why := CUT.get(answer.finish_reason):
        typer.echo(f"edge-runtime: {why}", err=True)
