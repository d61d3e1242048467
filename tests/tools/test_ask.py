"""`edge-runtime ask` against a device that really serves the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from edge_runtime.client import Client
from edge_tools.daemon import DEVICE
from support.command import COMMAND, edge_runtime, environment

pytestmark = pytest.mark.model
QUESTION = "What is the capital of France?"


def ask(port: int, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return edge_runtime("ask", *arguments, "--port", str(port), "--device", DEVICE, stdin=stdin)


def test_the_answer_is_printed_and_nothing_else(served_port: int) -> None:
    said = ask(served_port, QUESTION)
    assert said.returncode == 0, said.stderr
    assert "Paris" in said.stdout
    assert said.stdout.endswith("\n")
    assert said.stderr == ""


def test_streamed_and_whole_answers_are_the_same(served_port: int) -> None:
    assert ask(served_port, QUESTION).stdout == ask(served_port, QUESTION, "--no-stream").stdout


def test_the_question_can_come_from_stdin(served_port: int) -> None:
    assert "Paris" in ask(served_port, "-", stdin=QUESTION + "\n").stdout


def test_json_holds_text_usage_and_timings(served_port: int) -> None:
    record = json.loads(ask(served_port, QUESTION, "--json").stdout)
    assert "Paris" in record["text"]
    assert record["usage"]["prompt_tokens"] == 37
    assert record["timings"]["ttft_ms"] > 0


def test_a_cut_answer_says_so(served_port: int) -> None:
    said = ask(served_port, QUESTION, "--max-tokens", "2")
    assert said.returncode == 0
    assert "raise it with --max-tokens" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["hello", "--model", "other"], 2, "model_not_found"),
        (["hello", "--max-tokens", "100000"], 2, "max_tokens"),
        (["hello " * 600], 2, "context_length_exceeded"),
    ],
)
def test_a_refusal_is_one_line_and_a_status(served_port: int, arguments: list[str], status: int, says: str) -> None:
    said = ask(served_port, *arguments)
    assert said.returncode == status, said
    assert says in said.stderr
    assert said.stderr.count("\n") == 1


def test_a_device_nobody_knows_is_named(served_port: int) -> None:
    said = edge_runtime("ask", "hello", "--port", str(served_port), "--device", "elsewhere")
    assert said.returncode == 70
    assert "device 'elsewhere' is not known at the broker" in said.stderr


def test_interrupting_cancels_on_the_device(served_port: int) -> None:
    command = [*COMMAND, "ask", "Write a long story about the sea.", "--max-tokens", "256"]
    options = ["--port", str(served_port), "--device", DEVICE]
    with (
        Client(port=served_port, device=DEVICE) as client,
        subprocess.Popen([*command, *options], env=environment(), stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout
        assert child.stdout.read(1)  # the answer has begun
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(5) == 130
        # Both slots are free again: an answer of the whole length would still hold one for seconds.
        assert client.ask([{"role": "user", "content": QUESTION}], timeout_s=5).text
        assert client.status().running == 0
