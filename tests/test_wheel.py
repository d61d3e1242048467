"""Prove the packages: the wheel holds exactly our sources and works with the core dependencies alone."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"edge_runtime": ".", "edge_engines": "engines", "edge_jetson": "jetson", "edge_tools": "tools"}

# What only a build machine or a GPU has: importing it must fail, whatever this environment holds.
IMPORT_ALL = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "pycuda"}:
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
print("imported", len(sys.argv) - 1, "from", sys.modules["edge_runtime"].__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a fresh environment with the wheel and the core dependencies, and nothing else."""
    root = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", str(root))
    site = next(root.glob("lib/python3*/site-packages"))
    run(str(root / "bin/python"), "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel))
    for entry in core_dependencies():
        if not (link := site / entry.name).exists():
            link.symlink_to(entry)
    return root


def test_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names == {
        str(path.relative_to(ROOT / area)) for package, area in PACKAGES.items() for path in sources(package)
    }


def test_wheel_names_its_licence_command_and_floor(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(n).name: archive.read(n).decode() for n in archive.namelist() if ".dist-info/" in n}
    assert "edge-runtime = edge_tools.cli:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Requires-Python: >=3.10" in texts["METADATA"]
    assert "Apache License" in texts["LICENSE"]


def test_source_archive_holds_sources_and_documents_but_no_products(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "tests/test_wheel.py"} <= names
    assert {str(p.relative_to(ROOT)) for package in PACKAGES for p in sources(package)} <= names
    assert not [n for n in names if n.endswith((".gguf", ".onnx", ".data", ".pyc", ".whl")) or n.startswith(".cache")]


def test_every_runtime_module_imports_with_the_core_dependencies_alone(bare: Path) -> None:
    # The one file that talks to ONNX Runtime is imported by open_backend when an engine asks for it.
    names = [name for name in module_names("edge_runtime", "edge_jetson") if name != "edge_runtime.backends.ort"]
    said = run(str(bare / "bin/python"), "-I", "-c", IMPORT_ALL, *names)
    assert said.startswith(f"imported {len(names)} from {bare}")


def test_command_explains_itself_with_the_core_dependencies_alone(bare: Path) -> None:
    said = run(str(bare / "bin/edge-runtime"), "--help")
    assert all(verb in said for verb in ("build", "serve", "ask", "inspect", "bench", "demo", "config"))


def build(kind: str, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(ROOT))
    (product,) = out.iterdir()
    return product


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT.anchor, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])} ... exited {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def sources(package: str) -> Iterator[Path]:
    """Files that belong to a package: git's view, so that neither products nor caches count."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", f"{PACKAGES[package]}/{package}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    yield from (path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def module_names(*packages: str) -> list[str]:
    found = []
    for package in packages:
        for path in sources(package):
            if path.suffix == ".py":
                parts = path.relative_to(ROOT / PACKAGES[package]).with_suffix("").parts
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


def core_dependencies() -> Iterator[Path]:
    """Top-level entries of the installed packages that the wheel requires without any extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    todo, seen = list(project["dependencies"]), set[str]()
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        installed = metadata.distribution(requirement.name)
        todo += installed.requires or []
        tops = {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}
        yield from (Path(str(installed.locate_file(top))) for top in sorted(tops))
