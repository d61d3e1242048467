"""Say what an entry of the table of families holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.mapping import Source
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.checkpoint.tensor_names import GGUF_ROPE_FACTORS, hf_sources


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. A key that is neither in the file nor in `absent` is an error."""

    describe: Callable[[Config], ModelSpec]
    absent: Mapping[str, object]  # None: as if null
    nullable: frozenset[str]  # keys whose null means "none" or "as the others say"
    # Where the tensors stand in the Hugging Face layout, given all names that the files hold. Names the head too where
    # the model ties it: a copy would stand there.
    sources: Callable[[ModelSpec, Collection[str]], dict[str, Source]] = hf_sources
    unused: tuple[str, ...] = ()  # beginnings of the names of parts that an engine leaves out, such as the vision tower


def as_stored(config: Config) -> Config:
    """Return a configuration that needs no completion."""
    return config


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How GGUF files hold a family. Source: llama.cpp, convert_hf_to_gguf."""

    family: str  # key of FAMILIES
    paired: bool = False  # the converter laid rotary pairs of q and k side by side
    fused: bool = False  # q, k, v are one tensor, gate and up another
    shifted_norms: bool = False  # the converter has added the norm offset to the weights
    rope_tensors: tuple[str, ...] = (GGUF_ROPE_FACTORS,)  # tensors of rotary factors that the family may use
    complete: Callable[[Config], Config] = as_stored  # adds what such files leave out
