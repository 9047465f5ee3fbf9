"""Where configs are found, without Hydra: the shipped groups, and the user's `experiments/` beside the command.

The order is the order in which options win: EchoFree's own, then the user's, then the shipped recipes. An experiment
folder therefore adds options and can never shadow ours.
"""

from __future__ import annotations

import os
from pathlib import Path

from echofree.errors import ConfigError

EXPERIMENTS_VARIABLE = "ECHOFREE_EXPERIMENTS"


def _shipped(name: str) -> Path | None:
    """The folder `name` of a wheel (inside the package) or of a checkout (beside `src/`)."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / name, package.parent.parent / name):
        if folder.is_dir():
            return folder
    return None


def conf_dir() -> Path:
    """The folder of EchoFree's own configs.

    Raises:
        ConfigError: the installation lacks it.
    """
    folder = _shipped("conf")
    if folder is None or not (folder / "train.yaml").is_file():
        raise ConfigError(
            "EchoFree's folder conf/ isn't installed: reinstall the package (pip install --force-reinstall)"
        )
    return folder


def experiment_dirs() -> list[Path]:
    """Folders of the user's and the shipped options, absolute, existing, the one that wins first.

    Raises:
        ConfigError: ECHOFREE_EXPERIMENTS names a folder that doesn't exist.
    """
    named = os.environ.get(EXPERIMENTS_VARIABLE)
    if named and not Path(named).is_dir():
        raise ConfigError(
            f"{EXPERIMENTS_VARIABLE}={named!r} is no folder (looked at {Path(named).absolute()}). Create it, correct "
            f"the path, or type: unset {EXPERIMENTS_VARIABLE}"
        )
    candidates = [Path(named) if named else Path("experiments"), _shipped("experiments")]
    found: list[Path] = []
    for folder in candidates:
        if folder is not None and folder.is_dir() and folder.resolve() not in found:
            found.append(folder.resolve())
    return found


def groups() -> dict[str, list[str]]:
    """Group name -> its options, sorted, as Hydra would find them on our search path (its own groups left out)."""
    table: dict[str, set[str]] = {}
    for root in (conf_dir(), *experiment_dirs()):
        for path in root.rglob("*.yaml"):
            group = path.parent.relative_to(root).as_posix()
            hidden = any(part.startswith((".", "_")) for part in path.relative_to(root).parts)
            if group != "." and not hidden and not group.startswith("hydra/"):
                table.setdefault(group, set()).add(path.stem)
    return {group: sorted(table[group]) for group in sorted(table)}


def import_roots() -> list[str]:
    """Folders from which `experiments.<module>` is imported: the parents of the experiment folders of that name."""
    package = Path(__file__).resolve().parent.parent
    return [str(f.parent) for f in experiment_dirs() if f.name == "experiments" and f.parent != package]
