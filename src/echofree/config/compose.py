"""From the words on the command line to one typed run config, or to all of its problems at once.

`main_config` is what a verb calls. It answers `--help`, `--cfg` and friends itself, runs a sweep for `-m`, and
otherwise returns the composed run. Nothing is written and no process is started before the config is known to be right,
and torch is imported only once everything that can be judged without it is right.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathElement
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped,unused-ignore]

from echofree.config import check, frozen, override, resume, search
from echofree.config.arguments import Flags, parse_flags
from echofree.config.schema import RunConfig
from echofree.errors import ConfigError, UserError

# Beyond this many jobs a sweep's combinations are checked job by job as they start, not all beforehand.
MAX_CHECKED_JOBS = 200


@dataclass
class Composed:
    """One run, ready to be built.

    Attributes:
        config: the whole run config, typed, resolved, without Hydra's own node.
        words: the command line's settings as typed.
        changed: dotted keys whose value the command line changed, for `show.effective`.
        choices: group -> option chosen.
        run_dir: where the run must go when that is decided already (a resume, a sweep's job, hydra.run.dir); else None.
        checkpoint: the checkpoint directory that `resume=` named, or None: the last complete one of `run_dir`.
        resumed: whether this goes on with the run in `run_dir`.
        notes: what the log should say about all this.
        profile_steps: measure so many steps instead of training; None: train.
    """

    config: DictConfig
    words: list[str] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    choices: dict[str, str] = field(default_factory=dict)
    run_dir: Path | None = None
    checkpoint: Path | None = None
    resumed: bool = False
    notes: list[str] = field(default_factory=list)
    profile_steps: int | None = None


RunJob = Callable[[Composed], "float | None"]


class Composer:
    """Hydra's config loader on EchoFree's search path.

    Args:
        config_name: the primary config, `train` unless `--config-name` says otherwise.
        extra_dir: a folder of options searched before the experiments (`--config-dir`).
    """

    def __init__(self, config_name: str = "train", extra_dir: str | None = None):
        ConfigStore.instance().store(name="schema", node=RunConfig, provider="echofree")
        path = create_config_search_path(str(search.conf_dir()))
        if extra_dir is not None:
            if not Path(extra_dir).is_dir():
                raise ConfigError(f"--config-dir {extra_dir}: no such folder. Type the path of a folder of groups")
            _append(path, "command line", Path(extra_dir).absolute())
        for folder in search.experiment_dirs():
            _append(path, "experiments", folder)
        self.config_name = config_name
        self.loader = ConfigLoaderImpl(config_search_path=path)
        self.hydra = Hydra(task_name="train", config_loader=self.loader)
        self._base = functools.lru_cache(maxsize=256)(self._load)

    def base(self, words: Sequence[str], multirun: bool = False) -> DictConfig:
        """The composition with these words, Hydra's node included; a fresh copy.

        Raises:
            ConfigError: the YAML files don't fit together.
        """
        return self._base(tuple(words), multirun).copy()

    def _load(self, words: tuple[str, ...], multirun: bool) -> DictConfig:
        try:
            return self.loader.load_configuration(
                self.config_name,
                list(words),
                run_mode=RunMode.MULTIRUN if multirun else RunMode.RUN,
                validate_sweep_overrides=False,
            )
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            chain: list[str] = []
            cause: BaseException | None = error
            while cause is not None:
                chain += [line.strip() for line in str(cause).splitlines() if line.strip()]
                cause = cause.__cause__
            raise ConfigError(f"{' '.join(words) or self.config_name}: {'; '.join(dict.fromkeys(chain))}") from error


def _append(path: ConfigSearchPath, provider: str, folder: Path) -> None:
    """Adds a folder where Hydra looks last, but for its own schemas, which it insists on having at the end."""
    path.get_path().insert(-1, SearchPathElement(provider, f"file://{folder}"))


def compose(words: Sequence[str] = (), composer: Composer | None = None, launcher: str = "basic") -> Composed:
    """Composes and checks one run from `key=value` words. Signatures of open groups are not looked at (see `build`).

    Args:
        launcher: of the sweep that this is a job of; with slurm it won't run on this machine.

    Raises:
        ConfigError: every problem of the words and of the values together.
    """
    composer = composer or Composer()
    config, right, problems = settings(list(words), composer, multirun=False)
    return _finish(config, right, problems, composer, launcher)


def settings(words: list[str], composer: Composer, multirun: bool) -> tuple[DictConfig, list[Override], list[str]]:
    """-> (config with every right word applied and Hydra's node, the right words, the problems)."""
    parsed = override.parse(words, composer.loader)
    problems, right = list(parsed.problems), []
    empty = composer.base((), multirun)
    checker = override.Checker(composer.loader, empty, multirun)
    groups, keys = _sort(parsed.overrides, composer)
    for word in groups:
        if word.key_or_group in empty.hydra.runtime.choices:
            word = override.without_plus(word, composer.loader)
        found = checker.use_problems(word) + checker.group_problems(word)
        problems += found
        right += [] if found else [word]
    try:
        config = composer.base(first_values(right), multirun)
    except ConfigError as error:
        problems += error.problems
        config = empty
    usual = config.train.batch_size
    for word in keys:
        if override.exists(config, word.key_or_group):
            word = override.without_plus(word, composer.loader)
        found = checker.use_problems(word) or checker.value_problems(word, config)
        problems += found
        right += [] if found else [word]
    if config.train.batch_size == "auto" and isinstance(usual, int):
        config.train.batch_size = f"auto:{usual}"  # what auto splits: the clips that a preset would take at once
    return config, right, problems


def _sort(words: list[Override], composer: Composer) -> tuple[list[Override], list[Override]]:
    """Splits the words into group choices and keys."""
    groups = [word for word in words if composer.loader.repository.group_exists(word.key_or_group)]
    return groups, [word for word in words if word not in groups]


def first_values(groups: list[Override]) -> list[str]:
    return [
        f"{word.get_key_element()}={next(word.sweep_string_iterator())}"
        if word.is_discrete_sweep()
        else str(word.input_line)
        for word in groups
    ]


def _finish(
    config: DictConfig, right: list[Override], problems: list[str], composer: Composer, launcher: str = "basic"
) -> Composed:
    """Rules about values, resume, and the bookkeeping around one composed config."""
    choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items() if not str(k).startswith("hydra/")}
    choices[check.LAUNCHER] = launcher
    own_dir = next((word.value() for word in right if word.key_or_group == "hydra.run.dir"), None)
    config = without_hydra(config)
    if config.resume is None:  # else what counts is the frozen config with these words in it: see `_resumed`
        problems = problems + check.problems(config, choices)
    if problems:
        raise ConfigError(problems)
    default = without_hydra(composer.base(()))
    before, after = override.flat(default), override.flat(config)
    named = {word.key_or_group for word in right}
    changed = {key for key, value in after.items() if key in named or before.get(key, "???") != value}
    composed = Composed(
        config=config,
        words=[str(word.input_line) for word in right],
        changed=changed,
        choices=choices,
        run_dir=Path(str(own_dir)) if own_dir is not None else None,
    )
    if config.resume is None:
        return composed
    return _resumed(composed, right, composer)


def _resumed(composed: Composed, right: list[Override], composer: Composer) -> Composed:
    plan = resume.find(str(composed.config.resume), str(composed.config.output_root), str(composed.config.name))
    if plan is None:
        composed.notes.append(
            f"resume=auto: {composed.config.output_root}/{composed.config.name} holds no run with a checkpoint, "
            "a new one starts"
        )
        if found := check.problems(composed.config, composed.choices):
            raise ConfigError(found)
        return composed
    given = resume.given_keys(right, composed.config, lambda words: without_hydra(composer.base(words)))
    config, notes = resume.merge(plan, composed.config, given)
    composed.config, composed.run_dir, composed.checkpoint, composed.resumed = (
        config,
        plan.run_dir,
        plan.checkpoint,
        True,
    )
    composed.notes += notes
    found = check.problems(config, composed.choices)
    if found:
        raise ConfigError(found)
    return composed


def without_hydra(config: DictConfig) -> DictConfig:
    """The run's own part. `name` may quote Hydra's choices, so it is resolved first."""
    copy = config.copy()
    OmegaConf.set_struct(copy, False)
    if OmegaConf.is_interpolation(copy, "name"):
        copy.name = str(copy.name)
    copy.pop("hydra", None)
    OmegaConf.set_struct(copy, True)
    return copy


def main_config(argv: Sequence[str], run_job: RunJob | None = None, check_signatures: bool = True) -> Composed:
    """Everything between `python -m echofree.train ...` and a run.

    Args:
        argv: the words after the verb.
        run_job: runs one job of a sweep and returns the value that a sweeper minimises. Needed for `-m`.
        check_signatures: compare the open groups with the constructors that they name (imports torch).

    Raises:
        SystemExit: 0 after `--help`, `--cfg`, `--info`; 2 after the problems were printed; after a sweep 0, or the exit
            code of the first job that failed.
    """
    flags = parse_flags(argv)
    try:
        if flags.help:
            from echofree.config.help import verb_help

            print(verb_help("train"))
            raise SystemExit(0)
        composer = Composer(flags.config_name, flags.config_dir)
        if flags.show or flags.multirun:
            from echofree.config import sweep

            raise SystemExit(sweep.with_hydra(flags, composer, run_job, check_signatures))
        composed = compose_flags(flags, composer)
        if check_signatures:
            from echofree.config import build

            build.check(composed.config)
        return composed
    except UserError as error:
        raise SystemExit(report(error, flags.hint)) from None


def compose_flags(flags: Flags, composer: Composer) -> Composed:
    """`compose`, with the problems of the flags told in the same breath."""
    config, right, problems = settings(flags.words, composer, multirun=False)
    return _finish(config, right, flags.problems + problems, composer)


def report(error: UserError, hint: str = "") -> int:
    """Prints the error and a hint below it, once: ranks of torchrun or srun all read the same. -> the exit code"""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(error, *([hint] if hint else []), sep="\n", file=sys.stderr, flush=True)
    return int(error.exit_code)


def job_combinations(words: list[Override]) -> list[list[str]]:
    """The jobs of a sweep as the basic sweeper would make them, each as a list of words."""
    axes = []
    for word in words:
        if word.is_discrete_sweep():
            axes.append([f"{word.get_key_element()}={value}" for value in word.sweep_string_iterator()])
        else:
            axes.append([str(word.input_line)])
    return [list(job) for job in itertools.product(*axes)]


def resolved(config: DictConfig) -> dict[str, Any]:
    """The config as plain containers, interpolations resolved, enums by name (`frozen.freeze`)."""
    return frozen.freeze(config)
