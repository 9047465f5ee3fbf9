"""Checkpoints that can't hurt: complete exactly when their manifest is there.

A save goes to a uniquely named temporary folder: shards, flush, barrier, then rank 0 writes the manifest with sizes and
checksums and renames. Whatever ends the process in between leaves the earlier checkpoints untouched and a folder that
is never taken for one. Files hold tensors and plain containers only and load with the safe loader; names carry no
wrapper.

What a run shares out over its ranks (fsdp, tensor, pipeline) can stay shared out in a checkpoint: then every rank
writes its own part (`echofree.dist.parts`), and a reader sees no difference.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from echofree import durable, shipped
from echofree.dist.world import World
from echofree.errors import CheckpointError, SaveFailed

if TYPE_CHECKING:
    from echofree.dist.parts import Writing

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
PARTS = "parts"  # in the manifest: what was written in parts; parts.pt holds all of that but the tensors
PREFIX = "step-"
LEFT = "left-"  # no longer counts, kept until a person removes it
FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "PytorchStreamWriter failed")  # how a full disk speaks
Facts = dict[str, dict[str, Any]]  # file name -> bytes, sha256


# --- one checkpoint -------------------------------------------------------------------------------------------------


def save(
    root: Path,
    step: int,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    about: Mapping[str, Any],
    world: World,
    parts: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `root/step-000100`; every rank calls it.

    Args:
        shared: file stem -> content, written by rank 0 (model, optimizer, ...).
        own: what only this rank knows (its random state), one file per rank.
        about: goes into the manifest: run id, step, epoch, scores, world.
        parts: stem -> content whose tensors are this rank's parts (DTensors), whole ones, or another rank's (meta).
            Every rank writes its own.

    Returns:
        The finished folder, on every rank.

    Raises:
        SaveFailed: no space, or the folder vanished; the earlier checkpoints are as they were.
    """
    target = root / f"{PREFIX}{step:06d}"
    temporary = Path(world.from_first(str(root / f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")))
    # every rank passes the same exchanges whatever fails on one of them, or the others would wait for ever
    problem = world.from_first(_problem(lambda: _make(temporary)) if world.is_first else "")
    files: Facts = {}
    writing: Writing | None = None
    placed: list[Any] = []
    if not problem:
        mine = {**(shared if world.is_first else {}), f"rank{world.rank}": own}
        if parts is not None:
            from echofree.dist.parts import Writing, split

            tensors, rest = split(parts)
            writing = Writing(temporary, tensors, world)
            mine |= {PARTS: rest} if world.is_first else {}
        problem = _problem(lambda: _write_all(temporary, mine, writing, files, placed))
    told = world.gather((problem, files, placed))
    problems = list(dict.fromkeys(f"rank {rank}: {text}" for rank, (text, *_) in enumerate(told) if text))
    files = {name: facts for _, part, _ in told for name, facts in sorted(part.items())}
    if not problems and world.is_first:
        if writing is not None:
            about = {**about, PARTS: sorted(parts or ())}
        results = [result for *_, result in told]
        problem = _problem(lambda: _publish(temporary, target, about, files, writing, results))
        problems = [problem] if problem else []
    problems = world.from_first(problems)
    if problems:
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        full = any(text in problem for problem in problems for text in FULL)
        cure = "Free some space (or lower checkpoint.keep_last)" if full else "Make it writable"
        raise SaveFailed(
            f"checkpoint {target} could not be written: {'; '.join(problems)}. Earlier checkpoints are untouched. "
            f"{cure} and start again with resume=auto",
            full=full,
        )
    return target


def _make(temporary: Path) -> None:
    """The folder for a save. A checkpoint folder that somebody took away is made anew, a run directory isn't."""
    root = temporary.parent
    try:
        temporary.mkdir()
    except FileNotFoundError:
        root.mkdir()
        log.warning("%s was gone and is made anew: the checkpoints in it are lost", root)
        temporary.mkdir()


def _problem(action: Callable[[], None]) -> str:
    """Why the file system refused `action`; "" when it didn't."""
    try:
        action()
    except OSError as error:
        return str(error)
    return ""


def _write_all(
    folder: Path, contents: Mapping[str, Any], writing: Writing | None, files: Facts, placed: list[Any]
) -> None:
    """Writes this rank's files: stem -> content, and its share of the parts. Adds what the manifest says about each
    file to `files`, and where the pieces of the parts lie to `placed`.

    A file is brought to the disk and its checksum taken beside the writing of the next.
    """
    with ThreadPoolExecutor(2, "settle") as pool:
        jobs = {}

        def settle(path: Path) -> None:
            jobs[path] = pool.submit(durable.sha256, path), pool.submit(durable.sync_path, path)

        if writing is not None:
            placed += writing.write()
            if placed:
                settle(folder / writing.file)
        for stem, content in contents.items():
            path = folder / f"{stem}.pt"
            _write(path, content)
            settle(path)
        for _, synced in jobs.values():
            synced.result()
        for path, (digest, _) in jobs.items():
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest.result()}


def _write(path: Path, content: Any) -> None:
    # the zip's own checksums take longer than the disk, and the manifest has a better one
    old = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with open(path, "wb") as file:
            torch.save(content, file)
    except RuntimeError as error:  # torch's zip writer stumbles over a full disk a second time, while it closes
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path.name}: {why}") from error
    finally:
        torch.serialization.set_crc32_options(old)


def _publish(
    temporary: Path,
    target: Path,
    about: Mapping[str, Any],
    files: Facts,
    writing: Writing | None,
    placed: list[list[Any]],
) -> None:
    if writing is not None:
        table = writing.finish(placed)
        durable.sync_path(table)
        files[table.name] = {"bytes": table.stat().st_size, "sha256": durable.sha256(table)}
    manifest = {"format": FORMAT, **about, "saved": time.time(), "files": files}
    durable.sync_text(temporary / MANIFEST, json.dumps(manifest, indent=1))
    durable.sync_path(temporary)
    if not target.exists():
        os.replace(temporary, target)
    elif owner(target) == about.get("run_id"):
        # the same step again: the old one steps aside under a name that still counts, so that one is always found
        aside = target.with_name(f"{target.name}.old-{uuid.uuid4().hex[:8]}")
        os.replace(target, aside)
        os.replace(temporary, target)
        remove(aside)
    else:
        _leave(target)  # half-written, or another run's: not ours to remove
        os.replace(temporary, target)
    durable.sync_path(target.parent)


def owner(folder: Path) -> str | None:
    """The id of the run that wrote `folder`; None where nobody can tell."""
    try:
        return manifest(folder).get("run_id")
    except CheckpointError:
        return None


def remove(folder: Path) -> None:
    """The manifest goes first: a kill in between leaves a folder that nobody takes for a checkpoint."""
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder)


def _leave(folder: Path) -> None:
    """Renames `folder` so that it no longer counts, and keeps it."""
    os.replace(folder, folder.with_name(f"{LEFT}{folder.name}-{uuid.uuid4().hex[:8]}"))


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: there is none, or it's from a newer format.
    """
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}. Name a run directory, or a folder "
            f"checkpoints/{PREFIX}NNNNNN that has one"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}. Take an earlier checkpoint") from error
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise CheckpointError(f"{path} is not a manifest: it lists no files. Take an earlier checkpoint")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}, this EchoFree reads format {FORMAT}. Use the EchoFree "
            f"version "
            f"that wrote it ({content.get('version', 'unknown')})"
        )
    return content


def damage(folder: Path) -> str:
    """Why the checkpoint can't be trusted; "" when sizes and checksums agree with its manifest."""
    try:
        content = manifest(folder)
    except CheckpointError as error:
        return str(error)
    for name, facts in content["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{path} has {path.stat().st_size} bytes, its manifest says {facts['bytes']}: truncated"
        if durable.sha256(path) != facts["sha256"]:
            return f"{path} has another checksum than its manifest says: it changed after it was written"
    return ""


def sizes_fit(folder: Path, about: Mapping[str, Any]) -> bool:
    """A quick look instead of `damage`, which reads every byte."""
    paths = [(folder / name, facts["bytes"]) for name, facts in about["files"].items()]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def has(folder: Path, stem: str) -> bool:
    """Whether `load(folder, stem)` would find something."""
    return (folder / f"{stem}.pt").is_file() or stem in in_parts(folder)


def load(folder: Path, stem: str) -> Any:
    """One of the things in a checkpoint (model, optimizer, ...), on the CPU, through torch's safe loader; in whole
    tensors, also when several ranks wrote it in parts.

    Raises:
        CheckpointError: the file is missing or not what it should be.
    """
    path = folder / f"{stem}.pt"
    if stem in in_parts(folder) and not path.exists():
        from echofree.dist.parts import join

        targets = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in outline(folder, stem).items()}
        read_parts(folder, stem, targets)
        return join(targets, load(folder, PARTS)[stem])
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, although {folder / MANIFEST} names it") from error
    except Exception as error:
        raise CheckpointError(f"{path} can't be loaded: {error}") from error


# --- in parts -------------------------------------------------------------------------------------------------------


def in_parts(folder: Path) -> list[str]:
    """What of a checkpoint was written in parts, by all ranks: model, optimizer, ...; or nothing."""
    return list(manifest(folder).get(PARTS, [])) if (folder / MANIFEST).is_file() else []


def outline(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """The tensors of something that was written in parts, without content: their place in it ("state/weight/exp_avg")
    -> shape and type.

    Raises:
        CheckpointError: its table of contents can't be read.
    """
    from echofree.dist import parts

    with _told(folder):
        found = parts.outline(folder)
    start = f"{stem}/"
    return {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}


def read_parts(folder: Path, stem: str, targets: Mapping[str, torch.Tensor]) -> None:
    """Fills `targets`, named by their place, with what was written in parts: a DTensor with this rank's part of it,
    whatever ranks wrote it. Every rank reads for itself.

    Raises:
        CheckpointError: something is missing, has another shape or can't be read.
    """
    from echofree.dist import parts

    with _told(folder):
        parts.read(folder, {f"{stem}/{name}": tensor for name, tensor in targets.items()})


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{folder} can't be loaded: {error}") from error


# --- the checkpoints of a run ---------------------------------------------------------------------------------------


def complete(root: Path) -> list[Path]:
    """Folders under `root` that carry a manifest, oldest step first. Half-written ones are not listed."""
    return [p for p in _folders(root) if (p / MANIFEST).is_file()]


def _folders(root: Path) -> list[Path]:
    """What looks like a checkpoint, by step as a number (from a million on the names no longer sort)."""
    found = [(re.fullmatch(rf"{PREFIX}(\d+)(\.old-\w+)?", p.name), p) for p in root.glob(f"{PREFIX}*")]
    return [p for *_, p in sorted((int(m[1]), m[2] is None, p) for m, p in found if m is not None)]


def newest_good(root: Path) -> Path | None:
    """The newest undamaged checkpoint; damaged ones are passed over with a warning."""
    for folder in reversed(_folders(root)):
        why = damage(folder)
        if not why:
            return folder
        log.warning("passing over %s: %s", folder.name, why)
    return None


def point(root: Path, name: str, folder: Path) -> None:
    """`checkpoints/<name>` names one checkpoint of the same folder."""
    durable.write_text(root / name, folder.name + "\n")


def pointed(root: Path, name: str) -> Path | None:
    """What `checkpoints/<name>` names, if that is there."""
    path = root / name
    if not path.is_file():
        return None
    folder = root / path.read_text(encoding="utf-8").strip()
    return folder if (folder / MANIFEST).is_file() else None


def set_aside(root: Path, run_id: str, step: int) -> list[Path]:
    """Before going on from `step`: this run's later checkpoints no longer count (they are renamed, not removed), since
    the next resume would otherwise jump to the branch that was given up. -> those left behind"""
    later = [p for p in complete(root) if owner(p) == run_id and manifest(p)["step"] > step]
    for folder in later:
        _leave(folder)
    if later:
        point(root, "last", root / f"{PREFIX}{step:06d}")
    return later


def find(path: str | os.PathLike[str]) -> Path:
    """A run directory (its best, else its newest good checkpoint), a checkpoint folder, or the name of a shipped model
    -> the checkpoint folder.

    Raises:
        CheckpointError: there is nothing to use.
    """
    given = shipped.named(path) or Path(path)
    if not given.exists():
        raise CheckpointError(
            f"{given} doesn't exist. Name a run directory such as outputs/tiny/2026-11-30_10-00-00, or a trained model "
            f"that comes with EchoFree: {', '.join(shipped.names())}"
        )
    if (given / MANIFEST).is_file():
        found: Path | None = given
    elif given.name.startswith(PREFIX) and given.is_dir() and not (given / "checkpoints").is_dir():
        found = None
    else:
        root = given if given.name == "checkpoints" else given / "checkpoints"
        best = pointed(root, "best")
        found = best if best is not None and not damage(best) else newest_good(root)
    if found is None:
        raise CheckpointError(
            f"{given} holds no complete checkpoint. Name a run directory whose run.json says it saved one, or a folder "
            f"checkpoints/{PREFIX}NNNNNN"
        )
    why = damage(found)
    if why:
        raise CheckpointError(f"{found} is damaged: {why}. Take another folder of {found.parent}")
    return found


def run_of(folder: Path) -> Path:
    """The run directory a checkpoint folder belongs to."""
    return folder.parent.parent


# --- random state ---------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of every generator of this rank, as tensors and plain containers."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# --- a trained model ------------------------------------------------------------------------------------------------


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights to use: the averaged ones where the run kept them, else the live ones."""
    state: dict[str, torch.Tensor] = load(folder, "model")
    if has(folder, "ema"):
        state = {**state, **load(folder, "ema")["shadow"]}
    return state


def load_model(path: str | os.PathLike[str]) -> tuple[torch.nn.Module, Any]:
    """A run directory or checkpoint folder -> (model in evaluation mode on the CPU, the run's frozen config).

    With averaged weights where the run kept them.

    Raises:
        CheckpointError: nothing usable there, or the weights don't fit the config beside them.
    """
    from echofree.config import frozen
    from echofree.config.build import build_model

    folder = find(path)
    config = frozen.load(run_of(folder))
    model = build_model(config)
    try:
        model.load_state_dict(weights(folder))
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: the weights don't fit the model of {run_of(folder) / 'config.yaml'}: {error}"
        ) from error
    return model.eval(), config
