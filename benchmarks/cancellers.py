"""Side by side: a trained model, the linear filter, the microphone as it is, and the cancellers that others ship.

    python benchmarks/cancellers.py [--checkpoint RUN_DIR] [--recordings DIR] [--limit N] [--peers FOLDER]

All hear the same recordings (a folder as data=folder takes it; without one the embedded test scenes) and are scored by
`python -m echofree.evaluate` in one run, each as its program runs. peer.py says where the others come from; one that
can't be loaded is left out, and that is said. Without a checkpoint the linear filter stands for EchoFree. Prints the
table of evaluate and one JSON line: per system the means of the scores (null: nothing to score) and processor seconds
per second of audio.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCORES = {  # key -> (scenario, metric)
    "far_erle_db": ("far_end", "erle"),
    "far_echo": ("far_end", "aecmos_echo"),
    "talk_echo": ("double_talk", "aecmos_echo"),
    "talk_deg": ("double_talk", "aecmos_deg"),
    "near_deg": ("near_end", "aecmos_deg"),
    "near_level_db": ("near_end", "level_change"),
}


def present(folder: str | None) -> dict[str, list[str]]:
    """The peers that load here, with the command of each."""
    from peer import PEERS

    found = {}
    for name in PEERS:
        words = [sys.executable, str(HERE / "peer.py"), name, "{list}", *([folder] if folder else [])]
        tried = [word.replace("{list}", os.devnull) for word in words]
        trial = subprocess.run(tried, capture_output=True, text=True)
        if trial.returncode:
            print(f"left out: {name}: {trial.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        else:
            found[name] = words
    return found


def numbers(summary: dict[str, Any]) -> dict[str, float | None]:
    """The scores of one system in scores.json."""
    rows: dict[str, float | None] = {}
    for key, (scenario, metric) in SCORES.items():
        value = summary["scenarios"].get(scenario, {}).get("metrics", {}).get(metric)
        rows[key] = None if value is None else value["mean"]
    # processor time hop by hop of a model; that of a program needs no second measurement
    rows["rtf"] = summary["rtf"] if summary.get("rtf_stream") is None else summary["rtf_stream"]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--checkpoint")
    parser.add_argument("--recordings")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--peers", help="the folder into which livekit is installed")
    args = parser.parse_args()
    words = [f"checkpoint={args.checkpoint}" if args.checkpoint else "model=linear", "listen=null"]
    words += ["data=folder", f"data.root={args.recordings}", "data.test_fraction=1"] if args.recordings else []
    words += ["data.valid_fraction=0"] if args.recordings else ["data.num_test=24"]
    words += [f"limit={args.limit}"] if args.limit else []
    for name, command in present(args.peers).items():
        words.append(f"system.{name}.command={shlex.join(command)}")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "echofree.evaluate", *words, f"out={folder}/scores"])
        if done.returncode:
            return done.returncode
        systems = json.loads(Path(folder, "scores/scores.json").read_text(encoding="utf-8"))["systems"]
    print(json.dumps({"benchmark": "cancellers", "systems": {name: numbers(found) for name, found in systems.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
