from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate, signal, special

from echofree.data import device

RATE = 16000


@pytest.fixture
def wave(rng: np.random.Generator) -> np.ndarray:
    wave = rng.standard_normal(6000).astype(np.float32)
    return wave / np.abs(wave).max()


def test_erf_matches_scipy() -> None:
    x = np.linspace(-5, 5, 4001).astype(np.float32)
    assert np.abs(device.erf(x) - special.erf(x.astype(float))).max() < 5e-7


@pytest.mark.parametrize("v", [0.1, 1.0, 10.0])
def test_scaled_error_function_is_the_integral(v: float, rng: np.random.Generator) -> None:
    x = rng.uniform(-1, 1, 20)
    slow = [integrate.quad(lambda z: np.exp(-(z**2) / (2 * v)), 0, value)[0] for value in x]
    assert device.scaled_error_function(x.astype(np.float32), v) == pytest.approx(slow, abs=3e-6)


def test_asymmetric_sigmoid_is_the_formula(wave: np.ndarray) -> None:
    b = 1.5 * wave.astype(float) - 0.3 * wave.astype(float) ** 2
    slow = 2 / (1 + np.exp(-np.where(b > 0, 4.0, 0.5) * b)) - 1
    assert device.asymmetric_sigmoid(wave) == pytest.approx(slow, abs=1e-6)


@pytest.mark.parametrize(("kind", "btype"), [("high_pass", "highpass"), ("low_pass", "lowpass")])
def test_biquads_are_butterworth(kind: str, btype: str, rng: np.random.Generator) -> None:
    corner_hz = float(rng.uniform(200, 6000))
    freq_hz = np.arange(device.FIR_TAPS // 2 + 1) * RATE / device.FIR_TAPS
    _, slow = signal.sosfreqz(signal.butter(2, corner_hz, btype, fs=RATE, output="sos"), freq_hz, fs=RATE)
    fast = device.biquad(kind, corner_hz, RATE, q=np.sqrt(0.5))
    assert np.abs(fast - slow).max() < 1e-9


def test_peak_reaches_its_gain_at_its_corner() -> None:
    response = device.biquad("peak", 1000.0, RATE, q=2.0, gain_db=6.0)
    assert 20 * np.log10(abs(response[64])) == pytest.approx(6.0, abs=0.01)  # bin 64 is 1000 Hz
    assert 20 * np.log10(abs(response[0])) == pytest.approx(0.0, abs=0.01)


def test_equalisers_are_causal_without_delay(rng: np.random.Generator) -> None:
    for _ in range(10):
        taps = device.loudspeaker_eq(rng, RATE, 6.0, (80.0, 400.0), (5000.0, 8000.0))
        assert np.abs(taps[-64:]).max() < 1e-3 * np.abs(taps).max()  # nothing wraps round to before time 0
        assert np.argmax(np.abs(taps)) < 8


def test_convolve_and_chain_match_numpy(wave: np.ndarray, rng: np.random.Generator) -> None:
    first, second = rng.standard_normal(37).astype(np.float32), rng.standard_normal(501).astype(np.float32)
    out = device.convolve(wave, first, device.chain(first, second))
    assert out[0] == pytest.approx(np.convolve(wave.astype(float), first)[: len(wave)], abs=1e-4)
    both = np.convolve(np.convolve(wave.astype(float), first), second)[: len(wave)]
    assert np.abs(out[1] - both).max() < 1e-5 * np.abs(both).max() + 1e-3
    assert out[0].dtype == np.float32


def test_fast_lengths_have_small_factors(rng: np.random.Generator) -> None:
    for n in rng.integers(1, 300000, 200):
        length = device.fast_length(int(n))
        assert n <= length <= 1.2 * n + 2
        for factor in (2, 3, 5):
            while length % factor == 0:
                length //= factor
        assert length == 1


@pytest.mark.parametrize("kind", device.DISTORTIONS)
def test_every_distortion_is_finite_repeatable_and_not_linear(kind: str, wave: np.ndarray) -> None:
    if kind == "one_sided":
        wave = np.abs(wave) * np.where(np.arange(len(wave)) % 3 == 0, -1, 1).astype(np.float32)
    whole = device.distort(np.random.default_rng(5), wave, kind, RATE)
    again = device.distort(np.random.default_rng(5), wave, kind, RATE)
    half = device.distort(np.random.default_rng(5), -wave if kind == "one_sided" else 0.5 * wave, kind, RATE)
    assert whole.dtype == np.float32
    assert whole.shape == wave.shape
    assert np.isfinite(whole).all()
    assert np.array_equal(whole, again)
    linear = -whole if kind == "one_sided" else 0.5 * whole
    if kind == "sef":  # v may be 10: all but linear
        linear = linear * 1.5
    if kind == "memory":  # the displacement is relative, so only the rattle or the envelope shows
        linear = np.zeros_like(whole)
    assert np.abs(half - linear).max() > 1e-4


def test_memory_depends_on_the_past() -> None:
    tone = np.sin(2 * np.pi * 2000 / RATE * np.arange(8000)).astype(np.float32)
    bass = np.sin(2 * np.pi * 80 / RATE * np.arange(8000)).astype(np.float32)
    out = device.distort(np.random.default_rng(1), 0.2 * tone + 0.8 * bass, "memory", RATE)
    spectrum = np.abs(np.fft.rfft(out * np.hanning(8000)))
    # The gain follows the squared displacement at 160 Hz, so the tone gets side bands there.
    assert spectrum[1000 + 80] > 0.05 * spectrum[1000]


def test_unknown_distortion_is_refused(wave: np.ndarray) -> None:
    with pytest.raises(ValueError, match="hard_clip"):
        device.distort(np.random.default_rng(0), wave, "fuzz", RATE)


def test_gain_control_lifts_the_quiet_and_lowers_the_loud(rng: np.random.Generator) -> None:
    quiet, loud = (rng.standard_normal((2, RATE)) * np.array([[0.01], [0.5]])).astype(np.float32)
    gain_quiet = device.gain_control(quiet, RATE, -20.0, 12.0, 0.02, 0.3)
    gain_loud = device.gain_control(loud, RATE, -20.0, 12.0, 0.02, 0.3)
    assert 20 * np.log10(gain_quiet[-1]) == pytest.approx(12.0, abs=0.01)  # -40 dB would need 20, may have 12
    assert 20 * np.log10(gain_loud[-1]) == pytest.approx(-14.0, abs=1.0)  # from -6 dB to -20 dB


def test_structure_path_has_its_level_and_is_early(rng: np.random.Generator) -> None:
    taps = device.structure_path(rng, RATE, -17.0, 20)
    assert 10 * np.log10(np.sum(taps.astype(float) ** 2)) == pytest.approx(-17.0, abs=0.01)
    assert 0.001 * RATE <= len(taps) <= 0.004 * RATE
