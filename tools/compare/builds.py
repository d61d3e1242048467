"""Write the models that are compared: the peer's, by its own builder, and our engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from compare.hf_folder import write_hf_folder
from compare.install import PACKAGES, run_logged
from compare.rounds import CAPACITY
from edge_engines.checkpoint.open import Checkpoint
from edge_engines.pipeline import build
from edge_engines.progress import Progress
from edge_runtime.errors import EdgeError

# Options of the peer's builder that change speed on a CPU; `prune_lm_head` computes the logits of the last position of
# a prompt only, as our engine does. Source: `--help` of onnxruntime_genai.models.builder 0.18.
BUILDS = MappingProxyType(
    {
        "default": (),
        "pruned": ("prune_lm_head=true",),
        "fused": ("prune_lm_head=true", "fuse_mlp_gate_up=true"),
    }
)
PEER_PRECISIONS = ("fp32", "int4")  # what the peer's builder writes for a CPU
CONFIG_NAME = "genai_config.json"


def write_peer_models(
    home: Path, python: Path, model: Checkpoint, names: Sequence[str], precision: str, progress: Progress
) -> dict[str, Path]:
    """Return the peer's model folder for each of `names` (keys of BUILDS), building those that are not there.

    Folders are named by the digest of the checkpoint, the peer's version and its precision. Raises EdgeError when the
    builder fails.
    """
    version = PACKAGES[0].partition("==")[2]
    form = "" if precision == "fp32" else f"{precision}-"
    folders = {name: home / f"genai-{version}-{form}{name}-{model.digest[:12]}" for name in names}
    missing = [name for name, folder in folders.items() if not folder.is_dir()]
    if missing:
        with _scratch(home / "hf") as source:
            progress.step("writing the FP32 weights for the peer's builder", None)
            write_hf_folder(source, model)
            for name in missing:
                progress.step(f"building the peer's model ({name})", None)
                _build_peer_model(home, python, source, folders[name], precision, BUILDS[name])
    return folders


def write_engine(home: Path, source: Path, progress: Progress) -> Path:
    """Build our engine anew, so that it is always one of the present sources."""
    folder = home / "ours-fp32"
    build(source, folder, precision="fp32", capacity=CAPACITY, max_batch=2, force=True, progress=progress)
    return folder


def _build_peer_model(
    home: Path, python: Path, source: Path, folder: Path, precision: str, options: Sequence[str]
) -> None:
    with _scratch(folder.with_name(folder.name + ".part")) as part:
        command = [str(python), "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(part)]
        command += ["-p", precision, "-e", "cpu", "-c", str(home / "builder-cache")]
        command += ["--extra_options", *options] if options else []
        run_logged(command, home / "builder.log", "build the peer's model", env={"HF_HUB_OFFLINE": "1"})
        finish_config(part / CONFIG_NAME)
        part.rename(folder)


def finish_config(path: Path) -> None:
    """Take the end tokens out of the peer's configuration, and be sure that its KV cache is updated in place.

    The builder adds the tokenizer's end token to that of config.json; the peer would stop there and be timed on less.
    Raises EdgeError when the file is not as expected.
    """
    try:
        config = json.loads(path.read_bytes())
        shares, unused = config["search"]["past_present_share_buffer"], config["model"]["vocab_size"] - 1
    except (OSError, ValueError, KeyError) as error:
        raise EdgeError(f"the peer's builder wrote no sound {path.name}: {error!r}") from error
    if not shares:
        raise EdgeError(f"{path.name} of the peer lacks past_present_share_buffer: it would look slower than it is")
    config["model"] |= {"eos_token_id": unused, "pad_token_id": unused}
    path.write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is gone afterwards, unless it was renamed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
