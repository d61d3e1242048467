"""Imitate a TensorRT module of some version: objects that know exactly the names that version has, and nothing else.

`tests/data/tensorrt_names.json` holds the public names of the classes that compiling touches, version by version. They
were read with `dir` from the real Python bindings, the wheels `tensorrt_cu12_bindings` of the package index: a binding
can be imported without its two gigabytes of libraries when the nine C functions that it links to are stubs. Only names
were recorded: that calls do what they should is proved with TensorRT-RTX alone, whose library builds without a GPU.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES_FILE = Path(__file__).parents[1] / "data" / "tensorrt_names.json"

Names = Mapping[str, list[str]]

_MADE_BY = {
    "Builder.create_network": "INetworkDefinition",
    "Builder.create_builder_config": "IBuilderConfig",
    "Builder.create_optimization_profile": "IOptimizationProfile",
    "IBuilderConfig.create_timing_cache": "ITimingCache",
    "IBuilderConfig.get_timing_cache": "ITimingCache",
    "OnnxParser.get_error": "ParserError",
    "Runtime.deserialize_cuda_engine": "ICudaEngine",
    "ICudaEngine.create_engine_inspector": "EngineInspector",
}
_ANSWERS: dict[str, Any] = {
    "OnnxParser.parse_from_file": True,
    "IBuilderConfig.set_timing_cache": True,
    "ITimingCache.serialize": b"cache",
    "Builder.build_serialized_network": b"plan",
    "EngineInspector.get_engine_information": '{"Layers": []}',
    "ParserError.desc": "node 7 is unknown",
}
_NUMBERS = {"OnnxParser.num_errors": 1}
_SUBCLASSED = ("ILogger", "IProgressMonitor")
_CREATED = ("Builder", "OnnxParser", "Runtime")


def recorded_versions() -> dict[str, Names]:
    """Return the recorded names by version."""
    recorded: dict[str, dict[str, str]] = json.loads(NAMES_FILE.read_text())
    return {
        version: {name: members.split() for name, members in classes.items()} for version, classes in recorded.items()
    }


def names_of(module: Any) -> Names:
    """Return the names of a real module in the same form."""
    return {
        name: [member for member in dir(kind) if not member.startswith("_")]
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
    }


class StrictModule:
    """The module: classes to subclass or to create, and enumerations."""

    def __init__(self, version: str, names: Names, answers: Mapping[str, Any] | None = None) -> None:
        self.__version__ = version
        self.calls: list[tuple[str, tuple[Any, ...]]] = []  # ("IBuilderConfig.set_flag", arguments), in order
        self._names, self._answers = names, {**_ANSWERS, **(answers or {})}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"this version has no {name}")
        if name in _CREATED:
            return lambda *arguments: StrictObject(self, name)
        members = {member: number for number, member in enumerate(self._names[name])}
        if name in _SUBCLASSED:
            return type(name, (), members)
        return type(name, (), members)()

    def answer(self, path: str, arguments: tuple[Any, ...]) -> Any:
        """Return what the call `path` answers, and keep it in `calls`."""
        self.calls.append((path, arguments))
        return StrictObject(self, _MADE_BY[path]) if path in _MADE_BY else self._answers.get(path)


class StrictObject:
    """An object of class `kind`: other names than that class has can neither be read nor set."""

    def __init__(self, module: StrictModule, kind: str) -> None:
        self.__dict__.update(_module=module, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        path = self._checked(name)
        if path in _NUMBERS:
            return _NUMBERS[path]
        return lambda *arguments: self._module.answer(path, arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        self._module.calls.append((self._checked(name), (value,)))

    def _checked(self, name: str) -> str:
        if name not in self._module._names[self._kind]:
            raise AttributeError(f"this version has no {self._kind}.{name}")
        return f"{self._kind}.{name}"
