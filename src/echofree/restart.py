"""Going on with a run: what has to be as it was, what may differ when allowed, and what is then no longer exact."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import CheckpointError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from echofree.loop import Loop
    from echofree.rundir import RunDir

log = logging.getLogger("echofree")


def prepare(run: RunDir, config: DictConfig, named: Path | None, size: int, changed: Sequence[str]) -> None:
    """Before the first rank of a resume starts: refuses what differs, else writes down the config that holds from now
    on and what changed. Nothing is touched before everything was judged.

    Args:
        config: the frozen config with what the command line changes.
        named: the checkpoint that the user named; None: the newest.
        size: ranks of this start.
        changed: keys set on the command line, for the log.

    Raises:
        CheckpointError: another number of ranks or another code than before, not allowed by `resume_allow`.
    """
    from echofree import checkpoint, rundir
    from echofree.config import frozen
    from echofree.config.override import flat
    from echofree.durable import write_text
    from echofree.stop import FILE

    allow, facts = [str(name) for name in config.resume_allow], run.facts
    run.lock()  # refuses a second start before anything is touched
    try:
        folder = named or next(iter(reversed(checkpoint.complete(run.checkpoints))), None)
        notes = []
        if folder is not None:
            notes += check_world(checkpoint.manifest(folder), size, folder.name, allow)
        notes += check_code(facts, rundir.code_digest(), allow)
        new = config.copy()
        new.resume, new.resume_allow = None, []
        old = frozen.load(run.folder)
        before, after = flat(frozen.freeze(old)), flat(frozen.freeze(new))
        differs = {k: [before.get(k), after.get(k)] for k in sorted({*before, *after}) if before.get(k) != after.get(k)}
        differs = {k: pair for k, pair in differs.items() if k not in ("resume", "resume_allow")}
        past = facts.get("resumes", [])
        if differs:
            write_text(run.folder / f"config-{len(past)}.yaml", frozen.dump(old))  # what held until now
            write_text(run.folder / rundir.CONFIG, frozen.dump(new))
        entry = {
            "time": time.time(),
            "from": None if folder is None else folder.name,
            "changed": differs,
            "world_size": size,
            "allow": allow,
            "code_digest": rundir.code_digest(),
        }
        run.clear_failure()
        (run.folder / FILE).unlink(missing_ok=True)  # it stopped an earlier start
        run.note(
            resumed_from=None if named is None else named.name, resume=True, resume_allow=allow,
            changed=sorted(changed), resumes=[*past, entry],
            notes=notes + [f"resume: {key} changes from {a!r} to {b!r}" for key, (a, b) in differs.items()],
        )  # fmt: skip
    finally:
        run.unlock()


def check_world(about: Mapping[str, Any], size: int, name: str, allow: Sequence[str]) -> list[str]:
    """-> what is no longer exact, for the log

    Raises:
        CheckpointError: another number of ranks, and nobody allowed it.
    """
    old = int(about["world_size"])
    if old == size:
        return []
    if "world_size" not in allow:
        raise CheckpointError(
            f"{name} was saved by {old} rank(s), this start has {size}: the random states of the ranks and the share "
            f"of data per rank would differ. Type dist.num_procs={old}, or "
            f"'resume_allow=[{','.join([*allow, 'world_size'])}]' to go on with {size}"
        )
    text = (
        f"resume: {old} rank(s) become {size}. Weights, optimizer, schedule and scores go on as they were, and the "
        "order of the clips stays the run's; no longer exact: every rank's random state (dropout) begins anew, sums "
        "over ranks round differently"
    )
    return [text]


def check_code(facts: Mapping[str, Any], digest: str, allow: Sequence[str]) -> list[str]:
    """-> what is no longer exact, for the log

    Raises:
        CheckpointError: the source isn't what the run was started, or last resumed, with, and nobody allowed it.
    """
    resumes = facts.get("resumes", [])
    old = resumes[-1]["code_digest"] if resumes else facts.get("code_digest")
    if old is None or old == digest:
        return []
    text = f"the run was started with code {old} (commit {facts.get('git_commit')}), this is code {digest}"
    if "code" not in allow:
        raise CheckpointError(
            f"resume: {text}: it may compute something else. Go back to the old code (git stash, git checkout), or "
            f"type 'resume_allow=[{','.join([*allow, 'code'])}]' to go on with the new"
        )
    return [f"resume: {text}; no longer exact"]


def go_on(loop: Loop, run: RunDir, fingerprint: str) -> None:
    """In every rank: back to the checkpoint that the launcher named, or to the newest good one of this directory.

    Raises:
        CheckpointError: another number of ranks or other data than before, not allowed by `resume_allow`.
    """
    from echofree import checkpoint

    facts = run.facts
    if not facts.get("resume"):
        return
    root, world = run.checkpoints, loop.world
    allow = facts.get("resume_allow", [])
    old = facts.get("data_fingerprint")
    if old not in (None, fingerprint) and not any(name.split(".")[0] == "data" for name in allow):
        raise CheckpointError(
            f"the data isn't what the run in {run.folder} saw: fingerprint {old} then, {fingerprint} now. Files came, "
            f"went or changed. Restore them, or type 'resume_allow=[{','.join([*allow, 'data'])}]'"
        )
    check_teacher(facts, loop.task, allow)
    folder = None
    if world.is_first:
        folder = root / facts["resumed_from"] if facts.get("resumed_from") else checkpoint.newest_good(root)
    folder = world.from_first(folder)
    if folder is None:
        log.warning("resume: no complete checkpoint in %s; starting at step 0 in the same directory", root)
        run.truncate_metrics(-1)
        return
    about = checkpoint.manifest(folder)
    if check_world(about, world.size, folder.name, allow):
        reseed(loop, int(about["step"]))
    loop.load(folder)
    dropped = run.truncate_metrics(loop.state.step)
    if world.is_first and (later := checkpoint.set_aside(root, loop.run_id, loop.state.step)):
        log.warning("set aside as %s*: %s, of the branch given up", checkpoint.LEFT, ", ".join(p.name for p in later))
    again = f"; {dropped} later records dropped" if dropped else ""
    log.info("resumed from %s (epoch %d)%s", folder.name, loop.state.epoch, again)
    seen = loop.clips_again
    if loop.state.shift or seen:
        log.warning(
            "the global batch has another size than before: %d steps remain; %d clips of this epoch are seen again. "
            "train.gradient_accumulation_steps can keep batch size x ranks x accumulation as it was",
            loop.total_steps - loop.state.step,
            seen,
        )


def check_teacher(facts: Mapping[str, Any], task: Any, allow: Sequence[str]) -> None:
    """
    Raises:
        CheckpointError: the teacher isn't the one that the run had, and nobody allowed it.
    """
    old = (facts.get("teacher") or {}).get("fingerprint")
    new = task.teacher.facts if old is not None and hasattr(task, "teacher") else None
    if new is None or new.fingerprint == old or any(name.split(".")[0] == "task" for name in allow):
        return
    raise CheckpointError(
        f"resume: the teacher in {new.path} isn't the one that the run had: fingerprint {old} then, {new.fingerprint} "
        f"now. Name the checkpoint itself (a run directory's best may change), or type "
        f"'resume_allow=[{','.join([*allow, 'task'])}]'"
    )


def reseed(loop: Loop, step: int) -> None:
    """Random streams of this rank that no earlier part of the run has used."""
    import random

    import numpy as np
    import torch

    seed = np.random.SeedSequence([loop.config.seed, step, loop.world.size, loop.world.rank])
    words = seed.generate_state(3)
    torch.manual_seed(int(words[0]))
    random.seed(int(words[1]))
    np.random.seed(int(words[2]))
