"""Who am I in this SLURM job: read from the environment of a task, before anyone is contacted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echofree.errors import ConfigError

FIRST_SPECIAL_STEP = 0xFFFF0000  # batch script, interactive shell, extern: no steps of srun


@dataclass(frozen=True)
class Task:
    """One process that SLURM started.

    Attributes:
        job_id: the number of this job; a task of an array has one of its own.
        name: as scontrol and squeue take it: the same, or ARRAY_INDEX such as 123_4.
        step: number of the srun in this job; None in the batch script itself.
        rank, size: among the tasks of the step; 0 of 1 in the batch script.
        local_rank, local_size: among those of this node.
        nodes: of the step, in order; rank 0 is on the first.
        node: number of this task's among them.
        per_node: tasks of the step on each node.
        tasks: processes that the job asked for (--ntasks), whoever starts them; 1 if it doesn't say.
        restart: how often the job has been requeued.
        cluster: name; "" if unknown.
    """

    job_id: str
    name: str
    step: str | None
    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: tuple[str, ...]
    node: int
    per_node: tuple[int, ...]
    tasks: int
    restart: int
    cluster: str = ""

    @property
    def identity(self) -> str:
        """What all ranks of this start have in common, and nobody else: an earlier start of the job has another."""
        return f"slurm-{self.cluster}-{self.job_id}.{self.step}-{self.restart}"


def found_in(env: Mapping[str, str]) -> Task | None:
    """The task that the environment describes; None outside of a job, and in a shell that only inherited its id.

    Raises:
        ConfigError: variables that contradict each other.
    """
    job_id = env.get("SLURM_JOB_ID")
    if not job_id or "SLURM_PROCID" not in env:
        return None
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{index}" if array and index else job_id
    restart, cluster = int(env.get("SLURM_RESTART_COUNT") or 0), env.get("SLURM_CLUSTER_NAME", "")
    tasks = int(env.get("SLURM_NTASKS") or 1)
    step = env.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= FIRST_SPECIAL_STEP:
        nodes = tuple(expand(env.get("SLURM_JOB_NODELIST", "")))
        return Task(job_id, name, None, 0, 1, 0, 1, nodes, 0, (1,), tasks, restart, cluster)
    size = int(env.get("SLURM_STEP_NUM_TASKS") or tasks)
    nodes = tuple(expand(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")))
    per_node = counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", str(size)))
    if sum(per_node) != size or len(per_node) != len(nodes):
        raise ConfigError(
            f"SLURM's variables don't fit together: {size} tasks (SLURM_STEP_NUM_TASKS), but {per_node} on the nodes "
            f"{', '.join(nodes)}. Were they set by hand?"
        )
    node = int(env.get("SLURM_NODEID") or 0)
    rank, local_rank = int(env["SLURM_PROCID"]), int(env.get("SLURM_LOCALID") or 0)
    local_size, each = per_node[node], tuple(per_node)
    return Task(
        job_id, name, step, rank, size, local_rank, local_size, nodes, node, each, tasks, restart, cluster
    )  # fmt: skip


def expand(text: str) -> list[str]:
    """A list of nodes as SLURM writes it, "n[1-2,07],gpu1", as names: n1 n2 n07 gpu1."""
    found: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found += _expand_word(word)
    return found


def _expand_word(word: str) -> list[str]:
    head, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, tail = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if dash else [first]
    return [f"{head}{number}{end}" for number in numbers for end in _expand_word(tail)]


def counts(text: str) -> list[int]:
    """Tasks of each node as SLURM writes them, "2(x2),1", as numbers: 2 2 1."""
    found: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(number)] * int(times or 1)
    return found


def problems(name: str, num_procs: str, num_nodes: int, per_node: Sequence[int]) -> list[str]:
    """Whether `dist` and the tasks of a job say the same; what is wrong, with the sums.

    Args:
        name: `dist.name`: single, ddp, ...
        num_procs, num_nodes: of `dist`; num_procs "auto" takes what SLURM gives.
        per_node: tasks on each node.
    """
    size = sum(per_node)
    even = len(set(per_node)) == 1
    given = f"{len(per_node)} x {per_node[0]}" if even else " + ".join(map(str, per_node))
    have = f"SLURM starts {given} = {size} tasks on {len(per_node)} node(s)"
    if name == "single":
        if size == 1:
            return []
        return [f"{have}, dist=single trains in one process: they would be {size} equal runs. Type: dist=ddp"]
    found = []
    asked = size if num_procs == "auto" else num_nodes * int(num_procs)
    if num_procs != "auto" and (asked != size or (num_nodes > 1 and num_nodes != len(per_node))):
        nodes, procs = len(per_node), per_node[0]
        remedy = f"dist.num_nodes={nodes} dist.num_procs={procs}, or " if even else ""
        found.append(
            f"{have}, but dist.num_nodes={num_nodes} x dist.num_procs={num_procs} = {asked} rank(s). Type: {remedy}"
            f"dist.num_procs=auto, or ask SLURM for {num_nodes} node(s) with {num_procs} task(s) each"
        )
    elif num_nodes > 1 and num_nodes != len(per_node):
        found.append(f"{have}, but dist.num_nodes={num_nodes}. Type: dist.num_nodes={len(per_node)}, or leave it out")
    return found


def check(dist: Any, task: Task) -> None:
    """`problems` of a run config's `dist`.

    Raises:
        ConfigError: with the sums.
    """
    if found := problems(dist.name.value, str(dist.num_procs), dist.num_nodes, task.per_node):
        raise ConfigError(found)
