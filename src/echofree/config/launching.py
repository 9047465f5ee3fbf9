"""Between Hydra's launcher interface and `echofree.launch`: each job's config composed at submission, its own launcher
keys included, and what Hydra wants to hear about each at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from echofree.config import check
from echofree.config.compose import without_hydra
from echofree.config.sweep import StopSweep, SweepJob
from echofree.errors import ConfigError, EchoFreeError, ExitCode

if TYPE_CHECKING:
    from echofree.launch.start import Job


def launch(
    kind: str,
    settings: Mapping[str, Any],
    context: HydraContext,
    config: DictConfig,
    task: TaskFunction,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """What a launcher plugin does.

    Args:
        kind: local or slurm.
        settings: the launcher's keys as the command line has them.
        config: of the sweep, with Hydra's node.
        first: number of the first job.

    Raises:
        ConfigError: all problems of all jobs, before anything is written.
        StopSweep: after a Ctrl-C.
    """
    from echofree.launch.follow import Left
    from echofree.launch.start import launch as start

    if not isinstance(task, SweepJob):
        raise ConfigError(f"hydra/launcher={kind} is EchoFree's own. Other programs take submitit_{kind}")
    if settings["detach"] and not str(config.hydra.sweeper.get("_target_", "")).endswith("BasicSweeper"):
        raise ConfigError(
            "hydra.launcher.detach=true: this sweeper needs the result of each job before it can name the next. Type: "
            "hydra.launcher.detach=false (Ctrl-C leaves the jobs running)"
        )
    if kind == "slurm" and settings["detach"] and settings["on_failure"] == "stop":
        raise ConfigError(
            "hydra.launcher.on_failure=stop: with hydra.launcher.detach=true nobody is there to see a failure and "
            "cancel the others. Type: hydra.launcher.detach=false, or hydra.launcher.on_failure=continue"
        )
    jobs = [one_job(kind, context, config, task, list(words), first + i) for i, words in enumerate(job_overrides)]
    task.handed_over += len(jobs)
    try:
        done = start(kind, jobs, Path(str(config.hydra.sweep.dir)), settings)
    except Left:
        raise StopSweep(int(ExitCode.INTERRUPTED)) from None
    by_number = {view.number: view for view in done.views}
    returns = []
    for job in jobs:
        view = by_number[job.number]
        result = JobReturn(overrides=job.words, working_dir=str(job.folder), task_name="train")
        if done.detached or view.ok:
            result.status, result.return_value = JobStatus.COMPLETED, view.best
            task.done += view.ok
        else:
            error = EchoFreeError(f"job {job.number} {view.state}: {view.folder}")
            result.status, result.return_value = JobStatus.FAILED, error
            task.failed.append((job.number, done.code))
        returns.append(result)
    return returns


def one_job(kind: str, context: HydraContext, config: DictConfig, task: SweepJob, words: list[str], number: int) -> Job:
    """Composes one job as it is now."""
    from echofree.launch.start import Job

    composed = context.config_loader.load_sweep_config(config, words)
    with open_dict(composed.hydra.job):
        composed.hydra.job.num, composed.hydra.job.id = number, str(number)
    own = [str(word) for word in filter_overrides(words)]
    folder = Path(str(composed.hydra.sweep.dir)) / str(composed.hydra.sweep.subdir)
    settings = OmegaConf.to_container(composed.hydra.launcher, resolve=True)
    assert isinstance(settings, dict)
    if settings.get("max_num_timeout") is not None:  # the job itself counts, wherever the launcher is by then
        composed.dist.max_timeouts = settings["max_num_timeout"]
    parser = OverridesParser.create(config_loader=context.config_loader)
    return Job(
        number,
        [word for word in own if swept(config, word, parser)],
        task.composed(without_hydra(composed), composed.hydra, own, folder),
        {str(key): value for key, value in settings.items()},
        {**{str(k): str(v) for k, v in composed.hydra.runtime.choices.items()}, check.LAUNCHER: kind},
    )


def swept(config: DictConfig, word: str, parser: OverridesParser) -> bool:
    """Whether this word tells jobs apart: the command line doesn't have its key with one value for all."""
    key = word.partition("=")[0]
    typed = next((str(one) for one in config.hydra.overrides.task if str(one).partition("=")[0] == key), None)
    return typed is None or parser.parse_override(typed).is_sweep_override()
