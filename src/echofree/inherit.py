"""Going on from another model: its weights (`init_from`), what of them stays as it is (`optim.freeze`)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from echofree import shipped
from echofree.errors import CheckpointError, ConfigError

log = logging.getLogger("echofree")


def load_parent(path: str, model: nn.Module) -> dict[str, Any]:
    """Copies the weights of a run directory (its best) or a checkpoint into `model`: the averaged ones where that run
    kept them. -> what run.json says of the parent

    Raises:
        ConfigError: nothing usable there, or of another model; every difference is named.
    """
    from echofree import checkpoint

    try:
        folder = checkpoint.find(path)
        about, state = checkpoint.manifest(folder), checkpoint.weights(folder)
    except CheckpointError as error:
        raise ConfigError(f"init_from={path}: {error}") from error
    own = model.state_dict()
    found = [f"{name} is missing there" for name in own if name not in state]
    found += [f"{name} isn't part of this model" for name in state if name not in own]
    found += [
        f"{name} is {list(state[name].shape)} there and {list(value.shape)} here"
        for name, value in own.items()
        if name in state and state[name].shape != value.shape
    ]
    if found:
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise ConfigError(
            f"init_from={path}: its weights don't fit this model: {'; '.join(found[:5])}{more}. Type the model that "
            f"{checkpoint.run_of(folder) / 'config.yaml'} names"
        )
    model.load_state_dict(state)
    return {
        "path": str(folder),
        "run_id": about.get("run_id"),
        "step": about.get("step"),
        "weights": weights_mark(about),
        "scores": about.get("scores", {}),
    }


def weights_mark(about: Mapping[str, Any]) -> str:
    """16 hex digits over the weights that a checkpoint's manifest lists; equal ones are equal weights."""
    others = ("rank", "optimizer", "train")
    sums = [(name, facts["sha256"]) for name, facts in sorted(about["files"].items()) if not name.startswith(others)]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]


def run_dir_of(path: str | Path) -> Path:
    """The run directory of a run directory or of one of its checkpoints.

    Raises:
        ConfigError: neither.
    """
    given = shipped.named(path) or Path(path).expanduser()
    for folder in (given, given.parent.parent):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"{path} is neither a run directory (with config.yaml) nor one of its checkpoints")


def last_match(name: str, patterns: Sequence[str]) -> str | None:
    """The last of `patterns` that fits: * any letters, ? one, [ab] one of these; - in front says: not this."""
    return next((p for p in reversed(patterns) if fnmatchcase(name, p.removeprefix("-"))), None)


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Weights whose name's last fitting pattern has no - in front get no gradient. -> their names

    Raises:
        ConfigError: a pattern that fits no weight, or nothing left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    unused(patterns, names, "optim.freeze")
    frozen = []
    for name, parameter in model.named_parameters():
        hit = last_match(name, patterns)
        if hit is not None and not hit.startswith("-"):
            parameter.requires_grad_(False)
            frozen.append(name)
    if frozen and len(frozen) == len(names):
        raise ConfigError(
            f"optim.freeze={list(patterns)} leaves no weight to train. Let some go again, with a - in front: "
            "'optim.freeze=[*,-*norm*]'"
        )
    return frozen


def unused(patterns: Sequence[str], names: Sequence[str], key: str) -> None:
    """
    Raises:
        ConfigError: patterns that fit none of `names`.
    """
    bad = [p for p in patterns if not any(fnmatchcase(name, p.removeprefix("-")) for name in names)]
    if bad:
        parts = list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))
        raise ConfigError(
            f"{key}: {', '.join(bad)} fits no weight of this model. Its parts: {', '.join(parts[:20])}; "
            "a pattern is compared with the whole name, such as network.gru.*"
        )


def hold_statistics(model: nn.Module) -> int:
    """Batch norms all of whose weights are frozen keep their running statistics and use them in training as well: a
    frozen part computes what it did before. -> how many do"""
    held = 0
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if hasattr(module, "running_mean") and own and not any(p.requires_grad for p in own):
            module.register_forward_pre_hook(_evaluating)  # the loop puts the whole model into training mode
            held += 1
    return held


def _evaluating(module: nn.Module, inputs: Any) -> None:
    module.training = False


def tell(facts: Mapping[str, Any] | None, frozen: Sequence[str], held: int, total: int) -> None:
    """The line in the log."""
    if facts is not None:
        log.info("begins with the weights of %s (run %s, step %s)", facts["path"], facts["run_id"], facts["step"])
    if frozen:
        log.info("frozen: %d of %d weights by name, %d batch norms with them", len(frozen), total, held)
