"""Open a model: a Hugging Face folder or a GGUF file, checked in full before any weight is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

from edge_engines.checkpoint.config import Config, read_json
from edge_engines.checkpoint.digest import Progress, digest_files
from edge_engines.checkpoint.embed_scale import original_type, round_scale
from edge_engines.checkpoint.generation import folder_generation, gguf_generation
from edge_engines.checkpoint.gguf_config import gguf_config, read_architecture
from edge_engines.checkpoint.gguf_file import GgufFile
from edge_engines.checkpoint.gguf_tokenizer import gguf_text_assets
from edge_engines.checkpoint.mapping import (
    Source,
    TensorStore,
    check_tensors,
    check_tied_head,
    is_same_tensor,
    read_source,
)
from edge_engines.checkpoint.safetensors_files import SafetensorsFiles
from edge_engines.checkpoint.spec import Float32, GenerationDefaults, ModelSpec, TextAssets
from edge_engines.checkpoint.tensor_names import GGUF_NAMES, GGUF_ROPE_FACTORS, gguf_sources
from edge_engines.checkpoint.text_assets import folder_text_assets
from edge_engines.families import FAMILIES, LLAMA3_VOCAB, describe_model, find_family, find_gguf_architecture
from edge_runtime.errors import CheckpointError

LLAMA3_CONTEXT = 8192  # positions of Llama 3.0; longer ones need scaled rotary frequencies


@dataclass(frozen=True)  # no slots: the digest is computed once, when asked for
class Checkpoint:
    """An open model. Weights stay in mapped files; a context manager that lets go of them."""

    source: Path
    spec: ModelSpec
    text: TextAssets | None  # None: the model comes without a tokenizer
    generation: GenerationDefaults
    weight_bytes: int  # of all tensors as stored
    warnings: tuple[str, ...]
    _files: tuple[Path, ...]
    _store: TensorStore
    _sources: Mapping[str, Source]
    _on_digest: Progress | None = None

    def for_capacity(self, capacity: int) -> Checkpoint:
        """Return the model as an engine with `capacity` KV rows computes it; its files are shared."""
        return replace(self, spec=self.spec.for_capacity(capacity))

    def tensor(self, name: str) -> Float32:
        """Return one canonical tensor as a new float32 array in the shape of `tensor_shapes(spec)`."""
        return read_source(self._store, self._sources[name])

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex over weight files and configuration; reads all of them the first time."""
        return digest_files(self._files, self._on_digest)

    def close(self) -> None:
        """Let go of the mapped files."""
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: Path, on_digest: Progress | None = None) -> Checkpoint:
    """Open a model and check that its files hold exactly what its configuration describes.

    `on_digest` is told the bytes hashed so far and in all while `digest` is computed.
    Raises CheckpointError naming file, key or tensor, and what was expected.
    """
    if path.is_dir():
        return _open_folder(path, on_digest)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", remedy="give a Hugging Face folder or a .gguf file")
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(
            f"{path} is neither a folder nor a .gguf file",
            remedy="give the folder that holds config.json and the safetensors files, or a .gguf file",
        )
    return _open_gguf(path, on_digest)


def _open_folder(folder: Path, on_digest: Progress | None) -> Checkpoint:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{folder} holds no config.json", remedy="give a Hugging Face folder or a .gguf file")
    config = Config(file=str(config_file), values=read_json(config_file))
    model_type = find_family(config)
    spec, family = describe_model(config, model_type), FAMILIES[model_type]
    store = SafetensorsFiles(folder)
    sources = family.sources(spec, store.shapes)
    embed, head = sources["embed"].name, sources["head"].name
    unused = frozenset(name for name in store.shapes if name.startswith(family.unused))
    copies = frozenset({head}) if spec.tied_head else frozenset[str]()
    check_tensors(spec, sources, store, str(folder), consumed=copies | unused)
    if spec.tied_head:
        check_tied_head(embed, head, store, str(folder))
    spec = replace(spec, embed_scale=round_scale(spec.embed_scale, store.stored(embed)[0]))
    text, text_warnings = _fit_text(folder_text_assets(folder), spec)
    generation = folder_generation(folder, config.values, text, spec.vocab)
    return Checkpoint(
        source=folder,
        spec=spec,
        text=text,
        generation=generation,
        weight_bytes=store.weight_bytes,
        warnings=(*text_warnings, *_end_warnings(generation), *_unused_warnings(unused)),
        _files=(config_file, *store.files),
        _store=store,
        _sources=sources,
        _on_digest=on_digest,
    )


def _open_gguf(path: Path, on_digest: Progress | None) -> Checkpoint:
    store, file = GgufFile(path), str(path)
    architecture = find_gguf_architecture(read_architecture(store), file)
    config = gguf_config(store, read_architecture(store))
    head, embed = GGUF_NAMES["head"], GGUF_NAMES["embed"]
    # GGUF has no flag for a tied head: the head is left out, or it is there as an exact copy (C05).
    tied = head not in store.shapes or (embed in store.shapes and is_same_tensor(store, embed, head))
    config = architecture.complete(replace(config, values={**config.values, "tie_word_embeddings": tied}))
    # Mistral is stored as architecture llama; only its window tells.
    is_windowed = architecture.family == "llama" and config.values.get("sliding_window") is not None
    spec = describe_model(config, "mistral" if is_windowed else architecture.family)
    if architecture.shifted_norms:
        spec = replace(spec, norm_offset=0.0)
    sources = gguf_sources(spec, paired=architecture.paired, fused=architecture.fused)
    consumed = frozenset(architecture.rope_tensors) | (frozenset({head}) if tied else frozenset())
    check_tensors(spec, sources, store, file, consumed=consumed)
    spec = replace(spec, embed_scale=round_scale(spec.embed_scale, original_type(store.stored(embed)[0])))
    text, text_warnings = _fit_text(gguf_text_assets(store.metadata, file), spec)
    generation = gguf_generation(store.metadata, file, text, spec.vocab)
    return Checkpoint(
        source=path,
        spec=spec,
        text=text,
        generation=generation,
        weight_bytes=store.weight_bytes,
        warnings=(*text_warnings, *_end_warnings(generation), *_scaling_warnings(spec)),
        _files=(path,),
        _store=store,
        _sources=sources,
        _on_digest=on_digest,
    )


def _fit_text(text: TextAssets | None, spec: ModelSpec) -> tuple[TextAssets | None, list[str]]:
    """Return the assets with no more known ids than the head has rows, and what to tell the user."""
    if text is None:
        return None, ["the model comes without a tokenizer.json: it can be run on token ids only"]
    if text.known_ids <= spec.vocab:
        return text, []
    warning = f"the tokenizer knows {text.known_ids} ids, the model has {spec.vocab} rows: the last ones can't be used"
    return replace(text, known_ids=spec.vocab), [warning]


def _end_warnings(generation: GenerationDefaults) -> list[str]:
    return [] if generation.eos_ids else ["the model names no end token: every answer runs to its length limit"]


def _unused_warnings(names: frozenset[str]) -> list[str]:
    """Name the parts of a multimodal model that are left out."""
    if not names:
        return []
    parts = sorted({name.removeprefix("model.").partition(".")[0] for name in names})
    return [f"{len(names)} tensors of {', '.join(parts)} are not used: the engine takes text only"]


def _scaling_warnings(spec: ModelSpec) -> list[str]:
    """Warn of Llama 3.1 files made before converters wrote the rotary factors (C02)."""
    is_long = spec.vocab == LLAMA3_VOCAB and spec.max_positions > LLAMA3_CONTEXT
    if not is_long or spec.rotaries[0].kind != "default":
        return []
    return [
        f"{GGUF_ROPE_FACTORS} is missing although the context is {spec.max_positions}: a Llama 3.1 or later file "
        "without it loses the thread in long prompts; convert the model again"
    ]
