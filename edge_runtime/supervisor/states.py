"""Say what each state of the daemon means for new requests and for the status topic. There is no second opinion."""

from __future__ import annotations

from typing import Literal

from edge_runtime.messages import DeviceState

State = Literal["starting", "ready", "recovering", "failed", "draining", "stopped"]

REFUSES: dict[State, tuple[str, str, int]] = {  # state -> error code, text, retry after milliseconds
    "starting": ("not_ready", "the model is still loading", 1000),
    "failed": ("model_unavailable", "the model keeps failing; see the device's log", 10_000),
    "draining": ("shutting_down", "the device is shutting down", 2000),
    "stopped": ("shutting_down", "the device is shutting down", 2000),
}
SHOWN: dict[State, DeviceState] = {  # state -> `state` of the status topic
    "starting": "starting",
    "ready": "online",
    "recovering": "recovering",
    "failed": "failed",
    "draining": "draining",
    "stopped": "offline",
}
