"""Activation checkpointing: the same gradients, dropout included, with less kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echofree.errors import ConfigError
from echofree.recompute import recompute
from ranks.sharing import base, tiny


def gradient(forget: bool, dropout: float) -> tuple[dict[str, Tensor], int]:
    """-> (gradients, bytes kept for the backward pass)"""
    torch.manual_seed(1)
    model = base(dropout=dropout)
    if forget:
        recompute(model)
    torch.manual_seed(2)
    mic, far = torch.randn(2, 2, 4000).unbind()
    kept = [0]

    def pack(tensor: Tensor) -> Tensor:
        kept[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(mic, far).square().mean()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_same_gradients_with_less_memory(dropout: float) -> None:
    expected, much = gradient(False, dropout)
    found, little = gradient(True, dropout)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-9)
    assert little < 0.7 * much


def test_names_stay() -> None:
    model = base()
    names = list(model.state_dict())
    recompute(model)
    assert list(model.state_dict()) == names


def test_nothing_is_recomputed_without_a_gradient() -> None:
    model = base().eval()
    mic, far = torch.randn(2, 1, 2000).unbind()
    expected = model(mic, far).detach()
    recompute(model)
    with torch.no_grad():
        assert torch.equal(model(mic, far), expected)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"BarkNet offers no blocks.*model=base"):
        recompute(tiny())
    model = base()
    model.layers[1].extra = torch.nn.BatchNorm1d(3)
    with pytest.raises(ConfigError, match=r"layers\.1\.extra.*twice a step"):
        recompute(model)
