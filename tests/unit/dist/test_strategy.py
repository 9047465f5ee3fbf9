"""Which strategy a config gives, mixed precision, and what a forward pass may change; see tests/ranks/test_ddp.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echofree.config.schema import DistConfig, StrategyKind
from echofree.data.collate import collate
from echofree.dist.strategy import Amp, Single, build_strategy, saved_buffers
from echofree.dist.world import World
from echofree.errors import ConfigError
from toy import CPU, SAMPLE_RATE, ToyData, ToyModel, ToyTask


def test_single_in_a_world_of_several_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 ranks were started.*dist=ddp"):
        build_strategy(DistConfig(), ToyModel(), Amp("fp32", CPU), World(0, 2))


@pytest.mark.parametrize("kind", list(StrategyKind))
def test_a_world_of_one_is_single(kind: StrategyKind) -> None:
    model = ToyModel(norm=True)
    strategy = build_strategy(DistConfig(name=kind), model, Amp("fp32", CPU), World())
    assert isinstance(strategy, Single)
    assert strategy.model is strategy.bare is model
    assert type(model.norm) is nn.BatchNorm1d


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_clip_gives_the_norm_from_before(max_norm: float | None) -> None:
    net = nn.Linear(2, 2)
    strategy = Single(net, Amp("fp32", CPU))
    net.weight.grad, net.bias.grad = torch.tensor([[1.0, 2.0], [2.0, 0.0]]), torch.tensor([0.0, 4.0])
    assert float(strategy.clip(max_norm)) == 5.0
    factor = 0.1 if max_norm == 0.5 else 1.0
    torch.testing.assert_close(net.bias.grad, factor * torch.tensor([0.0, 4.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(net.weight.grad[0], factor * torch.tensor([1.0, 2.0]), rtol=1e-5, atol=0)


def test_frozen_and_unused_parameters_do_not_matter() -> None:
    net = nn.ModuleDict({"used": nn.Linear(1, 1), "frozen": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    net["frozen"].requires_grad_(False)
    strategy = Single(net, Amp("fp32", CPU))
    assert len(strategy.parameters) == 4
    net["used"](torch.ones(1, 1)).sum().backward()
    assert float(strategy.clip(1.0)) == pytest.approx(2**0.5)


def test_sums_over_micro_batches() -> None:
    data, task = ToyData(6), ToyTask()
    strategy = Single(ToyModel(), Amp("fp32", CPU))
    batches = [collate([data.item(i, 0) for i in part], SAMPLE_RATE) for part in ((0, 1), (2, 3, 4), (5,))]
    loss, parts = strategy.run(task, batches, 4.0)
    expected = sum(float(task.loss(strategy.model, b)[0].detach()) for b in batches)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(parts["mse"]) == pytest.approx(expected, rel=1e-6)
    assert not loss.requires_grad


@pytest.mark.parametrize(("precision", "inside"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision(precision: str, inside: torch.dtype) -> None:
    """Autocast covers the forward pass only; the weights and their gradients stay float32."""
    seen: list[torch.dtype] = []

    class Watching(ToyModel):
        def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor:
            seen.append(self.wide(torch.stack([mic, far], 1)).dtype)
            return super().forward(mic, far)

    net = Watching()
    amp = Amp(precision, CPU)
    data = ToyData(2)
    Single(net, amp).run(ToyTask(), [collate([data.item(i, 0) for i in range(2)], SAMPLE_RATE)], 2.0)
    assert seen == [inside]
    assert not amp.scaler.is_enabled()
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}


def test_only_half_precision_has_a_loss_scale() -> None:
    assert Amp("fp16", CPU).scaler.is_enabled()


def test_saved_buffers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("window", torch.ones(4), persistent=False)
            self.register_buffer("level", torch.ones(()))

    net = Net()
    assert {id(b) for b in saved_buffers(net)} == {id(net.level), *(id(b) for b in net.norm.buffers())}
    assert [id(b) for b in saved_buffers(net, besides=nn.BatchNorm1d)] == [id(net.level)]
