"""How fast scenes are made: seconds of audio per second of one core, with a warm room bank.

    python benchmarks/scene.py [--scenes 200] [--speech_root DIR]

Prints a table and one JSON line. The target is 200 times real time.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from echofree.contracts import Scenario
from echofree.data.rir import BankConfig, build_bank
from echofree.data.synthetic import Synthetic

TARGET = 200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--speech_root", default=None)
    args = parser.parse_args()

    start = time.process_time()
    build_bank(BankConfig())
    cold_s = time.process_time() - start

    source = Synthetic(num_train=args.scenes, speech_root=args.speech_root)
    start = time.perf_counter()
    scenes = source.split("train")
    assert scenes is not None
    scenes.item(0, 0)
    first_s = time.perf_counter() - start

    cpu_s = np.zeros(args.scenes)
    kind = np.zeros(args.scenes, dtype=int)
    wall = time.perf_counter()
    for i in range(args.scenes):
        before = time.process_time()
        kind[i] = int(scenes.item(i, 1).scenario)
        cpu_s[i] = time.process_time() - before
    wall = time.perf_counter() - wall
    seconds = scenes.num_samples / scenes.sample_rate
    for scenario in Scenario:
        if np.any(kind == scenario):
            ms = 1000 * cpu_s[kind == scenario]
            print(f"{scenario.name:12s} {len(ms):4d} scenes  {ms.mean():6.2f} ms  (slowest {ms.max():.2f})")
    result = {
        "benchmark": "scene",
        "times_real_time_cpu": round(seconds * args.scenes / cpu_s.sum(), 1),
        "times_real_time_wall": round(seconds * args.scenes / wall, 1),
        "target": TARGET,
        "room_bank_cold_cpu_s": round(cold_s, 2),
        "first_scene_s": round(first_s, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
