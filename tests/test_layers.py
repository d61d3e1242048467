"""Guard the layers: who may import whom. Reads the sources, runs nothing of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
AREAS = {"edge_runtime": ".", "edge_engines": "engines", "edge_jetson": "jetson", "edge_tools": "tools"}

# Inside edge_runtime an upper layer may import a lower one; "contract" is what both sides of a seam agree on.
LAYERS = ("contract", "backends", "session", "serving", "worker", "supervisor")
CONTRACT = {"errors", "config", "manifest", "memory", "messages", "topics", "worker.frames", "__version__"}
CLIENT_MAY_IMPORT = ("edge_runtime.client", "edge_runtime.supervisor.mqtt")
FACADE = "edge_runtime"  # its __init__ may name the session that it opens
OWN_IMPORTS = {
    "edge_runtime": {"edge_runtime"},
    "edge_jetson": {"edge_jetson", "edge_runtime"},
    "edge_engines": {"edge_engines", "edge_runtime"},
    "edge_tools": set(AREAS),
}
ONLY_IMPORTER = {  # third-party module -> the only file of edge_runtime that may import it
    "paho": "edge_runtime.supervisor.mqtt",
    "onnxruntime": "edge_runtime.backends.ort",
    "tensorrt": "edge_runtime.backends.tensorrt",
    "pycuda": "edge_runtime.backends.cuda",
}
NEVER_IN_RUNTIME = {"onnx", "gguf", "safetensors", "huggingface_hub", "typer", "rich"}


@dataclass(frozen=True)
class Import:
    """One import: `module` of one of our packages imports `target`."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def test_packages_import_only_what_stands_below_them() -> None:
    wrong = [
        item
        for item in all_imports(ROOT)
        if (top := top_of(item.target)) in AREAS and top not in OWN_IMPORTS[top_of(item.module)]
    ]
    assert not wrong, listing(wrong)


def test_imports_are_absolute() -> None:
    wrong = [item for item in all_imports(ROOT) if item.target.startswith(".")]
    assert not wrong, listing(wrong)


def test_runtime_layers_import_only_downwards() -> None:
    wrong = [item for item in all_imports(ROOT) if goes_up(item)]
    assert not wrong, listing(wrong)


def test_each_heavy_library_has_one_importer_in_the_runtime() -> None:
    wrong = [
        item
        for item in all_imports(ROOT)
        if top_of(item.module) == "edge_runtime"
        and (
            top_of(item.target) in NEVER_IN_RUNTIME
            or item.module != ONLY_IMPORTER.get(top_of(item.target), item.module)
        )
    ]
    assert not wrong, listing(wrong)


def test_the_board_package_needs_the_standard_library_and_the_runtime_only() -> None:
    allowed = sys.stdlib_module_names | OWN_IMPORTS["edge_jetson"]
    wrong = [i for i in all_imports(ROOT) if top_of(i.module) == "edge_jetson" and top_of(i.target) not in allowed]
    assert not wrong, listing(wrong)


def test_nobody_imports_torch() -> None:
    assert not [item for item in all_imports(ROOT) if top_of(item.target) == "torch"]


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in modules(ROOT)
        if top_of(name) != "edge_tools"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "print outside edge_tools: " + ", ".join(wrong)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("session/kv.py", "from edge_runtime.serving.scheduler import Scheduler"),
        ("backends/ort.py", "def f():\n    import edge_runtime.session.session"),
        ("worker/loop.py", "from edge_runtime.supervisor.mqtt import Mqtt"),
        ("serving/scheduler.py", "from edge_runtime import open_session"),
        ("errors.py", "from edge_runtime.backends import Backend"),
        ("client.py", "from edge_runtime.supervisor.gateway import Gateway"),
    ],
)
def test_a_planted_upward_import_is_found(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / "edge_runtime" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert [item for item in all_imports(tmp_path) if goes_up(item)]


def goes_up(item: Import) -> bool:
    """Whether an import inside edge_runtime leads to a higher layer."""
    if top_of(item.module) != "edge_runtime" or top_of(item.target) != "edge_runtime" or item.module == FACADE:
        return False
    if item.module.split(".")[1] == "client":  # beside the layers: the other end of the wire
        return not item.target.startswith(CLIENT_MAY_IMPORT) and layer_of(item.target) > 0
    return layer_of(item.target) > layer_of(item.module)


def layer_of(module: str) -> int:
    """Index into LAYERS; one more for what only packages above the runtime may import (client, the facade)."""
    inner = module.removeprefix("edge_runtime").removeprefix(".")
    if any(inner == name or inner.startswith(name + ".") for name in CONTRACT):
        return 0
    folder = inner.split(".")[0]
    return LAYERS.index(folder) if folder in LAYERS else len(LAYERS)


def all_imports(root: Path) -> Iterator[Import]:
    """Yield every import of every module below the four areas, function bodies and TYPE_CHECKING blocks included."""
    for name, tree in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (Import(name, alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                for alias in node.names:
                    yield Import(name, target_of(root, base, alias.name), node.lineno)


def target_of(root: Path, base: str, name: str) -> str:
    """Complete `from base import name`: the name belongs to the target only when it is a module."""
    area = AREAS.get(top_of(base))
    if area is None:
        return base
    inside = root / area / base.replace(".", "/")
    is_module = (inside / f"{name}.py").is_file() or (inside / name).is_dir()
    return f"{base}.{name}" if is_module or base == FACADE else base


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield dotted name and syntax tree of every module."""
    for package, area in AREAS.items():
        for path in sorted((root / area / package).rglob("*.py")):
            parts = path.relative_to(root / area).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield name, ast.parse(path.read_text(encoding="utf-8"), str(path))


def top_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def listing(wrong: list[Import]) -> str:
    return "imports across a layer:\n" + "\n".join(map(str, wrong))
