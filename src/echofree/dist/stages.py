"""Cutting a list of blocks into stages of a pipeline: contiguous, the dearest stage as cheap as possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from echofree.config.schema import DistConfig
from echofree.dist.fit import block_names
from echofree.model.count import count


def cut(config: DistConfig, model: nn.Module, num_stages: int) -> list[range]:
    """The blocks of each stage, by their place in `model.blocks()`: as `dist.stages` names them, else by cost."""
    blocks: list[nn.Module] = list(model.blocks())  # type: ignore[operator]
    if config.stages:
        names = block_names(model, blocks)
        starts = [0, *(names.index(name) for name in config.stages), len(blocks)]
        return [range(a, b) for a, b in itertools.pairwise(starts)]
    return balance(costs(model, blocks), num_stages)


def costs(model: nn.Module, blocks: Sequence[nn.Module]) -> list[float]:
    """Multiply-accumulates per frame of each block; parameters where nothing can be counted."""
    rows = count(model)["by_layer"]
    names = block_names(model, list(blocks))
    macs = [
        sum(row["macs_per_frame"] for row in rows if row["name"] == name or row["name"].startswith(f"{name}."))
        for name in names
    ]
    return macs if any(macs) else [float(sum(p.numel() for p in block.parameters())) for block in blocks]


def balance(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts `costs` into `num_stages` contiguous parts, none empty, so that the largest sum is as small as can be.

    Of equal cuts the one with fewer blocks at the end: the last stage has the loss to compute as well.
    """
    number = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][n]: the largest sum of the first n blocks in k stages, and where the last of them begins
    best = [[(sums[n], 0) for n in range(number + 1)]]
    for k in range(1, num_stages):
        row = [(float("inf"), 0)] * (number + 1)
        for n in range(k + 1, number + 1):
            choices = ((max(best[k - 1][m][0], sums[n] - sums[m]), m) for m in range(k, n))
            row[n] = min(choices, key=lambda choice: (choice[0], -choice[1]))
        best.append(row)
    cuts = [number]
    for k in range(num_stages - 1, 0, -1):
        cuts.append(best[k][cuts[-1]][1])
    cuts = [0, *reversed(cuts)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]
