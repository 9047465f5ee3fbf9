from __future__ import annotations

from typing import Any

import model_checks as checks
import numpy as np
import pytest
import torch
from model_checks import single_thread  # noqa: F401

from echofree.errors import ConfigError
from echofree.model.chain import compress
from echofree.model.count import count
from echofree.model.crn import ConvRecurrentNet
from echofree.model.mask import MaskedSum, bounded_mask

SMALL: dict[str, Any] = {"channels": (6, 8, 10), "hidden_size": 24}


@pytest.fixture
def model(rng: np.random.Generator) -> Any:
    return checks.scramble(ConvRecurrentNet(**SMALL).eval(), rng)


def test_preset_is_within_its_budget() -> None:
    counted = count(checks.preset("small"))
    assert 1e6 <= counted["parameters"] <= 3e6
    assert counted["parameters"] == 1_578_764
    assert counted["macs_per_frame"] == 6_300_928


def test_latency_is_true(model: Any, rng: np.random.Generator) -> None:
    checks.check_latency(model, rng)
    plain = ConvRecurrentNet(**SMALL, front_end=checks.PlainFrontEnd())
    checks.check_latency(checks.scramble(plain.eval(), rng), rng)


def test_network_is_causal_by_gradient(model: Any, rng: np.random.Generator) -> None:
    network = model.network.double()
    x = torch.tensor(rng.standard_normal((1, 12, 257, 8)), requires_grad=True)
    y, _, _ = network(x)
    y[:, 8].sum().backward()
    heard = x.grad.abs().amax((0, 2, 3))  # type: ignore[union-attr]
    assert float(heard[9:].max()) == 0
    assert float(heard[:9].min()) > 0


def test_stream_equals_forward(model: Any, rng: np.random.Generator) -> None:
    checks.check_stream(model, rng, chunks=(1, 256, 441))


def test_stream_of_other_shapes(rng: np.random.Generator) -> None:
    for change in (
        {"time_taps": 4, "num_layers": 2, "mask_on": ("error",)},
        {"time_taps": 1, "window_samples": 320, "hop_samples": 160, "inputs": ("mic", "far"), "mask_on": ("mic",)},
    ):
        other = ConvRecurrentNet(**{**SMALL, **change}, front_end=checks.PlainFrontEnd())
        checks.check_stream(checks.scramble(other.eval(), rng), rng, chunks=(333,))


def test_ahead(model: Any, rng: np.random.Generator) -> None:
    checks.check_ahead(model, rng)


def test_state(model: Any, rng: np.random.Generator) -> None:
    checks.check_state(model, rng)


def test_lengths_and_silence(model: Any, rng: np.random.Generator) -> None:
    checks.check_lengths_and_silence(model, rng)


def test_nothing_is_dead(rng: np.random.Generator) -> None:
    checks.check_training(ConvRecurrentNet(**SMALL, front_end=checks.PlainFrontEnd()), rng)


def test_untrained_model_is_open(rng: np.random.Generator) -> None:
    checks.check_open(ConvRecurrentNet(**SMALL).eval(), rng)
    checks.check_open(ConvRecurrentNet(**SMALL, mask_on=("error",)).eval(), rng)


def test_half_precision(model: Any, rng: np.random.Generator) -> None:
    checks.check_half(model, rng)


def test_estimate_is_the_masked_sum(model: Any, rng: np.random.Generator) -> None:
    mic, far = checks.pair(rng, 4000)
    with torch.no_grad():
        out = model(mic, far, details=True)
        stft = model.chain.stft
        spectrum = sum(out["mask"][..., i] * stft.analyse(out[name]) for i, name in enumerate(("mic", "error")))
        again = stft.synthesise(spectrum, 4000)  # type: ignore[arg-type]
    torch.testing.assert_close(again[:, :3584], out["est"][:, :3584], rtol=0, atol=1e-6)
    assert out["latent"].shape == (1, 17, 24)


def test_compression_keeps_phase_and_raises_magnitude(rng: np.random.Generator) -> None:
    spectra = torch.tensor(rng.standard_normal((2, 3, 4, 5)) + 1j * rng.standard_normal((2, 3, 4, 5)))
    packed = compress(spectra)  # [2, 4, 5, 6]
    z = torch.complex(packed[..., 2], packed[..., 3])
    x = spectra[:, 1]
    torch.testing.assert_close(z, x.abs() ** 0.3 * x / x.abs(), rtol=1e-6, atol=1e-6)
    assert float(compress(torch.zeros(1, 1, 1, 1, dtype=torch.complex64)).abs().max()) == 0


def test_mask_is_bounded_and_reaches_silence(rng: np.random.Generator) -> None:
    raw = torch.tensor(rng.standard_normal((1000, 3)) * 20)
    assert float(bounded_mask(raw, 2.0).abs().max()) <= 2.0
    by_hand = bounded_mask(torch.tensor([0.0, -1.0, 1.0], dtype=torch.float64), 2.0)  # direction (0, 1): +90 degrees
    torch.testing.assert_close(by_hand, torch.tensor(1j, dtype=torch.complex128), rtol=1e-4, atol=0)
    assert 20 * torch.log10(bounded_mask(torch.tensor([-10.0, 0.0, 0.0]), 2.0).abs()) < -80


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.mask_on"):
        ConvRecurrentNet(inputs=("mic", "echo"), mask_on=("error",))
    with pytest.raises(ConfigError, match=r"\[mic,error\]"):
        MaskedSum(("mic", "far"), ("far",), 2.0)
    with pytest.raises(ConfigError, match=r"model\.mask_limit"):
        MaskedSum(("mic",), ("mic",), 0.5)
