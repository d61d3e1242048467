"""Faults of our own code while a message is admitted: the sender is answered once, and the next one is served.

They are planted through what a gateway is made of: a configuration whose values have a type that they can't have, and
an outbox that breaks.
"""

from __future__ import annotations

import pytest

from edge_runtime.config import Config, LimitsConfig, OutboxConfig, TenantConfig
from edge_runtime.messages import ErrorFrame
from edge_runtime.supervisor.outbox import Item, Outbox
from support.gateway import RESULT, TOPICS, Desk

BROKEN_CHECK = Config(limits=LimitsConfig(max_tokens="many"))  # type: ignore[arg-type]  # fails in `examine`
BROKEN_POLICY = Config(tenants={"default": TenantConfig(classes=None)})  # type: ignore[arg-type]  # fails in `_admit`
SECRET = "zanzibar"


class BreakingOutbox(Outbox):
    """Refuses its first frame."""

    def __init__(self) -> None:
        super().__init__(OutboxConfig())
        self.is_broken = True

    def put(self, item: Item) -> None:
        if self.is_broken:
            self.is_broken = False
            raise OSError(SECRET)
        super().put(item)


@pytest.mark.fault("B11")
@pytest.mark.parametrize("config", [BROKEN_CHECK, BROKEN_POLICY], ids=["while examined", "while admitted"])
def test_a_fault_of_ours_is_answered_counted_and_noticed_without_the_prompt(config: Config) -> None:
    desk = Desk(config)
    desk.ask(prompt=SECRET)
    (item,) = desk.taken()
    assert item.message.topic == RESULT
    assert b'"code":"internal_error"' in item.message.payload
    assert b'"id":"r1"' in item.message.payload
    assert desk.gateway.counts["internal_error"] == 1
    (facts,) = [facts for event, facts in desk.notices if event == "internal_error"]
    assert facts["reason"] == "TypeError"
    assert ".py:" in str(facts["where"])
    assert SECRET not in str(desk.notices)
    assert desk.submitted() == []


@pytest.mark.fault("B11")
def test_where_the_sender_may_not_be_answered_a_fault_is_only_noticed() -> None:
    desk = Desk(BROKEN_CHECK)
    desk.ask()
    desk.taken()
    foreign = TOPICS.result("other", "cli1")
    desk.send({"id": "r2", "model": "tiny", "prompt": "hi"}, response_topic=foreign)
    desk.send({"id": "r3", "model": "tiny", "prompt": "hi"}, retain=True)
    assert desk.replies() == []


@pytest.mark.fault("B11")
def test_a_request_that_was_admitted_when_the_fault_struck_ends_once_and_does_not_run() -> None:
    desk = Desk(outbox=BreakingOutbox())
    desk.ask(stream=True)  # its `accepted` frame breaks, when it is queued already
    (frame,) = desk.replies()
    assert isinstance(frame, ErrorFrame)
    assert (frame.id, frame.error.code, frame.error.retryable) == ("r1", "internal_error", True)
    assert desk.submitted() == []
    assert (desk.gateway.num_queued, desk.gateway.num_running) == (0, 0)
    desk.ask("r2")
    assert len(desk.submitted()) == 1


@pytest.mark.fault("B11")
def test_a_fault_at_a_repeated_request_leaves_the_running_one_alone() -> None:
    outbox = BreakingOutbox()
    outbox.is_broken = False
    desk = Desk(outbox=outbox)
    desk.ask()
    (submit,) = desk.submitted()
    outbox.is_broken = True
    desk.ask()  # its `accepted` frame breaks
    assert desk.replies() == []
    assert desk.gateway.counts["internal_error"] == 1
    desk.finish(submit.key, "a ")
    assert desk.final().choices[0].message.content == "a "


@pytest.mark.fault("B11")
def test_a_refusal_that_breaks_is_answered_as_an_internal_error() -> None:
    desk = Desk(outbox=BreakingOutbox())
    desk.send(b"nonsense")
    assert desk.error().error.code == "internal_error"
