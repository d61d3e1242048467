"""Compute the rotary table of Phi-3: a part of each head may be rotated, and longrope keeps two lists of frequencies.

Source: transformers 4.57.1, modeling_rope_utils and configuration_phi3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.rotary import inverse_frequencies, read_base, read_kind, scaling_section
from edge_engines.checkpoint.spec import LongRange, Rotary

# "su" and "yarn" are what configurations of 2024 call longrope in this family.
PHI3_KINDS: Mapping[str, str] = MappingProxyType(
    {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
)


def read_longrope(config: Config, head_dim: int, *, absent_base: float) -> Rotary:
    """Return the rotary table; `Rotary.long` holds the second list where the model is scaled.

    Which list an engine uses is decided by its capacity, `Rotary.for_capacity`. Raises CheckpointError naming the key.
    """
    scaling = scaling_section(config, PHI3_KINDS)
    base, dim = read_base(config, absent_base), _rotated_dims(config, scaling, head_dim)
    plain = inverse_frequencies(base, dim)
    if scaling is None or read_kind(scaling, PHI3_KINDS) == "default":
        return Rotary(base=base, kind="default", inv_freq=plain)
    original = _original_context(config, scaling)
    return Rotary(
        base=base,
        kind="longrope",
        inv_freq=_divide(plain, scaling, "short_factor"),
        attention_factor=_attention_factor(config, scaling, original),
        long=LongRange(original, _divide(plain, scaling, "long_factor")),
    )


def attention_factor(context: int, original: int) -> float:
    """Return what cos and sin are multiplied with in a model stretched from `original` to `context` positions."""
    if context <= original:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def _rotated_dims(config: Config, scaling: Config | None, head_dim: int) -> int:
    """Return how many leading dims of each head are rotated: a share of the head, or a number in GGUF files."""
    if "rotary_dims" in config.values:
        dims = config.integer("rotary_dims")
        if dims % 2 or dims > head_dim:
            raise config.refusal("rotary_dims", dims, f"an even number up to the head size {head_dim}")
        return dims
    key = "partial_rotary_factor"
    stated = [section for section in (scaling, config) if section and section.values.get(key) is not None]
    if not stated:
        return head_dim
    share = stated[0].number(key)
    if any(section.values[key] != share for section in stated):
        raise config.refusal(key, config.values[key], f"{share}, as in {stated[0].file}")
    dims = int(round(head_dim * share, 6))  # 0.4 * 80 must not become 31
    if dims % 2 or not 2 <= dims <= head_dim:
        raise stated[0].refusal(key, share, f"a share that gives an even part of the head size {head_dim}")
    return dims


def _original_context(config: Config, scaling: Config) -> int:
    """Return the context of the first training; configurations state it at the top, newer ones beside the lists."""
    key = "original_max_position_embeddings"
    section = scaling if key in scaling.values else config
    original = section.integer(key)
    if config.values.get(key, original) != original:
        raise config.refusal(key, config.values[key], f"{original}, as in {scaling.file}")
    if original < 2:
        raise section.refusal(key, original, "a number above 1")
    return original


def _attention_factor(config: Config, scaling: Config, original: int) -> float:
    if scaling.values.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    return attention_factor(config.integer("max_position_embeddings"), original)


def _divide(plain: Sequence[float], scaling: Config, key: str) -> tuple[float, ...]:
    """Return the frequencies of one list: each of `plain` divided by its factor."""
    factors = scaling.value(key)
    if not isinstance(factors, list) or len(factors) != len(plain) or not all(map(_is_factor, factors)):
        raise scaling.refusal(key, factors, f"{len(plain)} numbers above 0, one for each pair of rotated dims")
    return tuple(frequency / float(factor) for frequency, factor in zip(plain, factors, strict=True))


def _is_factor(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
