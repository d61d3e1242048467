"""Measure a checkpoint's sensitivity to INT8: open it, prepare the texts, assess, describe."""

from __future__ import annotations

import tempfile
from datetime import datetime, timezone
from pathlib import Path

from edge_engines.checkpoint.open import Checkpoint, open_checkpoint
from edge_engines.progress import Progress
from edge_engines.sensitivity.planning import plan_int8
from edge_engines.sensitivity.table import Table
from edge_engines.text_files import write_text_files
from edge_engines.texts.sets import DEFAULT_SIZES, TextSets, TextSizes, load_text_sets
from edge_runtime.session.text import TextCodec

FIXED_NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)  # for templates that write the date: the same text every day


def measure_checkpoint(
    source: Path,
    *,
    calibration: Path | None,
    threshold: float,
    gate: float,
    progress: Progress,
    sizes: TextSizes = DEFAULT_SIZES,
    journal: Path | None = None,
) -> Table:
    """Return the table of a Hugging Face folder or GGUF file.

    `calibration` is the user's own text, chats or token ids; results are kept in the folder `journal`. Raises
    CheckpointError, UsageError and BuildError.
    """
    with open_checkpoint(source) as model:
        texts = load_texts(model, calibration, sizes)
        return plan_int8(model, texts, progress, threshold=threshold, gate=gate, journal=journal)[1]


def load_texts(model: Checkpoint, calibration: Path | None, sizes: TextSizes = DEFAULT_SIZES) -> TextSets:
    """Return the three texts in the model's own ids, prefix and chat template included."""
    sizes, vocab = sizes.within(model.spec.max_positions), model.spec.vocab
    if model.text is None:
        return load_text_sets(None, None, vocab, user_file=calibration, sizes=sizes)
    with tempfile.TemporaryDirectory() as folder:
        write_text_files(Path(folder), model)
        codec = TextCodec.load(Path(folder), now=lambda: FIXED_NOW)
    chat = codec.encode_chat if model.text.chat_template is not None else None
    return load_text_sets(codec.encode, chat, vocab, user_file=calibration, sizes=sizes)
