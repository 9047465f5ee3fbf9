"""What each job of a SLURM sweep asks for, and whether that sum comes out: nodes x tasks against `dist` and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from echofree.launch.ticket import Ticket

if TYPE_CHECKING:
    from echofree.launch.start import Job

# Keys of the launcher that are no resources: they say how a sweep is handled, or are read elsewhere.
HANDLING = ("_target_", "on_failure", "on_interrupt", "detach", "snapshot", "by_model", "max_num_timeout")


def plan(jobs: Sequence[Job]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Gives each job its ticket. -> (settings of the whole sweep, what to tell, problems)"""
    problems: list[str] = []
    sums: dict[str, list[int]] = {}
    for job in jobs:
        settings, found = of_model(job.settings, job.choices.get("model", ""))
        nodes, tasks = settings["nodes"], settings["tasks_per_node"]
        found += sum_problems(settings, job.composed.config)
        problems += [f"job {job.number}: {problem}" for problem in found]
        resources = {k: v for k, v in settings.items() if k not in HANDLING and v is not None}
        job.settings = settings
        job.ticket = Ticket(job.number, str(job.folder), job.words, queue="slurm", resources=resources)
        job.ticket.ranks = nodes * tasks if not found else 1
        sums.setdefault(shown(settings, job.composed.config), []).append(job.number)
    lines = [f"slurm: job{'s' if len(n) > 1 else ''} {ranges(n)}: {text}" for text, n in sums.items()]
    return {}, lines, list(dict.fromkeys(problems))


def of_model(settings: Mapping[str, Any], model: str) -> tuple[dict[str, Any], list[str]]:
    """The launcher's keys of one job, `by_model` applied. -> (keys, problems)"""
    own = dict(settings.get("by_model") or {}).get(model) or {}
    wrong = [key for key in own if key not in settings or key in HANDLING]
    known = ", ".join(key for key in settings if key not in HANDLING)
    problems = [f"hydra.launcher.by_model.{model}.{key}: there is no such key. Keys: {known}" for key in wrong]
    return {**settings, **{key: value for key, value in own.items() if key not in wrong}}, problems


def sum_problems(settings: Mapping[str, Any], config: Any) -> list[str]:
    """Whether nodes x tasks_per_node is what `dist` and the GPUs say."""
    nodes, tasks, dist = settings["nodes"], settings["tasks_per_node"], config.dist
    if not all(isinstance(n, int) and n >= 1 for n in (nodes, tasks)):
        return [f"hydra.launcher.nodes={nodes} tasks_per_node={tasks}: both must be whole numbers from 1 up"]
    ranks = nodes * tasks
    total = f"hydra.launcher.nodes={nodes} x tasks_per_node={tasks} = {ranks} ranks"
    found = []
    if dist.name.value == "single" and ranks > 1:
        found.append(f"{total}, but dist=single is one process. Type: dist=ddp, or leave both out")
    elif dist.name.value != "single" and dist.num_procs not in ("auto", str(tasks)):
        found.append(
            f"{total}, but dist.num_procs={dist.num_procs} asks for {nodes} x {dist.num_procs} = "
            f"{nodes * int(dist.num_procs)}. Type: hydra.launcher.tasks_per_node={dist.num_procs}, or "
            "dist.num_procs=auto"
        )
    if dist.num_nodes > 1 or dist.rendezvous is not None:
        found.append("dist.num_nodes and dist.rendezvous are for machines without a scheduler: leave them out")
    gpus = gpus_per_node(settings)
    if gpus and config.train.device == "cpu":
        found.append(f"{gpus} GPUs per node are asked for, but train.device=cpu uses none. Leave one of them out")
    elif gpus is not None and gpus != tasks:
        found.append(
            f"{total}, but {nodes} nodes x {gpus} GPUs = {nodes * gpus} GPUs; each rank takes one. Type: "
            f"hydra.launcher.tasks_per_node={gpus}, or hydra.launcher.gpus_per_node={tasks}"
        )
    elif not gpus and not settings.get("gres") and (config.train.device == "cuda" or dist.backend.value == "nccl"):
        found.append(
            f"{total}, which need a GPU each, but none is asked for. Type: hydra.launcher.gpus_per_node={tasks}"
        )
    if settings["timeout_min"] * 60 <= settings["signal_delay_s"]:
        found.append(
            f"hydra.launcher.signal_delay_s={settings['signal_delay_s']} isn't below timeout_min="
            f"{settings['timeout_min']} ({settings['timeout_min'] * 60} s): the job would be told to stop at once. "
            f"Type: hydra.launcher.signal_delay_s={max(10, settings['timeout_min'] * 10)}"
        )
    return found


def gpus_per_node(settings: Mapping[str, Any]) -> int | None:
    """GPUs of a node as asked for; None when nothing was said that tells their number."""
    if settings.get("gpus_per_node") is not None:
        return int(settings["gpus_per_node"])
    if settings.get("gpus_per_task") is not None:
        return int(settings["gpus_per_task"]) * int(settings["tasks_per_node"])
    return None


def shown(settings: Mapping[str, Any], config: Any) -> str:
    """The sum, for people."""
    nodes, tasks = settings["nodes"], settings["tasks_per_node"]
    text = f"{nodes} node{'s' if nodes > 1 else ''} x {tasks} task{'s' if tasks > 1 else ''} = {nodes * tasks} "
    text += f"rank{'s' if nodes * tasks > 1 else ''} (dist={config.dist.name.value})"
    gpus = gpus_per_node(settings)
    if gpus:
        text += f", {nodes * gpus} GPUs"
    where = [f"{key} {settings[key]}" for key in ("partition", "account", "qos", "constraint") if settings.get(key)]
    return ", ".join([text, *where, f"{settings['timeout_min']} min"])


def ranges(numbers: Sequence[int]) -> str:
    """ "0-3,7", as SLURM writes array indices."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
