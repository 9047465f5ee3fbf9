"""The Kalman filter against a float64 numpy reference written from the equations, one stream and one sample block at a
time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echofree import dsp
from echofree.model.adaptive import DOUBT, KalmanFilter


def reference(
    mic: np.ndarray, far: np.ndarray, hop: int, count: int, transition: float, output: str, start: float, floor: float
) -> np.ndarray:
    """Plain loops over hops and partitions; the error high-passed by a sample loop. -> error [T]."""
    b, a = dsp.high_pass(80.0, 16000)
    response = dsp.frequency_response(b, a, hop + 1)
    weight = np.zeros((count, hop + 1), complex)
    variance = np.full((count, hop + 1), start)
    spectra = np.zeros((count, hop + 1), complex)  # newest first
    psd, memory, previous, out = np.zeros(hop + 1), np.zeros(2), np.zeros(hop), []
    for t in range(len(mic) // hop):
        x, d = far[t * hop : (t + 1) * hop], mic[t * hop : (t + 1) * hop]
        spectra = np.concatenate([np.fft.rfft(np.concatenate([previous, x]))[None], spectra[:-1]])
        previous = x
        error = d - np.fft.irfft((weight * spectra).sum(0))[hop:]
        passed = np.zeros(hop)
        for n, sample in enumerate(error):
            passed[n] = b[0] * sample + memory[0]
            memory = np.array([b[1] * sample - a[1] * passed[n] + memory[1], b[2] * sample - a[2] * passed[n]])
        spectrum = np.fft.rfft(np.concatenate([np.zeros(hop), passed]))
        psd = 0.5 * psd + 0.5 * np.abs(spectrum) ** 2
        heard = np.abs(response * spectra) ** 2
        total = (variance * heard).sum(0) + 2 / count * psd + 1e-20
        plain = np.fft.rfft(np.concatenate([np.zeros(hop), error]))
        after = np.fft.irfft(plain * (1 - (variance * heard).sum(0) / total))[hop:]
        for part in range(count):
            gain = variance[part] / total
            step = np.fft.irfft(gain * np.conj(response * spectra[part]) * spectrum)
            step[hop:] = 0
            weight[part] = transition * (weight[part] + np.fft.rfft(step))
            noise = (1 - transition**2) * np.abs(weight[part]) ** 2
            variance[part] = transition**2 * (1 - 0.5 * gain * heard[part]) * variance[part] + noise
        variance = np.maximum(variance, floor)
        out.append(after if output == "posterior" else error)
    return np.concatenate(out)


def run(mic: np.ndarray, far: np.ndarray, model: KalmanFilter, start: float, floor: float) -> np.ndarray:
    """The torch filter on a batch [B, T], with the loop of the front end reduced to the filter."""
    hop, count, batch = model.hop_samples, model.num_partitions, len(mic)
    high = dsp.BlockIir(*dsp.high_pass(80.0, 16000), hop, dtype=torch.float64)
    state, memory = model.init_state(batch), torch.zeros(batch, 2, dtype=torch.float64)
    state["variance"] += start
    line = torch.nn.functional.pad(torch.tensor(far), (hop * count, 0))
    spectra = torch.fft.rfft(line.unfold(-1, 2 * hop, hop))  # [B, count - 1 + L, F]
    re, im = spectra.real.contiguous(), -spectra.imag
    ones, out = torch.ones(batch, 1, dtype=torch.float64), []
    for t in range(mic.shape[1] // hop):
        here = slice(t, t + count)
        error = torch.tensor(mic[:, t * hop : (t + 1) * hop]) - model.predict(spectra[:, here], state)
        passed, memory = high(error, memory)
        planes, power = (re[:, here], im[:, here]), (re**2 + im**2)[:, here]
        out.append(model.correct(planes, power, torch.stack([error, passed], 1), ones, floor * ones, state))
    return torch.cat(out, 1).numpy()


@pytest.mark.parametrize("output", ["prior", "posterior"])
@pytest.mark.parametrize(("hop", "count"), [(64, 3), (160, 4)])
def test_equals_numpy_reference(output: str, hop: int, count: int, rng: np.random.Generator) -> None:
    far = 0.1 * rng.standard_normal((2, hop * 60))
    path = rng.standard_normal(hop * 2) * np.exp(-np.arange(hop * 2) / hop)
    mic = np.stack([np.convolve(x, path)[: far.shape[1]] for x in far]) + 0.01 * rng.standard_normal(far.shape)
    response = dsp.frequency_response(*dsp.high_pass(80.0, 16000), hop + 1)
    model = KalmanFilter(hop, count, 0.998, output, 0.5, response, dtype=torch.float64)
    got = run(mic, far, model, start=2.0, floor=1e-8)
    for i in range(2):
        want = reference(mic[i], far[i], hop, count, 0.998, output, start=2.0, floor=1e-8)
        assert np.abs(got[i] - want).max() < 1e-6 * np.abs(want).max()
    assert np.mean(got[:, -hop * 20 :] ** 2) < 0.1 * np.mean(mic[:, -hop * 20 :] ** 2)  # and both do cancel


def test_shift_moves_the_echo_path_with_the_delay_line(rng: np.random.Generator) -> None:
    """Whole partitions and odd samples; the impulse response is checked in time, newest block first."""
    hop, count = 8, 4
    model = KalmanFilter(hop, count, 1.0, "prior", 0.5, np.ones(9, complex), dtype=torch.float64)
    moves = [8, -16, 72, 3, -5, 0]
    state = model.init_state(len(moves))
    taps = rng.standard_normal(hop * count)
    parts = np.pad(taps.reshape(count, hop)[::-1], ((0, 0), (0, hop)))
    state["weight"] += torch.view_as_real(torch.tensor(np.fft.rfft(parts)))
    state["variance"] += torch.arange(1.0, 5.0).view(1, 4, 1)  # oldest block first
    model.shift(torch.tensor(moves, dtype=torch.float64)[:, None], torch.full((6, 1), 7.0, dtype=torch.float64), state)
    got = torch.fft.irfft(torch.view_as_complex(state["weight"])).numpy()
    assert np.abs(got[:, :, hop:]).max() < 1e-12
    for move, found in zip(moves, got[:, ::-1, :hop].reshape(len(moves), -1), strict=True):
        wanted = [taps[n + move] if 0 <= n + move < len(taps) else 0.0 for n in range(len(taps))]
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    wanted_variance = [[7, 1, 2, 3], [3, 4, 7, 7], [7, 7, 7, 7], [7, 2, 3, 4], [2, 3, 4, 7], [1, 2, 3, 4]]
    assert state["variance"][:, :, 0].tolist() == wanted_variance


def test_doubt_makes_it_quick_where_told(rng: np.random.Generator) -> None:
    model = KalmanFilter(8, 2, 1.0, "prior", 0.5, np.ones(9, complex))
    state = model.init_state(3)
    state["weight"] += torch.tensor([3.0, 4.0])  # |W|^2 = 25
    state["variance"] += 0.5
    alarm, spoilt = torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([[0.0], [0.0], [1.0]])
    model.doubt(alarm, spoilt, state)
    assert state["variance"][:, 1, 3].tolist() == [0.5, 25 * DOUBT, 25 * DOUBT]
    assert state["weight"].square().sum((1, 2, 3)).tolist() == [450.0, 450.0, 0.0]
