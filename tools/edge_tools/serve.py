"""`edge-runtime serve`: run the daemon in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from edge_runtime.backends import check_loadable
from edge_runtime.config import load_config
from edge_runtime.errors import UsageError
from edge_runtime.manifest import read_manifest

LogLevel = Literal["debug", "info", "warning", "error"]


def serve(
    *,
    engine: Annotated[Path | None, typer.Option(help="Engine folder; else model.folder of the configuration.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    host: Annotated[str | None, typer.Option(help="Broker's host; 127.0.0.1 when nothing says otherwise.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Broker's port; 1883 by default.")] = None,
    device: Annotated[str | None, typer.Option(help="Name of this device in the topics; local by default.")] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Least level that is logged; info by default.")] = None,
) -> int:
    """Serve an engine over MQTT until Ctrl-C or SIGTERM; the broker may come and go.

    Command-line options win over the environment (EDGE_MQTT__HOST ...), that over the file.

    Examples:

      edge-runtime serve --engine out/

      edge-runtime serve --config /etc/edge-runtime/edge.toml

      edge-runtime serve --engine out/ --host broker.example --device kiosk-7
    """
    from edge_runtime.supervisor.daemon import run_daemon  # noqa: PLC0415  # keeps --help fast

    chosen: dict[str, dict[str, Any]] = {
        "model": {"folder": str(engine) if engine else None},
        "mqtt": {"host": host, "port": port},
        "device": {"name": device},
        "log": {"level": log_level},
    }
    settings = load_config(config, overrides=_given(chosen))
    if not settings.model.folder:
        raise UsageError(
            "no engine named", remedy="give --engine FOLDER, or set model.folder in the file given by --config"
        )
    folder = Path(settings.model.folder)
    check_loadable(folder, read_manifest(folder, check_digests=False))  # so that a wrong folder is one plain line
    return run_daemon(settings)


def _given(options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Leave out what was not given on the command line."""
    return {
        section: {key: value for key, value in keys.items() if value is not None} for section, keys in options.items()
    }
