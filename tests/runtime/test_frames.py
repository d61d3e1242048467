"""Frames between supervisor and worker."""

from __future__ import annotations

import msgspec
import pytest

from edge_runtime.worker.frames import (
    MAX_FRAME,
    Cancel,
    DeviceError,
    Failed,
    Finished,
    FrameError,
    FrameReader,
    FromWorker,
    Heartbeat,
    Hello,
    Init,
    Progress,
    Ready,
    Started,
    Stop,
    Submit,
    Tokens,
    ToWorker,
    encode_frame,
)

TO_WORKER: list[ToWorker] = [
    Init(model="m", engine="/e"),
    Submit(key=1, tenant="acme", service_class="standard", prompt="Grüße 😀", stop=["\n"], seed=2**63 - 1),
    Submit(key=2, tenant="acme", service_class="standard", messages=[{"role": "user", "content": "hi"}]),
    Cancel(1, "deadline"),
    Stop(2.5),
]
FROM_WORKER: list[FromWorker] = [
    Hello(pid=7, version="0.1.0"),
    Progress("read", 12.5),
    Ready(
        backend={"name": "x"},
        slots=2,
        capacity=512,
        max_prompt=511,
        precision="fp32",
        engine_sha256="0" * 64,
        start_seconds={"load": 0.5},
    ),
    Started(key=1, prompt_tokens=3, prepare_ms=0.1, seed=5),
    Tokens(key=1, text="né", count=2),
    Finished(
        key=1,
        reason="stop",
        text="né",
        prompt_tokens=3,
        completion_tokens=2,
        queue_ms=1.0,
        prefill_ms=2.0,
        ttft_ms=3.0,
        tpot_ms=4.0,
    ),
    Failed(key=2, code="numeric_error", message="step 3"),
    DeviceError(code=700, where="step", sticky=True),
    Heartbeat(
        seq=1,
        phase="serving",
        step_count=2,
        step_age_s=0.0,
        rows_busy=1,
        kv_tokens=9,
        rss_bytes=10,
        useful_tokens=3,
        computed_tokens=3,
        step_ms=[1.5],
        nan_count=0,
    ),
]


@pytest.mark.parametrize(("kind", "frames"), [(ToWorker, TO_WORKER), (FromWorker, FROM_WORKER)])
@pytest.mark.parametrize("piece", [1, 3, 1 << 16])
def test_frames_survive_any_cut_of_the_stream(kind: type, frames: list[ToWorker], piece: int) -> None:
    stream = b"".join(map(encode_frame, frames))
    reader = FrameReader(kind)
    found = [frame for i in range(0, len(stream), piece) for frame in reader.feed(stream[i : i + piece])]
    assert found == frames


@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_length_out_of_range_is_refused_before_its_body(length: int) -> None:
    with pytest.raises(FrameError, match=str(length)):
        list(FrameReader(FromWorker).feed(length.to_bytes(4, "big")))


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode({"type": "bogus"}),
        msgspec.msgpack.encode({"type": "tokens", "key": 1}),
        msgspec.msgpack.encode({"type": "tokens", "key": "1", "text": "", "count": 0}),
        b"\x82\xa4",
        b"\xc1",
    ],
    ids=["unknown type", "missing field", "wrong type", "truncated", "no msgpack"],
)
def test_an_undecodable_frame_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="undecodable"):
        list(FrameReader(FromWorker).feed(len(body).to_bytes(4, "big") + body))


def test_a_frame_of_the_other_direction_is_refused() -> None:
    with pytest.raises(FrameError):
        list(FrameReader(FromWorker).feed(encode_frame(Stop())))


def test_a_frame_above_the_limit_is_not_sent() -> None:
    with pytest.raises(FrameError, match=str(MAX_FRAME)):
        encode_frame(Tokens(key=1, text="x" * MAX_FRAME, count=1))


def test_a_cancel_reason_is_one_of_two() -> None:
    frame = msgspec.msgpack.encode({"type": "cancel", "key": 1, "reason": "stop"})
    with pytest.raises(FrameError):
        list(FrameReader(ToWorker).feed(len(frame).to_bytes(4, "big") + frame))
