"""How long a newcomer waits: the first optimizer step against importing torch and building the same model bare, and
the answers that need no torch.

    python benchmarks/startup.py [--rounds 5]

The first step counts from the start of the command to its line in metrics.jsonl, with everything in between: config
checks, run directory, data, banner, the first batch. Two bare scripts stand beside it: `bare` imports torch and builds
the model; `bare_step` goes on to one AdamW step on a batch of noise of the same size, of which the import of torch's
compiler by `torch.optim` and the step itself are the larger part. Prints a table and one JSON line; targets: 1.5 times
bare_step, and 1.5 s for --help and for an error in a typed group.
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

BARE = "import torch; from echofree.model.bark import BarkNet; BarkNet()"
BARE_STEP = (
    "import torch; from echofree.model.bark import BarkNet; torch.set_num_threads(1); model = BarkNet(); "
    "optimizer = torch.optim.AdamW(model.parameters()); mic, far = 0.1 * torch.randn(2, 16, 64000); "
    "model(mic, far).square().mean().backward(); "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()"
)
FIRST = ["train.log_every=1", "train.max_steps=1", "train.final_test=false", "train.batch_size=16"]


def timed(*command: str) -> float:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if "Traceback" in done.stderr:
        raise RuntimeError(f"{command}: {done.stderr}")
    return time.perf_counter() - begin


def first_step(folder: Path) -> float:
    """Seconds until the first training record is written; the rest of the run is ended."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "echofree.train", *FIRST],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            for path in folder.glob("outputs/*/*/metrics.jsonl"):
                if '"train"' in path.read_text():
                    return time.perf_counter() - begin
            if process.poll() is not None:
                raise RuntimeError(f"the run ended with {process.returncode} before its first step")
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    times: dict[str, list[float]] = {"bare": [], "bare_step": [], "first_step": [], "help": [], "typed_error": []}
    for _ in range(args.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            times["first_step"].append(first_step(Path(folder)))
        times["bare"].append(timed("-c", BARE))
        times["bare_step"].append(timed("-c", BARE_STEP))
        times["help"].append(timed("-m", "echofree.train", "--help"))
        times["typed_error"].append(timed("-m", "echofree.train", "train.epochs=many"))
    median = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms the disk
    for name, value in median.items():
        print(f"{name:12s} {value:6.2f} s")
    ratio = median["first_step"] / median["bare_step"]
    print(
        json.dumps(
            {
                "benchmark": "startup",
                "ratio": round(ratio, 3),
                "target": 1.5,
                "ratio_to_import_and_build": round(median["first_step"] / median["bare"], 3),
                **{k: round(v, 2) for k, v in median.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
