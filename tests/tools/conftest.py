"""Fixtures of the command-line tests: a device that serves the demo model through a broker of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_tools.broker import find_mosquitto, running_broker
from edge_tools.daemon import served


@pytest.fixture(scope="session")
def served_port(smollm2_engine_w8: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a broker at which the device `demo` serves SmolLM2-135M-Instruct with 8-bit weights."""
    assert find_mosquitto(), (
        "this test needs the mosquitto broker; on Debian and Ubuntu: sudo apt-get install mosquitto"
    )
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch, running_broker(folder) as broker:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        with served(smollm2_engine_w8, broker.port, folder):
            yield broker.port
