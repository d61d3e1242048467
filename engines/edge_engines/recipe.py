"""Read a recipe: a checkpoint with the parameters that were found best for it, by name or as a file.

What a recipe says is what the flags of `build` say; a flag that is given wins.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from edge_runtime.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SUFFIX = ".toml"


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a recipe file; what is absent is left to the defaults of `build`."""

    source: str  # checkpoint, as `build` takes it
    about: str = ""  # device class, and what was measured
    name: str | None = None
    target: Literal["ort-cpu", "tensorrt", "tensorrt-rtx"] | None = None
    precision: Literal["fp32", "fp16", "w8", "int8", "auto"] | None = None
    objective: Literal["bytes", "time"] | None = None  # of precision auto
    lowering: Literal["ort", "native", "portable"] | None = None
    kv: Literal["float", "int8"] | None = None
    capacity: Annotated[int, Meta(ge=1)] | None = None
    batch: Annotated[int, Meta(ge=1, le=2)] | None = None
    calibration: str | None = None  # beside the recipe, unless absolute
    plan: str | None = None  # a sensitivity.json, beside the recipe unless absolute
    threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    gate: Annotated[float, Meta(ge=1, le=2)] | None = None
    compute_capability: list[str] | None = None
    optimization_level: Annotated[int, Meta(ge=0, le=5)] | None = None
    workspace_mib: Annotated[int, Meta(ge=1)] | None = None

    def overridden_by(self, other: Recipe) -> Recipe:
        """Return this recipe with everything that `other` says."""
        said = {field: value for field, value in msgspec.structs.asdict(other).items() if value is not None}
        return msgspec.structs.replace(self, **said)


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with this package."""
    names = (entry.name for entry in files("edge_engines.recipes").iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def find_recipe(argument: str) -> Recipe | None:
    """Return the recipe that the argument of `build` names, or None when it is a checkpoint.

    A recipe is a file that ends in .toml, or the name of a shipped one that is no file here. Raises UsageError naming
    file and field.
    """
    if argument.endswith(_SUFFIX):
        path = Path(argument).expanduser()
        return _beside(path, _read(str(path), _read_file(path)))
    if argument in shipped_recipes() and not Path(argument).exists():
        path = Path(str(files("edge_engines.recipes"))) / (argument + _SUFFIX)
        return _beside(path, _read(path.name, path.read_bytes()))
    return None


def source_of(argument: str) -> str:
    """Return the checkpoint that an argument names, itself or through a recipe."""
    recipe = find_recipe(argument)
    return recipe.source if recipe else argument


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        known = ", ".join(shipped_recipes())
        raise UsageError(f"{path}: {error.strerror}", remedy=f"shipped recipes, by name: {known}") from error


def _read(name: str, content: bytes) -> Recipe:
    try:
        return msgspec.convert(tomllib.loads(content.decode()), Recipe)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        known = ", ".join(Recipe.__struct_fields__)
        raise UsageError(f"{name}: not a valid recipe: {error}", remedy=f"its fields are: {known}") from error


def _beside(path: Path, recipe: Recipe) -> Recipe:
    """Return a recipe whose files are found from anywhere."""
    named = {field: getattr(recipe, field) for field in ("calibration", "plan")}
    found = {field: str(path.parent / value) for field, value in named.items() if value is not None}
    source = path.parent / recipe.source
    if source.exists():
        found["source"] = str(source)
    return msgspec.structs.replace(recipe, **found)
