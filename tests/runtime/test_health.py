"""When a worker counts as stuck, and when it is started again. No process, no clock."""

from __future__ import annotations

from random import Random

import pytest

from edge_runtime.config import HeartbeatConfig, RestartConfig
from edge_runtime.supervisor.health import BeatWatch, RestartPolicy
from edge_runtime.worker.frames import Heartbeat

SEED = 1


def beat(*, steps: int = 0, age_s: float = 0.0, busy: int = 0, step_ms: list[float] | None = None) -> Heartbeat:
    return Heartbeat(
        seq=0,
        phase="serving",
        step_count=steps,
        step_age_s=age_s,
        rows_busy=busy,
        kv_tokens=0,
        rss_bytes=0,
        useful_tokens=0,
        computed_tokens=0,
        step_ms=step_ms or [],
        nan_count=0,
    )


def judged_each_tenth(watch: BeatWatch, start: float, end: float) -> None:
    for tenth in range(round(start * 10), round(end * 10) + 1):
        watch.judge(tenth / 10)


@pytest.mark.fault("W2")
def test_the_third_missed_beat_in_a_row_is_too_many() -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    judged_each_tenth(watch, 0, 3.5)  # due at 1, 2, 3; missed half a second later
    assert (watch.missed, watch.is_lost) == (2, False)
    watch.judge(3.6)
    assert (watch.missed, watch.is_lost) == (3, True)


@pytest.mark.fault("W4")
def test_two_missed_one_good_two_missed_is_not_too_many_and_four_are_counted() -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    judged_each_tenth(watch, 0, 2.9)
    assert watch.missed == 2
    watch.beat(beat(), 2.9)
    judged_each_tenth(watch, 3.0, 5.5)  # due at 3.9 and 4.9
    assert (watch.missed, watch.is_lost, watch.missed_total) == (2, False, 4)


@pytest.mark.fault("W4")
def test_a_late_supervisor_blames_nobody() -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    watch.judge(0.1)
    watch.judge(4.1)  # four seconds without looking
    assert watch.missed == 0
    judged_each_tenth(watch, 4.2, 7.7)
    assert watch.is_lost


@pytest.mark.fault("W3")
def test_a_stuck_step_counts_from_its_limit_on_although_beats_go_on() -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    for second in range(1, 9):
        watch.beat(beat(steps=7, age_s=second - 0.5, busy=1), float(second))
        watch.judge(second + 0.1)
        # The limit is 5 s: ages 5.5, 6.5 and 7.5 are missed beats.
        assert watch.missed == max(0, second - 5)
    assert watch.is_lost


@pytest.mark.fault("W3")
@pytest.mark.parametrize(("p99_ms", "limit_s"), [(10.0, 5.0), (250.0, 5.0), (400.0, 8.0)])
def test_the_limit_of_a_step_follows_the_slowest_steps(p99_ms: float, limit_s: float) -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    watch.beat(beat(steps=100, step_ms=[p99_ms] * 100), 1.0)
    assert watch.hang_limit_s == pytest.approx(limit_s)


@pytest.mark.fault("W3")
def test_a_long_but_moving_prefill_is_left_alone() -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    for second in range(1, 60):
        watch.beat(beat(steps=second // 6, age_s=(second % 6) + 0.1, busy=1), float(second))
        assert watch.missed <= 1  # ages up to 5.1 s just before the count moves
    assert not watch.is_lost


def test_an_idle_worker_is_not_stuck() -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    for second in range(1, 100):
        watch.beat(beat(steps=7, age_s=0.0, busy=0), float(second))
    assert watch.missed_total == 0


def test_percentiles_are_of_the_latest_steps() -> None:
    watch = BeatWatch(HeartbeatConfig(), 0.0)
    assert watch.step_percentile_ms(0.99) == 0.0
    watch.beat(beat(step_ms=[float(number) for number in range(1, 101)]), 1.0)
    assert watch.step_percentile_ms(0.5) == 51.0
    assert watch.step_percentile_ms(0.99) == 100.0


@pytest.mark.fault("W8")
def test_the_pause_before_a_restart_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy(RestartConfig(limit=100), Random(SEED))
    pauses = [policy.died(float(number)).delay_s for number in range(9)]
    for pause, nominal in zip(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert nominal * 0.75 <= pause <= nominal


@pytest.mark.fault("W8")
def test_more_than_five_deaths_in_the_window_are_a_failure() -> None:
    policy = RestartPolicy(RestartConfig(), Random(SEED))
    verdicts = [policy.died(float(second)) for second in range(6)]
    assert [verdict.has_failed for verdict in verdicts] == [False] * 5 + [True]
    assert verdicts[-1].delay_s == 60.0


def test_deaths_outside_the_window_do_not_count() -> None:
    policy = RestartPolicy(RestartConfig(), Random(SEED))
    assert not any(policy.died(61.0 * number).has_failed for number in range(20))


@pytest.mark.fault("W8")
def test_a_failed_worker_is_given_up_after_its_time_and_not_before() -> None:
    policy = RestartPolicy(RestartConfig(give_up_s=100.0), Random(SEED))
    for second in range(6):
        policy.died(float(second))  # failed at 5
    assert not policy.died(104.9).gives_up
    assert policy.died(105.0).gives_up


def test_a_worker_that_serves_again_has_not_failed() -> None:
    policy = RestartPolicy(RestartConfig(), Random(SEED))
    for second in range(6):
        policy.died(float(second))
    policy.ready(10.0)
    assert not policy.died(700.0).has_failed


def test_ten_healthy_minutes_begin_the_backoff_anew() -> None:
    for healthy_s, nominal in ((599.0, 8), (600.0, 1)):
        policy = RestartPolicy(RestartConfig(), Random(SEED))
        for second in range(3):
            policy.died(float(second))
        policy.ready(10.0)
        assert policy.died(10.0 + healthy_s).delay_s <= nominal
        assert policy.num_restarts == 4


def test_a_hopeless_death_fails_at_once() -> None:
    assert RestartPolicy(RestartConfig(), Random(SEED)).died(0.0, is_hopeless=True).has_failed
