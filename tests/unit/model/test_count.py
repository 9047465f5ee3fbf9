from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echofree.model.count import count, describe


class Layers(nn.Module):
    """Frames of 10 samples through one layer."""

    sample_rate, hop_samples, latency_samples = 1000, 10, 20

    def __init__(self, layer: nn.Module, channels_first: bool = False):
        super().__init__()
        self.layer, self.channels_first = layer, channels_first
        self.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)

    def forward(self, mic: Tensor, far: Tensor) -> Tensor:
        frames = mic.unflatten(1, (-1, 10))  # [1, L, 10]
        if isinstance(self.layer, nn.MultiheadAttention):
            self.layer(frames, frames, frames)
        else:
            self.layer(frames.transpose(1, 2) if self.channels_first else frames)
        return mic


@pytest.mark.parametrize(
    ("layer", "channels_first", "macs", "parameters"),
    [
        (nn.Linear(10, 7), False, 70, 77),
        (nn.Conv1d(10, 6, 3, padding=1), True, 180, 186),
        (nn.Conv1d(10, 20, 5, padding=2, groups=5), True, 200, 220),
        (nn.ConvTranspose1d(10, 4, 2, stride=2), True, 80, 84),
        (nn.GRU(10, 8, batch_first=True), False, 3 * 8 * 18, 3 * 8 * 18 + 48),
        (nn.LSTM(10, 8, batch_first=True, bidirectional=True), False, 2 * 4 * 8 * 18, 2 * (4 * 8 * 18 + 64)),
        (nn.LayerNorm(10), False, 0, 20),
    ],
)
def test_hand_worked_layers(layer: nn.Module, channels_first: bool, macs: int, parameters: int) -> None:
    counted = count(Layers(layer, channels_first))
    assert counted["macs_per_frame"] == macs
    assert counted["macs_per_s"] == 100 * macs
    assert counted["trainable"] == parameters
    assert counted["parameters"] == parameters + 7
    assert sum(row["macs_per_frame"] for row in counted["by_layer"]) == macs


def test_attention_over_a_whole_clip_is_counted_with_its_length() -> None:
    # 100 frames against 200: projections 4 x 10 x 10 per frame; scores and sums 2 x 10 per pair of frames
    counted = count(Layers(nn.MultiheadAttention(10, 2, batch_first=True)), seconds=1.0)
    assert counted["macs_per_frame"] == 400 + (200**2 - 100**2) * 20 / 100


class Fixed(nn.Module):
    """Says what it costs."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def macs(self, x: Tensor) -> int:
        return 3 * x.numel()

    def macs_per_hop(self) -> int:
        return 1234


def test_modules_can_say_what_they_cost() -> None:
    counted = count(Layers(Fixed()))
    assert counted["macs_per_frame"] == 30
    assert counted["fixed_macs_per_frame"] == 1234


def test_counting_leaves_the_model_as_it_was() -> None:
    model = Layers(nn.Sequential(nn.Conv1d(10, 10, 1), nn.BatchNorm1d(10), nn.Dropout()), channels_first=True)
    model.layer.get_submodule("2").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    assert True in modes
    assert False in modes
    count(model)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_counting_restores_the_model_after_a_failure() -> None:
    class Broken(Layers):
        def forward(self, mic: Tensor, far: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = Broken(nn.Linear(10, 3))
    with pytest.raises(RuntimeError, match="broken"):
        count(model)
    assert model.training
    assert not model.layer._forward_hooks


def test_description_says_size_cost_and_latency() -> None:
    model: Any = Layers(nn.Linear(10, 7))
    line = describe(model)
    assert line == "Layers: 84 parameters (7 frozen), 70 MAC per 10 ms frame (0.0 MMAC/s), latency 20 ms"
    table = describe(model, by_layer=True).splitlines()
    assert table[0] == line
    assert table[2].split() == ["layer", "Linear", "77", "70"]
