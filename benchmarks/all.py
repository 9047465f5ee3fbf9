"""Every figure that the project claims, measured by one command, as a page in English and Chinese.

    python benchmarks/all.py [--only NAME ...] [--small] [--pages]
                             [--checkpoint RUN_DIR] [--recordings DIR] [--peers FOLDER] [--slurm]

Runs the benchmarks one after another, each in a process of its own, on a machine that should do nothing else (an hour
or two). What each prints as JSON goes, with the command, the machine and the time, into figures.json beside this file,
and docs/benchmarks.md and .zh.md are written from that; --only measures some anew and leaves the others as they were.
--peers names the folder with the other frameworks and livekit (see frameworks.py and cancellers.py), --recordings a
folder of real recordings, --checkpoint a trained run; --slurm also starts a cluster (root, and Debian's packages).
--small shows in minutes that every benchmark works: its figures mean nothing, and go to build/benchmarks/ instead.
--pages measures nothing. Exit code 1 when a benchmark failed or a bound was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from claims import BENCHES, Bench
from sheet import missed, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FIGURES = HERE / "figures.json"
CLUSTER = "tests/slurm/cluster.py"


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def command(bench: Bench, args: argparse.Namespace) -> list[str]:
    """The words as a person would type them, from the root of the repository."""
    words = ["python", f"benchmarks/{bench.script}", *(bench.small if args.small else bench.words)]
    for option in bench.options:
        if value := getattr(args, option):
            words += [f"--{option}", value]
    return ["python", CLUSTER, "--", *words] if bench.cluster else words


def hidden(words: list[str], args: argparse.Namespace) -> str:
    """The command for the page: the folders of this machine under names that anybody can fill in."""
    names = {args.checkpoint: "RUN_DIR", args.recordings: "DIR", args.peers: "FOLDER"}
    return shlex.join(names.get(word, word) for word in words)


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Runs it. -> what figures.json keeps of it"""
    words, begin = command(bench, args), time.monotonic()
    entry: dict[str, Any] = {"command": hidden(words, args), "date": datetime.now(UTC).date().isoformat()}
    entry |= {"machine": machine(), "load_before": round(os.getloadavg()[0], 2)}
    real = [sys.executable if word == "python" else word for word in words]
    process = subprocess.Popen(real, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        text, _ = process.communicate(timeout=bench.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        entry["failed"] = f"not done after {bench.limit_s:g} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    print(text, flush=True)
    entry["seconds"] = round(time.monotonic() - begin)
    entry["lines"] = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if "failed" not in entry and not entry["lines"]:
        entry["failed"] = f"exit code {process.returncode}, no figures"
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--slurm", action="store_true")
    for option in ("checkpoint", "recordings", "peers"):
        parser.add_argument(f"--{option}")
    args = parser.parse_args()
    figures, docs = (ROOT / "build/benchmarks/figures.json", None) if args.small else (FIGURES, ROOT / "docs")
    folder = docs or figures.parent
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    for bench in BENCHES if not args.pages else ():
        if bench.name not in args.only or (bench.cluster and not args.slurm):
            continue
        print(f"=== {bench.name}: {hidden(command(bench, args), args)}", flush=True)
        found[bench.name] = measure(bench, args)
        figures.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        write(found, folder)
    write(found, folder)
    problems = missed(found, [] if args.pages else args.only)
    print(*problems, sep="\n")
    return 1 if problems and not args.small else int(any("failed" in found.get(name, {}) for name in args.only))


if __name__ == "__main__":
    sys.exit(main())
