"""Install ONNX Runtime GenAI, and what its model builder needs, into an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_engines.progress import Progress
from edge_runtime.errors import EdgeError

TORCH = "torch==2.13.0"  # the builder loads checkpoints with it; nothing of it runs while measuring
# Named by the builder's own requirements; it fails on import without any of them.
PACKAGES = ("onnxruntime-genai==0.18.0", "transformers==5.24.0", "onnx", "onnx_ir", "safetensors")
_STAMP = "installed.txt"


def install_peer(home: Path, torch: str, progress: Progress) -> Path:
    """Return the Python of the peer's environment, installing it when it is absent, unfinished or other than asked for.

    Raises EdgeError when pip can't.
    """
    folder = home / "venv"
    python, stamp, wanted = folder / "bin/python", folder / _STAMP, "\n".join((*PACKAGES, torch))
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    home.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    progress.step("installing the peer (about 1.5 GB, minutes)", None)
    run_logged([sys.executable, "-m", "venv", str(folder)], home / "install.log", "make an environment for the peer")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    remedy = "check the network and pip's index; --torch names another build of torch"
    run_logged([*pip, torch, *PACKAGES], home / "install.log", "install the peer", remedy=remedy)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def run_logged(
    command: Sequence[str], log: Path, task: str, *, remedy: str = "", env: Mapping[str, str] | None = None
) -> None:
    """Run a command with its output in `log`. Raises EdgeError with the last error that it printed."""
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                env={**os.environ, **(env or {})},
            )
    except OSError as error:
        raise EdgeError(f"can't {task}: {command[0]}: {error.strerror}", remedy=remedy) from error
    if done.returncode:
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
        last = (errors or said or ["it printed nothing"])[-1]
        raise EdgeError(f"can't {task}: {last} (all of it in {log})", remedy=remedy)
