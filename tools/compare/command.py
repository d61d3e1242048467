"""Run the comparison: the options, and the steps in order."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
from rich.console import Console

from compare.builds import BUILDS, PEER_PRECISIONS, write_engine, write_peer_models
from compare.engine_process import EngineProcess
from compare.install import TORCH, install_peer
from compare.our_engine import SPINNING
from compare.report import Comparison, PeerTrial, table
from compare.rounds import CAPACITY, SAME_TOKENS, Plan, agreed_tokens, answer_ms, measure_rounds
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.sources import resolve_source
from edge_runtime.backends.cores import default_threads
from edge_runtime.errors import EdgeError, UsageError
from edge_tools.bench.machine import LoadWatch, describe_machine
from edge_tools.places import cache_folder
from edge_tools.progress import Shown, shown_progress

PROGRAM = "compare_genai"
INTERRUPTED = 130  # 128 + SIGINT, as shells count it
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/data/golden/smollm2-135m-instruct.json"
LONG_PROMPT = 256
TABLE_WIDTH = 110  # columns where the output is no terminal
PEER_SPINNING = {"on": (True,), "off": (False,), "best": (False, True)}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for."""

    checkpoint: str
    home: Path
    threads: int  # 0: physical cores
    rounds: int
    tokens: int  # decoded per prompt and round
    spinning: str  # key of our_engine.SPINNING
    engine: Path | None  # ours; None: an FP32 engine is built
    peer_precision: str
    peer_builds: tuple[str, ...]  # keys of BUILDS
    peer_spinning: tuple[bool, ...]
    torch: str


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; errors leave one line on stderr."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        options = parse_options(arguments)
        comparison = compare(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except EdgeError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return error.exit_status
    console = Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    console.print(table(comparison))
    if comparison.load.busy:
        console.print("[bold]warning:[/] the machine was busy with other programs; measure again when it is quiet")
    sys.stdout.write(msgspec.json.encode(comparison).decode() + "\n")
    return 0


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line. Raises UsageError; `--help` leaves the process."""
    parser = _Parser(prog=PROGRAM, description="Compare our speed with ONNX Runtime GenAI on the same weights.")
    parser.add_argument("--threads", type=_whole(0, 256), default=0, help="of each engine; 0 means physical cores")
    parser.add_argument("--rounds", type=_whole(1, 1000), default=7, help="interleaved rounds (7)")
    most = CAPACITY - LONG_PROMPT - 1
    parser.add_argument("--tokens", type=_whole(8, most), default=48, help="decoded after each prompt (48)")
    parser.add_argument("--home", type=Path, default=ROOT / ".cache/peer-genai", help="kept files (.cache/peer-genai)")
    parser.add_argument("--checkpoint", default="smollm2-135m-instruct", help="what `edge-runtime build` takes")
    parser.add_argument("--engine", type=Path, help="engine folder of ours to measure (an FP32 one is built)")
    parser.add_argument("--peer-precision", choices=PEER_PRECISIONS, default="fp32", help="of the peer's model (fp32)")
    parser.add_argument("--spinning", choices=list(SPINNING), default="shipped", help="of our idle threads (shipped)")
    parser.add_argument("--peer-build", choices=[*BUILDS, "best"], default="best", help="how the peer is built (best)")
    parser.add_argument(
        "--peer-spinning", choices=list(PEER_SPINNING), default="best", help="of the peer's idle threads (best)"
    )
    parser.add_argument("--torch", default=TORCH, help=f"torch for the peer's model builder, as pip takes it ({TORCH})")
    given = parser.parse_args(arguments)
    return Options(
        checkpoint=given.checkpoint,
        home=given.home.absolute(),
        threads=given.threads,
        rounds=given.rounds,
        tokens=given.tokens,
        spinning=given.spinning,
        engine=given.engine,
        peer_precision=given.peer_precision,
        peer_builds=tuple(BUILDS) if given.peer_build == "best" else (given.peer_build,),
        peer_spinning=PEER_SPINNING[given.peer_spinning],
        torch=given.torch,
    )


def compare(options: Options) -> Comparison:
    """Install and build what is missing, choose the peer's best form, and measure."""
    with shown_progress() as progress:
        python = install_peer(options.home, options.torch, progress)
        source = resolve_source(options.checkpoint, cache_folder(os.environ), progress)
        with open_checkpoint(source) as model:
            plan = Plan(prompts=read_prompts(model.spec.vocab), tokens=options.tokens, rounds=options.rounds)
            peers = write_peer_models(
                options.home, python, model, options.peer_builds, options.peer_precision, progress
            )
        ours = options.engine or write_engine(options.home, source, progress)
        threads = options.threads or default_threads()
        progress.step("measuring the read bandwidth", None)
        machine, watch = describe_machine(threads), LoadWatch()
        trials = _try_peers(python, peers, options.peer_spinning, threads, plan, progress)
        best = min(trials, key=lambda trial: trial.answer_ms)
        with (
            _our_process(ours, threads, options.spinning) as our_process,
            _peer_process(python, peers[best.build], threads, best.spinning) as peer_process,
        ):
            progress.step("comparing the tokens", None)
            least = SAME_TOKENS if options.peer_precision == "fp32" else 0  # 4 bits may well answer otherwise
            agreed = agreed_tokens(our_process, peer_process, plan, least)
            figures = measure_rounds(our_process, peer_process, plan, progress)
        return Comparison(
            schema=1, model=source.name, peer_precision=options.peer_precision, machine=machine,
            ours=our_process.facts, peer=peer_process.facts,
            peer_trials=trials, peer_form=best, same_tokens=agreed, rounds=plan.rounds, tokens=plan.tokens,
            figures=figures,
            load=watch.stop(),  # the children have ended: only now does their time count as ours
        )  # fmt: skip


def read_prompts(vocab: int, file: Path = GOLDEN) -> tuple[tuple[int, ...], ...]:
    """Return the chat prompt of the golden file, and the same repeated to LONG_PROMPT ids.

    Times do not depend on what ids mean, so they do for any model with at least as many ids.
    """
    short = tuple(json.loads(file.read_bytes())["cases"][0]["prompt_ids"])
    if max(short) >= vocab:
        raise UsageError(
            f"--checkpoint: its vocabulary of {vocab} ids is smaller than the prompt's largest {max(short)}"
        )
    long = (short * (LONG_PROMPT // len(short) + 1))[:LONG_PROMPT]
    return short, long


def _try_peers(
    python: Path, peers: dict[str, Path], spinning: Sequence[bool], threads: int, plan: Plan, progress: Shown
) -> list[PeerTrial]:
    """Time each form of the peer alone, one after the other."""
    forms = [(build, spins) for build in peers for spins in spinning]
    trials = []
    for build, spins in forms:
        progress.step(f"trying the peer: build {build}, spinning {'on' if spins else 'off'}", None)
        trial = PeerTrial(build, spins, answer_ms=0.0)
        if len(forms) > 1:
            with _peer_process(python, peers[build], threads, spins) as process:
                trial = replace(trial, answer_ms=round(answer_ms(process, plan), 1))
            progress.note(f"  {trial.answer_ms:.0f} ms for a prompt of {LONG_PROMPT} and {plan.tokens} tokens")
        trials.append(trial)
    return trials


def _our_process(engine: Path, threads: int, spinning: str) -> EngineProcess:
    command = [sys.executable, "-m", "compare.our_engine", str(engine), str(threads), spinning]
    return EngineProcess("our engine", command, [ROOT, ROOT / "engines", ROOT / "tools"])


def _peer_process(python: Path, model: Path, threads: int, spinning: bool) -> EngineProcess:
    command = [str(python), "-m", "compare.peer_genai", str(model), str(threads), str(int(spinning)), str(CAPACITY)]
    return EngineProcess("the peer", command, [ROOT / "tools"])  # nothing of our environment


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy="see --help")


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} to {most}")
        return int(text)

    return read


def _leave(number: int, frame: FrameType | None) -> None:  # the signature of a signal handler
    """End like Ctrl-C does, through every `finally`, when another process asks."""
    raise SystemExit(128 + number)
