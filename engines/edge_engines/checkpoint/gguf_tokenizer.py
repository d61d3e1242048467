"""Build from a GGUF file the tokenizer the model was trained with, so that ids equal those of its tokenizer.json.

The split rule (`tokenizer.ggml.pre`) is checked, never guessed: a wrong one gives other ids without any error (C12).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edge_engines.checkpoint.gguf_sentencepiece import build_sentencepiece
from edge_engines.checkpoint.gguf_vocabulary import TokenKind, Vocabulary, read_vocabulary
from edge_engines.checkpoint.spec import TextAssets
from edge_runtime.errors import CheckpointError

# Split rules as the publishers' tokenizer.json files state them. They differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"

# Phi-3's tokenizer.json drops white space behind all other markers; a GGUF file can't say so.
PHI3_UNSTRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})

LLAMA3_TOKENS = 128256
LLAMA3_MARKERS: Mapping[int, str] = MappingProxyType(
    {
        128000: "<|begin_of_text|>",
        128001: "<|end_of_text|>",
        128006: "<|start_header_id|>",
        128007: "<|end_header_id|>",
        128009: "<|eot_id|>",
    }
)


@dataclass(frozen=True, slots=True)
class PreKind:
    """What one value of `tokenizer.ggml.pre` stands for."""

    splits: Callable[[], list[pre_tokenizers.PreTokenizer]]
    ignore_merges: bool = False  # a piece that is a token as a whole is taken before any merge
    add_bos: bool = False
    nfc: bool = False


def gguf_text_assets(metadata: Mapping[str, object], file: str) -> TextAssets | None:
    """Return tokenizer and template, None if the file has no vocabulary. Raises CheckpointError for an unknown kind."""
    if "tokenizer.ggml.model" not in metadata and "tokenizer.ggml.tokens" not in metadata:
        return None
    vocabulary = read_vocabulary(metadata, file)
    try:
        tokenizer, add_bos = _build_tokenizer(metadata, vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file}: no tokenizer can be built from tokenizer.ggml.* ({error})") from error
    template = metadata.get("tokenizer.chat_template")
    return TextAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template if isinstance(template, str) else None,
        bos_token=_token_text(metadata, "tokenizer.ggml.bos_token_id", vocabulary),
        eos_token=_token_text(metadata, "tokenizer.ggml.eos_token_id", vocabulary),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos) is True,
        known_ids=len(vocabulary.tokens),
    )


def _build_tokenizer(metadata: Mapping[str, object], vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether raw text gets a BOS where the file does not say (as llama.cpp does)."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        kind = _find_pre_kind(metadata, vocabulary)
        tokenizer, add_bos = _build_byte_level(vocabulary, kind), kind.add_bos
    elif model == "llama":
        add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        tokenizer, add_bos = build_sentencepiece(vocabulary, add_prefix), True
    else:
        raise CheckpointError(
            f"{vocabulary.file}: tokenizer.ggml.model = {model!r} is not supported", remedy="supported: gpt2, llama"
        )
    strips = model == "llama" and metadata.get("general.architecture") == "phi3"
    _add_marked_tokens(tokenizer, vocabulary, unstripped=PHI3_UNSTRIPPED if strips else None)
    return tokenizer, add_bos


def _find_pre_kind(metadata: Mapping[str, object], vocabulary: Vocabulary) -> PreKind:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None and _is_llama3(vocabulary):
        pre = "llama-bpe"
    if not isinstance(pre, str) or pre not in PRE_KINDS:
        state = "is missing" if pre is None else f"= {pre!r} is not supported"
        raise CheckpointError(
            f"{vocabulary.file}: tokenizer.ggml.pre {state}: text would be split by a wrong rule",
            remedy=f"convert the model again with a current converter; supported: {', '.join(PRE_KINDS)}",
        )
    return PRE_KINDS[pre]


def _is_llama3(vocabulary: Vocabulary) -> bool:
    """Recognise the one family whose old files without a split rule are still common."""
    tokens = vocabulary.tokens
    return len(tokens) == LLAMA3_TOKENS and all(tokens[index] == text for index, text in LLAMA3_MARKERS.items())


def _build_byte_level(vocabulary: Vocabulary, kind: PreKind) -> Tokenizer:
    if not vocabulary.merges:
        raise CheckpointError(f"{vocabulary.file}: tokenizer.ggml.merges is missing or empty")
    merges = list(vocabulary.merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=kind.ignore_merges))
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(kind.splits())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_marked_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, unstripped: frozenset[str] | None) -> None:
    """Let control and user-defined tokens be found in text as a whole; their ids are those of the vocabulary.

    White space behind a marker is dropped except behind the `unstripped` ones; None: it is kept behind all.
    """

    def marker(token: str, *, special: bool) -> AddedToken:
        rstrip = unstripped is not None and token not in unstripped
        return AddedToken(token, special=special, normalized=False, rstrip=rstrip)

    marked = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    special = [token for token, kind in marked if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN)]
    added = [token for token, kind in marked if kind == TokenKind.USER_DEFINED]
    tokenizer.add_special_tokens([marker(token, special=True) for token in special])
    tokenizer.add_tokens([marker(token, special=False) for token in added])


def _token_text(metadata: Mapping[str, object], key: str, vocabulary: Vocabulary) -> str | None:
    index = metadata.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.file}: {key} = {index}, expected an id below {len(vocabulary.tokens)} (the known tokens)"
        )
    return vocabulary.tokens[index]


def _split_then_bytes(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _gpt2_splits() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


_QWEN2 = PreKind(lambda: _split_then_bytes(QWEN2_SPLIT), nfc=True)
_LLAMA3 = PreKind(lambda: _split_then_bytes(LLAMA3_SPLIT), ignore_merges=True, add_bos=True)

PRE_KINDS: Mapping[str, PreKind] = MappingProxyType(
    {
        "gpt-2": PreKind(_gpt2_splits),
        "smollm": PreKind(lambda: [pre_tokenizers.Digits(individual_digits=True), *_gpt2_splits()]),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,  # older spelling
        "llama-v3": _LLAMA3,  # older spelling
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,  # other markers, the same rules
    }
)
