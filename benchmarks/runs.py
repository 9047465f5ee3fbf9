"""How long `python -m echofree.runs` takes over ten thousand run directories.

    python benchmarks/runs.py [--runs 10000] [--rounds 3]

The directories look like real ones: run.json of a few kilobytes, config.yaml, logs, checkpoints; one in twenty crashed
while it ran. The time is that of the whole command, Python's start included. Target: 3 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from echofree import rundir


def fill(root: Path, count: int) -> None:
    """Copies one real run.json, with other numbers, into `count` directories of 20 names."""
    made = rundir.create(root / "seed", "seed: 0\n", ["python", "-m", "echofree.train", "optim.lr=0.001"], 0)
    facts = json.loads((made / rundir.RUN).read_text())
    facts |= {"metric": "loss", "world": {"size": 1, "hosts": ["a"], "device": "cpu", "threads": 2}, "steps": 500}
    for number in range(count):
        folder = root / f"name{number % 20}" / f"2026-01-01_00-00-00-{number}"
        (folder / "logs").mkdir(parents=True)
        best = folder / "checkpoints" / "step-000500"
        best.mkdir(parents=True)
        crashed = number % 20 == 7
        settings = {"optim.lr": 0.001 * number, "train.batch_size": 8, "name": f"name{number % 20}"}
        told = {
            "status": "running" if crashed else "done",
            "best": number / count,
            "settings": settings,
            "start": number,
        }
        (folder / rundir.RUN).write_text(json.dumps({**facts, **told}, indent=1))
        (folder / rundir.CONFIG).write_text("seed: 0\n")
        (folder / rundir.METRICS).write_text('{"kind": "train", "step": 10, "loss": 1.0}\n' * 50)
        (folder / ".lock").write_text("process 1 on a")
        (best / "manifest.json").write_text(json.dumps({"scores": {"loss": 0.5}}))
        (folder / "checkpoints" / "best").write_text("step-000500\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        fill(Path(folder), args.runs)
        times = []
        for _ in range(args.rounds):
            began = time.perf_counter()
            command = [sys.executable, "-m", "echofree.runs", folder, "sort=-best", "filter=status=failed"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            times.append(time.perf_counter() - began)
    print(f"{args.runs} runs, {len(told.splitlines()) - 1} of them shown: {statistics.median(times):.2f} s")
    print(json.dumps({"runs": args.runs, "seconds": times}))


if __name__ == "__main__":
    main()
