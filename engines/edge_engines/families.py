"""Say what each supported model family is: its blocks, what an absent key means, where its tensors stand.

A new family is one entry here and its test. An entry is a function from configuration to ModelSpec, so it is free to
give layers their own windows, a second rotary table, a norm offset or a scaled embedding; `sources` may cut fused
tensors by rows.

Sources: transformers 4.57.1, `configuration_*` and `modeling_*` of each family; "tf" below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.mapping import Source
from edge_engines.checkpoint.rotary import read_rotary
from edge_engines.checkpoint.spec import LayerSpec, ModelSpec
from edge_engines.checkpoint.tensor_names import hf_sources
from edge_runtime.errors import CheckpointError

Windows = tuple[int | None, ...]  # visible keys by layer, the query included; None = all

# Far above any published model: a damaged file must not make us build tables of billions of entries.
MAX_LAYERS = 1024
MAX_HEAD_DIM = 4096
LLAMA3_VOCAB = 128256  # rows of Llama 3: the mark of checkpoints that never use the rotary base of Llama 2


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. A key that is neither in the file nor in `absent` is an error."""

    describe: Callable[[Config], ModelSpec]
    absent: Mapping[str, object]  # None: as if null
    nullable: frozenset[str]  # keys whose null means "none" or "as the others say"
    sources: Callable[[ModelSpec], dict[str, Source]] = hf_sources  # tensors of the Hugging Face layout


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How GGUF files hold a family."""

    family: str
    paired: bool  # the converter laid rotary pairs of q and k side by side (llama.cpp, convert_hf_to_gguf: permute)


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


def _describe_llama(config: Config) -> ModelSpec:
    # Llama 2 configurations of 2023 leave the base out and mean 1e4 (mit-han-lab/llm-awq PR #326).
    base = None if config.integer("vocab_size") == LLAMA3_VOCAB else 1e4
    bias = config.flag("attention_bias")
    spec = _describe_common(config, "llama", _no_windows(config), absent_base=base)
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))


def _describe_mistral(config: Config) -> ModelSpec:
    window = config.optional_integer("sliding_window")  # null from v0.2 on: full attention
    windows = (window,) * config.integer("num_hidden_layers", MAX_LAYERS)
    return _describe_common(config, "mistral", windows, absent_base=1e4)  # v0.1 base [tf]


def _describe_qwen2(config: Config) -> ModelSpec:
    spec = _describe_common(config, "qwen2", _qwen_windows(config), absent_base=None)
    # Bias on q, k, v without a flag that says so [tf]; QK overflows FP16 (C43).
    return replace(spec, qkv_bias=True, scores_fp32=True)


def _describe_qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    spec = _describe_common(config, "qwen3", _qwen_windows(config), absent_base=None)
    return replace(spec, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _describe_common(config: Config, family: str, windows: Windows, *, absent_base: float | None) -> ModelSpec:
    """Describe pre-norm blocks with grouped-query attention, a gated SiLU MLP and one rotary table."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads")
    activation = config.text("hidden_act")
    if activation != "silu":
        raise config.refusal("hidden_act", activation, '"silu" in this family')
    head_dim = _head_dim(config, heads)
    return ModelSpec(
        family=family,
        hidden=config.integer("hidden_size"),
        ffn=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps"),
        max_positions=config.integer("max_position_embeddings"),
        layers=tuple(LayerSpec(rotary=0, window=window) for window in windows),
        rotaries=(read_rotary(config, head_dim, absent_base=absent_base),),
        tied_head=config.flag("tie_word_embeddings"),
    )


def _head_dim(config: Config, heads: int) -> int:
    """Return the stated head size; hidden / heads only where the family lets it be absent (C04)."""
    stated, hidden = config.optional_integer("head_dim"), config.integer("hidden_size")
    if stated is None and hidden % heads:
        raise config.refusal("hidden_size", hidden, f"a multiple of the {heads} heads, or a head_dim of its own")
    head_dim = stated or hidden // heads
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise config.refusal("head_dim", head_dim, f"an even number (rotary works on pairs) from 2 to {MAX_HEAD_DIM}")
    return head_dim


def _no_windows(config: Config) -> Windows:
    return (None,) * config.integer("num_hidden_layers", MAX_LAYERS)


def _qwen_windows(config: Config) -> Windows:
    """Return the windows of Qwen2 and Qwen3, which set a window and then mostly turn it off (C08)."""
    num_layers = config.integer("num_hidden_layers", MAX_LAYERS)
    if not config.flag("use_sliding_window"):
        return _no_windows(config)
    window = config.integer("sliding_window")
    kinds = config.value("layer_types")
    if kinds is None:
        full = config.integer("max_window_layers")  # the first so many layers see everything [tf]
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
    names = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in names for kind in kinds):
        raise config.refusal("layer_types", kinds, f"{num_layers} of {', '.join(names)}")
    return tuple(names[kind] for kind in kinds)


_NULLABLE = frozenset({"num_key_value_heads", "head_dim", "sliding_window", "layer_types"})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            describe=_describe_llama,
            absent={
                "num_key_value_heads": None,  # before grouped queries: as many as query heads [tf]
                "head_dim": None,  # hidden / heads [tf]
                "hidden_act": "silu",  # [tf]
                "attention_bias": False,  # key is younger than the first checkpoints [tf]
                "mlp_bias": False,  # the same
                "tie_word_embeddings": False,  # [tf]
            },
            nullable=_NULLABLE,
        ),
        "qwen2": Family(
            describe=_describe_qwen2,
            absent={
                "head_dim": None,  # hidden / heads [tf]
                "hidden_act": "silu",  # [tf]
                "use_sliding_window": False,  # [tf]
                "layer_types": None,  # key is younger than most checkpoints: max_window_layers decides
                "tie_word_embeddings": False,  # [tf]
            },
            nullable=_NULLABLE,
        ),
        "qwen3": Family(
            describe=_describe_qwen3,
            absent={
                # head_dim is not here: 128 does not follow from hidden / heads, and every release states it.
                "hidden_act": "silu",  # [tf]
                "attention_bias": False,  # [tf]
                "use_sliding_window": False,  # [tf]
                "layer_types": None,
                "tie_word_embeddings": False,  # [tf]
            },
            nullable=_NULLABLE - {"head_dim"},
        ),
        "mistral": Family(
            describe=_describe_mistral,
            absent={
                # sliding_window is not here: the class default is 4096, later releases mean none; the file must say.
                "head_dim": None,  # hidden / heads [tf]; Nemo states 128
                "hidden_act": "silu",  # [tf]
                "tie_word_embeddings": False,  # [tf]
            },
            nullable=_NULLABLE,
        ),
    }
)

GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(family="llama", paired=True),
        "qwen2": GgufArchitecture(family="qwen2", paired=False),
        "qwen3": GgufArchitecture(family="qwen3", paired=False),
    }
)
