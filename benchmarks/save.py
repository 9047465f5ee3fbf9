"""How long training stands for a checkpoint: at once, in the background, and beside a plain write of the same bytes.

    python benchmarks/save.py [--model base] [--rounds 5] [--folder DIR]

The content is that of a real run: weights and two moments of each (zeros would be written as fast). In turns, so that a
busy machine slows all: the bytes of a checkpoint in as many files with fsync; `Saver.save` at once; `Saver.save` in the
background, of which only what training waits for counts. Prints medians and one JSON line. Targets: the stall in the
background at most a quarter of a save at once; a save at once within 1.3 of the plain write.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echofree import checkpoint, space
from echofree.config.build import build_model
from echofree.config.compose import compose
from echofree.config.schema import CheckpointConfig
from echofree.dist.watchdog import Pulse
from echofree.dist.world import World
from echofree.saver import Saver
from echofree.stop import StopFlag


def content(name: str) -> dict[str, Any]:
    """The shared part of a checkpoint of a model after some steps."""
    model = build_model(compose([f"model={name}"]).config)
    weights = model.state_dict()
    moments = {i: {k: torch.randn_like(p) for k in ("exp_avg", "exp_avg_sq")} for i, p in enumerate(model.parameters())}
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}, "train": {"state": {}}}


def plain(root: Path, blocks: list[bytes]) -> None:
    root.mkdir()
    for i, block in enumerate(blocks):
        with open(root / str(i), "wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="save-", dir=args.folder))
    shared = content(args.model)
    blocks = [os.urandom(1 << 20) * (space.size(part) >> 20) for part in shared.values() if space.size(part) >> 20]
    savers = {}
    for name, background in (("at once", False), ("in the background", True)):
        rule = CheckpointConfig(keep_last=1, keep_best=0, async_save=background)
        savers[name] = Saver(root / name, "run", rule, World(), Pulse(), StopFlag())
    times: dict[str, list[float]] = {"plain write": [], "at once": [], "in the background": [], "whole background": []}
    for step in range(1, args.rounds + 2):  # the first round warms up
        about = {"run_id": "run", "step": step, "epoch": 0, "scores": {}, "world_size": 1, "best_step": 0}
        took = {"plain write": timed(lambda: plain(root / "plain", blocks))}
        shutil.rmtree(root / "plain")
        for name, saver in savers.items():
            took[name] = timed(
                lambda saver=saver, about=about: saver.save(shared, checkpoint.random_state(), about, False)
            )
            took["whole background"] = took[name] + timed(saver.finish)
        if step > 1:
            for name, seconds in took.items():
                times[name].append(seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    size = sum(map(len, blocks)) / 1e6
    print(f"model={args.model}, {size:.0f} MB: " + ", ".join(f"{n} {s:.3f} s" for n, s in medians.items()))
    stall = statistics.median(b / a for a, b in zip(times["at once"], times["in the background"], strict=True))
    sync = statistics.median(b / a for a, b in zip(times["plain write"], times["at once"], strict=True))
    print(json.dumps({"megabytes": size, **medians, "background / at once": stall, "at once / plain": sync}))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
