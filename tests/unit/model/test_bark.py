from __future__ import annotations

from typing import Any

import model_checks as checks
import numpy as np
import pytest
import torch
from model_checks import single_thread  # noqa: F401
from torch import nn

from echofree.dsp import band_centres, band_matrices, vorbis_window
from echofree.errors import ConfigError
from echofree.model.bark import BarkNet
from echofree.model.causal import Depthwise, convolve, gru_step
from echofree.model.count import count


@pytest.fixture
def model(rng: np.random.Generator) -> Any:
    return checks.scramble(BarkNet().eval(), rng)


def test_preset_has_the_published_size() -> None:
    counted = count(checks.preset("tiny"))
    assert counted["parameters"] == counted["trainable"] == 278_496
    assert counted["macs_per_frame"] == 390_464
    assert counted["macs_per_s"] == 24_404_000
    assert counted["fixed_macs_per_frame"] == 3 * 257 * 100


def test_20_ms_preset_keeps_the_latency_of_the_challenges() -> None:
    model: Any = checks.preset("tiny_20ms")
    assert model.latency_samples / model.sample_rate == 0.02
    assert model.network.sizes == [95, 47, 23, 11, 5]
    counted = count(model)
    assert (counted["parameters"], counted["macs_per_frame"]) == (250_673, 344_290)


def test_latency_is_true(model: Any, rng: np.random.Generator) -> None:
    checks.check_latency(model, rng)
    checks.check_latency(checks.scramble(BarkNet(front_end=checks.PlainFrontEnd()).eval(), rng), rng)
    checks.check_latency(checks.scramble(checks.preset("tiny_20ms"), rng), rng)


def test_a_window_of_10_ms_trains_and_another_hop_is_refused(rng: np.random.Generator) -> None:
    short: Any = checks.scramble(BarkNet(window_samples=160, hop_samples=80, front_end=checks.PlainFrontEnd()), rng)
    assert (short.hop_samples, short.latency_samples) == (80, 160)
    checks.check_training(short, rng)
    assert all(bool(p.grad.isfinite().all()) for p in short.parameters())
    checks.check_stream(short, rng, chunks=(333,))
    with pytest.raises(ConfigError, match="hop"):
        BarkNet(window_samples=160, hop_samples=128)


def test_network_is_causal_by_gradient(rng: np.random.Generator) -> None:
    network = checks.scramble(BarkNet().eval(), rng).network.double()  # type: ignore[union-attr, operator]
    features = torch.tensor(rng.standard_normal((1, 2, 30, 112)), requires_grad=True)
    gain, _, _ = network(features)
    gain[:, 20].sum().backward()
    heard = features.grad.abs().amax((0, 1, 3))  # type: ignore[union-attr]
    assert float(heard[21:].max()) == 0
    assert float(heard[: 20 + 1].min()) > 0  # the present frame, and through the GRU all before


def test_stream_equals_forward(model: Any, rng: np.random.Generator) -> None:
    checks.check_stream(model, rng, chunks=(1, 160, 256, 441, 4096))


def test_stream_of_deeper_20_ms_model(rng: np.random.Generator) -> None:
    deep = BarkNet(
        window_samples=320,
        hop_samples=160,
        hidden_size=32,
        num_layers=2,
        inputs=("echo", "mic", "error", "far"),
        front_end=checks.PlainFrontEnd(),
    )
    checks.check_stream(checks.scramble(deep.eval(), rng), rng, chunks=(77,))


def test_ahead(model: Any, rng: np.random.Generator) -> None:
    checks.check_ahead(model, rng)


def test_state(model: Any, rng: np.random.Generator) -> None:
    checks.check_state(model, rng)


def test_lengths_and_silence(model: Any, rng: np.random.Generator) -> None:
    checks.check_lengths_and_silence(model, rng)


def test_nothing_is_dead(rng: np.random.Generator) -> None:
    checks.check_training(BarkNet(front_end=checks.PlainFrontEnd()), rng)


def test_untrained_model_is_open(rng: np.random.Generator) -> None:
    checks.check_open(BarkNet().eval(), rng)


def test_half_precision(model: Any, rng: np.random.Generator) -> None:
    checks.check_half(model, rng)


def test_features_equal_a_slow_reference(rng: np.random.Generator) -> None:
    model = BarkNet()
    wave = rng.standard_normal(2000) * 0.1
    spectra = model.chain.stft.analyse(torch.tensor(np.stack([wave, 0.1 * wave]), dtype=torch.float32)).unsqueeze(0)
    ours, _ = model.features(model.filterbank.collect(spectra))  # [1, 2, L, 112]
    assert ours.shape == (1, 2, 9, 112)
    padded = np.concatenate([np.zeros(256), wave, np.zeros(1000)])
    level = np.zeros((9 + 2, 100))  # two silent frames in front
    for t in range(9):
        power = np.abs(np.fft.rfft(64 * padded[256 * t : 256 * t + 512] * vorbis_window(512))) ** 2
        for k, centre in enumerate(band_centres()):
            low, high = band_centres()[max(k - 1, 0)], band_centres()[min(k + 1, 99)]
            for j in range(low, high + 1):
                width = (high - centre) if j > centre else (centre - low)
                level[t + 2, k] += power[j] * (1 - abs(j - centre) / width if width else 1.0)
    level = np.log10(1 + 100 * level)
    for t in range(9):
        now, one, two = level[t + 2], level[t + 1], level[t]
        slow = np.concatenate([now, (now - two)[:6], (now - 2 * one + two)[:6]])
        np.testing.assert_allclose(ours[0, 0, t].numpy(), slow, atol=2e-3)


def test_unit_gains_change_nothing(rng: np.random.Generator) -> None:
    bank = BarkNet().filterbank
    torch.testing.assert_close(bank.spread(torch.ones(1, 100)), torch.ones(1, 257), rtol=0, atol=1e-6)
    wave = torch.tensor(rng.standard_normal((1, 3000)), dtype=torch.float32)
    total = bank.stft.analyse(wave).abs().square().sum(-1)
    torch.testing.assert_close(bank.power(wave).sum(-1), total, rtol=1e-4, atol=1e-3)  # bands share, nothing is lost
    np.testing.assert_array_equal(bank.synthesis.numpy(), band_matrices(band_centres())[1].astype(np.float32))


def test_gains_multiply_the_bins_of_the_chosen_wave(rng: np.random.Generator) -> None:
    mic, far = checks.pair(rng, 5000)
    for mask_on, inputs in (("mic", ("mic", "echo")), ("error", ("mic", "echo", "error"))):
        model: Any = checks.scramble(BarkNet(mask_on=mask_on, inputs=inputs).eval(), rng)
        with torch.no_grad():
            out = model(mic, far, details=True)
            stft = model.chain.stft
            bins = torch.einsum("blk,kf->blf", out["gain"], model.filterbank.synthesis)
            again = stft.synthesise(bins * stft.analyse(out["gain_input"]), 5000)
        torch.testing.assert_close(out["gain_input"], out[mask_on])
        # the end of the clip aside, where the model's last frame goes on hearing the echo filter ring out
        torch.testing.assert_close(again[:, :4600], out["est"][:, :4600], rtol=0, atol=1e-6)
        assert out["gain"].shape == (1, 21, 100)
        assert out["filterbank"].power(mic).shape == (1, 21, 100)
        assert out["latent"].shape == (1, 21, 192)
        assert {"echo", "error", "flags"} <= set(out)


def test_gain_floor_holds_and_gains_reach_silence(rng: np.random.Generator) -> None:
    mic, far = checks.pair(rng, 8000)
    mic -= mic.mean()
    for floor, level_db in ((0.0, -100.0), (0.1, -20.0)):
        model: Any = BarkNet(gain_floor=floor).eval()
        with torch.no_grad():
            model.network.gain.bias.fill_(-30.0)
            out = model(mic, far, details=True)
        assert float(out["gain"].min()) >= floor
        reached_db = float(20 * torch.log10(out["est"].std() / out["gain_input"].std()))
        assert reached_db < level_db + 0.1 if floor == 0 else abs(reached_db - level_db) < 0.1


def test_skip_convolutions_are_used(model: Any, rng: np.random.Generator) -> None:
    mic, far = checks.pair(rng, 3000)
    with torch.no_grad():
        before = model(mic, far)
        for layer in (*model.network.decoders, model.network.last):
            layer.skip.weight.zero_()
            after = model(mic, far)
            assert float((after - before).abs().max()) > 1e-5
            before = after


def test_echo_comes_before_mic_and_the_last_skip_is_the_masked_plane(model: Any, rng: np.random.Generator) -> None:
    features = torch.tensor(rng.standard_normal((1, 2, 5, 112)), dtype=torch.float32)
    network = model.network
    seen = []
    network.last.register_forward_hook(lambda module, inputs, output: seen.append(inputs[1]))
    network.encoders[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        network(features)
        mic, _ = network.planes[0](features[:, 0, :, :, None], None)
        echo, _ = network.planes[1](features[:, 1, :, :, None], None)
    torch.testing.assert_close(seen[0], torch.cat([echo, mic], dim=-1))
    torch.testing.assert_close(seen[1], mic)


def test_depthwise_equals_grouped_convolution(rng: np.random.Generator) -> None:
    ours = Depthwise(5, 4, stride=2)
    torchs = nn.Conv2d(5, 5, (4, 3), stride=(1, 2), groups=5)
    with torch.no_grad():
        torchs.weight.copy_(ours.weight.unsqueeze(1))
        torchs.bias.copy_(ours.bias)  # type: ignore[union-attr]
    x = torch.tensor(rng.standard_normal((2, 7, 23, 5)), dtype=torch.float32)
    padded = nn.functional.pad(x.permute(0, 3, 1, 2), (0, 0, 3, 0))
    y, past = convolve(ours, x, None)
    torch.testing.assert_close(y.permute(0, 3, 1, 2), torchs(padded))
    torch.testing.assert_close(past, x[:, -3:])


def test_gru_step_equals_nn_gru(rng: np.random.Generator) -> None:
    gru = nn.GRU(20, 30, num_layers=2, batch_first=True)
    x = torch.tensor(rng.standard_normal((3, 50, 20)), dtype=torch.float32)
    hidden = torch.zeros(3, 2, 30)
    with torch.no_grad():
        whole, last = gru(x)
        for t in range(50):
            y, hidden = gru_step(gru, x[:, t], hidden)
            torch.testing.assert_close(y, whole[:, t], rtol=0, atol=1e-6)
    torch.testing.assert_close(hidden.transpose(0, 1), last, rtol=0, atol=1e-6)
    double, state = gru.double(), torch.zeros(3, 2, 30, dtype=torch.float64)
    with torch.no_grad():
        whole, _ = double(x.double())
        for t in range(50):
            y, state = gru_step(double, x[:, t].double(), state)
    assert float((y - whole[:, -1]).abs().max()) < 1e-14


def test_wrong_settings_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        BarkNet(mask_on="error", gain_floor=1.5, num_delta_bands=-1)
    assert len(caught.value.problems) == 3
    assert "model.inputs" in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.front_end\.num_partition is not known.*num_partitions"):
        BarkNet(front_end={"num_partition": 3})
    with pytest.raises(ConfigError, match="near"):
        BarkNet(inputs=("mic", "near"))


def test_front_end_options_and_modules_are_taken() -> None:
    assert BarkNet(front_end={"num_partitions": 3}).chain.front_end.num_partitions == 3
    own = nn.Identity()
    assert BarkNet(front_end=own).chain.front_end is own
