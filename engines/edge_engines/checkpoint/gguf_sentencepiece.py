"""Build a SentencePiece-type tokenizer (Llama 2, Mistral v0.x) from the vocabulary of a GGUF file.

Such files hold scores instead of merges. A piece is merged from any two pieces that spell it, best score first; text is
marked with ▁ for each space; what no piece spells falls back to byte tokens.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers

from edge_engines.checkpoint.gguf_vocabulary import TokenKind, Vocabulary
from edge_runtime.errors import CheckpointError

SPACE = "▁"


def build_sentencepiece(vocabulary: Vocabulary, add_prefix: bool) -> Tokenizer:
    """Return the tokenizer. `add_prefix`: text begins with a space mark of its own, as Llama 2 was trained."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.file}: tokenizer.ggml.scores has {len(vocabulary.scores)} entries for "
            f"{len(vocabulary.tokens)} tokens, expected one each"
        )
    unknown = [token for token, kind in _marked(vocabulary) if kind == TokenKind.UNKNOWN]
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_from_scores(vocabulary),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    mark_spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), *mark_spaces] if add_prefix else mark_spaces
    )
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all merges that give a normal piece: best score first, of equal ones that with the lowest ids."""
    ids, ranked = vocabulary.ids, []
    for index, (token, kind) in enumerate(_marked(vocabulary)):
        if kind != TokenKind.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-vocabulary.scores[index], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _marked(vocabulary: Vocabulary) -> zip[tuple[str, int]]:
    return zip(vocabulary.tokens, vocabulary.kinds, strict=True)
