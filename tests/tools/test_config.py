"""`edge-runtime config`: what it prints is what the daemon would use; every fault is said."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from edge_runtime.config import Config, load_config
from edge_tools.cli import run
from edge_tools.config import toml_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_shown_configuration_reads_back_as_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path / "edge.toml",
        '[mqtt]\nhost = "broker.example"\n[tenants.acme]\nclasses = ["background"]\n[tenants.b]\n',
    )
    assert run(["config", "show", "--config", str(file)]) == 0
    shown = write(tmp_path / "shown.toml", capsys.readouterr().out)
    assert load_config(shown, env={}) == load_config(file, env={})


def test_text_with_quotes_and_umlauts_survives_as_toml() -> None:
    table = {"a": 'say "hör"\\', "b": {"c": [1, 2.5, True], "d": {}, "e": None}}
    assert tomllib.loads("\n".join(toml_lines(table))) == {"a": 'say "hör"\\', "b": {"c": [1, 2.5, True], "d": {}}}


def test_defaults_are_complete_as_toml() -> None:
    shown = tomllib.loads("\n".join(toml_lines(msgspec.to_builtins(Config()))))
    assert shown["limits"]["timeout_ms"] == {"default": 60000, "max": 600000}


def test_check_says_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "edge.toml", "schema = 1\n")
    assert run(["config", "check", "--config", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour = 1\n", "unknown key 'colour'"),
        ("[mqtt]\nport = 70000\n", "got 70000"),
        ("[mqtt\n", "not valid TOML"),
        ("[limits]\nmax_tokens = 40000\n", "max_tokens 40000 may write 320000 bytes"),
        ('[model]\nfolder = "/no/such/engine"\n', "no such engine folder"),
        ('[mqtt]\npassword_file = "/no/such/file"\n', "password_file"),
    ],
)
def test_each_fault_is_refused_with_78(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "check", "--config", str(write(tmp_path / "edge.toml", text))]) == 78
    assert says in capsys.readouterr().err


def test_a_file_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "--config", str(tmp_path / "none.toml")]) == 78
    assert str(tmp_path / "none.toml") in capsys.readouterr().err
