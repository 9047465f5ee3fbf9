"""Room on the disk: compared with what a run needs at its start, before each save, and while it trains.

Quotas don't show in the numbers of a file system. A save that hits one ends like one on a full disk: the old
checkpoints stay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from echofree.config.schema import OptimConfig, OptimKind

SLACK_BYTES = 2**20  # of one checkpoint beside its tensors: manifest, random states
SLACK_FILES = 4
HEADER_BYTES = 2048  # of each tensor, or piece of one, in a file; its line in the table of contents


def free(path: Path) -> tuple[int, int]:
    """Bytes and inodes that this user may still take where `path` is or will be. No limit on inodes: 2**62."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else 2**62


def size(tree: Any) -> int:
    """Bytes of the tensors in nested containers."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(size(value) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return sum(size(value) for value in tree)
    return 0


def expected(model: torch.nn.Module, optim: OptimConfig, averaged: bool, writers: int = 1) -> int:
    """Bytes of one checkpoint before there is one, over all ranks: weights and buffers, and for what is trained the
    moments and the average as well.

    Args:
        model: of which this rank may hold a part only: shards know the size of the whole, and so do tensors that are
            another rank's.
        averaged: whether a moving average is kept.
        writers: ranks that write parts of the tensors; 1: whole ones.
    """
    moments = 2 if optim.name is not OptimKind.sgd else int(optim.momentum > 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    state = list(model.state_dict().values())
    count = len(state) + (1 + moments + averaged) * len(trained)  # a step count for each beside its moments
    return size(state) + size(trained) * (moments + averaged) + SLACK_BYTES + HEADER_BYTES * count * writers


def count(config: Any, total_steps: int, steps_per_epoch: int) -> int:
    """Checkpoints that lie there at once when the run is over, the one that is being written included."""
    train, rule = config.train, config.checkpoint
    periods = [train.save_every_steps, train.save_interval * steps_per_epoch]
    period = min((p for p in periods if p > 0), default=total_steps)
    saves = -(-total_steps // max(1, period))
    many = rule.keep_last + rule.keep_best + len(rule.pin) + rule.window_steps // max(1, period)
    if rule.keep_every_steps:
        many += total_steps // rule.keep_every_steps
    return min(many, saves + rule.keep_best) + 1


def problem(where: Path, num_bytes: int, num_files: int) -> str:
    """Why `num_bytes` in `num_files` don't fit there; "" when they do."""
    bytes_free, files_free = free(where)
    if bytes_free < num_bytes:
        return f"{where} needs {_mb(num_bytes)} and its disk has {_mb(bytes_free)} left"
    if files_free < num_files:
        return f"{where} needs {num_files} files and its disk has room for {files_free} more (inodes)"
    return ""


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
