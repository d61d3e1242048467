"""What a report shows: gathered from table and manifest, written as a whole, and the sample that other tests render."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_engines.pipeline import build
from edge_engines.progress import NoProgress
from edge_engines.report.build_data import report_of
from edge_engines.report.data import (
    Board,
    Histogram,
    ParetoPoint,
    Part,
    ReportData,
    Sample,
    Step,
)
from edge_engines.report.parts import list_parts
from edge_engines.report.write import JSON_NAME, PAGE_NAME, write_report
from edge_engines.sensitivity.command import measure_checkpoint
from edge_engines.sensitivity.table import CheckRow, GateRow, Table, UnitRow
from edge_engines.texts.sets import SetSize, TextSizes
from edge_runtime.errors import BuildError
from edge_runtime.manifest import (
    BuildFacts,
    FileEntry,
    GateFacts,
    Geometry,
    Manifest,
    ModelFacts,
    UnitPrecision,
    VerifyFacts,
)
from support.tiny_engines import GOLDEN

L, HIDDEN, FFN, HEADS, KV_HEADS, D, V = 30, 576, 1536, 9, 3, 64, 49152  # SmolLM2-135M
WEIGHTS = {"embed": V * HIDDEN, "qkv": HIDDEN * 960, "o": HIDDEN * HIDDEN, "gate_up": HIDDEN * 2 * FFN,
           "down": FFN * HIDDEN, "head": V * HIDDEN}  # fmt: skip
ORDINARY = {"embed": (0.006, 4e-5), "qkv": (0.010, 6e-5), "o": (0.016, 5e-5), "gate_up": (0.017, 9e-5),
            "down": (0.05, 7e-4), "head": (0.025, 6e-3)}  # fmt: skip  # error and KL of a kind
SPIKED = {1: 0.122, 2: 0.129, 11: 0.323, 28: 0.123}  # layers whose `down` is above the threshold
BOARDS = [
    Board("Jetson Orin Nano Super 8 GB", "MAXN_SUPER", 102.4),
    Board("Jetson Orin Nano 8 GB", "15W", 68.3),
    Board("Jetson AGX Orin 64 GB", "MAXN", 204.8),
]
PARIS = "The capital of France is Paris."
RIVERS = "Three rivers in Europe are the Danube, the Rhine and the"
STEPS = [("reading the checkpoint", 1.2), ("collecting ranges", 21.4), ("choosing the smoothing", 96.3),
         ("measuring each unit's own error", 14.8), ("measuring each unit's effect on the logits", 171.0),
         ("checking the gate", 71.7), ("writing the graph", 6.1), ("verifying", 9.9), ("compiling", 39.3)]  # fmt: skip


def sample_table() -> Table:
    """A table like that of SmolLM2-135M, made up from a seed."""
    rng = np.random.default_rng(7)
    names = ["embed", *(f"layers.{i}.{kind}" for i in range(L) for kind in ("qkv", "o", "gate_up", "down")), "head"]
    units = [sample_unit(name, rng) for name in names]
    shares = [0.957, 0.949, 0.94, 0.924, 0.891, 0.842, 0.866, 0.854, 0.860, 0.863]
    ratios = [1.0631, 1.0587, 1.0543, 1.0502, 1.0398, 1.0241, 1.0287, 1.0262, 1.0271, 1.0279]
    return Table(
        format=2,
        model="SmolLM2-135M-Instruct.Q4_1.gguf",
        checkpoint_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        texts={name: rng.bytes(32).hex() for name in ("calibration", "ranking", "gate")},
        threshold=0.1,
        alphas={"qkv": 0.8, "o": 0.8, "gate_up": 0.8, "down": 0.8, "head": 0.65},
        scales={unit.unit: 0.01 for unit in units},
        gate=GateRow(
            limit=1.05, ratio=1.0279, low=1.0202, high=1.0349, upper=1.0355,
            by_domain={"technical": 1.021, "chat": 1.034, "narrative": 1.025, "legal": 1.019, "languages": 1.046},
            base_perplexity=21.494, kl=0.0245, kl_p99=0.21, kl_max=1.9, same_top1=0.9115, checks=len(shares),
        ),
        checks=[CheckRow(121 - i, s, r, r + 0.0076) for i, (s, r) in enumerate(zip(shares, ratios, strict=True))],
        rule_only=CheckRow(94, 0.802, 1.21, 1.243),
        int8_share=0.863,
        seconds=375.2,
        model_passes=210.0,
        units=units,
    )  # fmt: skip


def sample_unit(name: str, rng: np.random.Generator) -> UnitRow:
    kind = name.rpartition(".")[2]
    layer = int(name.split(".")[1]) if "." in name else -1
    error, kl = (value * float(rng.lognormal(0, 0.35)) for value in ORDINARY[kind])
    pooled, per_token = min(error, 0.094), min(error * float(rng.uniform(0.8, 1.3)), 0.094)
    is_spiked = kind == "down" and layer in SPIKED
    is_back = kind == "down" and not is_spiked and layer % 3 == 0
    per_token = SPIKED[layer] if is_spiked else per_token
    return UnitRow(
        unit=name, weights=WEIGHTS[kind], pooled_error=pooled, per_token_error=per_token,
        worst_token_error=min(per_token * float(rng.uniform(1.5, 9)), 0.66),
        score_without_smoothing=max(pooled, per_token) * 2.6, kl=kl * (6 if is_spiked else 1), kl_p99=kl * 8,
        kl_max=kl * 40, same_top1=1 - 8 * kl,
        precision="fp16" if is_spiked or is_back else "int8",
        reason="hard rule" if is_spiked else "gate" if is_back else "given back" if kl > 2e-3 else "int8",
    )  # fmt: skip


def sample_manifest(precision: str = "int8", table: Table | None = None) -> Manifest:
    """A manifest of the same model; `table` decides the units of an INT8 engine."""
    names = [row.unit for row in (table or sample_table()).units]
    chosen = {row.unit: row.precision for row in table.units} if table else dict.fromkeys(names, precision)
    return Manifest(
        format=1, target="tensorrt", lowering="native", precision=precision, kv_dtype="float16",  # type: ignore[arg-type]
        geometry=Geometry(L, KV_HEADS, D, V, 512, 2),
        model=ModelFacts("smollm2-135m-instruct.q4_1", "llama", "SmolLM2-135M-Instruct.Q4_1.gguf", "b1" * 32, HIDDEN,
                         FFN, HEADS, 134515008, [{"base": 1e5, "kind": "default", "dims": 64.0}], None, V, True),
        graph="model.onnx", inputs=[], outputs=[],
        units=[UnitPrecision(unit, chosen[unit], f"--precision {precision}") for unit in names],
        weight_bytes=153_400_000,
        build=BuildFacts("0.2.0", "2026-11-29T15:57:06+00:00", 431.7, 1_286_915_584,
                         {"lowering": "native", "precision": precision, "capacity": "512", "max_batch": "2"},
                         {"python": "3.11.7", "machine": "x86_64", "onnx": "1.23.2", "numpy": "2.4.6"}),
        gate=GateFacts(1.05, 1.0284, 1.0361, 21.494, 8128, 1.0279, 0.0245, 0.9115) if table else None,
        verify=VerifyFacts(12, 0.0249, 0.4, True, 0.0646, "graph"),
        files=[FileEntry("model.plan", 155_100_000, "0" * 64), FileEntry("tokenizer.json", 1_563_270, "1" * 64)],
    )  # fmt: skip


def sample_report() -> ReportData:
    """A report with every section, as of a SmolLM2 build."""
    table = sample_table()
    report = report_of(
        table,
        sample_manifest(table=table),
        parts=[
            Part("table", "embedding and head, one table", 28_311_552, 28_508_160),
            Part("int8", "body, INT8", 91_570_176, 91_804_032),
            Part("fp16", "body, FP16", 29_196_288, 29_196_288),
            Part("rest", "norms, tables", None, 1_322_112),
        ],
        boards=BOARDS,
        samples=[
            Sample("What is the capital of France?", PARIS, PARIS),
            Sample("Name three rivers in Europe.", f"{RIVERS} Volga. The Danube flows through ten countries.",
                   f"{RIVERS} Loire.\nThe Loire is the longest in France."),
        ],
        steps=[Step(name, seconds) for name, seconds in STEPS],
        cache_hits=0,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    edges = [round(0.03 * i, 3) for i in range(22)]
    worst = ["layers.11.down", "layers.2.down", "layers.28.down", "layers.1.down", "layers.9.down"]
    return msgspec.structs.replace(
        report,
        residual=[round(0.002 + 0.0011 * i + 0.012 * (i > 11), 5) for i in range(L)],
        histograms=[
            Histogram(unit, edges, [int(c) for c in rng.poisson(40 * 0.8 ** np.arange(21))],
                      "<|im_start|>" if i == 0 else None)
            for i, unit in enumerate(worst)
        ],
        pareto=[
            ParetoPoint("FP16", 271_000_000, 1.0, 2.65, "Orin Nano Super"),
            ParetoPoint("all INT8", 136_000_000, 1.063, 1.33, "Orin Nano Super"),
            ParetoPoint("pooled rule alone", 158_000_000, 1.21, 1.54, "Orin Nano Super"),
            ParetoPoint("chosen", 151_000_000, 1.0279, 1.47, "Orin Nano Super", chosen=True),
        ],
    )  # fmt: skip


def refused_report() -> ReportData:
    """A report of a build that the gate refused: there is no engine."""
    table = sample_table()
    gate = msgspec.structs.replace(table.gate, limit=1.0001)
    line = "no choice of INT8 layers passes the gate: with none, the upper bound is 1.0003, at most 1.0001 is allowed"
    return report_of(msgspec.structs.replace(table, gate=gate), None, refusal=line)


def without_int8(precision: str = "fp32") -> ReportData:
    """A report of a build that chose nothing."""
    return report_of(None, sample_manifest(precision), steps=[Step("writing the graph", 3.1)], boards=BOARDS)


def hostile_report() -> ReportData:
    """A report whose every text tries to become part of the page."""
    evil = '<script>document.title="taken"</script><img src="https://192.0.2.1/x.png" onerror="document.title=1">"\'&'
    report = sample_report()
    units = [msgspec.structs.replace(u, unit=f"{evil}.{i}.{u.kind}") for i, u in enumerate(report.units)]
    units[1] = msgspec.structs.replace(units[1], kind=evil, precision=evil, reason=evil)
    return msgspec.structs.replace(
        report,
        subject=msgspec.structs.replace(
            report.subject, model=evil, source=evil, family=evil, created=evil, target=evil
        ),
        units=units,
        parts=[Part(evil, evil, 5, 7)],
        samples=[Sample(evil, evil + " a", evil + " b")],
        steps=[Step(evil, 1.0)],
        ceilings=[msgspec.structs.replace(c, board=Board(evil, evil, 9.0)) for c in report.ceilings],
        texts={evil: evil},
        alphas={evil: 0.5},
        options={evil: evil},
        versions={evil: evil},
        histograms=[Histogram(evil, [0.0, 0.1], [3], evil)],
        pareto=[ParetoPoint(evil, 5, 1.0, 1.0, evil), ParetoPoint(evil, 6, 1.1, 1.0, evil)],
        plan=evil + "</pre></textarea>--><!--",
    )


def test_report_survives_its_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    report = sample_report()
    page = write_report(tmp_path / "out", report)
    assert page == tmp_path / "out" / PAGE_NAME
    assert msgspec.json.decode((page.parent / JSON_NAME).read_bytes(), type=ReportData) == report
    assert sorted(path.name for path in page.parent.iterdir()) == [PAGE_NAME, JSON_NAME]
    assert page.stat().st_mode & 0o444 == 0o444


def test_a_second_report_replaces_the_first_as_a_whole(tmp_path: Path) -> None:
    write_report(tmp_path, sample_report())
    write_report(tmp_path, without_int8())
    assert msgspec.json.decode((tmp_path / JSON_NAME).read_bytes(), type=ReportData).gate is None
    assert "Perplexity" not in (tmp_path / PAGE_NAME).read_text(encoding="utf-8")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match=r"file: .*; name a folder you may write to"):
        write_report(tmp_path / "file", sample_report())


def test_what_a_table_says_is_shown_as_it_is() -> None:
    table, report = sample_table(), sample_report()
    assert report.passed
    assert [unit.unit for unit in report.units] == [row.unit for row in table.units]
    for unit, row in zip(report.units, table.units, strict=True):
        assert (unit.precision, unit.reason, unit.weights) == (row.precision, row.reason, row.weights)
        assert unit.measures is not None
        assert unit.measures.score == row.score
    assert report.plan is not None
    assert msgspec.json.decode(report.plan, type=Table) == table


def test_upper_bound_above_the_limit_is_refused() -> None:
    report = refused_report()
    assert not report.passed
    assert report.subject.model == "SmolLM2-135M-Instruct.Q4_1.gguf"
    table = sample_table()
    gate = msgspec.structs.replace(table.gate, upper=1.0501)
    assert not report_of(msgspec.structs.replace(table, gate=gate), None).passed


def test_the_written_engine_has_the_last_word() -> None:
    table, manifest = sample_table(), sample_manifest(table=sample_table())
    report = report_of(table, manifest)
    assert report.gate is not None
    assert report.chosen is not None
    assert (report.gate.subject, report.gate.ratio) == ("engine", 1.0284)
    assert report.gate.low == pytest.approx(1.0284**2 / 1.0361)
    assert report.chosen.ratio == table.gate.ratio
    assert manifest.gate is not None
    worse = msgspec.structs.replace(manifest, gate=msgspec.structs.replace(manifest.gate, upper=1.06))
    assert not report_of(table, worse).passed
    simulated = report_of(table, msgspec.structs.replace(manifest, gate=None))
    assert simulated.gate is not None
    assert (simulated.gate.subject, simulated.gate.ratio) == ("simulation", table.gate.ratio)


def test_an_int8_cache_alone_has_a_verdict_of_its_own() -> None:
    manifest = msgspec.structs.replace(sample_manifest("fp16"), gate=sample_manifest(table=sample_table()).gate)
    report = report_of(None, manifest)
    assert report.passed
    assert report.gate is not None
    assert report.chosen is None


def test_values_that_are_not_finite_are_absent_in_both_files(tmp_path: Path) -> None:
    table = sample_table()
    gate = msgspec.structs.replace(table.gate, ratio=math.inf, low=math.nan, high=math.inf, upper=math.inf)
    units = [msgspec.structs.replace(table.units[0], kl=math.nan), *table.units[1:]]
    report = report_of(
        msgspec.structs.replace(table, gate=gate, units=units),
        msgspec.structs.replace(sample_manifest(table=table), gate=None),
    )
    assert not report.passed
    assert report.units[0].measures is None
    page = write_report(tmp_path, report).read_text(encoding="utf-8")
    assert msgspec.json.decode((tmp_path / JSON_NAME).read_bytes(), type=ReportData) == report
    assert "not finite" in page


def test_builders_reason_stands_where_it_could_not_follow_the_choice() -> None:
    table, manifest = sample_table(), sample_manifest(table=sample_table())
    units = [msgspec.structs.replace(manifest.units[1], precision="fp16", reason="no kernel for 7 inputs")]
    report = report_of(table, msgspec.structs.replace(manifest, units=[manifest.units[0], *units, *manifest.units[2:]]))
    assert table.units[1].precision == "int8"
    assert (report.units[1].precision, report.units[1].reason) == ("fp16", "no kernel for 7 inputs")


def test_ceiling_is_bandwidth_over_the_bytes_of_a_step() -> None:
    report = sample_report()
    kv_slot = 2 * L * KV_HEADS * D * 512 * 2  # K and V of 512 rows in FP16
    assert report.ceilings[0].empty == pytest.approx(102.4e9 / 153_400_000)
    assert report.ceilings[0].full == pytest.approx(102.4e9 / (153_400_000 + kv_slot))


def test_an_embedding_apart_from_the_head_is_not_read_in_a_step() -> None:
    parts = [Part("embed", "embedding", None, 3_400_000), Part("head", "head", None, 3_400_000)]
    report = report_of(sample_table(), sample_manifest(table=sample_table()), parts=parts, boards=BOARDS)
    assert report.bytes_per_token == 150_000_000


def test_parts_are_counted_from_the_graph(tmp_path: Path) -> None:
    manifest = sample_manifest(table=sample_table())
    path = write_graph(
        tmp_path, ["embed.codes", "head.codes", "layers.0.qkv.q.codes", "layers.1.down.weight", "norm.weight"]
    )
    found = {part.key: part for part in list_parts(manifest, path)}
    assert {key: part.real for key, part in found.items()} == {
        "embed": 40,
        "head": 40,
        "int8": 40,
        "fp16": 40,
        "rest": 40,
    }
    int8 = sum(row.weights for row in sample_table().units if row.precision == "int8" and "layers" in row.unit)
    assert found["int8"].predicted == int8
    assert found["embed"].predicted == V * HIDDEN
    assert found["rest"].predicted is None


@pytest.mark.parametrize(
    "names", [["embed.codes", "embed.scales"], ["table.codes", "embed.inverse", "head.input_scale"]]
)
def test_a_shared_table_is_counted_once(tmp_path: Path, names: list[str]) -> None:
    path = write_graph(tmp_path, names)
    found = {part.key: part for part in list_parts(sample_manifest(table=sample_table()), path)}
    assert found["table"].real == 40 * len(names)
    assert found["table"].predicted == V * HIDDEN
    assert not {"embed", "head"} & set(found)


def write_graph(folder: Path, names: list[str]) -> Path:
    """Write a graph of constants of 40 bytes, every second of them in external data."""
    tensors = [helper.make_tensor(name, TensorProto.FLOAT, [10], [0.0] * 10, raw=False) for name in names]
    for tensor in tensors:
        tensor.ClearField("float_data")
        tensor.raw_data = bytes(40)
    for tensor in tensors[::2]:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "model.onnx.data"), ("offset", "0"), ("length", "40")):
            tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph([], "parts", [], [], tensors)
    onnx.save_model(helper.make_model(graph), folder / "model.onnx")
    return folder / "model.onnx"


def test_parts_of_a_built_engine_are_as_predicted(tmp_path: Path) -> None:
    """Of FP32 exactly; of 8-bit weights within 10 %: blocks are smaller than 64 where the model is tiny."""
    for precision, tolerance in (("fp32", 0.0), ("w8", 0.1)):
        manifest = build(GOLDEN / "llama-tied", tmp_path / precision, precision=precision)  # type: ignore[arg-type]
        found = {part.key: part for part in list_parts(manifest, tmp_path / precision / "model.onnx")}
        assert set(found) == {"table", precision, "rest"}
        for key in ("table", precision):
            assert found[key].real == pytest.approx(found[key].predicted, rel=tolerance)
        assert report_of(None, manifest, parts=list(found.values())).passed


def test_a_measured_table_makes_a_whole_page(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(9).integers(0, 320, (12, 48)))
    table = measure_checkpoint(
        GOLDEN / "qwen2", calibration=tmp_path / "ids.npy", threshold=0.1, gate=1.5, progress=NoProgress(),
        sizes=TextSizes(SetSize(4, 48), SetSize(2, 32), SetSize(6, 48)),
    )  # fmt: skip
    report = report_of(table, None)
    page = write_report(tmp_path / "out", report).read_text(encoding="utf-8")
    assert report.passed
    assert [unit.measures is not None for unit in report.units] == [True] * len(table.units)
    assert all(f"{row.unit}</th>" in page for row in table.units)
