"""Say what each supported model family is: its blocks, what an absent key means, where its tensors stand.

A new family is one file here, one entry below and its test. An entry is a function from configuration to ModelSpec, so
it is free to give layers their own windows, a second rotary table, a norm offset or a scaled embedding; `sources` may
cut fused tensors by rows.

Sources: transformers 4.57.1, `configuration_*` and `modeling_*` of each family, "tf" in these files; "gm" is
google-deepmind/gemma.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.checkpoint.tensor_names import GGUF_LONG_FACTORS, GGUF_SHORT_FACTORS
from edge_engines.families.entry import Family, GgufArchitecture
from edge_engines.families.gemma3 import GEMMA3, GEMMA3_TEXT, complete_gemma3_gguf
from edge_engines.families.llama import LLAMA, LLAMA3_VOCAB
from edge_engines.families.mistral import MISTRAL
from edge_engines.families.phi3 import PHI3, check_phi3_gguf
from edge_engines.families.qwen import QWEN2, QWEN3
from edge_runtime.errors import CheckpointError

__all__ = [
    "FAMILIES",
    "GGUF_ARCHITECTURES",
    "LLAMA3_VOCAB",
    "describe_model",
    "find_family",
    "find_gguf_architecture",
]

# By `model_type`.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "mistral": MISTRAL,
        "gemma3_text": GEMMA3_TEXT,
        "gemma3": GEMMA3,
        "phi3": PHI3,
    }
)

# By `general.architecture`. Mistral is stored as llama.
GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(family="llama", paired=True),
        "qwen2": GgufArchitecture(family="qwen2"),
        "qwen3": GgufArchitecture(family="qwen3"),
        "gemma3": GgufArchitecture(
            family="gemma3_text", shifted_norms=True, rope_tensors=(), complete=complete_gemma3_gguf
        ),
        "phi3": GgufArchitecture(
            family="phi3",
            fused=True,
            rope_tensors=(GGUF_LONG_FACTORS, GGUF_SHORT_FACTORS),
            complete=check_phi3_gguf,
        ),
    }
)


def describe_model(config: Config, family: str) -> ModelSpec:
    """Return the model that a configuration describes. Raises CheckpointError naming the key at fault."""
    entry = FAMILIES[family]
    return entry.describe(replace(config, absent=entry.absent, nullable=entry.nullable))


def find_family(config: Config) -> str:
    """Return the family of a Hugging Face configuration, by `model_type` alone."""
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{config.file}: model_type = {model_type!r} is not supported", remedy=f"supported: {', '.join(FAMILIES)}"
        )
    if config.values.get("quantization_config") is not None:
        raise CheckpointError(
            f"{config.file}: quantization_config is set: already quantised weights can't be calibrated",
            remedy="use the original F32, F16 or BF16 checkpoint",
        )
    return model_type


def find_gguf_architecture(architecture: str, file: str) -> GgufArchitecture:
    """Return how a GGUF file of this `general.architecture` is read."""
    if architecture not in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{file}: general.architecture = {architecture!r} is not supported",
            remedy=f"supported: {', '.join(GGUF_ARCHITECTURES)}",
        )
    return GGUF_ARCHITECTURES[architecture]
