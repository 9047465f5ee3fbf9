"""What each job of a local sweep gets of this machine: devices of its own, cores of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from echofree.launch.ticket import Ticket
from echofree.process import num_cores

if TYPE_CHECKING:
    from echofree.launch.start import Job


def plan(jobs: Sequence[Job], settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Gives each job its ticket. -> (settings of the whole sweep, what to tell, problems)"""
    from echofree import train

    devices, problems = found_devices(settings["devices"])
    asked = settings["max_parallel"]
    if asked != "auto" and not (isinstance(asked, int) and asked >= 1):
        problems.append(f"hydra.launcher.max_parallel={asked}: must be a whole number from 1 up, or auto")
        asked = 1
    for job in jobs:
        config = job.composed.config
        if config.dist.num_nodes > 1:
            problems.append(
                f"job {job.number}: dist.num_nodes={config.dist.num_nodes}, but hydra/launcher=local is one machine. "
                "Type: dist.num_nodes=1, or hydra/launcher=slurm hydra.launcher.nodes=2"
            )
        ranks = train.num_ranks(config)
        need = 0
        if devices and config.train.device != "cpu":
            need = ranks
            if config.dist.num_procs == "auto":
                need = int(settings["gpus_per_job"] or max(1, len(devices) // (1 if asked == "auto" else asked)))
            ranks = need
            if need > len(devices):
                problems.append(
                    f"job {job.number}: {need} ranks x 1 GPU = {need} GPUs, and this machine has {len(devices)}. Type: "
                    f"dist.num_procs={len(devices)}"
                )
        job.ticket = Ticket(job.number, str(job.folder.resolve()), job.words, ranks=ranks)
        job.ticket.resources = {"devices": need}
    made = [job.ticket for job in jobs if job.ticket is not None]
    most = max((one.ranks for one in made), default=1)
    room = len(devices) // most if any(one.resources["devices"] for one in made) else num_cores() // most
    slots = max(1, min(room, len(jobs) or 1)) if asked == "auto" else int(asked)
    have = f"{len(devices)} GPUs" if devices else f"{num_cores()} cores"
    each = f"{most} rank{'s' if most > 1 else ''}"
    lines = [f"local: {len(jobs)} jobs of up to {each}, {slots} at once on {have}"] if jobs else []
    return {"max_parallel": slots, "devices": devices}, lines, problems


def found_devices(asked: Any) -> tuple[list[str], list[str]]:
    """`devices` -> (names for CUDA_VISIBLE_DEVICES, problems)"""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    have = [name.strip() for name in visible.split(",")][:count] if visible else [str(i) for i in range(count)]
    if asked == "auto":
        return have, []
    names = [str(name) for name in asked] if isinstance(asked, (list, tuple)) else [str(asked)]
    wrong = [name for name in names if name not in have]
    if wrong:
        there = ", ".join(have) or "none"
        return have, [f"hydra.launcher.devices={asked}: there is no GPU {wrong[0]} here. There are: {there}"]
    return names, []
