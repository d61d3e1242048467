"""`edge-runtime ask`: ask a device over MQTT and print the answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from edge_runtime.client import AnswerStream, Client, Options
from edge_runtime.config import MqttConfig, read_password
from edge_runtime.errors import EdgeError, UsageError

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
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
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
    tls_ca: Annotated[Path | None, typer.Option(help="Use TLS, and trust this CA file only.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Our certificate, for a broker that asks for one.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of our certificate.")] = None,
) -> None:
    """Ask a device and print its answer as it comes. Ctrl-C cancels the request on the device.

    An answer that fails midway is printed as far as it came; the error is the last line, on stderr.

    Examples:

      edge-runtime ask "What is the capital of France?"

      git diff | edge-runtime ask - --system "Summarise this."

      edge-runtime ask "Invent a name." --temperature 0.8 --seed 7 --json

      edge-runtime ask --raw "Once upon a time" --max-tokens 40
    """
    text = _read_prompt(prompt)
    password = read_password(MqttConfig(username=username, password_file=password_file))
    options = Options(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or ())
    with Client(
        host, port, device, tenant, model=model, username=username, password=password,
        tls=bool(tls_ca or tls_cert), ca_file=str(tls_ca or ""), cert_file=str(tls_cert or ""),
        key_file=str(tls_key or ""),
    ) as client:  # fmt: skip
        answers = client.stream(text, system=system, raw=raw, max_tokens=max_tokens, timeout_s=timeout, options=options)
        _show(answers, as_it_comes=stream and not json, as_json=json)


def _read_prompt(prompt: str) -> str:
    # The newline that ends a line of stdin is no part of the question: small models answer differently with it.
    text = sys.stdin.read().removesuffix("\n") if prompt == FROM_STDIN else prompt
    if not text.strip():
        raise UsageError("the question is empty", remedy='give a text, or "-" and a text on stdin')
    return text


def _show(answers: AnswerStream, *, as_it_comes: bool, as_json: bool) -> None:
    """Print an answer, also one that fails midway."""
    text = ""
    try:
        for piece in answers:
            text += piece
            if as_it_comes:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        answers.cancel()
        raise
    except EdgeError:
        if text and not as_json:
            typer.echo("" if as_it_comes else text)
        raise
    answer = answers.answer
    if as_json:
        typer.echo(msgspec.json.encode(answer))
        return
    typer.echo("" if as_it_comes else text)
    if why := CUT.get(answer.finish_reason):
        typer.echo(f"edge-runtime: {why}", err=True)
