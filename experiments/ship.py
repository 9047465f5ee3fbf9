"""Makes the folder of a shipped model out of a finished run: its averaged weights, its config, what is known of it.

    python experiments/ship.py outputs/tiny/DATE_TIME src/echofree/weights/tiny

The names of the folders with audio don't travel (they are somebody's disk), nor do the host and the place where the run
was typed. MODEL_CARD.md is written by a person.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import yaml

from echofree import checkpoint
from echofree.config import frozen
from echofree.dist.world import World

KEPT = (
    "id", "status", "start", "end", "seed", "version", "python", "packages", "code_digest", "git_commit", "patch",
    "data_fingerprint", "step_size", "total_steps", "best", "steps", "peak_mem_mb",
)  # fmt: skip
ROOTS = ("speech_root", "noise_root", "rir_root")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    folder = checkpoint.find(args.run)
    run = checkpoint.run_of(folder)
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    if facts["status"] != "done":
        raise SystemExit(f"{run} is {facts['status']}: only a finished run is shipped")
    for name in ("checkpoints", "run.json", "config.yaml", "metrics.jsonl"):
        old = args.target / name
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    (args.target / "checkpoints").mkdir(parents=True)

    config = frozen.freeze(frozen.load(run))
    roots = {key: config["data"][key] for key in ROOTS if config["data"].get(key)}
    config["data"].update(dict.fromkeys(roots))
    config |= {"resume": None, "output_root": "outputs"}
    (args.target / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    kept = {key: facts[key] for key in KEPT if key in facts}
    command = facts["command"]
    for key, root in roots.items():
        command = command.replace(str(root), key.removesuffix("_root"))
    kept["command"] = re.sub(r" (train\.max_time|logger\.\w+)=\S+", "", command)
    (args.target / "run.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    shutil.copy(run / "metrics.jsonl", args.target / "metrics.jsonl")

    about = checkpoint.manifest(folder)
    told = {key: about[key] for key in ("run_id", "version", "step", "epoch", "scores", "world_size", "best_step")}
    weights = checkpoint.weights(folder)
    made = checkpoint.save(args.target / "checkpoints", told["step"], {"model": weights}, {}, told, World())
    for name in ("best", "last"):
        checkpoint.point(args.target / "checkpoints", name, made)
    print(f"{made}: {sum(path.stat().st_size for path in made.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
