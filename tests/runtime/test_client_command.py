"""`edge-runtime ask` when things go wrong: what was generated is printed, then one clear line and the right status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.broker import Broker, free_port
from support.command import edge_runtime
from support.daemon import DaemonProcess, eventually
from support.peer import TOPICS, Peer


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


@pytest.fixture
def device(broker: Broker, tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon:
        daemon.wait_ready()
        yield daemon


def words(count: int) -> str:
    return "".join(f"w{number} " for number in range(count))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("option", ["--stream", "--no-stream"])
def test_an_answer_that_fails_midway_is_printed_as_far_as_it_came(broker: Broker, option: str) -> None:
    said = edge_runtime("ask", "KILL AFTER some text", "--port", str(broker.port), option)
    assert said.returncode == 70
    assert said.stdout.endswith(" \n")
    assert said.stdout[:-1] == words(said.stdout.count("w"))
    assert said.stdout.count("w") >= 5
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("edge-runtime: worker_restarted: the worker died")


@pytest.mark.usefixtures("device")
def test_a_failed_answer_leaves_no_half_json(broker: Broker) -> None:
    said = edge_runtime("ask", "KILL AFTER some text", "--port", str(broker.port), "--json")
    assert (said.returncode, said.stdout) == (70, "")
    assert "worker_restarted" in said.stderr


@pytest.mark.usefixtures("device")
def test_raw_sends_the_text_itself_and_takes_no_system_message(broker: Broker) -> None:
    with Peer(broker.port, TOPICS.requests) as wire:
        said = edge_runtime("ask", "Once upon", "--raw", "--max-tokens", "2", "--port", str(broker.port))
        assert (said.returncode, said.stdout) == (0, words(2) + "\n")
        wire.wait_for(lambda: wire.messages)
        assert b'"prompt":"Once upon"' in wire.messages[0].payload
    said = edge_runtime("ask", "Once upon", "--raw", "--system", "be brief", "--port", str(broker.port))
    assert said.returncode == 2
    assert "raw" in said.stderr
    assert said.stderr.count("\n") == 1


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["hello", "--device", "nobody"], 70, "device 'nobody' is not known at the broker"),
        (["hello", "--device", "nobody"], 70, "start it with: edge-runtime serve --device nobody"),
        (["hello", "--model", "other"], 2, "model_not_found: model 'other' is not served; 'tiny' is"),
        (["REFUSE"], 2, "context_length_exceeded: too long"),
        (["hello", "--max-tokens", "257"], 2, "max_tokens 257 is above this device's limit of 256"),
    ],
)
def test_each_refusal_is_one_clear_line(broker: Broker, arguments: list[str], status: int, says: str) -> None:
    said = edge_runtime("ask", *arguments, "--port", str(broker.port))
    assert (said.returncode, said.stdout) == (status, "")
    assert says in said.stderr
    assert said.stderr.count("\n") == 1


def test_a_broker_that_is_away_is_named_with_what_to_do() -> None:
    port = free_port()
    said = edge_runtime("ask", "hello", "--port", str(port))
    assert said.returncode == 70
    assert said.stderr == (
        f"edge-runtime: no connection to the broker at 127.0.0.1:{port}: Connection refused; "
        "start a broker there, or name another host and port\n"
    )


def test_a_device_that_was_stopped_is_offline(broker: Broker, device: DaemonProcess) -> None:
    assert device.stop() == 0
    said = edge_runtime("ask", "hello", "--port", str(broker.port))
    assert said.returncode == 70
    assert said.stderr == (
        "edge-runtime: device 'local' is offline (stopped); start it with: edge-runtime serve --device local\n"
    )


def test_a_timeout_ends_the_answer_and_says_how_to_get_more(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port, worker={"step_ms": 50}) as daemon:
        daemon.wait_ready()
        said = edge_runtime("ask", "hello", "--timeout", "0.5", "--port", str(broker.port))
        assert said.returncode == 0
        assert said.stdout.startswith("w0 ")
        assert said.stderr == "edge-runtime: the answer was cut at its deadline; raise it with --timeout\n"


def test_a_model_that_is_still_loading_at_the_deadline_is_named(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port, worker={"load_s": 30}) as daemon:
        eventually(lambda: daemon.events("broker_connected"), 10, daemon.text)
        said = edge_runtime("ask", "hello", "--timeout", "0.5", "--port", str(broker.port))
        assert (said.returncode, said.stderr) == (70, "edge-runtime: not_ready: the model is still loading\n")
