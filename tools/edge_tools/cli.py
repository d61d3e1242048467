"""Wire the verbs into one command and turn every error into one line and an exit status."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, cast

import typer

from edge_runtime import EdgeError, __version__
from edge_runtime.errors import RequestError, UsageError
from edge_runtime.messages import ERROR_TABLE
from edge_tools.ask import ask
from edge_tools.bench.command import bench
from edge_tools.build import build
from edge_tools.config import app as config_app
from edge_tools.demo import demo
from edge_tools.inspect import inspect
from edge_tools.plan import plan
from edge_tools.sensitivity import sensitivity
from edge_tools.serve import serve
from edge_tools.verify import verify

PROGRAM = "edge-runtime"
DEBUG = "--debug"
INTERRUPTED = 130  # 128 + SIGINT, as shells count it
INTERNAL = 70

# Typer carries its own copy of click since 0.25: the base of its usage errors is reached through a name both have.
ClickError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build small language models into engines and serve them over MQTT, on a Jetson or any Linux machine.",
    epilog=f"A first try: {PROGRAM} demo. Every verb explains itself: {PROGRAM} VERB --help.",
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command of this process and exit with its status."""
    signal.signal(signal.SIGTERM, _leave)
    # ONNX Runtime 1.32 reports its use to the vendor unless told before its import; a device has to keep still.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; errors leave one line on stderr."""
    debug = DEBUG in arguments
    try:
        status = app(args=[a for a in arguments if a != DEBUG] or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`| head`): nothing more to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (EdgeError, ClickError) as error:
        text, status = _explained(error)
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"{PROGRAM}: {text}\n")
        return status
    except OSError as error:
        # No permission, no space, no such folder: the user's to mend, wherever it struck.
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"{PROGRAM}: {error.filename or 'input or output'}: {error.strerror or error}\n")
        return UsageError.exit_status
    except Exception as error:
        if debug:
            traceback.print_exc()
        sys.stderr.write(
            f"{PROGRAM}: internal error: {type(error).__name__}: {error}; run again with {DEBUG} for the traceback\n"
        )
        return INTERNAL


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error. May stand anywhere.")] = False,
) -> None:
    """Declare the options of the command itself; `run` reads --debug wherever it stands."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _explained(error: EdgeError | typer.BadParameter) -> tuple[str, int]:
    if isinstance(error, RequestError):
        kind = ERROR_TABLE[error.code]
        return (
            f"{error.code}: {error}",
            UsageError.exit_status if kind.status < 500 and not kind.retryable else INTERNAL,
        )
    if isinstance(error, EdgeError):
        return str(error), error.exit_status
    context = error.ctx
    verb = context.command_path.removeprefix(PROGRAM).strip() if context else ""
    help_of = " ".join(filter(None, (PROGRAM, verb, "--help")))
    return f"{error.format_message().rstrip('.')}; see: {help_of}", error.exit_code


def _leave(number: int, frame: FrameType | None) -> None:  # the signature of a signal handler
    """End like Ctrl-C does, through every `finally`, when another process asks."""
    raise SystemExit(128 + number)


for _verb in (build, serve, ask, inspect, verify, bench, plan, sensitivity, demo):
    app.command()(_verb)
app.add_typer(config_app)
