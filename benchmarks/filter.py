"""How fast the linear front end runs: seconds of audio per second of one core, in one process and one thread.

    python benchmarks/filter.py [--batch 64] [--seconds 10]

Two rows: the Kalman filter alone (prediction and update of every hop), and the front end as a whole: conditioning,
filter, delay estimation, guards. Prints a table and one JSON line. The target is 250 times real time for the filter.
Times are medians over periods of 16 hops; on a machine with other work, the fastest period is the better number.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from echofree.model.frontend import CPU_BATCH, FrontEnd

TARGET = 250.0
HOPS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    front = FrontEnd()
    chunk = min(args.batch, CPU_BATCH)
    chunks = -(-args.batch // chunk)
    runs = max(1, round(args.seconds / (HOPS * front.hop_s)))
    torch.manual_seed(0)
    far = 0.05 * torch.randn(chunk, (runs + 1) * HOPS * front.hop_samples)
    mic = 0.3 * far.roll(300, -1) + 1e-4 * torch.randn_like(far)

    whole_s, filter_s = [], []
    with torch.no_grad():
        for _ in range(chunks):
            whole_s += time_front_end(front, mic, far)[1:]
            filter_s += time_filter(front, mic, far)[1:]
    audio_s = chunk * HOPS * front.hop_s
    result: dict[str, float] = {"batch": args.batch, "seconds": args.seconds}
    print(f"{'':12s} {'median':>8s} {'fastest':>8s}   times real time per core, target {TARGET:.0f} for the filter")
    for name, values in (("filter", filter_s), ("front end", whole_s)):
        median, fastest = audio_s / float(np.median(values)), audio_s / min(values)
        print(f"{name:12s} {median:8.0f} {fastest:8.0f}")
        result |= {f"{name.replace(' ', '_')}_median_x": median, f"{name.replace(' ', '_')}_fastest_x": fastest}
    print(json.dumps({key: round(value, 1) for key, value in result.items()}))


def time_front_end(front: FrontEnd, mic: torch.Tensor, far: torch.Tensor) -> list[float]:
    """Seconds for each period of all the front end does."""
    pair, state, out = torch.stack([mic, far], dim=1), front.init_state(len(mic)), []
    size = HOPS * front.hop_samples
    for start in range(0, pair.shape[-1], size):
        begin = time.perf_counter()
        front._advance(pair[:, :, start : start + size], state, due=True)
        out.append(time.perf_counter() - begin)
    return out


def time_filter(front: FrontEnd, mic: torch.Tensor, far: torch.Tensor) -> list[float]:
    """Seconds for each period of prediction and update, transforms included."""
    hop, count, kalman = front.hop_samples, front.num_partitions, front.filter
    state = kalman.init_state(len(mic))
    state["variance"] += 1.0
    line = torch.nn.functional.pad(far, (hop * count, 0))
    ones, out = torch.ones(len(mic), 1), []
    for start in range(0, far.shape[-1], HOPS * hop):
        begin = time.perf_counter()
        spectra = torch.fft.rfft(line[:, start : start + (HOPS + count) * hop].unfold(-1, 2 * hop, hop))
        re, im = spectra.real.contiguous(), -spectra.imag
        power = re.square().addcmul_(im, im)
        for i in range(HOPS):
            block = slice(i, i + count)
            error = mic[:, start + i * hop : start + (i + 1) * hop] - kalman.predict(spectra[:, block], state)
            planes = (re[:, block], im[:, block])
            kalman.correct(planes, power[:, block], torch.stack([error, error], 1), ones, 1e-7 * ones, state)
        out.append(time.perf_counter() - begin)
    return out


if __name__ == "__main__":
    main()
