"""Compute the inverse frequencies of rotary position embedding from a configuration, scaling included.

An unknown scaling kind is refused, never ignored: the model would answer short prompts and fail on long ones (C02).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.spec import Rotary
from edge_runtime.errors import CheckpointError

# As configurations spell the scaling kind -> what it stands for.
SCALING_KINDS: Mapping[str, str] = MappingProxyType({kind: kind for kind in ("default", "linear", "llama3")})


def read_rotary(config: Config, head_dim: int, *, absent_base: float | None) -> Rotary:
    """Return the one rotary table of a model that rotates whole heads in every layer.

    Reads `rope_theta` and `rope_scaling`, or `rope_parameters` of newer configurations. `absent_base` is what a
    missing base means in this family; None makes it an error. Factors in the key `rope_freqs` (the tensor of that
    name in GGUF files) divide the frequencies and stand for llama3 scaling.
    """
    scaling = scaling_section(config)
    _refuse_partial_rotation(config, scaling, head_dim)
    base = read_base(config, absent_base)
    kind = read_kind(scaling) if scaling else "default"
    plain = inverse_frequencies(base, head_dim)
    factors = config.values.get("rope_freqs")
    if factors is not None:
        return Rotary(base=base, kind="llama3", inv_freq=_divide(config, plain, factors, kind))
    if scaling is None or kind == "default":
        return Rotary(base=base, kind="default", inv_freq=plain)
    if kind == "linear":
        factor = scaling.number("factor")
        return Rotary(base=base, kind=kind, inv_freq=tuple(f / factor for f in plain))
    return Rotary(base=base, kind=kind, inv_freq=_llama3(plain, scaling))


def inverse_frequencies(base: float, dim: int) -> tuple[float, ...]:
    """Return base ** (-2i / dim) for i in [0, dim / 2): radians per position of each pair."""
    return tuple(base ** (-2 * i / dim) for i in range(dim // 2))


def llama3_frequencies(
    plain: Sequence[float], *, factor: float, low: float, high: float, original: float
) -> tuple[float, ...]:
    """Scale frequencies as Llama 3.1 does: keep short waves, divide long ones by `factor`, blend between.

    `low` and `high` are the numbers of turns within the `original` context that bound the blend.
    Source: transformers 4.57.1, modeling_rope_utils.
    """
    scaled = []
    for frequency in plain:
        turns = original * frequency / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))  # 1: unchanged, 0: divided by factor
        scaled.append(keep * frequency + (1 - keep) * frequency / factor)
    return tuple(scaled)


def scaling_section(config: Config, kinds: Mapping[str, str] = SCALING_KINDS) -> Config | None:
    """Return the object that holds the scaling, in whichever of the two layouts the file uses."""
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    if new is not None and old is not None and read_kind(new, kinds) != read_kind(old, kinds):
        raise CheckpointError(f"{config.file}: rope_parameters and rope_scaling disagree", remedy="keep one of them")
    section = new or old
    if section is not None and any(isinstance(value, dict) for value in section.values.values()):
        raise CheckpointError(f"{section.file} differs by layer type, which this model family does not have")
    return section


def read_base(config: Config, absent: float | None) -> float:
    """Return the rotary base; `absent` is what a missing one means, None makes it an error (C03)."""
    new = config.section("rope_parameters")
    if new is not None and "rope_theta" in new.values:
        base = new.number("rope_theta")
        if config.values.get("rope_theta", base) != base:
            raise CheckpointError(f"{config.file}: rope_theta and rope_parameters.rope_theta disagree")
        return base
    if absent is None:
        return config.number("rope_theta")
    return replace(config, absent={**config.absent, "rope_theta": absent}).number("rope_theta")


def read_kind(scaling: Config, kinds: Mapping[str, str] = SCALING_KINDS) -> str:
    """Return the scaling kind: `rope_type`, or `type` of older configurations. An unknown one is refused (C02)."""
    given = {key: scaling.values[key] for key in ("rope_type", "type") if scaling.values.get(key) is not None}
    if not given:
        if scaling.values.keys() <= {"rope_theta", "rope_type", "type", "partial_rotary_factor"}:
            return "default"
        raise CheckpointError(f"{scaling.file}: rope_type is missing, expected one of {', '.join(kinds)}")
    for key, kind in given.items():
        if not isinstance(kind, str) or kind not in kinds:
            raise scaling.refusal(key, kind, f"one of {', '.join(kinds)}")
    found = {kinds[str(kind)] for kind in given.values()}
    if len(found) > 1:
        raise CheckpointError(f"{scaling.file}: rope_type and type disagree ({given['rope_type']}, {given['type']})")
    return found.pop()


def _refuse_partial_rotation(config: Config, scaling: Config | None, head_dim: int) -> None:
    for section in (config, scaling):
        factor = section.values.get("partial_rotary_factor") if section else None
        if section is not None and factor not in (None, 1, 1.0):
            raise section.refusal("partial_rotary_factor", factor, "1: this family rotates whole heads")
    stated = config.values.get("rotary_dims", head_dim)
    if stated != head_dim:
        raise config.refusal("rotary_dims", stated, f"the head size {head_dim}: this family rotates whole heads")


def _divide(config: Config, plain: Sequence[float], factors: object, kind: str) -> tuple[float, ...]:
    if kind != "default":
        raise CheckpointError(f"{config.file} holds both rope_freqs.weight and {kind} rope scaling; expected one")
    if not isinstance(factors, tuple) or len(factors) != len(plain) or not all(f > 0 for f in factors):
        raise CheckpointError(f"{config.file}: rope_freqs.weight must hold {len(plain)} numbers above 0")
    return tuple(frequency / factor for frequency, factor in zip(plain, factors, strict=True))


def _llama3(plain: Sequence[float], scaling: Config) -> tuple[float, ...]:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.refusal("high_freq_factor", high, f"a number above low_freq_factor ({low})")
    original = scaling.number("original_max_position_embeddings")
    return llama3_frequencies(plain, factor=scaling.number("factor"), low=low, high=high, original=original)
