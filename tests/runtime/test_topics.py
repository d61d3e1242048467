"""Topic names, and which of them belong to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.topics import DeviceTopics

TOPICS = DeviceTopics("edge/v1", "jetson-01")


def test_names_are_those_of_the_interface() -> None:
    root = "edge/v1/d/jetson-01"
    assert (TOPICS.status, TOPICS.info, TOPICS.event) == (f"{root}/status", f"{root}/info", f"{root}/event")
    assert (TOPICS.requests, TOPICS.cancels) == (f"{root}/t/+/req", f"{root}/t/+/cancel")
    assert TOPICS.request("acme") == f"{root}/t/acme/req"
    assert TOPICS.cancel("acme") == f"{root}/t/acme/cancel"
    assert TOPICS.result("acme", "cli1") == f"{root}/t/acme/res/cli1"


def test_what_is_built_is_read_back() -> None:
    assert TOPICS.tenant_of(TOPICS.request("acme")) == ("acme", "req")
    assert TOPICS.tenant_of(TOPICS.cancel("acme")) == ("acme", "cancel")
    assert TOPICS.is_result_of(TOPICS.result("acme", "cli1"), "acme")


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "edge/v1/d/jetson-01/t//req",
        "edge/v1/d/jetson-01/t/Acme/req",
        "edge/v1/d/jetson-01/t/acme\n/req",
        "edge/v1/d/jetson-01/t/acme/x/req",
        "edge/v1/d/jetson-01/t/acme/req/",
        "edge/v1/d/jetson-01/t/acme/req/x",
        "edge/v1/d/jetson-01/t/acme/res/cli1",
        "edge/v1/d/jetson-02/t/acme/req",
        "edge/v2/d/jetson-01/t/acme/req",
        "x/edge/v1/d/jetson-01/t/acme/req",
        "edge/v1/d/jetson-01/t/" + "a" * 33 + "/req",
    ],
)
def test_other_topics_have_no_tenant(topic: str) -> None:
    assert TOPICS.tenant_of(topic) is None


@pytest.mark.fault("R2")
@given(st.text(max_size=20), st.text(max_size=20))
def test_no_result_topic_leaves_its_tenant(tenant: str, client: str) -> None:
    topic = TOPICS.result(tenant, client)
    if tenant != "acme":
        assert not TOPICS.is_result_of(topic, "acme") or topic == TOPICS.result("acme", client)
    if TOPICS.is_result_of(topic, "acme"):
        assert "/" not in client
        assert "+" not in client
        assert "#" not in client
