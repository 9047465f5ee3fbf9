"""Going on from another model: weights, frozen parts, rates of parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echofree.config.schema import OptimConfig, OptimKind, ScheduleKind
from echofree.errors import ConfigError
from echofree.inherit import freeze, hold_statistics, last_match, load_parent, run_dir_of, unused
from echofree.model.bark import BarkNet
from echofree.optim import Schedule, build_optimizer
from parent import TINY, make_run

FRONT = {"num_partitions": 2, "max_delay_ms": 100.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out


def test_weights_of_a_parent(tmp_path: Path) -> None:
    folder, parent = make_run(tmp_path / "parent", TINY)
    model = BarkNet(hidden_size=24, front_end=FRONT)
    facts = load_parent(str(folder), model)
    assert all(torch.equal(value, parent.state_dict()[name]) for name, value in model.state_dict().items())
    assert facts["run_id"] == "parent-5"
    assert facts["step"] == 1
    assert Path(facts["path"]).name == "step-000001"
    other, _ = make_run(tmp_path / "other", TINY, seed=6)
    assert load_parent(str(other), model)["weights"] != facts["weights"]
    assert run_dir_of(facts["path"]) == run_dir_of(folder) == folder


def test_another_model_is_no_parent(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path / "parent", TINY)
    with pytest.raises(ConfigError, match=r"init_from=.*gru.weight_ih_l0 is \[72, 192\] there and \[36, 192\] here"):
        load_parent(str(folder), BarkNet(hidden_size=12, front_end=FRONT))
    with pytest.raises(ConfigError, match=r"init_from=.*nowhere"):
        load_parent(str(tmp_path / "nowhere"), Net())
    with pytest.raises(ConfigError, match="neither a run directory"):
        run_dir_of(tmp_path)


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["first.*"], {"first.weight", "first.bias"}),
        (["*", "-last.*"], {"first.weight", "first.bias", "norm.weight", "norm.bias"}),
        (["*", "-norm.*", "norm.bias", "-last.*"], {"first.weight", "first.bias", "norm.bias"}),
        (["*.bias"], {"first.bias", "norm.bias", "last.bias"}),
        ([], set()),
    ],
)
def test_frozen_by_pattern(patterns: list[str], frozen: set[str]) -> None:
    net = Net()
    assert set(freeze(net, patterns)) == frozen
    assert {n for n, p in net.named_parameters() if not p.requires_grad} == frozen


def test_patterns_that_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.freeze: gru\.\* fits no weight.*first\.weight"):
        freeze(Net(), ["first.*", "gru.*"])
    with pytest.raises(ConfigError, match="leaves no weight"):
        freeze(Net(), ["*"])
    with pytest.raises(ConfigError, match=r"optim\.lr_by_part"):
        unused(["nothing"], ["first.weight"], "optim.lr_by_part")
    assert last_match("a.b", ["a.*", "-*.b", "*.c"]) == "-*.b"


def test_a_frozen_batch_norm_computes_what_it_did() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 3)
    freeze(net, ["first.*", "norm.*"])
    assert hold_statistics(net) == 1
    net.eval()
    assert net.norm.running_mean is not None
    expected, before = net(x), net.norm.running_mean.clone()
    net.train()
    assert torch.equal(net(x), expected)
    assert torch.equal(net.norm.running_mean, before)
    free = Net()
    freeze(free, ["first.*"])
    assert hold_statistics(free) == 0


def optim(**keys: Any) -> OptimConfig:
    return OptimConfig(lr=0.1, weight_decay=0.0, schedule=ScheduleKind.constant, **keys)


def test_rates_by_part() -> None:
    """SGD moves each weight by its own rate times the gradient; the schedule keeps the ratios."""
    net = Net()
    parts = ["*:0.5", "last.*:0.01", "last.bias:2"]
    config = optim(name=OptimKind.sgd, momentum=0.0, lr_by_part=parts, warmup_steps=2)
    optimizer = build_optimizer(config, net.parameters(), dict(net.named_parameters()))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    assert Schedule(optimizer, config, 10).apply(0) == pytest.approx(0.05)
    optimizer.step()
    factors = {"first": 0.5, "norm": 0.5, "last.weight": 0.01, "last.bias": 2.0}
    for name, p in net.named_parameters():
        factor = factors.get(name, factors.get(name.split(".")[0], 0.0))
        assert torch.allclose(before[name] - p, torch.full_like(p, 0.05 * factor), atol=1e-7), name


def test_without_parts_nothing_changes() -> None:
    net = Net()
    groups = build_optimizer(optim(), net.parameters(), dict(net.named_parameters())).param_groups
    assert [len(g["params"]) for g in groups] == [2, 4]
    assert {g["lr"] for g in groups} == {0.1}
