"""What a log begins with: what runs, where, on what, and the arithmetic of a step."""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

import torch

from echofree import __version__
from echofree.config.show import effective
from echofree.contracts import DataSource
from echofree.data.loader import Plan
from echofree.dist.world import World
from echofree.loop import Loop
from echofree.rundir import RunDir

log = logging.getLogger("echofree")


def banner(
    config: Any, run: RunDir, world: World, device: torch.device, about: str, source: DataSource, plan: Plan, loop: Loop
) -> None:
    """Says everything once, on rank 0; `about` is the line about the model."""
    facts = run.facts
    hosts = ", ".join(sorted(set(world.hosts)))
    where = (
        f"world: {world.size} rank(s) on {world.num_nodes} host(s) ({hosts}), back end {world.backend}, found from: "
    )
    threads = f"{world.source}; device {_device_name(device)}, {torch.get_num_threads()} thread(s) per rank"
    lines = [
        f"EchoFree {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
        f"run {facts['id']} in {os.path.relpath(run.folder)}",
        where + threads,
        "config (values the command line changed are marked):",
        *("  " + line for line in effective(config, set(facts.get("changed", []))).splitlines()),
        *facts.get("notes", []),
        "data:",
        *(f"  {what}: {value}" for what, value in source.survey()),
        about,
        arithmetic(config, plan, loop),
    ]
    for line in lines:
        log.info("%s", line)


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def arithmetic(config: Any, plan: Plan, loop: Loop) -> str:
    """The one line that says what a step is."""
    segment = config.data.get("segment_s")
    seconds = f" = {plan.global_batch * segment:g} s of audio" if isinstance(segment, int | float) else ""
    return (
        f"step: {plan.batch_size} clips x {plan.data_size} data rank(s) x {plan.accumulation} accumulation = "
        f"{plan.global_batch} "
        f"clips{seconds}; {plan.num_items} clips = {plan.steps_per_epoch} steps an epoch; {loop.total_steps} steps in "
        f"all"
    )
