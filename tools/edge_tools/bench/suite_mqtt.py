"""Measure what the way through MQTT, supervisor and worker costs against the bare session, in turns."""

from __future__ import annotations

import time
from dataclasses import dataclass

from edge_runtime.client import Client
from edge_tools.bench.bed import Bed
from edge_tools.bench.stats import Stats, summarise

ROUNDS = 8
TOKENS = 64
PROMPT = "Once upon a time, in a small house by the sea, there lived"  # continued as it is, rarely to an end


@dataclass(frozen=True, slots=True)
class MqttResult:
    """Client to client on one machine. `ratio` is the speed over MQTT as a share of the bare session's."""

    rounds: int
    tokens: int
    bare_tokens_per_s: float
    mqtt_tokens_per_s: float
    ratio: float
    bare_ttft: Stats
    mqtt_ttft: Stats
    added_ttft_p50_ms: float
    added_ttft_p99_ms: float  # P99 over MQTT less the median of the bare session


@dataclass(frozen=True, slots=True)
class _Run:
    ttft_ms: float
    token_ms: float  # per token after the first
    tokens: int
    prompt_tokens: int


def measure_mqtt(bed: Bed, client: Client) -> MqttResult:
    """Let the same prompt be continued by TOKENS tokens over MQTT and by the bare session, ROUNDS times in turns."""
    tokens = min(TOKENS, bed.capacity // 2)
    _over_mqtt(client, tokens)  # warm-up of the daemon's path
    bare, mqtt = [], []
    for _ in range(ROUNDS):
        mqtt.append(_over_mqtt(client, tokens))
        bare.append(_bare(bed, mqtt[-1].prompt_tokens, mqtt[-1].tokens))
    bare_ttft, mqtt_ttft = summarise([r.ttft_ms for r in bare]), summarise([r.ttft_ms for r in mqtt])
    bare_ms, mqtt_ms = summarise([r.token_ms for r in bare]).p50_ms, summarise([r.token_ms for r in mqtt]).p50_ms
    return MqttResult(
        rounds=ROUNDS,
        tokens=mqtt[-1].tokens,
        bare_tokens_per_s=1e3 / bare_ms,
        mqtt_tokens_per_s=1e3 / mqtt_ms,
        ratio=bare_ms / mqtt_ms,
        bare_ttft=bare_ttft,
        mqtt_ttft=mqtt_ttft,
        added_ttft_p50_ms=mqtt_ttft.p50_ms - bare_ttft.p50_ms,
        added_ttft_p99_ms=mqtt_ttft.p99_ms - bare_ttft.p50_ms,
    )


def _over_mqtt(client: Client, tokens: int) -> _Run:
    begun = time.perf_counter()
    first = 0.0
    stream = client.stream(PROMPT, raw=True, max_tokens=tokens)
    for _ in stream:
        first = first or time.perf_counter()
    ended, usage = time.perf_counter(), stream.answer.usage
    later = max(1, usage.completion_tokens - 1)
    return _Run((first - begun) * 1e3, (ended - first) * 1e3 / later, usage.completion_tokens, usage.prompt_tokens)


def _bare(bed: Bed, prompt_tokens: int, tokens: int) -> _Run:
    ttft_ms = bed.prefill_ms(0, prompt_tokens)
    decoded = bed.decode([0], prompt_tokens, max(1, tokens - 1))
    return _Run(ttft_ms, sum(decoded.step_ms) / len(decoded.step_ms), tokens, prompt_tokens)
