"""What goes through Hydra's own machinery: `-m`, `--cfg`, `--info`, `--hydra-help`.

A sweep is checked whole before its first job starts: every value of every word, then every combination. Hydra's basic
launcher then composes each job again and calls `SweepJob`, which hands it on as a `Composed` like that of a single run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from echofree.config import override
from echofree.config.arguments import Flags
from echofree.config.compose import (
    MAX_CHECKED_JOBS,
    Composed,
    Composer,
    RunJob,
    compose,
    first_values,
    job_combinations,
    settings,
    without_hydra,
)
from echofree.errors import ConfigError, EchoFreeError, ExitCode, UserError

EXECUTOR = "SUBMITIT_EXECUTOR"  # set in the jobs of submitit_local and submitit_slurm


class StopSweep(BaseException):
    """Ends a sweep at once. No Exception, since Hydra keeps those until all jobs have run."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


def with_hydra(flags: Flags, composer: Composer, run_job: RunJob | None, check_signatures: bool) -> int:
    """Shows what was asked for, or runs the sweep. -> the exit code

    Raises:
        ConfigError: every problem of the command line.
    """
    config, right, problems = settings(flags.words, composer, multirun=flags.multirun)
    problems = flags.problems + problems
    words = [str(word.input_line) for word in right]
    if flags.show:
        if problems:
            raise ConfigError(problems)
        _show(flags, composer, first_values(right), config)  # of a sweep: its first job
        return int(ExitCode.DONE)
    if run_job is None:
        problems.append("-m: this verb takes one set of values only. Leave -m out")
    if config.resume is not None:
        problems.append(
            f"resume={config.resume}: a sweep goes on by its folder: type hydra.sweep.dir=<the sweep's folder> and the "
            "same words. One run is resumed without -m"
        )
        right = [word for word in right if word.key_or_group != "resume"]
    if str(config.hydra.sweeper.get("_target_", "")).endswith("BasicSweeper"):
        launcher = "slurm" if "Slurm" in str(config.hydra.launcher.get("_target_", "")) else "basic"
        goes_on = Path(str(config.hydra.sweep.dir)).is_dir()
        jobs = job_combinations([word for word in right if not (goes_on and word.key_or_group == "resume_allow")])
        problems += _job_problems(jobs, composer, launcher, check_signatures and not problems)
    problems += _direction_problems(config)
    if problems or run_job is None:
        raise ConfigError(problems)
    if not any(word.key_or_group == "hydra.sweep.dir" for word in right):
        words.append(f"hydra.sweep.dir='{own_folder(Path(str(config.hydra.sweep.dir)))}'")
    return _run(composer, words, run_job, without_hydra(composer.base(())))


def _direction_problems(config: DictConfig) -> list[str]:
    """Whether a sweeper that searches, such as Optuna's, looks for what `checkpoint.mode` calls better."""
    direction = config.hydra.sweeper.get("direction")
    wanted = {"min": "minimize", "max": "maximize"}[config.checkpoint.mode.value]
    said = getattr(direction, "name", direction)
    if not isinstance(said, str) or said == wanted:
        return []
    what = f"checkpoint.metric={config.checkpoint.metric} (checkpoint.mode={config.checkpoint.mode.value})"
    return [f"hydra.sweeper.direction={said} would look for the worst {what}. Type: hydra.sweeper.direction={wanted}"]


def own_folder(wanted: Path) -> Path:
    """Makes the folder of a sweep; with a number behind it when another sweep of this second has taken the name."""
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _job_problems(jobs: list[list[str]], composer: Composer, launcher: str, check_signatures: bool) -> list[str]:
    """Composes and checks each job; a problem that many share is told once, with the first job that has it."""
    seen: dict[str, str] = {}
    targets: set[str] = set()
    for number, words in enumerate(jobs[:MAX_CHECKED_JOBS]):
        own = [word for word in words if not word.startswith("hydra")]
        try:
            composed = compose(own, composer, launcher)
            open_part = str([OmegaConf.to_container(composed.config[group]) for group in override.OPEN_GROUPS])
            if check_signatures and open_part not in targets:
                from echofree.config import build

                targets.add(open_part)
                build.check(composed.config)
        except ConfigError as error:
            for problem in error.problems:
                seen.setdefault(problem, f"job {number} ({' '.join(own)}): {problem}")
    return list(seen.values())


class SweepJob:
    """The task function that Hydra's launchers call.

    Args:
        run_job: runs one composed job.
        defaults: the config without any words, to mark what a job changes.
    """

    def __init__(self, run_job: RunJob, defaults: DictConfig):
        self.run_job = run_job
        self.before = override.flat(defaults)
        self.failed: list[tuple[int, int]] = []  # (job number, exit code)
        self.done = self.handed_over = 0

    def composed(self, config: DictConfig, hydra: Any, words: list[str], run_dir: Path) -> Composed:
        """One job as a single run would have it.

        Args:
            config: without Hydra's own node.
            hydra: that node.
        """
        named = {word.partition("=")[0].lstrip("+~") for word in words}
        return Composed(
            config=config,
            words=words,
            changed={k for k, v in override.flat(config).items() if k in named or self.before.get(k, "???") != v},
            choices={str(k): str(v) for k, v in hydra.runtime.choices.items() if not str(k).startswith("hydra/")},
            run_dir=run_dir,
        )

    def __call__(self, config: DictConfig) -> float | None:
        hydra = HydraConfig.get()
        number, words = int(hydra.job.num), [str(word) for word in hydra.overrides.task]
        print(f"[EchoFree] job {number}: {' '.join(words) or 'no settings'} -> {hydra.runtime.output_dir}", flush=True)
        composed = self.composed(config, hydra, words, Path(str(hydra.runtime.output_dir)))
        try:
            value = self.run_job(composed)
        except Exception as error:
            code = int(error.exit_code) if isinstance(error, EchoFreeError) else int(ExitCode.FAILED)
            text = str(error) if isinstance(error, EchoFreeError) else traceback.format_exc()
            print(f"[EchoFree] job {number} failed (exit code {code}): {text}", file=sys.stderr, flush=True)
            self.failed.append((number, code))
            if EXECUTOR in os.environ:  # Hydra would keep the exception, and the scheduler say COMPLETED
                sys.stdout.flush()
                os._exit(code)
            if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
                raise StopSweep(code) from error
            raise
        self.done += 1
        return value


@contextmanager
def _hydra(composer: Composer) -> Iterator[Any]:
    GlobalHydra.instance().clear()
    GlobalHydra.instance().initialize(composer.hydra)
    try:
        yield composer.hydra
    finally:
        GlobalHydra.instance().clear()


def _run(composer: Composer, words: list[str], run_job: RunJob, defaults: DictConfig) -> int:
    job = SweepJob(run_job, defaults)
    code = int(ExitCode.DONE)
    try:
        with _hydra(composer) as hydra:
            returned = hydra.multirun(composer.config_name, job, [*words, "hydra.mode=MULTIRUN"])
        if not job.done and not job.handed_over and isinstance(returned, list):  # run in other processes, all well
            job.done = sum(len(batch) for batch in returned)
    except StopSweep as stop:
        code = stop.exit_code
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except Exception as error:
        if not job.failed:  # Hydra or a launcher failed, not a job: told here, or nobody would
            if isinstance(error, UserError):
                raise
            traceback.print_exc()
            return int(ExitCode.FAILED)
        code = job.failed[0][1]
    if job.handed_over:
        return code  # its jobs run elsewhere
    numbers = ", ".join(str(number) for number, _ in job.failed)
    print(f"[EchoFree] sweep: {job.done} jobs done" + (f", failed: {numbers}" if numbers else ""), flush=True)
    return code


def _show(flags: Flags, composer: Composer, words: list[str], config: DictConfig) -> None:
    if flags.package and OmegaConf.select(config, flags.package, throw_on_missing=False) is None:
        groups = ", ".join(str(key) for key in config if key != "hydra")
        raise ConfigError(f"--package {flags.package}: the config has no such part. Parts: {groups}")
    with _hydra(composer) as hydra:
        if flags.cfg:
            hydra.show_cfg(composer.config_name, words, flags.cfg, flags.package, flags.resolve)
        elif flags.info:
            hydra.show_info(flags.info, config_name=composer.config_name, overrides=words)
        else:
            arguments = argparse.Namespace(overrides=words, resolve=flags.resolve)
            hydra.hydra_help(composer.config_name, args_parser=get_args_parser(), args=arguments)
