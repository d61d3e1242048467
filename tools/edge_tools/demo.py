"""`edge-runtime demo`: fetch a small model, build it, serve it, ask it a question over MQTT, stop cleanly."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from edge_runtime import EdgeError, __version__
from edge_runtime.client import Answer, Client
from edge_runtime.manifest import read_manifest
from edge_tools.broker import Broker, find_mosquitto, running_broker
from edge_tools.daemon import served
from edge_tools.extras import needs_extra
from edge_tools.places import cache_folder
from edge_tools.progress import Shown, shown_progress

MODEL = "smollm2-135m-instruct"
PRECISION: Literal["w8"] = "w8"
QUESTION = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What a demo run did. `seconds` tells where its time went; `ttft_ms` is what the asking side saw."""

    version: str
    question: str
    answer: Answer
    ttft_ms: float
    tokens_per_s: float
    engine: str
    broker: str
    seconds: dict[str, float]


def demo(
    question: Annotated[str, typer.Argument(metavar="[QUESTION]", help="What to ask.")] = QUESTION,
    *,
    home: Annotated[
        Path | None, typer.Option(help="Folder for engine, logs and report; in the user's cache when not given.")
    ] = None,
) -> None:
    """Fetch a 135M model, build its engine, start a broker and the daemon, ask over MQTT, stop everything.

    The second run downloads and builds nothing. Examples:

      edge-runtime demo

      edge-runtime demo "Why is the sky blue?"
    """
    home = home or cache_folder(os.environ) / "demo"
    engine, run = home / f"{MODEL}-{PRECISION}", home / "run"
    run.mkdir(parents=True, exist_ok=True)
    laps = _Laps()
    with shown_progress() as progress:
        _ensure_engine(engine, progress)
        laps.end("engine")
    with running_broker(run) as broker:
        laps.end("broker")
        typer.echo(f"broker: {_described(broker)}")
        with served(engine, broker.port, run) as device:
            laps.end("daemon")
            answer, ttft_ms = _ask(device.client, question)
            laps.end("answer")
    laps.end("stop")
    report = DemoReport(
        version=__version__,
        question=question,
        answer=answer,
        ttft_ms=round(ttft_ms, 1),
        tokens_per_s=round(1e3 / answer.timings.tpot_ms, 1) if answer.timings.tpot_ms else 0.0,
        engine=str(engine),
        broker=broker.name,
        seconds=laps.seconds,
    )
    (home / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    _show(report, home / "report.json")
    _show_next(broker, run)


def _ensure_engine(engine: Path, progress: Shown) -> None:
    """Build the demo engine when it is absent, damaged or of another version."""
    try:
        made = read_manifest(engine).build
        if made.tool_version == __version__:
            return
        progress.note(f"{engine} was built by version {made.tool_version}, building it again")
    except EdgeError as error:
        if engine.exists():
            progress.note(f"{error}")
    with needs_extra("the demo", "demo"):
        from edge_engines.pipeline import build  # noqa: PLC0415  # heavy, and an optional extra
        from edge_engines.sources import resolve_source  # noqa: PLC0415
    checkpoint = resolve_source(MODEL, cache_folder(os.environ), progress)
    build(checkpoint, engine, precision=PRECISION, name=MODEL, force=True, progress=progress)


def _ask(client: Client, question: str) -> tuple[Answer, float]:
    """Print the answer as it comes; return it, and the milliseconds until its first text was here."""
    typer.echo(f"\n> {question}\n")
    first_ms, begun = 0.0, time.perf_counter()
    stream = client.stream([{"role": "user", "content": question}])
    for piece in stream:
        first_ms = first_ms or (time.perf_counter() - begun) * 1e3
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo("\n")
    return stream.answer, first_ms


def _show(report: DemoReport, file: Path) -> None:
    usage = report.answer.usage
    rows = {
        "first token": f"{report.ttft_ms:.0f} ms after asking ({usage.prompt_tokens} prompt tokens)",
        "speed": f"{report.tokens_per_s:.1f} tokens/s ({usage.completion_tokens} tokens)",
        "whole run": f"{sum(report.seconds.values()):.1f} s",
        "engine": report.engine,
        "report": str(file),
    }
    for name, value in rows.items():
        typer.echo(f"{name:12} {value}")


def _show_next(broker: Broker, run: Path) -> None:
    """Print the commands that do by hand what the demo did: a broker, then build, serve and ask."""
    if broker.name == "mosquitto":
        start, port = f"{find_mosquitto()} -p 1883", ""
    else:
        start, port = f"{sys.executable} -m iotcore --config {run / 'iotcore.toml'}", f" --port {broker.port}"
    typer.echo(f"\nGo on with the three below; serve needs a broker, for example: {start}\n")
    program = _program()
    typer.echo(f"  {program} build {MODEL} -o out/ --precision {PRECISION}")
    typer.echo(f"  {program} serve --engine out/{port}")
    typer.echo(f'  {program} ask "Name three rivers."{port}')


def _program() -> str:
    """Return how this command can be called again: by name where PATH has it, else by its path."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{sys.executable} -m edge_tools"
    return called.name if shutil.which(called.name) else str(called)


def _described(broker: Broker) -> str:
    limits = "" if broker.name == "mosquitto" else ": single tenant, no access control"
    return f"{broker.name} on 127.0.0.1:{broker.port}{limits}"


class _Laps:
    """Seconds since the lap before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 3), now
