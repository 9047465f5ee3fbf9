"""What the linear front end loses under every condition that a bare Kalman filter doesn't survive.

    python benchmarks/robustness.py [--seed 0] [--far speech.wav] [--near talker.wav] [--seconds 24]

One row a condition: echo reduction (ERLE) of a plain partitioned-block Kalman filter and of the front end, each a
priori and a posteriori, and the bound that the front end must keep. Speech is what the package carries, or your own
recordings at 16 kHz; rooms are image-method boxes, drawn by --seed; the echo peaks at 0.3, noise is 80 dB below it.
ERLE is taken over the second half, without DC.

Rows: DC, scale, delays to 1 s and drifts to 500 ppm may lose 3 dB against the undisturbed row of the front end; others
may not fall below the plain filter where that has 9 to 30 dB. After a change of the echo path 10 dB are to be back in
1.5 s. The last line is JSON: how many rows have a bound, and how many keep it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import numpy as np
import scipy.signal
import soundfile
import torch

from echofree.data.rir import shoebox
from echofree.data.scene import resample_clock
from echofree.model.adaptive import KalmanFilter
from echofree.model.frontend import FrontEnd

RATE = 16000
HOP = 256
LOSS_DB = 3.0  # of the rows that the front end mends
KEPT_DB = 9.0  # rows of the plain filter from here on may not fall
SLACK_DB = 0.5  # but for this
LEFT_DB = 36.0  # and for what the 50 Hz high-pass keeps from the filter: 0.3 dB of 24, 2.6 of 36
ENOUGH_DB = 30.0  # what the plain filter has beyond this isn't asked for
NEAR_DB = 25.0  # of a talker alone, whom the DC blocker turns by some degrees
BACK_DB, BACK_S = 10.0, 1.5
MENDED = ("mic DC", "far DC", "scale", "delay", "drift")


@dataclass
class Row:
    """A condition.

    Attributes:
        name: as printed.
        mic, far: float32 [T].
        near: the talker in it, or None; then the output is judged by SI-SDR.
        change_s: when the echo path changes; then by the time until 10 dB are back.
        from_s: where ERLE begins; None: at half.
        to_s: and ends; None: at the end.
    """

    name: str
    mic: np.ndarray
    far: np.ndarray
    near: np.ndarray | None = None
    change_s: float | None = None
    from_s: float | None = None
    to_s: float | None = None


def embedded(start: str) -> np.ndarray:
    """The package's recordings whose names begin so, one after another."""
    folder = resources.files("echofree.data") / "embedded"
    names = sorted(item.name for item in folder.iterdir() if item.name.startswith(start))
    with_files = [soundfile.read(str(folder / name), dtype="float32")[0] for name in names]
    return np.concatenate(with_files)


def room(rng: np.random.Generator, rt60_s: float) -> np.ndarray:
    """A small device in a box: loudspeaker and microphone 30 to 60 cm apart, 0.4 s long."""
    size = np.array([rng.uniform(3, 6), rng.uniform(2.8, 5), rng.uniform(2.4, 3)])
    mic = size * rng.uniform(0.3, 0.7, 3)
    turn = rng.standard_normal(3)
    source = mic + turn / np.linalg.norm(turn) * rng.uniform(0.3, 0.6)
    return shoebox(rng, size, source, mic, rt60_s, RATE, int(0.4 * RATE))[0].astype(np.float64)


def played(far: np.ndarray, h: np.ndarray, delay_ms: float = 0.0) -> np.ndarray:
    """far through h, peak 0.3, later by delay_ms (negative: earlier), same length."""
    shift = round(delay_ms * RATE / 1000)
    # no small loudspeaker plays more than this; recordings of speech hold rumble that is no part of the question
    high = scipy.signal.butter(2, 100, "highpass", fs=RATE, output="sos")
    out = scipy.signal.fftconvolve(scipy.signal.sosfilt(high, far.astype(np.float64)), h)
    out = np.concatenate([np.zeros(max(shift, 0)), out[max(-shift, 0) :]])[: len(far)]
    out = np.pad(out, (0, len(far) - len(out)))
    return (0.3 * out / np.abs(out).max()).astype(np.float32)


def rows(
    seed: int = 0, far: np.ndarray | None = None, near: np.ndarray | None = None, seconds: float = 24.0
) -> list[Row]:
    """All conditions on one piece of speech and one room."""
    rng = np.random.default_rng(seed)
    size = int(seconds * RATE)
    far = np.resize(embedded("austen") if far is None else far, size).astype(np.float32)
    near = np.resize(embedded("cards") if near is None else near, size).astype(np.float32)
    far, near = 0.8 * far / np.abs(far).max(), 0.3 * near / np.abs(near).max()
    h, other = room(rng, 0.3), room(rng, 0.3)
    noise = (0.3e-4 * rng.standard_normal(size) / 3).astype(np.float32)
    echo = played(far, h)
    silence = np.zeros_like(far)

    def distorted(curve: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return played(curve(far / np.abs(far).max()), h) + noise

    def loudspeaker(x: np.ndarray) -> np.ndarray:  # the asymmetric sigmoid of simulations of nonlinear echo
        b = 1.5 * x - 0.3 * x**2
        return np.asarray(2 / (1 + np.exp(-np.where(b > 0, 4.0, 0.5) * b)) - 1)

    half = size // 2
    changed = np.concatenate([echo[:half], played(far, other)[half:]]) + noise
    late_far = far.copy()
    late_far[: 10 * RATE] = 0
    root = math.sqrt(math.pi * 0.1 / 2)
    erf = np.vectorize(math.erf)
    level = float(np.sqrt(np.mean(echo**2)))
    white = rng.standard_normal(size).astype(np.float32)
    out = [Row("undisturbed", echo + noise, far)]
    out += [Row(f"RT60 {rt} s", played(far, room(rng, rt)) + noise, far) for rt in (0.15, 0.5, 0.8)]
    out += [Row(f"delay {ms} ms", played(far, h, ms) + noise, far) for ms in (50, 100, 150, 200, 400, 700, 980)]
    out += [Row(f"mic early by {ms} ms", played(far, h, -ms) + noise, far) for ms in (2, 10)]
    for ppm in (10, 50, 100, 500, -500, 1000):
        out.append(Row(f"drift {ppm} ppm", played(resample_clock(far, -ppm), h, 40 if ppm < 0 else 0) + noise, far))
    for share in (0.8, 0.4):
        top = share * np.abs(echo).max()
        out.append(Row(f"hard clip {100 * share:.0f} %", np.clip(echo, -top, top) + noise, far))
    out += [
        Row("SEF 0.1", distorted(lambda x: root * erf(x / math.sqrt(0.2))), far),
        Row("tanh(2x)", distorted(lambda x: np.tanh(2 * x)), far),
        Row("one-sided -6 dB", distorted(lambda x: np.where(x < 0, 0.5 * x, x)), far),
        Row("asym. sigmoid", distorted(loudspeaker), far),
        Row("mic DC +0.05", echo + noise + np.float32(0.05), far),
        Row("far DC +0.05", echo + noise, far + np.float32(0.05)),
    ]
    for snr in (40, 20, 10, 0):
        out.append(Row(f"echo-to-noise {snr} dB", echo + white * np.float32(level * 10 ** (-snr / 20)), far))
    out += [
        Row("scale: both x32768", 32768 * (echo + noise), 32768 * far),
        Row("scale: mic x32768", 32768 * (echo + noise), far),
        Row("scale: far x32768", echo + noise, 32768 * far),
        Row("both silent", silence, silence),
        Row("10 s silent far, then 2 s", played(late_far, h) + noise, late_far, from_s=10.0, to_s=12.0),
        Row("echo path change", changed, far, change_s=half / RATE),
        Row("echo path -6 dB", np.concatenate([echo[:half], 0.5 * echo[half:]]) + noise, far, change_s=half / RATE),
    ]
    near = scipy.signal.sosfilt(scipy.signal.butter(2, 80, "highpass", fs=RATE, output="sos"), near).astype(np.float32)
    talk = near * np.float32(level / np.sqrt(np.mean(near**2)))
    for ser in (-10, 0, 10):
        part = talk * np.float32(10 ** (ser / 20))
        out.append(Row(f"double talk, SER {ser} dB", echo + part + noise, far, near=part))
    out.append(Row("near end alone", talk + noise, silence, near=talk))
    for row in out:
        row.mic, row.far = row.mic.astype(np.float32), row.far.astype(np.float32)
    return out


def plain(mic: torch.Tensor, far: torch.Tensor, output: str) -> torch.Tensor:
    """The published filter without anything around it: mic, far [B, T] -> error [B, T]."""
    model = KalmanFilter(HOP, 10, 0.999, output, 0.5, np.ones(HOP + 1, complex))
    state, out = model.init_state(len(mic)), []
    state["variance"] += 10.0
    line = torch.nn.functional.pad(far, (10 * HOP, 0))
    spectra = torch.fft.rfft(line.unfold(-1, 2 * HOP, HOP))
    re, im = spectra.real.contiguous(), -spectra.imag
    power = re.square() + im.square()
    ones = torch.ones(len(mic), 1)
    for t in range(mic.shape[1] // HOP):
        block = slice(t, t + 10)
        error = mic[:, t * HOP : (t + 1) * HOP] - model.predict(spectra[:, block], state)
        planes = (re[:, block], im[:, block])
        errors = torch.stack([error, error], 1)
        out.append(model.correct(planes, power[:, block], errors, ones, 0 * ones, state))
    return torch.cat(out, 1)


def erle_db(row: Row, error: np.ndarray, start_s: float, end_s: float) -> float:
    """Echo reduction between two moments, without DC."""
    part = slice(int(start_s * RATE), int(end_s * RATE))
    a, b = row.mic[: len(error)][part].astype(np.float64), error[part].astype(np.float64)
    return float(10 * np.log10((np.var(a) + 1e-20) / (np.var(b) + 1e-20)))


def back_s(row: Row, error: np.ndarray) -> float:
    """Seconds after the change until half a second with 10 dB begins."""
    assert row.change_s is not None
    for late in np.arange(0.0, 8.0, 0.05):
        if erle_db(row, error, row.change_s + late, row.change_s + late + 0.5) >= BACK_DB:
            return float(late)
    return math.inf


def si_sdr_db(est: np.ndarray, near: np.ndarray) -> float:
    """Scale-invariant signal-to-distortion ratio over the second half."""
    est, near = est[len(est) // 2 :].astype(np.float64), near[: len(est)][len(est) // 2 :].astype(np.float64)
    target = near * (est @ near) / (near @ near)
    return float(10 * np.log10(np.sum(target**2) / (np.sum((est - target) ** 2) + 1e-20)))


def score(row: Row, error: np.ndarray) -> float:
    """dB; seconds for a change of the echo path."""
    if row.near is not None:
        return si_sdr_db(error, row.near)
    if row.change_s is not None:
        return back_s(row, error)
    length_s = len(row.mic) / RATE
    return erle_db(row, error, length_s / 2 if row.from_s is None else row.from_s, row.to_s or length_s)


def measure(conditions: list[Row]) -> list[dict[str, float]]:
    """For each row: plain and front end, a priori and a posteriori, and the bound (nan: none)."""
    mic, far = (torch.tensor(np.stack([getattr(r, name) for r in conditions])) for name in ("mic", "far"))
    found: dict[str, np.ndarray] = {}
    for output in ("prior", "posterior"):
        found[f"plain {output}"] = plain(mic, far, output).numpy()
        found[f"front {output}"] = FrontEnd(output=output)(mic, far)["error"].numpy()
    out = []
    for i, row in enumerate(conditions):
        result = {name: score(row, errors[i]) for name, errors in found.items()}
        result["finite"] = float(all(np.isfinite(errors[i]).all() for errors in found.values()))
        out.append(result)
    for row, result in zip(conditions, out, strict=True):
        result["bound"] = bound(row, result["plain prior"], out[0]["front prior"])
    return out


def bound(row: Row, of_plain: float, undisturbed: float) -> float:
    """What the front end must reach a priori: at least, or at most where it's a time."""
    if row.change_s is not None:
        return BACK_S
    if row.name.startswith(MENDED) and row.name != "drift 1000 ppm":
        return undisturbed - LOSS_DB
    if row.name == "near end alone":
        return NEAR_DB
    possible = -10 * math.log10(10 ** (-of_plain / 10) + 10 ** (-LEFT_DB / 10))
    return min(possible - SLACK_DB, ENOUGH_DB) if of_plain >= KEPT_DB else math.nan


def kept(row: Row, result: dict[str, float]) -> bool:
    """Whether the bound holds."""
    value, limit = result["front prior"], result["bound"]
    return bool(result["finite"]) and (
        math.isnan(limit) or (value <= limit if row.change_s is not None else value >= limit)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--far", default="")
    parser.add_argument("--near", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    own = [soundfile.read(path, dtype="float32")[0] if path else None for path in (args.far, args.near)]
    conditions = rows(args.seed, own[0], own[1], args.seconds)
    print(f"{'':28s} {'plain':>13s} {'front end':>13s} {'bound':>7s}   dB a priori / a posteriori")
    results, held = measure(conditions), []
    for row, result in zip(conditions, results, strict=True):
        pairs = [f"{result[f'{who} prior']:6.1f}/{result[f'{who} posterior']:6.1f}" for who in ("plain", "front")]
        unit = " s" if row.change_s is not None else "   SI-SDR" if row.near is not None else ""
        limit = "" if math.isnan(result["bound"]) else f"{result['bound']:7.1f}"
        print(f"{row.name:28s} {pairs[0]} {pairs[1]} {limit:>7s} {'' if kept(row, result) else 'FALLS'}{unit}")
        held.append(kept(row, result))
    bounded = [ok for ok, result in zip(held, results, strict=True) if not math.isnan(result["bound"])]
    first = {name: round(results[0][f"{name} prior"], 1) for name in ("plain", "front")}
    print(json.dumps({"benchmark": "robustness", "rows": len(held), "bounded": len(bounded), "held": sum(bounded),
                      "undisturbed_db": first}))  # fmt: skip


if __name__ == "__main__":
    main()
