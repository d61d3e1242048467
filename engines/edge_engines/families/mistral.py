"""Say what Mistral is."""

from __future__ import annotations

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.families.dense import NULLABLE, describe_plain, one_window
from edge_engines.families.entry import Family


def _describe(config: Config) -> ModelSpec:
    # The window is null from v0.2 on: full attention. 1e4 is the base of v0.1 [tf].
    return describe_plain(config, "mistral", one_window(config), absent_base=1e4)


MISTRAL = Family(
    describe=_describe,
    absent={
        # sliding_window is not here: the class default is 4096, later releases mean none; the file must say.
        "head_dim": None,  # hidden / heads [tf]; Nemo states 128
        "hidden_act": "silu",  # [tf]
        "tie_word_embeddings": False,  # [tf]
    },
    nullable=NULLABLE,
)
