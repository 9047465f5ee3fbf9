"""What a teacher adds: the same student, steps and scenes with and without one, for several seeds.

    python benchmarks/distill.py [--teacher tiny] [--student tiny] [--steps 150] [--seeds 0 1 2] [key=value ...]

The student begins from nothing. Scored on the run's test scenes (its own 64 of 8 s, which neither saw): SI-SDR wherever
somebody talks, ERLE where only the far end does. Words behind the options go to every training. Target: at least 0.3 dB
SI-SDR more with the teacher, as the mean over seeds; the spread is told with it.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TAUGHT = ("task=distill", "task.weights.gain=1.0", "task.weights.latent=0.1")


def train(folder: Path, words: list[str]) -> dict[str, float]:
    """A training to its end in a folder of its own. -> mean scores of its test scenes"""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "echofree.train", *words]
    subprocess.run(command, cwd=folder, stdout=sys.stderr, check=True)
    (path,) = folder.glob("outputs/*/*/evaluate/test/scores.csv")
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["system"] not in ("mic", "linear")]
    wanted = {"si_sdr": ("double_talk", "near_end"), "erle": ("far_end",), "speech_survival": ("double_talk",)}
    return {
        name: statistics.mean(float(row[name]) for row in rows if row["scenario"] in scenarios and row[name])
        for name, scenarios in wanted.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--teacher", default="tiny")
    parser.add_argument("--student", default="tiny")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, words = parser.parse_known_args()
    pairs = []
    with tempfile.TemporaryDirectory(prefix="distill-") as name:
        for seed in args.seeds:
            same = [
                f"model={args.student}", "loss=bark", f"seed={seed}", f"train.max_steps={args.steps}", *words
            ]  # fmt: skip
            taught = [*TAUGHT, f"task.teacher={args.teacher}"]
            plain = train(Path(name) / f"plain{seed}", same)
            pairs.append(
                {"seed": seed, "plain": plain, "taught": train(Path(name) / f"taught{seed}", [*same, *taught])}
            )
            print(json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    gains = {key: [pair["taught"][key] - pair["plain"][key] for pair in pairs] for key in pairs[0]["plain"]}
    print(
        json.dumps(
            {
                "steps": args.steps,
                "seeds": pairs,
                "gain": {key: statistics.mean(values) for key, values in gains.items()},
                "least": {key: min(values) for key, values in gains.items()},
                "most": {key: max(values) for key, values in gains.items()},
                "plain_si_sdr": statistics.mean(pair["plain"]["si_sdr"] for pair in pairs),
                "plain_erle": statistics.mean(pair["plain"]["erle"] for pair in pairs),
            }
        )
    )


if __name__ == "__main__":
    main()
