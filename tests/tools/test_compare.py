"""The comparison with a peer, as far as it needs no peer: options, schedule, ratios, and the weights handed over."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from compare.builds import finish_config
from compare.command import LONG_PROMPT, parse_options, read_prompts, run
from compare.engine_process import EngineProcess
from compare.hf_folder import write_hf_folder
from compare.install import run_logged
from compare.ratios import Sample, figure_of
from compare.rounds import CAPACITY, Plan, agreed_tokens, measure_rounds
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import tensor_shapes
from edge_engines.progress import NoProgress
from edge_runtime.errors import EdgeError, UsageError

Golden = Callable[[str], Path]
ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(prompts=((1, 2, 3), (1, 2, 3, 4, 5)), tokens=8, rounds=4)


class ScriptedEngine:
    """Takes `prefill` and `decode` milliseconds for each step, and writes down when it is asked."""

    def __init__(self, name: str, log: list[str], *, prefill: float = 1.0, decode: float = 1.0, ids: int = 9) -> None:
        self._name, self._log, self._prefill, self._decode = name, log, prefill, decode
        self._ids, self._batch = ids, 0

    def prefill_ms(self, prompts: Sequence[Sequence[int]]) -> float:
        self._log.append(f"{self._name} prefill")
        self._batch = len(prompts)
        return self._prefill

    def decode_ms(self, steps: int) -> list[float]:
        self._log.append(f"{self._name} decode")
        return [self._decode] * steps

    def ids(self) -> list[list[int]]:
        return [list(range(self._ids))] * self._batch

    def wait_until_quiet(self) -> None:
        self._log.append(f"{self._name} quiet")


def test_options_default_to_the_peer_at_its_best_and_ours_as_shipped() -> None:
    options = parse_options([])
    assert options.peer_builds == ("default", "pruned", "fused")
    assert options.peer_spinning == (False, True)
    assert (options.spinning, options.threads) == ("shipped", 0)
    assert LONG_PROMPT + options.tokens < CAPACITY


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "-1"], "whole number from 0 to 256"),
        (["--rounds", "0"], "whole number from 1 to 1000"),
        (["--tokens", "400"], "whole number from 8 to 255"),
        (["--peer-build", "other"], "invalid choice"),
    ],
)
def test_a_value_out_of_range_is_one_line_and_exit_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_prompts_are_the_golden_chat_and_a_long_one() -> None:
    short, long = read_prompts(vocab=49152)
    assert (len(short), len(long)) == (37, LONG_PROMPT)
    assert long[:37] == short


def test_a_vocabulary_that_lacks_the_prompts_ids_is_refused() -> None:
    with pytest.raises(UsageError, match="vocabulary of 320 ids"):
        read_prompts(vocab=320)


def test_ratio_is_their_time_over_ours() -> None:
    assert Sample(ours_ms=10.0, theirs_ms=25.0).ratio == 2.5


def test_ratio_of_a_figure_is_the_median_of_the_rounds_ratios() -> None:
    # Ratios 1, 2, 4: the machine was twice as slow in the second round, for both.
    samples = [Sample(10, 10), Sample(20, 40), Sample(10, 40)]
    figure = figure_of("decode", 1, 37, samples, target=2.0)
    assert (figure.ratio, figure.ratio_low, figure.ratio_high) == (2.0, 1.5, 3.0)  # quartiles, linear
    assert (figure.ours_ms, figure.theirs_ms) == (10, 40)
    assert figure.met


def test_a_ratio_below_its_target_is_a_miss() -> None:
    assert not figure_of("decode", 1, 37, [Sample(10, 9.4)], target=0.95).met
    assert figure_of("decode", 1, 37, [Sample(10, 9.5)], target=0.95).met


def test_every_kind_batch_and_prompt_becomes_a_figure() -> None:
    log: list[str] = []
    ours = ScriptedEngine("ours", log, prefill=10, decode=2)
    theirs = ScriptedEngine("theirs", log, prefill=25, decode=3)
    figures = measure_rounds(ours, theirs, PLAN, NoProgress())
    found = {(f.kind, f.batch, f.prompt_tokens): f.ratio for f in figures}
    expected = {"prefill": 2.5, "decode": 1.5}
    assert found == {(kind, b, n): ratio for kind, ratio in expected.items() for b in (1, 2) for n in (3, 5)}


def test_an_engine_is_timed_only_while_the_other_is_quiet() -> None:
    log: list[str] = []
    measure_rounds(ScriptedEngine("ours", log), ScriptedEngine("theirs", log), PLAN, NoProgress())
    for before, entry in pairwise(log):
        if entry.endswith(("prefill", "decode")) and entry != before:
            assert before.endswith("quiet")


def test_who_goes_first_alternates() -> None:
    log: list[str] = []
    measure_rounds(ScriptedEngine("ours", log), ScriptedEngine("theirs", log), PLAN, NoProgress())
    blocks = [entry for entry in log if entry.endswith("decode")]
    per_round = len(blocks) // PLAN.rounds
    assert [blocks[i * per_round] for i in range(4)] == ["ours decode", "theirs decode"] * 2


def test_the_same_tokens_are_counted() -> None:
    log: list[str] = []
    agreed = agreed_tokens(ScriptedEngine("ours", log), ScriptedEngine("theirs", log), PLAN)
    assert agreed == {"1x3": 9, "1x5": 9, "2x3": 9, "2x5": 9}


def test_engines_that_answer_differently_are_not_compared() -> None:
    class Other(ScriptedEngine):
        def ids(self) -> list[list[int]]:
            return [[7] * 9] * self._batch

    with pytest.raises(EdgeError, match="agree on the first 0 tokens"):
        agreed_tokens(ScriptedEngine("ours", []), Other("theirs", []), PLAN)


def test_an_engine_that_stops_early_is_not_compared() -> None:
    with pytest.raises(EdgeError, match="gave 4 tokens instead of 9"):
        agreed_tokens(ScriptedEngine("ours", []), ScriptedEngine("theirs", [], ids=4), PLAN)


def test_the_peer_gets_the_same_bits(golden: Golden, tmp_path: Path) -> None:
    with open_checkpoint(golden("llama-tied")) as model:
        write_hf_folder(tmp_path, model)
        with open_checkpoint(tmp_path) as written:
            assert written.spec == model.spec
            for name, _ in tensor_shapes(model.spec):
                np.testing.assert_array_equal(written.tensor(name), model.tensor(name))


def test_a_model_that_the_written_configuration_can_not_describe_is_refused(golden: Golden, tmp_path: Path) -> None:
    with open_checkpoint(golden("llama3-scaled")) as model, pytest.raises(UsageError, match="llama3 rotary scaling"):
        write_hf_folder(tmp_path, model)
    assert not list(tmp_path.iterdir())


def test_the_peer_does_not_stop_at_an_end_token(tmp_path: Path) -> None:
    path = tmp_path / "genai_config.json"
    model = {"vocab_size": 320, "eos_token_id": [2, 3], "pad_token_id": 2, "type": "llama"}
    path.write_text(json.dumps({"model": model, "search": {"past_present_share_buffer": True}}))
    finish_config(path)
    assert json.loads(path.read_text())["model"] == model | {"eos_token_id": 319, "pad_token_id": 319}


def test_a_peer_that_copies_its_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "genai_config.json"
    path.write_text(json.dumps({"model": {"vocab_size": 320}, "search": {"past_present_share_buffer": False}}))
    with pytest.raises(EdgeError, match="past_present_share_buffer"):
        finish_config(path)


def test_a_failed_install_names_pips_error_and_its_log(tmp_path: Path) -> None:
    script = "import sys; print('Looking'); print('ERROR: No matching distribution'); print('hint'); sys.exit(1)"
    with pytest.raises(EdgeError, match=r"can't install it: No matching distribution .*pip\.log.*check the network"):
        run_logged([sys.executable, "-c", script], tmp_path / "pip.log", "install it", remedy="check the network")


def test_an_engine_process_answers_until_its_block_ends(tmp_path: Path) -> None:
    (tmp_path / "fake_engine.py").write_text(
        "from compare.engine_loop import serve\n"
        "class Fake:\n"
        "    def facts(self): print('noise of a library'); return {'name': 'fake'}\n"
        "    def reset(self, batch): self.out = [[] for _ in range(batch)]\n"
        "    def prefill(self, prompts): [row.append(len(p)) for row, p in zip(self.out, prompts)]\n"
        "    def decode(self): [row.append(row[-1] + 1) for row in self.out]\n"
        "    def ids(self): return self.out\n"
        "serve(Fake)\n"
    )
    with EngineProcess("a fake", [sys.executable, "-m", "fake_engine"], [ROOT / "tools", tmp_path]) as engine:
        assert engine.facts == {"name": "fake"}
        assert engine.prefill_ms([[5, 6], [7, 8]]) >= 0
        assert len(engine.decode_ms(3)) == 3
        assert engine.ids() == [[2, 3, 4, 5], [2, 3, 4, 5]]
        engine.wait_until_quiet()


def test_an_engine_process_that_dies_is_one_line_with_its_last_words() -> None:
    script = "import sys; sys.exit('no such model')"
    with pytest.raises(EdgeError, match="a fake ended: no such model"):
        EngineProcess("a fake", [sys.executable, "-c", script], []).__enter__()
