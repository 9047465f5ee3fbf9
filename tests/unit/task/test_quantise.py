"""Training with the rounding of an 8-bit export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from echofree.contracts import Batch, Clip
from echofree.data.collate import collate
from echofree.errors import ConfigError
from echofree.loss import CompressedSpectral, SiSdr, Weighted
from echofree.model.bark import BarkNet
from echofree.task.quantise import QuantAware, quantised_weights, round_frames, round_weight
from echofree.task.supervised import Supervised

RATE = 16000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loss_fn() -> Weighted:
    return Weighted({"spectral": CompressedSpectral(), "sdr": SiSdr()}, {"spectral": 1.0, "sdr": 0.02})


def task(**more: object) -> QuantAware:
    return QuantAware(loss_fn(), ["si_sdr"], RATE, **more)  # type: ignore[arg-type]


def batch(rng: np.random.Generator) -> Batch:
    clips = []
    for i in range(2):
        far, near = (0.1 * rng.standard_normal(8000).astype(np.float32) for _ in range(2))
        clips.append(Clip(mic=near + 0.3 * far, far=far, near=near, name=str(i), index=i))
    return collate(clips, RATE)


def network() -> BarkNet:
    """Gains that move, as those of a trained one do."""
    torch.manual_seed(1)
    model = BarkNet().eval()
    with torch.no_grad():
        model.network.gain.weight.mul_(30)
        model.network.gain.bias.zero_()
    return model


def reference(w: np.ndarray) -> np.ndarray:
    """A row of a weight as onnxruntime's quantize_dynamic stores and reads it: unsigned, a scale and zero for each."""
    low, high = min(w.min(), 0.0), max(w.max(), 0.0)
    scale = (high - low) / 255
    zero = np.round(-low / scale)
    return (np.clip(np.round(w / scale) + zero, 0, 255) - zero) * scale


def test_weights_take_256_values_per_output(rng: np.random.Generator) -> None:
    w = torch.tensor(rng.standard_normal((5, 40)) * 10.0 ** rng.integers(-3, 2, (5, 1)))
    w[2] = w[2].abs() + 1  # 0 is one of the values whatever the weights are
    got = round_weight(w).numpy()
    for row, want in zip(got, w.numpy(), strict=True):
        assert np.abs(row - reference(want)).max() < 1e-12
        assert len(np.unique(row)) <= 256
    assert torch.equal(round_weight(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_frames_are_rounded_one_by_one(rng: np.random.Generator) -> None:
    x = torch.tensor(rng.standard_normal((2, 3, 4, 6)) * 10.0 ** rng.integers(-3, 2, (2, 3, 1, 1)))
    got = round_frames(x).numpy()
    for b in range(2):
        for frame in range(3):
            assert np.abs(got[b, frame] - reference(x[b, frame].numpy())).max() < 1e-12


def test_rounding_is_the_identity_backward(rng: np.random.Generator) -> None:
    w = torch.tensor(rng.standard_normal((4, 8)), requires_grad=True)
    factor = torch.tensor(rng.standard_normal((4, 8)))
    (round_weight(w) * factor).sum().backward()
    assert torch.equal(w.grad, factor)


def test_the_model_hears_rounded_weights_and_keeps_its_own(rng: np.random.Generator) -> None:
    """Equal to a model whose weights were rounded by hand, the recurrent ones included; gradients reach all weights."""
    model, data = network(), batch(rng)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    by_hand = BarkNet().eval()
    by_hand.load_state_dict(before)
    weights = dict(by_hand.named_parameters())
    names = list(quantised_weights(model, ()))
    assert {"network.gru.weight_ih_l0", "network.gru.weight_hh_l0", "network.gain.weight"} <= set(names)
    assert not any("norm" in name or "bias" in name for name in names)
    with torch.no_grad():
        for name in names:
            weights[name].copy_(round_weight(weights[name]))
    total, seconds, _ = task(activations=False).loss(model, data)
    want, _, _ = Supervised(loss_fn(), ["si_sdr"], RATE).loss(by_hand, data)
    assert float(total.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    plain, _, _ = Supervised(loss_fn(), ["si_sdr"], RATE).loss(model, data)
    assert float(total.detach()) != float(plain.detach())
    total.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    full, _, _ = task().loss(model, data)
    assert float(full.detach()) != float(total.detach())
    assert task().weight(data) == pytest.approx(float(seconds))


def test_one_layer_alone_can_stay_float(rng: np.random.Generator) -> None:
    model = BarkNet()
    names = quantised_weights(model, ["network.gru", "unfold"])
    assert names
    assert not any("gru" in name or "unfold" in name for name in names)


def test_statistics_stay_and_can_go_on(rng: np.random.Generator) -> None:
    data = batch(rng)
    for freeze in (True, False):
        model = BarkNet().train()
        before = model.network.last.norm.running_mean.clone()
        task(freeze_statistics=freeze).loss(model, data)
        assert torch.equal(before, model.network.last.norm.running_mean) == freeze


def test_validation_hears_the_rounded_model(rng: np.random.Generator) -> None:
    model, data = network(), batch(rng)
    rounded = [row["loss"] for row in task().evaluate(model, data)]
    plain = [row["loss"] for row in Supervised(loss_fn(), ["si_sdr"], RATE).evaluate(model, data)]
    assert len(rounded) == 2
    assert rounded != plain
    assert rounded == pytest.approx(plain, abs=0.02)


def test_what_can_not_be_rounded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.keep=gur: no layer"):
        task(keep=["gur"]).check_model(BarkNet())
    with pytest.raises(ConfigError, match="no linear or recurrent layer"):
        task().check_model(nn.Conv1d(1, 1, 3))
    task(keep=["gru"]).check_model(BarkNet())


def test_a_trained_step_and_an_export_agree(tmp_path: Path, rng: np.random.Generator) -> None:
    """What quantize_dynamic writes is what this task trains with: the file's weights are the rounded ones."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    from onnx import numpy_helper

    from echofree.export.quantize import OnnxInt8
    from echofree.model.graph import stream_graph

    torch.manual_seed(1)
    model = BarkNet().eval()
    graph = stream_graph(model)
    assert graph is not None
    OnnxInt8().write(graph, lambda: iter(()), tmp_path)
    made = onnx.load(tmp_path / "model.onnx")
    held = {item.name: numpy_helper.to_array(item) for item in made.graph.initializer}
    found = []
    for name, value in held.items():
        if name.endswith("_quantized"):
            stem = name.removesuffix("_quantized")
            scale, zero = held[stem + "_scale"], held[stem + "_zero_point"].astype(np.float64)
            found.append((value.astype(np.float64) - zero) * scale)
    want = round_weight(model.network.gru.weight_hh_l0).detach().numpy()
    same = [w for w in found if sorted(w.shape) == sorted(want.shape)]
    assert any(np.abs((w if w.shape == want.shape else w.T) - want).max() < 1e-6 for w in same), [
        w.shape for w in found
    ]
