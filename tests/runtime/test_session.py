"""The session over ONNX Runtime against transformers' logits, the slow twin and itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_engines.checkpoint.open import open_checkpoint
from edge_runtime import open_session
from edge_runtime.errors import BackendError, RequestError, UsageError
from edge_runtime.session.session import Session
from engines.slow_twin import SlowTwin
from support.tiny_engines import FAMILIES, FP32_TOLERANCE, GOLDEN, build_tiny, expected, greedy

# The same FP32 sums in another order: measured at most 8e-6 on these models.
SAME_SUMS = 5e-5

LOWERINGS = ("ort", pytest.param("native", marks=pytest.mark.native))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped heads, llama3 rotary, untied head; capacity 64."""
    return build_tiny("llama3-scaled", tmp_path_factory.mktemp("engines") / "tiny")


@pytest.fixture
def session(engine: Path) -> Iterator[Session]:
    with open_session(engine, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_position_has_the_logits_of_transformers(name: str, lowering: str, tmp_path: Path) -> None:
    want = expected(name)
    with open_session(build_tiny(name, tmp_path / "engine", lowering=lowering), threads=1, verify_rows=40) as session:
        assert np.abs(session.verify(0, want.ids, 0) - want.logits).max() < FP32_TOLERANCE
        session.prefill(1, want.ids[:7])
        for position in range(7, len(want.ids)):
            logits = session.decode([1], [want.ids[position]], [position])[0]
            assert np.abs(logits - want.logits[position]).max() < FP32_TOLERANCE


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str, lowering: str, tmp_path: Path) -> None:
    want = expected(name)
    with open_session(build_tiny(name, tmp_path / "engine", lowering=lowering), threads=1) as session:
        assert greedy(session, 1, want.prompt, len(want.greedy)) == want.greedy


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_fp16_logits_stay_close_to_the_reference(name: str, lowering: str, tmp_path: Path) -> None:
    want = expected(name)
    folder = build_tiny(name, tmp_path / "engine", lowering=lowering, precision="fp16")
    with open_session(folder, threads=1, verify_rows=40) as session:
        error = np.linalg.norm(session.verify(0, want.ids, 0) - want.logits) / np.linalg.norm(want.logits)
    assert error < 0.02  # FP16 keeps 11 bits: 5e-4 per rounding, some dozen roundings in three layers; measured 0.008


def test_session_agrees_with_the_slow_twin_on_fresh_ids(session: Session) -> None:
    ids = np.random.default_rng(7).integers(0, session.geometry.vocab, 33).tolist()
    with open_checkpoint(GOLDEN / "llama3-scaled") as checkpoint:
        want = SlowTwin(checkpoint).logits(ids)[-1]
    assert np.abs(session.prefill(0, ids) - want).max() < FP32_TOLERANCE


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_c30_prefill_in_chunks_equals_the_whole(session: Session, chunk: int) -> None:
    ids = expected("llama3-scaled").ids
    whole = session.prefill(0, ids).copy()
    for start in range(0, len(ids), chunk):
        logits = session.prefill(1, ids[start : start + chunk], start)
    assert np.abs(logits - whole).max() < SAME_SUMS


def test_c29_rows_beyond_the_valid_length_never_matter(session: Session) -> None:
    ids = expected("llama3-scaled").ids
    session.prefill(0, ids[:20])
    clean = session.decode([0], [ids[20]], [20])[0].copy()
    capacity, kv_heads, head_dim = session.geometry.capacity, session.geometry.kv_heads, session.geometry.head_dim
    poison = [np.full((kv_heads, capacity - 20, head_dim), 1e4, np.float32) for _ in range(2 * session.geometry.layers)]
    session.prefill(0, ids[:20])
    session.load_rows(0, 20, poison)
    assert np.array_equal(session.decode([0], [ids[20]], [20])[0], clean)


def test_c29_the_step_beyond_capacity_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    with open_session(build_tiny("llama-tied", tmp_path / "engine", capacity=8), threads=1) as session:
        assert session.manifest.inputs[3].shape == ["B", 1, 8, 16]  # [B, K, C, D]: capacity, not prompt + capacity
        session.prefill(0, [5, 6, 7, 8, 9])
        for position in (5, 6, 7):
            session.decode([0], [10], [position])
        before = session.save_rows(0, 0, 8)
        with pytest.raises(RequestError, match="capacity of 8") as refused:
            session.decode([0], [10], [8])
        assert refused.value.code == "context_length_exceeded"
        after = session.save_rows(0, 0, 8)
        assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))


def test_c31_an_idle_second_slot_changes_nothing(session: Session) -> None:
    ids = expected("llama3-scaled").ids
    alone = session.prefill(0, ids[:9]).copy()
    assert np.isfinite(alone).all()
    session.load_rows(1, 0, [rows * 0 + np.float32(1e4) for rows in session.save_rows(1, 0, session.geometry.capacity)])
    assert np.array_equal(session.prefill(0, ids[:9]), alone)


def test_c32_a_batch_of_two_gives_the_tokens_of_two_single_runs(session: Session) -> None:
    prompts = ([3, 14, 15], expected("llama3-scaled").ids[:11])
    alone = [greedy(session, 0, prompt, 20) for prompt in prompts]
    for slots in ((0, 1), (1, 0)):  # either prompt in either slot
        assert decode_together(session, [prompts[i] for i in slots], 20) == [alone[i] for i in slots]
    same = decode_together(session, [prompts[0], prompts[0]], 20)
    assert same == [alone[0], alone[0]]


def test_c32_a_second_sequence_may_join_while_the_first_decodes(session: Session) -> None:
    first, second = [3, 14, 15], expected("llama3-scaled").ids[:11]
    alone = [greedy(session, 0, first, 16), greedy(session, 0, second, 8)]
    ids = [greedy(session, 0, first, 8), []]
    token = [alone[0][8], int(session.prefill(1, second).argmax())]
    session.prefill(0, first + ids[0])  # the ninth token comes from the same rows
    for step in range(8):
        for slot in (0, 1):
            ids[slot].append(token[slot])
        logits = session.decode([0, 1], token, [len(first) + 8 + step, len(second) + step])
        token = logits.argmax(axis=1).tolist()
    assert ids == alone


@pytest.mark.native
def test_c35_native_cache_is_updated_in_place_without_a_copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime warns when TensorScatter's output can't be its input's buffer."""
    with open_session(build_tiny("qwen2", tmp_path / "engine", lowering="native"), threads=1) as session:
        session.prefill(0, [1, 2, 3])
        session.decode([0], [4], [3])
        session.decode([0, 1], [4, 4], [4, 0])
    assert "copy" not in capfd.readouterr().err.lower()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_c35_cache_after_steps_equals_that_of_one_pass(lowering: str, tmp_path: Path) -> None:
    ids = expected("qwen2").ids
    with open_session(build_tiny("qwen2", tmp_path / "engine", lowering=lowering), threads=1) as session:
        session.prefill(0, ids)
        for position, token in enumerate(ids):
            session.decode([1], [token], [position])
        for once, stepwise in zip(session.save_rows(0, 0, len(ids)), session.save_rows(1, 0, len(ids)), strict=True):
            assert np.abs(once).max() > 0.01  # something was written
            assert np.abs(once - stepwise).max() < SAME_SUMS


def test_c36_memory_stays_level_over_loads_and_requests(engine: Path) -> None:
    process = psutil.Process()

    def load_and_run() -> None:
        with open_session(engine, threads=1) as session:
            session.prefill(0, [1, 2, 3])

    for _ in range(20):
        load_and_run()
    before = process.memory_info().rss
    for _ in range(100):
        load_and_run()
    assert process.memory_info().rss - before < 5e6  # case C36: 5 MB per 100 cycles
    with open_session(engine, threads=1) as session:
        for i in range(1200):
            if i == 200:
                before = process.memory_info().rss
            session.prefill(i % 2, [1 + i % 100] * (1 + i % 30))
            session.decode([0, 1], [3, 4], [40, 40])
    assert process.memory_info().rss - before < 5e6


def test_c37_a_call_from_another_thread_is_refused(session: Session) -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            session.prefill(0, [1])
        except BackendError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "another thread" in str(caught[0])


def test_c38_a_reused_slot_answers_like_a_fresh_one(session: Session, engine: Path) -> None:
    long, short = expected("llama3-scaled").ids, [9, 8, 7]
    session.prefill(0, long)
    session.reset(0)
    reused = session.prefill(0, short).copy()
    with open_session(engine, threads=1) as fresh:
        assert np.array_equal(fresh.prefill(0, short), reused)


def test_c43_a_nan_is_reported_for_its_slot_and_spares_the_other(session: Session) -> None:
    session.prefill(0, [1, 2, 3])
    alone = session.decode([0], [4], [3])[0].copy()
    assert session.bad_slots == ()
    session.prefill(0, [1, 2, 3])
    session.prefill(1, [1, 2, 3])
    session.load_rows(1, 1, [np.full_like(rows, np.nan) for rows in session.save_rows(1, 1, 2)])
    logits = session.decode([0, 1], [4, 4], [3, 3])
    assert session.bad_slots == (1,)
    assert np.abs(logits[0] - alone).max() < SAME_SUMS
    session.reset(1)
    assert session.bad_slots == ()


def test_saved_rows_continue_in_another_slot(session: Session) -> None:
    ids = expected("llama3-scaled").ids
    session.prefill(0, ids[:12])
    session.copy_rows(0, 1, 12)
    kept = session.decode([0], [ids[12]], [12])[0].copy()
    assert np.array_equal(session.decode([1], [ids[12]], [12])[0], kept)


def test_verify_gives_the_logits_of_single_steps(session: Session) -> None:
    ids = expected("llama3-scaled").ids
    session.prefill(0, ids[:10])
    stepwise = [session.decode([0], [ids[p]], [p])[0].copy() for p in range(10, 14)]
    assert np.abs(session.verify(0, ids[10:14], 10) - stepwise).max() < SAME_SUMS


def test_verify_beyond_the_reserved_rows_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="33 rows"):
        session.verify(0, [1] * 33, 0)


@pytest.mark.parametrize(("ids", "error"), [([], UsageError), ([-1], RequestError), ([320], RequestError)])
def test_ids_outside_the_vocabulary_are_refused(session: Session, ids: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        session.prefill(0, ids)


@pytest.mark.parametrize("slots", [[2], [1, 0], [0, 0], [0, 1, 2], []])
def test_slots_that_do_not_exist_are_refused(session: Session, slots: list[int]) -> None:
    with pytest.raises(UsageError, match="slot"):
        session.decode(slots, [1] * len(slots), [0] * len(slots))


def test_closing_twice_is_harmless_and_a_closed_session_says_so(engine: Path) -> None:
    session = open_session(engine, threads=1)
    session.close()
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.prefill(0, [1])


def decode_together(session: Session, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    tokens = [int(session.prefill(slot, prompt).argmax()) for slot, prompt in enumerate(prompts)]
    ids: list[list[int]] = [[], []]
    for step in range(num_new):
        for slot in (0, 1):
            ids[slot].append(tokens[slot])
        logits = session.decode([0, 1], tokens, [len(prompt) + step for prompt in prompts])
        tokens = logits.argmax(axis=1).tolist()
    return ids
