"""Keep compiled plans by what they were made from, so that a build that was interrupted late does not compile twice.

The key holds everything that decides a plan: digests of graph and weights, the request, module, library and device.
A kept plan is checked against its digest before it is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_engines.compile.frames import Compiled, CompileRequest, ModuleFacts
from edge_runtime.manifest import FileEntry, digest_file

KEPT_PLANS = 4  # of the last builds; a plan is as large as its engine
_FACTS = "kept.json"


class _Kept(Struct, frozen=True, forbid_unknown_fields=True):
    """What lies beside a kept plan."""

    done: Compiled
    files: dict[str, str]  # name -> SHA-256


def plan_key(request: CompileRequest, source: Sequence[FileEntry], module: ModuleFacts) -> str:
    """Return the key of the plan that a request makes; where the folders lie does not matter."""
    request = msgspec.structs.replace(request, folder="", timing_cache=None)
    return hashlib.sha256(msgspec.json.encode([request, list(source), module])).hexdigest()


def take_plan(plans: Path, key: str, request: CompileRequest) -> Compiled | None:
    """Copy a kept plan into the request's folder; None when there is none, or it is damaged."""
    kept, target = plans / key, Path(request.folder)
    try:
        facts = msgspec.json.decode((kept / _FACTS).read_bytes(), type=_Kept)
        if any(digest_file(kept / name) != digest for name, digest in facts.files.items()):
            return None
        for name in facts.files:
            shutil.copyfile(kept / name, target / name)
        os.utime(kept)
    except (OSError, msgspec.MsgspecError):
        return None
    return facts.done


def keep_plan(plans: Path, key: str, request: CompileRequest, done: Compiled) -> None:
    """Keep a plan that was just made, and let the oldest go; a disk that is full costs the cache, never the build."""
    names = [name for name in (request.plan, request.layers) if (Path(request.folder) / name).exists()]
    try:
        plans.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".keeping-", dir=plans))
    except OSError:
        return
    try:
        for name in names:
            shutil.copyfile(Path(request.folder) / name, part / name)
        facts = _Kept(done, {name: digest_file(part / name) for name in names})
        (part / _FACTS).write_bytes(msgspec.json.encode(facts))
        shutil.rmtree(plans / key, ignore_errors=True)
        part.rename(plans / key)
    except OSError:
        pass  # the disk is full: this plan is compiled again next time
    finally:
        shutil.rmtree(part, ignore_errors=True)  # what Ctrl-C or a full disk has left
    _forget_oldest(plans)


def _forget_oldest(plans: Path) -> None:
    whole = [path for path in plans.iterdir() if not path.name.startswith(".")]
    kept = sorted(whole, key=lambda path: -path.stat().st_mtime)
    for path in kept[KEPT_PLANS:]:
        shutil.rmtree(path, ignore_errors=True)
