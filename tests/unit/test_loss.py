"""Losses: hand-worked values, and nothing that depends on padding, on the split of a batch, or on fillers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from echofree.contracts import Batch, Scenario
from echofree.errors import ConfigError
from echofree.loss import BarkGain, CompressedSpectral, EchoResidual, SiSdr, Weighted
from echofree.spectral import spectrum

RATE_HZ = 16000
WINDOW, HOP = 512, 256


class Bands:
    """A filterbank for tests: 16 bands of 16 bins, half-overlapping frames that see every sample."""

    def power(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (HOP, -x.shape[1] % HOP + HOP)).unfold(1, WINDOW, HOP)
        spec = torch.fft.rfft(x * torch.hann_window(WINDOW, dtype=x.dtype)).abs().square()
        return spec[:, :, :256].unflatten(2, (16, 16)).sum(3)


def make_batch(lengths: list[int], seed: int, scenarios: list[Scenario] | None = None, pad: int = 0) -> Batch:
    """Random clips; far-end clips have no near end. `pad` adds that many zeros behind the longest."""
    rng = np.random.default_rng(seed)
    size = max(lengths) + pad
    waves = {k: np.zeros((len(lengths), size), np.float32) for k in ("mic", "far", "near", "echo", "noise")}
    scenarios = scenarios or [Scenario.DOUBLE_TALK] * len(lengths)
    for i, (n, scenario) in enumerate(zip(lengths, scenarios)):
        waves["far"][i, :n] = rng.normal(0, 0.1, n)
        waves["noise"][i, :n] = rng.normal(0, 0.001, n)
        if scenario != Scenario.FAR_END:
            waves["near"][i, :n] = rng.normal(0, 0.05, n)
        if scenario != Scenario.NEAR_END:
            waves["echo"][i, :n] = rng.normal(0, 0.05, n)
        waves["mic"][i] = waves["near"][i] + waves["echo"][i] + waves["noise"][i]
    count = len(lengths)
    return Batch(
        **{k: torch.from_numpy(v) for k, v in waves.items()},
        has_near=torch.ones(count, dtype=torch.bool),
        has_echo=torch.ones(count, dtype=torch.bool),
        num_samples=torch.tensor(lengths),
        weight=torch.tensor(lengths, dtype=torch.float32) / RATE_HZ,
        scenario=torch.tensor([int(s) for s in scenarios]),
        delay_samples=torch.zeros(count, dtype=torch.int64),
        index=torch.arange(count),
        name=[f"clip {i}" for i in range(count)],
    )


def output(batch: Batch, seed: int) -> dict:
    """A half-good estimate that continues into the padding, as a model's would, and gains for every frame."""
    rng = torch.Generator().manual_seed(seed)
    est = batch.near + 0.3 * batch.echo + 0.01 * torch.randn(batch.mic.shape, generator=rng)
    frames = Bands().power(batch.mic).shape
    return {"est": est, "gain": torch.rand(frames, generator=rng), "filterbank": Bands()}


def everything(noise_keep: float = 0.0) -> Weighted:
    terms = {
        "spectral": CompressedSpectral((512, 128), oversuppression=0.5),
        "sdr": SiSdr(free_scale=False),
        "si_sdr": SiSdr(),
        "gain": BarkGain(),
        "residual": EchoResidual(),
    }
    return Weighted(terms, {"spectral": 1.0, "sdr": 0.1, "si_sdr": 0.05, "gain": 1.0, "residual": 0.02}, noise_keep)


def take(batch: Batch, rows: slice) -> Batch:
    return replace(batch.map(lambda t: t[rows]), name=batch.name[rows])


def test_si_sdr_equals_the_definition_in_float64():
    batch = make_batch([8000, 6000], seed=1)
    out = output(batch, seed=2)
    value = Weighted({"a": SiSdr(max_db=200.0)}, {"a": 1.0}).per_clip(out, batch)[0]
    for i, n in enumerate([8000, 6000]):
        s, e = batch.near[i, :n].double().numpy(), out["est"][i, :n].double().numpy()
        target = (e @ s) / (s @ s) * s
        assert value[i].item() == pytest.approx(
            -10 * np.log10((target @ target) / ((e - target) @ (e - target))), abs=1e-3
        )


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, -30.0),
        (0.0, 0.0),
        (0.5, -10 * math.log10((1 + 1e-3) / (0.25 + 1e-3))),
        (-1.0, 10 * math.log10((4.001) / 1.001)),
    ],
)
def test_sdr_by_hand_for_a_scaled_target(share, expected):
    """est = share * near: |e|^2 = (1 - share)^2 |s|^2, and the bound adds 0.001 |s|^2 to both sides."""
    batch = make_batch([8000], seed=3)
    value = SiSdr(free_scale=False)({"est": share * batch.near}, batch)
    assert value.item() == pytest.approx(expected, abs=0.005)


def test_si_sdr_forgives_the_level_and_sdr_does_not():
    batch = make_batch([8000], seed=4)
    quiet, same = {"est": 0.5 * batch.near}, {"est": batch.near}
    assert SiSdr()(quiet, batch).item() == pytest.approx(-24.0, abs=0.1)  # (0.25 + q) / q, q = 0.001
    assert SiSdr()(same, batch).item() == pytest.approx(-30.0, abs=0.1)
    assert SiSdr(free_scale=False)(quiet, batch).item() == pytest.approx(-6.0, abs=0.1)


def test_spectral_equals_a_slow_reference():
    batch = make_batch([3000], seed=5)
    est = output(batch, seed=6)["est"]
    level = float(np.sqrt((batch.mic.double().numpy() ** 2).mean()))
    hop, window = 64, np.hanning(257)[:256] / np.sqrt(0.375 * 256)
    num_frames = -(-3000 // hop) + 3
    padded = {k: np.concatenate([np.zeros(192), v[0].double().numpy() / level, np.zeros(600)]) for k, v in
              {"est": est, "near": batch.near}.items()}  # fmt: skip
    total = 0.0
    for frame in range(num_frames):
        e, s = (np.fft.rfft(padded[k][frame * hop : frame * hop + 256] * window) for k in ("est", "near"))
        e_power, s_power = np.abs(e) ** 2 + 1e-6, np.abs(s) ** 2 + 1e-6
        direct = np.abs(s * s_power**-0.35 - e * e_power**-0.35) ** 2
        magnitude = s_power**0.15 - e_power**0.15
        total += (0.3 * direct + 0.7 * magnitude**2 + 0.5 * np.maximum(magnitude, 0) ** 2).mean()
    value = CompressedSpectral((256,), oversuppression=0.5)({"est": est}, batch)
    assert value.item() == pytest.approx(total / num_frames, rel=1e-4)


def test_spectrum_of_white_noise_has_power_one_in_a_bin():
    noise = torch.randn(1, 64000, generator=torch.Generator().manual_seed(0))
    power = spectrum(noise, 512).abs().square()[:, 4:-4, 2:-2].mean()
    assert power.item() == pytest.approx(1.0, rel=0.03)


def test_spectral_doesnt_depend_on_the_recording_level():
    batch = make_batch([8000], seed=7)
    est = output(batch, seed=8)["est"]
    quiet = replace(batch, mic=batch.mic / 50, near=batch.near / 50)
    term = CompressedSpectral()
    assert term({"est": est / 50}, quiet).item() == pytest.approx(term({"est": est}, batch).item(), rel=1e-4)


def test_oversuppression_costs_more_than_leaving_echo():
    batch = make_batch([8000], seed=9)
    plain, careful = CompressedSpectral(), CompressedSpectral(oversuppression=1.0)
    too_quiet, too_loud = {"est": 0.5 * batch.near}, {"est": 1.5 * batch.near}
    assert careful(too_quiet, batch) > 1.2 * plain(too_quiet, batch)
    assert careful(too_loud, batch).item() == pytest.approx(plain(too_loud, batch).item(), rel=1e-3)


def test_bark_gain_is_zero_at_its_target_and_by_hand_elsewhere():
    batch = make_batch([8000], seed=10)
    term = BarkGain(correlation=1.0)
    target, valid = term.target(Bands().power, batch.mic, batch.near)
    out = {"est": batch.mic, "gain": target.clamp(1e-7, 1 - 1e-7), "filterbank": Bands()}
    entropy = torch.nn.functional.binary_cross_entropy(out["gain"], out["gain"], reduction="none")
    assert valid.all()
    assert term(out, batch).item() == pytest.approx(0.01 * entropy.mean().item(), rel=1e-4)
    flat = {**out, "gain": torch.full_like(target, 0.25)}
    step = 0.5 - target.sqrt()
    cross = -(target * math.log(0.25) + (1 - target) * math.log(0.75))
    assert term(flat, batch).item() == pytest.approx((10 * step**4 + step**2 + 0.01 * cross).mean().item(), rel=1e-4)


@pytest.mark.parametrize(("correlation", "expected"), [(1.0, 0.5), (0.0, 0.5**0.5)])
def test_bark_gain_target_with_an_uncorrelated_echo_of_equal_level(correlation, expected):
    """E_in = 2 E_near and Re<in, near> = E_near: level ratio 0.707, correlation 0.707."""
    batch = make_batch([160000], seed=11)
    target, _ = BarkGain(correlation).target(Bands().power, batch.near + batch.echo, batch.near)
    assert target[:, 2:-2].mean().item() == pytest.approx(expected, abs=0.02)


def test_bark_gain_leaves_out_silent_bands_and_follows_the_wave_it_is_applied_to():
    batch = make_batch([8000], seed=12)
    half = batch.map(lambda t: t.clone())
    half.mic[:, 4000:] = 0
    half.near[:, 4000:] = 0
    _, valid = BarkGain().target(Bands().power, half.mic, half.near)
    assert valid[:, :15].all()
    assert not valid[:, 18:].any()
    out = output(batch, seed=1)
    clean = {**out, "gain": torch.ones_like(out["gain"]), "gain_input": batch.near}
    assert BarkGain()(clean, batch).item() < 1e-4  # what is gained is the near end already: pass it
    assert BarkGain()({**out, "gain": torch.ones_like(out["gain"])}, batch).item() > 0.01


def test_echo_residual_by_hand():
    batch = make_batch([16000], seed=13, scenarios=[Scenario.FAR_END])
    assert EchoResidual()({"est": 0.1 * batch.mic}, batch).item() == pytest.approx(-20.0, abs=0.01)
    assert EchoResidual()({"est": 0.0 * batch.mic}, batch).item() == pytest.approx(-50.0, abs=0.01)
    assert EchoResidual()({"est": batch.mic}, batch).item() == pytest.approx(0.0, abs=0.01)


def test_echo_residual_counts_only_frames_without_near_end():
    batch = make_batch([16000], seed=14)
    batch.near[:, :9600] = 0
    batch.mic = batch.near + batch.echo
    est = batch.mic.clone()
    est[:, :9600] *= 0.1
    assert EchoResidual()({"est": est}, batch).item() == pytest.approx(-20.0, abs=0.01)
    near_only = make_batch([16000], seed=15, scenarios=[Scenario.NEAR_END])
    assert EchoResidual()({"est": near_only.mic}, near_only).item() == 0.0


@pytest.mark.parametrize("noise_keep", [0.0, 0.3])
def test_padding_never_matters(noise_keep):
    loss = everything(noise_keep)
    for seed in range(3):
        plain, padded = make_batch([4001], seed), make_batch([4001], seed, pad=7777)
        out = output(padded, seed=5)
        short = {**out, "est": out["est"][:, :4001], "gain": out["gain"][:, : Bands().power(plain.mic).shape[1]]}
        a, b = loss.per_clip(short, plain), loss.per_clip(out, padded)
        torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6)
        for name in a[1]:
            torch.testing.assert_close(a[1][name], b[1][name], rtol=1e-5, atol=1e-5, msg=name)


def test_a_batch_may_be_split_anyhow():
    kinds = [Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END, Scenario.DOUBLE_TALK, Scenario.FAR_END]
    batch = make_batch([8000, 5000, 7001, 300, 16000], seed=20, scenarios=kinds)
    out, loss = output(batch, seed=21), everything()
    whole, seconds, parts = loss(out, batch)
    pieces = []
    for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
        piece = {k: v[rows] if isinstance(v, Tensor) else v for k, v in out.items()}
        pieces.append(loss(piece, take(batch, rows)))
    assert sum(p[0] for p in pieces).item() == pytest.approx(whole.item(), rel=1e-6)
    assert sum(p[1] for p in pieces).item() == pytest.approx(seconds.item(), rel=1e-6) == batch.weight.sum().item()
    for name, part in parts.items():
        assert sum(p[2][name] for p in pieces).item() == pytest.approx(part.item(), rel=1e-6, abs=1e-7), name
    total = sum(loss.weights[name] * parts[name] for name in parts)
    assert total.item() == pytest.approx(whole.item(), rel=1e-5)


def test_fillers_add_exactly_nothing_even_when_the_model_gives_nan():
    loss = everything()
    batch = make_batch([8000, 8000], seed=30)
    out = output(batch, seed=31)
    batch.weight[1] = 0.0
    alone = loss({k: v[:1] if isinstance(v, Tensor) else v for k, v in out.items()}, take(batch, slice(0, 1)))
    out["est"][1], out["gain"][1] = torch.nan, torch.nan
    out["est"].requires_grad_()
    out["gain"].requires_grad_()
    value, seconds, _ = loss(out, batch)
    value.backward()
    assert value.item() == pytest.approx(alone[0].item(), rel=1e-6)
    assert seconds.item() == 0.5
    assert torch.equal(out["est"].grad[1], torch.zeros(8000))
    assert torch.isfinite(out["est"].grad).all()
    assert torch.isfinite(out["gain"].grad).all()
    assert (out["gain"].grad[1] == 0).all()


def test_gradients_are_finite_on_silence_everywhere():
    loss = everything(noise_keep=0.5)
    batch = make_batch(
        [8000, 8000, 8000], seed=40, scenarios=[Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END]
    )
    for silent in (["mic", "near", "echo", "noise"], ["near"], ["mic"]):
        quiet = replace(batch, **{k: torch.zeros_like(batch.mic) for k in silent})
        for est in (torch.zeros_like(batch.mic), batch.mic.clone(), batch.near.clone()):
            out = {
                "est": est.requires_grad_(),
                "gain": torch.zeros(3, 33, 16, requires_grad=True),
                "filterbank": Bands(),
            }
            value, _, parts = loss(out, quiet)
            value.backward()
            assert torch.isfinite(value), (silent, parts)
            assert torch.isfinite(out["est"].grad).all(), silent
            assert torch.isfinite(out["gain"].grad).all(), silent


def test_leaks_beside_a_narrow_near_end_cost_less_than_muting_it():
    """300 to 3400 Hz: whatever is in its empty bands is bounded, so that nothing is learnt from it but to leave it."""
    wide = make_batch([16000, 16000], seed=3)
    freq = torch.fft.rfftfreq(16000, 1 / RATE_HZ)
    narrow = replace(wide, near=torch.fft.irfft(torch.fft.rfft(wide.near) * ((freq > 300) & (freq < 3400)), n=16000))
    loss = Weighted({"spectral": CompressedSpectral(), "sdr": SiSdr(free_scale=False)}, {"spectral": 5.0, "sdr": 0.03})
    values = []
    for kept, leak in ((1.0, 0.0), (1.0, 0.1), (1.0, 0.3), (0.0, 0.0)):
        est = (kept * narrow.near + leak * wide.echo).requires_grad_()
        total, weight, _ = loss({"est": est}, narrow)
        total.backward()
        assert est.grad.isfinite().all()
        values.append(float(total.detach() / weight))
    assert values == sorted(values)
    assert values[-1] - values[0] > 1.5 * (values[1] - values[0])


def test_recordings_without_a_target_give_zero_and_no_gradient():
    batch = make_batch([8000], seed=50)
    batch.has_near[:] = False
    batch.near.zero_()
    out = output(batch, seed=51)
    out["est"].requires_grad_()
    value, _, _ = everything()(out, batch)
    value.backward()
    assert value.item() == 0.0
    assert not out["est"].grad.any()


def test_noise_keep_moves_the_target():
    batch = make_batch([8000], seed=60)
    batch.noise *= 10
    out = {"est": batch.near + 0.5 * batch.noise}
    values = [
        Weighted({"a": SiSdr(free_scale=False)}, {"a": 1.0}, keep).per_clip(out, batch)[0].item() for keep in (0, 0.5)
    ]
    assert values[1] == pytest.approx(-30.0, abs=0.1)
    assert values[0] > -22


def test_half_precision_outputs_are_scored_in_float32():
    batch = make_batch([8000], seed=70)
    out = output(batch, seed=71)
    exact = everything().per_clip(out, batch)[0]
    half = {**out, "est": out["est"].bfloat16(), "gain": out["gain"].bfloat16()}
    value = everything().per_clip(half, batch)[0]
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, exact, rtol=0.05, atol=0.02)


def test_wrong_settings_are_named_together():
    with pytest.raises(ConfigError) as caught:
        Weighted({"a": SiSdr(), "b": SiSdr()}, {"a": -1.0, "c": 1.0}, noise_keep=2.0)
    assert len(caught.value.problems) == 4
    for text in ("loss.weights.c", "loss.weights.b=1.0", "loss.weights.a=-1.0", "noise_keep=2.0"):
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="nothing would be learnt"):
        Weighted({"a": SiSdr()}, {"a": 0.0})
    for wrong in (lambda: SiSdr(max_db=0), lambda: BarkGain(correlation=2), lambda: EchoResidual(1.0)):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="multiples of 4"):
        CompressedSpectral((510,))


def test_a_term_of_weight_zero_asks_the_model_for_nothing():
    loss = Weighted({"a": SiSdr(), "gain": BarkGain()}, {"a": 1.0, "gain": 0.0})
    assert loss.needs == ()
    assert set(loss({"est": torch.zeros(1, 800)}, make_batch([800], 1))[2]) == {"a"}
    needy = Weighted({"gain": BarkGain()}, {"gain": 1.0})
    assert needy.needs == ("gain", "filterbank")
