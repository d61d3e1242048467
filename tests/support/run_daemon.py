"""Run the daemon for a test: `run_daemon.py CONFIG_TOML WORKER_COMMAND_JSON`. Makes a file "ready" beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edge_runtime.config import load_config
from edge_runtime.supervisor.daemon import run_daemon

if __name__ == "__main__":
    file = Path(sys.argv[1])
    sys.exit(
        run_daemon(
            load_config(file, env={}),
            worker_command=json.loads(sys.argv[2]),
            ready=lambda: file.with_name("ready").touch(),
        )
    )
