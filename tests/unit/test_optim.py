"""Optimizers, schedules and the moving average against hand-worked values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from echofree.config.schema import OptimConfig, OptimKind, ScheduleKind
from echofree.optim import Ema, Schedule, build_optimizer


def schedule(total: int = 10, **keys: object) -> tuple[Schedule, torch.optim.Optimizer]:
    config = OptimConfig(lr=2.0, **keys)  # type: ignore[arg-type]
    optimizer = build_optimizer(config, [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))])
    return Schedule(optimizer, config, total), optimizer


def test_warm_up_and_cosine_by_hand() -> None:
    rate, optimizer = schedule(10, schedule=ScheduleKind.cosine, warmup_steps=4, min_lr_ratio=0.25)
    lrs = [rate.apply(step) for step in range(12)]
    # 4 steps up; then 0.25 + 0.75 (1 + cos(pi k / 6)) / 2 of 2.0 for k = 0..; below the end it stays at a quarter
    half_root3 = math.sqrt(3) / 2
    cosines = [1.0, half_root3, 0.5, 0.0, -0.5, -half_root3, -1.0, -1.0]
    assert lrs[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert lrs[4:] == pytest.approx([2.0 * (0.25 + 0.75 * (1 + c) / 2) for c in cosines])
    assert lrs[7] == pytest.approx(1.25)
    assert [g["lr"] for g in optimizer.param_groups] == [lrs[-1]] * 2


def test_warm_up_then_constant() -> None:
    rate, _ = schedule(10, schedule=ScheduleKind.constant, warmup_steps=2)
    assert [rate.apply(step) for step in range(4)] == [1.0, 2.0, 2.0, 2.0]


def test_a_warm_up_longer_than_the_run() -> None:
    rate, _ = schedule(3, schedule=ScheduleKind.cosine, warmup_steps=10)
    assert [rate.apply(step) for step in range(3)] == pytest.approx([0.2, 0.4, 0.6])


def test_plateau() -> None:
    """Patience 1: the second evaluation in a row without a better value halves the rate, down to the floor."""
    keys = {"schedule": ScheduleKind.plateau, "plateau_patience": 1, "plateau_factor": 0.5, "min_lr_ratio": 0.3}
    rate, _ = schedule(100, **keys)
    seen = []
    for step, value in enumerate([5.0, 4.0, 4.0, 4.5, 3.0, 3.5, 3.5, 3.5, 3.5]):
        rate.evaluated(value)
        seen.append(rate.apply(step))
    assert seen == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.6, 0.6, 0.6]
    other, _ = schedule(100, **keys)
    other.load_state_dict(rate.state_dict())
    assert other.apply(9) == 0.6
    other.evaluated(1.0)
    assert other.best == 1.0


def test_other_schedules_ignore_scores() -> None:
    rate, _ = schedule(10, schedule=ScheduleKind.constant, plateau_patience=0)
    for value in (1.0, 2.0, 3.0):
        rate.evaluated(value)
    assert rate.apply(5) == 2.0


@pytest.mark.parametrize("kind", list(OptimKind))
def test_weight_decay_spares_biases_and_norms(kind: OptimKind) -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net[2].bias.requires_grad_(False)
    optimizer = build_optimizer(OptimConfig(name=kind, weight_decay=0.5), net.parameters())
    decayed, spared = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(net[0].weight), id(net[2].weight)]
    assert [id(p) for p in spared["params"]] == [id(net[0].bias), id(net[1].weight), id(net[1].bias)]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)


def test_a_model_with_biases_only_has_one_group() -> None:
    optimizer = build_optimizer(OptimConfig(), [nn.Parameter(torch.ones(3))])
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0]


def test_adamw_step_by_hand() -> None:
    """The first step moves each weight by lr in the direction of its gradient's sign, after decay lr x 0.5."""
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    config = OptimConfig(lr=0.1, weight_decay=0.5, eps=0.0)
    optimizer = build_optimizer(config, [weight])
    weight.grad = torch.tensor([[3.0, -0.01]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.95 - 0.1, -1.9 + 0.1]]))


def test_sgd_momentum_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = build_optimizer(OptimConfig(name=OptimKind.sgd, lr=0.1, momentum=0.5), [weight])
    for expected in (0.9, 0.75):  # steps of 1, then 1 + 0.5
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        assert float(weight.detach()) == pytest.approx(expected)


def test_moving_average_by_hand(rng: np.random.Generator) -> None:
    """Decay min(d, (1 + n) / (10 + n)): 0.1, then 2/11, then capped."""
    net = nn.Linear(1, 1, bias=False)
    start, values = rng.standard_normal(), rng.standard_normal(3)
    with torch.no_grad():
        net.weight.fill_(start)
    ema, expected = Ema(dict(net.named_parameters()), decay=0.15), start
    for value, decay in zip(values, (0.1, 0.15, 0.15), strict=True):
        with torch.no_grad():
            net.weight.fill_(value)
        ema.update()
        expected = decay * expected + (1 - decay) * value
    assert float(ema.shadow["weight"]) == pytest.approx(expected, rel=1e-6)


def test_moving_average_swaps_there_and_back() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3))
    ema = Ema(dict(net.named_parameters()), 0.5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    live = {n: p.detach().clone() for n, p in net.named_parameters()}
    shadow = {n: v.clone() for n, v in ema.shadow.items()}
    ema.swap()
    assert all(torch.equal(p, shadow[n]) for n, p in net.named_parameters())
    ema.swap()
    assert all(torch.equal(p, live[n]) for n, p in net.named_parameters())
    assert all(torch.equal(ema.shadow[n], v) for n, v in shadow.items())
    other = Ema(dict(net.named_parameters()), 0.5)
    other.load_state_dict(ema.state_dict())
    assert all(torch.equal(other.shadow[n], v) for n, v in shadow.items())
    assert not any(other.shadow[n] is ema.shadow[n] for n in shadow)
