"""`edge-runtime config`: check a configuration, or show what the daemon would use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from edge_runtime.config import Config, load_config, read_password
from edge_runtime.errors import ConfigError
from edge_runtime.manifest import read_manifest

BYTES_PER_TOKEN = 8  # of answer text, generous: about 4 is usual for English

app = typer.Typer(
    name="config", help="Check a configuration file, or show what the daemon would use.", no_args_is_help=False
)
ConfigFile = Annotated[Path, typer.Option("--config", help="Configuration file (TOML).", show_default=False)]


@app.command()
def check(config: ConfigFile) -> None:
    """Check the file, conf.d beside it, the environment, the password and the engine folder it names.

    Prints one line per fault and exits 78, or "ok" and 0.

    Example:

      edge-runtime config check --config /etc/edge-runtime/edge.toml
    """
    settings = load_config(config)
    _check_response_limit(settings, config)
    read_password(settings.mqtt)
    if settings.model.folder:
        read_manifest(Path(settings.model.folder), check_digests=False)
    typer.echo(f"{config}: ok")


@app.command()
def show(config: ConfigFile) -> None:
    """Print the merged configuration as TOML: defaults, file, conf.d and environment. It holds no secret.

    Example:

      edge-runtime config show --config /etc/edge-runtime/edge.toml
    """
    typer.echo("\n".join(toml_lines(msgspec.to_builtins(load_config(config)))))


def toml_lines(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Write nested tables of strings, numbers, booleans and lists as TOML; a None is left out."""
    values = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    if path and (values or not table):
        yield f"\n[{'.'.join(path)}]"
    for key, value in values.items():
        # JSON writes strings, numbers, booleans and lists as TOML does.
        yield f"{key} = {dumps(value, ensure_ascii=False)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from toml_lines(value, (*path, key))


def _check_response_limit(settings: Config, file: Path) -> None:
    limits = settings.limits
    if limits.max_tokens * BYTES_PER_TOKEN > limits.bytes.response:
        raise ConfigError(
            f"{file}: [limits] max_tokens {limits.max_tokens} may write {limits.max_tokens * BYTES_PER_TOKEN} bytes, "
            f"bytes.response allows {limits.bytes.response}",
            remedy=f"set max_tokens to at most {limits.bytes.response // BYTES_PER_TOKEN} or raise bytes.response",
        )
