"""What only the built model knows: sizes of layers, heads, blocks, norms."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from echofree.config.schema import DistConfig, StrategyKind
from echofree.dist import fit, stages
from ranks.sharing import base, small, tiny


def config(name: str, **keys: Any) -> DistConfig:
    return DistConfig(name=StrategyKind[name], **keys)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_any_model_by_data(name: str) -> None:
    for model in (tiny(), small(), base()):
        assert fit.problems(config(name), model, 2) == []


def test_base_by_everything() -> None:
    for name in ("tensor", "pipeline"):
        for size in (2, 4):
            assert fit.problems(config(name), base(), size) == []


def test_one_rank_shares_nothing() -> None:
    assert fit.problems(config("tensor"), tiny(), 1) == []


def test_tiny_says_which_layers_are_in_the_way() -> None:
    (text,) = fit.problems(config("tensor"), tiny(), 2)
    assert "GRU" in text
    assert "dist=fsdp" in text


def test_heads_and_sizes() -> None:
    texts = fit.problems(config("tensor"), base(), 3)  # 4 heads, 32 wide
    assert any("4 attention heads" in text and "num_procs=2" in text for text in texts) or "32 values" in texts[0]
    assert any("layers.0.attention.query has 32 values to split over 3 ranks" in text for text in texts)


def test_more_stages_than_blocks() -> None:
    (text,) = fit.problems(config("pipeline"), base(num_layers=2), 5)
    assert "4 blocks" in text
    assert "5 stages" in text
    (text,) = fit.problems(config("pipeline", schedule="interleaved"), base(num_layers=2), 3)
    assert "6 stages" in text


def test_weights_outside_the_blocks_and_batch_norms() -> None:
    model = base()
    model.gain = nn.Parameter(torch.ones(1))
    model.layers[0].extra = nn.BatchNorm1d(4)
    texts = fit.problems(config("pipeline"), model, 2)
    assert any("gain is outside" in text for text in texts)
    assert any("layers.0.extra (a batch norm)" in text for text in texts)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.9"], "layers.9 begins no stage"),
        (["embed"], "embed begins no stage"),
        (["layers.0", "layers.1"], "the 1 block"),
    ],
)
def test_named_stages(names: list[str], text: str) -> None:
    (found,) = fit.problems(config("pipeline", stages=names), base(), 2)
    assert text in found
    assert "layers.0, layers.1, layers.2, head" in found


def test_stages_cut_where_they_are_named() -> None:
    assert stages.cut(config("pipeline", stages=["layers.2"]), base(), 2) == [range(3), range(3, 5)]


@pytest.mark.parametrize(
    ("costs", "count", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([5, 1, 1, 1, 5], 3, [1, 3, 1]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([1, 2], 2, [1, 1]),
        ([1, 1, 1], 2, [2, 1]),  # the last stage has the loss as well
        ([0, 0, 0, 0], 4, [1, 1, 1, 1]),
    ],
)
def test_balance(costs: list[float], count: int, expected: list[int]) -> None:
    assert [len(part) for part in stages.balance(costs, count)] == expected


def test_balance_is_the_best_of_all_cuts(rng: Any) -> None:
    def worst(costs: list[float], cuts: list[int]) -> float:
        return max(sum(costs[first:stop]) for first, stop in pairwise(cuts))

    for _ in range(50):
        number = int(rng.integers(2, 8))
        count = int(rng.integers(1, number + 1))
        costs = rng.integers(0, 10, number).astype(float).tolist()
        found = stages.balance(costs, count)
        assert [i for part in found for i in part] == list(range(number))
        assert all(len(part) for part in found)
        inner = combinations(range(1, number), count - 1)
        best = min(worst(costs, [0, *cuts, number]) for cuts in inner)
        assert max(sum(costs[i] for i in part) for part in found) == best


def test_cost_of_a_block_is_what_it_computes() -> None:
    model = base()
    hidden, bins, context = 32, 257, 8
    layer = 4 * hidden**2 + 2 * 4 * hidden**2 + 2 * context * hidden
    expected = [8 * bins * hidden, layer, layer, layer, hidden * 6 * bins]
    assert stages.costs(model, model.blocks()) == pytest.approx(expected)
