"""Going on with a run: which one, and what the command line may still change.

The frozen config of the run holds. A setting given beside `resume=` that equals it is fine; one that differs is refused
with both values shown, unless `resume_allow` names its key or group. Otherwise a new learning rate would be silently
overruled by the old one, or the old curve silently bent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from echofree.config.frozen import freeze, load
from echofree.config.override import flat
from echofree.errors import CheckpointError, ConfigError

# May always differ: they say where to look or what to show, never what is computed.
FREE: tuple[str, ...] = ("resume", "resume_allow", "logger.progress", "logger.level", "train.max_time")
FREE += tuple(f"checkpoint.{name}" for name in (
    "keep_last", "keep_best", "keep_every_steps", "window_steps", "pin", "archive_dir", "async_save", "on_full",
    "format"
))  # fmt: skip
# Names that `resume_allow` takes beside keys and groups -> the keys they cover. `code` and `data` (a group, and its
# content) are looked at when the run directory is opened.
NAMES = {
    "world_size": ("dist", "train.batch_size", "train.gradient_accumulation_steps"),
    "lr": ("optim.lr",),
    "code": (),
}
# Groups whose option is spread over the whole config.
GLOBAL_GROUPS = ("experiment", "debug", "local", "model_preset")


@dataclass
class Plan:
    """The run to go on with.

    Attributes:
        run_dir: its directory, absolute.
        checkpoint: the checkpoint directory named by the user; None: the last complete one.
        config: its frozen config, typed.
    """

    run_dir: Path
    checkpoint: Path | None
    config: DictConfig


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run that have their manifest, oldest first. Links and half-written folders don't count."""
    found = (path.parent for path in (run_dir / "checkpoints").glob("step-*/manifest.json"))
    return sorted(path for path in found if not path.is_symlink())


def find(resume: str, output_root: str, name: str) -> Plan | None:
    """The run that `resume=` means; None for `auto` when there is none yet.

    Args:
        resume: auto (the newest run of this name that has a checkpoint), a run directory, or a checkpoint directory.

    Raises:
        CheckpointError: no such directory, or nothing in it to go on with.
        ConfigError: its config can't be read.
    """
    if resume == "auto":
        runs = sorted(
            (path.parent for path in Path(output_root, name).glob("*/config.yaml")), key=lambda path: path.name
        )
        usable = [run for run in runs if complete_checkpoints(run)]
        return Plan(usable[-1].resolve(), None, load(usable[-1])) if usable else None
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(
            f"resume={resume}: no such directory. Type a run directory, for example: {_example(output_root)}"
        )
    path = path.resolve()
    if (path / "config.yaml").is_file():
        if not complete_checkpoints(path):
            raise CheckpointError(
                f"resume={resume}: this run has no complete checkpoint (checkpoints/step-*/manifest.json). "
                "Start it anew without resume="
            )
        return Plan(path, None, load(path))
    run_dir = path.parent.parent
    if path.parent.name == "checkpoints" and (run_dir / "config.yaml").is_file():
        if not (path / "manifest.json").is_file():
            names = ", ".join(p.name for p in complete_checkpoints(run_dir)) or "none"
            raise CheckpointError(
                f"resume={resume}: this checkpoint is incomplete (no manifest.json). Complete ones: {names}"
            )
        return Plan(run_dir, path, load(run_dir))
    raise CheckpointError(
        f"resume={resume}: neither a run directory (with config.yaml) nor one of its checkpoints. "
        f"Type, for example: {_example(output_root)}"
    )


def _example(output_root: str) -> str:
    runs = sorted(Path(output_root).glob("*/*/config.yaml"), key=lambda path: path.stat().st_mtime)
    return f"resume={runs[-1].parent}" if runs else f"resume={output_root}/<name>/<date_time>"


def given_keys(words: Sequence[Override], config: DictConfig, compose: Callable[[list[str]], DictConfig]) -> set[str]:
    """The dotted keys that these words mean to set.

    A key word means its key (all leaves below it), a group its whole node; a choice of an experiment or a debug remedy
    means every key that it changes. What a model's preset brings along isn't counted as asked for.

    Args:
        config: the composition of all words.
        compose: composes other words, for the difference that one makes.
    """
    leaves, given = flat(config), set()
    for word in words:
        key = word.key_or_group
        if key.startswith(("hydra.", "hydra/")):
            continue
        if key in GLOBAL_GROUPS:
            with_it, without = flat(compose([f"{key}={word.value()}"])), flat(compose([]))
            given |= {name for name, value in with_it.items() if without.get(name, "???") != value}
        else:
            given |= {name for name in leaves if name == key or name.startswith(f"{key}.")} or {key}
    return given


def merge(plan: Plan, config: DictConfig, given: set[str]) -> tuple[DictConfig, list[str]]:
    """The frozen config with what the command line may change. -> (config, notes for the log)

    Raises:
        ConfigError: settings that differ and aren't allowed to, all of them, old and new shown; names in
            `resume_allow` that no key or group has.
    """
    allow = [str(name) for name in config.resume_allow]
    old, new = flat(freeze(plan.config)), flat(freeze(config))
    problems = [
        f"resume_allow: there is no key or group {name!r}. Type a key such as optim.lr or a group such as optim"
        for name in allow
        if name not in NAMES and not any(_covers(name, key) for key in {*old, *new})
    ]
    # A group whose option was given is compared with the keys that only the frozen run has, too.
    heads = {key.split(".")[0] for key in given if key.split(".")[0] in ("model", "data", "task", "loss")}
    whole = {head for head in heads if all(key in given for key in new if _covers(head, key))}
    differs = {key for key in given if key not in FREE and old.get(key, "???") != new.get(key, "???")}
    differs |= {key for key in old if key.split(".")[0] in whole and key not in new}
    for key in sorted(differs):
        if not any(_covers(name, key) for name in allow):
            problems.append(
                f"{key}: the run in {plan.run_dir} has {_show(old, key)}, the command line says {_show(new, key)}. "
                f"Leave it out, or type: 'resume_allow=[{','.join([*allow, key])}]'"
            )
    if problems:
        raise ConfigError(problems)
    result = plan.config.copy()
    OmegaConf.set_struct(result, False)
    for key in sorted(given | differs):
        head = key.split(".")[0]
        if head in whole and key in differs:
            result[head] = config[head]
        elif key in new and (key in FREE or key in differs):
            OmegaConf.update(result, key, OmegaConf.select(config, key), merge=False)
    result.resume, result.resume_allow = config.resume, config.resume_allow
    OmegaConf.set_struct(result, True)
    notes = [f"resume: {key} changes from {_show(old, key)} to {_show(new, key)}" for key in sorted(differs)]
    return result, notes


def _covers(name: str, key: str) -> bool:
    return any(key == head or key.startswith(f"{head}.") for head in NAMES.get(name, (name,)))


def _show(leaves: dict[str, Any], key: str) -> str:
    return repr(leaves[key]) if key in leaves else "nothing"
