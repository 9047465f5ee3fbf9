"""Which checkpoints stay: the last, the best, a window, every n, pinned ones. What goes may go into an archive first.

Runs after a successful save. The history is in the manifests, so that a resume forgets nothing.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from pathlib import Path
from typing import Any

from echofree import checkpoint, durable
from echofree.config.schema import CheckpointConfig, Mode

log = logging.getLogger("echofree")

PINNED = "pinned"  # a file of this name inside a checkpoint keeps it for ever


def retain(root: Path, run_id: str, rule: CheckpointConfig) -> list[Path]:
    """Removes what `rule` doesn't keep; -> what was removed.

    Counts complete checkpoints only, never removes the last good one, and never touches what another run wrote. With
    `rule.archive_dir` a checkpoint is removed only once its copy there is verified.
    """
    mine = [(p, checkpoint.manifest(p)) for p in checkpoint.complete(root) if checkpoint.owner(p) == run_id]
    keep = kept(root, mine, rule)
    removed = []
    for folder, _ in mine:
        if folder in keep or (rule.archive_dir is not None and not archive(folder, Path(rule.archive_dir), run_id)):
            continue
        checkpoint.remove(folder)
        removed.append(folder)
    return removed


def kept(root: Path, mine: list[tuple[Path, dict[str, Any]]], rule: CheckpointConfig) -> set[Path]:
    """Those of `mine` (folder, manifest; oldest first) that stay."""
    keep = {p for p, _ in mine[-max(1, rule.keep_last) :]}
    keep |= set([p for p, m in mine if checkpoint.sizes_fit(p, m)][-1:])  # the disk may have eaten newer ones meanwhile
    scored = [(m["scores"][rule.metric], p) for p, m in mine if m.get("scores", {}).get(rule.metric) is not None]
    scored.sort(key=lambda pair: pair[0], reverse=rule.mode is Mode.max)
    keep |= {p for _, p in scored[: rule.keep_best]}
    keep |= {p for p in (checkpoint.pointed(root, "last"), checkpoint.pointed(root, "best")) if p is not None}
    newest = max((m["step"] for _, m in mine), default=0)
    keep |= {p for p, m in mine if rule.window_steps > newest - m["step"]}
    keep |= {p for p, m in mine if rule.keep_every_steps > 0 and m["step"] % rule.keep_every_steps == 0}
    keep |= {p for p, m in mine if m["step"] in rule.pin or (p / PINNED).exists()}
    return keep


def archive(folder: Path, where: Path, run_id: str) -> bool:
    """Copies a checkpoint to `where/<run id>/checkpoints/<its name>`, beside the run's config; -> whether the copy is
    there and whole. It loads from there like from a run directory. What goes wrong is told and ends no training."""
    target = where / run_id / "checkpoints" / folder.name
    temporary = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        if (target / checkpoint.MANIFEST).is_file() and _same(target, folder):
            return True
        target.parent.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "run.json"):
            if (beside := folder.parent.parent / name).is_file():
                shutil.copyfile(beside, target.parent.parent / name)
        shutil.copytree(folder, temporary)
        why = checkpoint.damage(temporary)
        if not why:
            for path in temporary.iterdir():
                durable.sync_path(path)
            if target.exists():
                target.rename(target.with_name(f"{checkpoint.LEFT}{target.name}-{uuid.uuid4().hex[:8]}"))
            temporary.rename(target)
            durable.sync_path(target.parent)
    except OSError as error:
        why = str(error)
    if why:
        shutil.rmtree(temporary, ignore_errors=True)
        log.warning("%s stays: it could not be archived in %s: %s", folder.name, where, why)
    return not why


def _same(copy: Path, folder: Path) -> bool:
    """Whether an undamaged copy of this very checkpoint is there already: a kill may have come before the removal."""
    told = [json.loads((p / checkpoint.MANIFEST).read_text(encoding="utf-8")) for p in (copy, folder)]
    return bool(told[0] == told[1]) and not checkpoint.damage(copy)
