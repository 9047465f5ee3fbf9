"""Windows, STFT, bands, block filters and GCC-PHAT against slow float64 references and exact identities."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.signal
import torch

from echofree import dsp
from echofree.errors import ConfigError


@pytest.mark.parametrize("hop", [160, 256])
def test_vorbis_window_is_power_complementary(hop: int) -> None:
    window = dsp.vorbis_window(2 * hop)
    assert np.abs(window[:hop] ** 2 + window[hop:] ** 2 - 1).max() < 1e-14


@pytest.mark.parametrize("hop", [160, 256])
@pytest.mark.parametrize("num_samples", [1, 255, 257, 4801])
def test_stft_reconstructs(hop: int, num_samples: int, rng: np.random.Generator) -> None:
    stft = dsp.Stft(2 * hop, hop)
    x = torch.tensor(rng.standard_normal((2, num_samples)), dtype=torch.float32)
    spectra = stft.analyse(x)
    assert spectra.shape == (2, stft.num_frames(num_samples), hop + 1)
    assert (stft.synthesise(spectra, num_samples) - x).abs().max() < 2e-6


def test_stft_frame_is_windowed_fft_of_previous_and_new_hop(rng: np.random.Generator) -> None:
    stft = dsp.Stft(512, 256)
    x = rng.standard_normal(1024)
    spectra = stft.analyse(torch.tensor(x[None]))
    padded = np.concatenate([np.zeros(256), x])
    for t in range(4):
        frame = np.fft.rfft(padded[t * 256 : t * 256 + 512] * dsp.vorbis_window(512))
        assert np.abs(spectra[0, t].numpy() - frame).max() < 1e-5


def test_stft_refuses_another_overlap() -> None:
    with pytest.raises(ConfigError, match="twice"):
        dsp.Stft(512, 128)


@pytest.mark.parametrize(("window", "rate"), [(512, 16000), (320, 16000), (1024, 48000), (256, 8000)])
def test_bands_cover_every_bin_once(window: int, rate: int, rng: np.random.Generator) -> None:
    centres = dsp.band_centres(window, rate)
    assert centres[0] == 0
    assert centres[-1] == window // 2
    assert (np.diff(centres) > 0).all()
    analysis, synthesis = dsp.band_matrices(centres)
    assert analysis.shape == synthesis.shape == (len(centres), window // 2 + 1)
    assert np.abs(synthesis.sum(0) - 1).max() < 1e-12  # DC and Nyquist included
    power = rng.random(window // 2 + 1)
    assert np.isclose((analysis @ power).sum(), power.sum())  # no energy lost or counted twice
    assert np.abs(np.ones(len(centres)) @ synthesis * power - power).max() < 1e-12


def test_reference_bands_are_the_published_hundred() -> None:
    centres = dsp.band_centres(512, 16000)
    assert len(centres) == 100
    assert centres[46:50].tolist() == [46, 48, 50, 52]
    assert centres[-4:].tolist() == [224, 232, 240, 256]


@pytest.mark.parametrize("hops", [1, 7])
@pytest.mark.parametrize("design", [dsp.dc_blocker, dsp.high_pass])
def test_block_iir_equals_sample_loop(design: Callable, hops: int, rng: np.random.Generator) -> None:
    b, a = design(80.0, 16000)
    block = dsp.BlockIir(b, a, 256, dtype=torch.float64)
    x = rng.standard_normal((3, 256 * 14))
    state, parts = torch.zeros(3, block.order, dtype=torch.float64), []
    for start in range(0, x.shape[1], 256 * hops):
        y, state = block(torch.tensor(x[:, start : start + 256 * hops]), state)
        parts.append(y)
    want = scipy.signal.lfilter(b, a, x)
    assert np.abs(torch.cat(parts, 1).numpy() - want).max() < 1e-10 * np.abs(want).max()


def test_high_pass_is_butterworth_and_response_agrees() -> None:
    b, a = dsp.high_pass(80.0, 16000)
    want_b, want_a = scipy.signal.butter(2, 80.0, "highpass", fs=16000)
    assert np.allclose(b, want_b, atol=1e-12)
    assert np.allclose(a, want_a, atol=1e-12)
    _, want = scipy.signal.freqz(want_b, want_a, 257, include_nyquist=True)
    assert np.allclose(dsp.frequency_response(b, a, 257), want, atol=1e-9)


def test_dc_blocker_removes_dc_and_leaves_voice() -> None:
    response = dsp.frequency_response(*dsp.dc_blocker(5.0, 16000), 8001)  # 1 Hz per bin
    assert abs(response[0]) < 1e-9
    assert abs(20 * np.log10(abs(response[100]))) < 0.02
    assert abs(np.angle(response[100], deg=True)) < 3


def test_decimation_keeps_the_band_and_stops_the_rest() -> None:
    taps, factor, hop = 32, 4, 256
    matrix = dsp.decimation_matrix(factor, hop, taps)
    n = np.arange(taps - 1 + hop)
    for hz, low, high in ((500, -0.5, 0.5), (1500, -2.5, 0.5), (3000, -200, -30)):
        y = np.exp(2j * np.pi * hz * n / 16000) @ matrix
        assert low < 20 * np.log10(np.abs(y).max()) < high, hz


@pytest.mark.parametrize("delay", [-400, 0, 37, 1600, 14400])
def test_gcc_phat_finds_the_delay(delay: int, rng: np.random.Generator) -> None:
    far = rng.standard_normal(48000)
    mic = np.roll(np.pad(far, 16000), delay)[16000:-16000]
    found, confidence = dsp.gcc_phat(mic, far, 16000)
    assert abs(found - delay) < 0.5
    assert confidence > 20


def test_gcc_phat_doubts_unrelated_and_silent_signals(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 48000))
    assert dsp.gcc_phat(a, b, 16000)[1] < 7
    assert dsp.gcc_phat(a, 0 * b, 16000) == (0.0, 0.0)
    assert dsp.gcc_phat(a, b[:0], 16000) == (0.0, 0.0)
