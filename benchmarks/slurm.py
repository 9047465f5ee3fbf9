"""What a job on a cluster costs beside the bare thing, and whether it survives whatever the scheduler does.

    python tests/slurm/cluster.py -- python benchmarks/slurm.py start [--rounds 5] [--tasks-per-node 2]
    python tests/slurm/cluster.py -- python benchmarks/slurm.py soak [--stops 20]

start: a job of two nodes with two ranks each, from sbatch to the end of its first optimizer step. Beside it `bare`: a
script that a person would write, started by the same srun: import torch, init_process_group, the same model in
DistributedDataParallel, one AdamW step on noise of the same size. In turn, medians; target: 1.2. Where both nodes are
one machine with fewer cores than ranks, everything beyond torch that a rank does (composing the config, two loader
workers that make scenes and run the linear stage ahead) waits for a core.

soak: one job of two ranks that is stopped again and again, by the signal of --signal (a time-out) and by a job of a
higher partition (a preemption), each at a random moment. None may be lost: every stop is counted in run.json with its
kind, and the curve equals that of a run which nobody has disturbed, number for number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUIET = {"OMP_NUM_THREADS": "1"}
TRAIN = ["-m", "echofree.train", "dist=ddp", "train.device=cpu", "train.log_every=1", "train.final_test=false"]
FIRST = ["train.max_steps=1", "train.batch_size=4", "data.num_train=64", "data.num_valid=4"]
BARE = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from echofree.model.bark import BarkNet
torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
os.environ.update(MASTER_ADDR="node1", MASTER_PORT="29400")
dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
model = BarkNet()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())
mic, far = 0.1 * torch.randn(2, 4, 64000)
ddp(mic, far).square().mean().backward()
torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
optimizer.step()
if dist.get_rank() == 0:
    open("first", "w").write("x")
dist.barrier()
os._exit(0)
"""


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip()


def submit(folder: Path, command: list[str], *options: str) -> str:
    script = folder / "script.sh"
    script.write_text("#!/bin/bash\nexec srun " + " ".join(f"'{word}'" for word in command) + "\n")
    words = ["sbatch", "--parsable", "-o", "%j.out", "--open-mode=append", "-t", "60", *options, str(script)]
    done = subprocess.run(words, cwd=folder, env={**os.environ, **QUIET}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def over(job: str) -> str:
    """The state in which it has ended; "" while it hasn't."""
    state = said("squeue", "-h", "-r", "-t", "all", "-o", "%T", "-j", job)
    return "" if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") else state


def restarts(job: str) -> int:
    words = dict(word.partition("=")[::2] for word in said("scontrol", "show", "job", "-o", job).split())
    return int(words.get("Restarts", 0))


def until_over(job: str, limit_s: float) -> str:
    end = time.monotonic() + limit_s
    while not (state := over(job)):
        if time.monotonic() > end:
            raise TimeoutError(f"job {job}")
        time.sleep(0.2)
    return state


def first_step(folder: Path, command: list[str], pattern: str, tasks: int) -> float:
    """Seconds from sbatch to the file that the first step writes."""
    folder.mkdir()
    begin = time.time()
    job = submit(folder, command, "-N2", f"--ntasks-per-node={tasks}")
    end = begin + 120
    while not (found := [path for path in folder.glob(pattern) if path.stat().st_size]) and time.time() < end:
        time.sleep(0.01)
    if not found:
        raise RuntimeError("".join(path.read_text() for path in folder.glob("*.out")))
    took = found[0].stat().st_mtime - begin
    until_over(job, 120)
    return took


def start(rounds: int, tasks: int) -> int:
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "bare.py").write_text(BARE)
        for number in range(rounds + 1):  # the first warms the caches
            theirs = first_step(Path(name) / f"bare{number}", [sys.executable, f"{name}/bare.py"], "first", tasks)
            mine = first_step(
                Path(name) / f"ours{number}", [sys.executable, *TRAIN, *FIRST], "outputs/*/*/metrics.jsonl", tasks
            )
            print(f"round {number}: bare {theirs:.2f} s, echofree {mine:.2f} s", flush=True)
            if number:
                bare.append(theirs)
                ours.append(mine)
    ratio = statistics.median(ours) / statistics.median(bare)
    result = {
        "bare_s": statistics.median(bare),
        "ours_s": statistics.median(ours),
        "ratio": ratio,
        "rounds": rounds,
        "tasks_per_node": tasks,
    }
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))
    return int(ratio > 1.2)


def curve(folder: Path) -> list[tuple[int, float, float]]:
    (path,) = folder.glob("outputs/*/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


def steps_of(folder: Path) -> int:
    paths = list(folder.glob("outputs/*/*/metrics.jsonl"))
    return len(paths[0].read_text().splitlines()) if paths else 0


def soak(stops: int, seed: int) -> int:
    rng = random.Random(seed)
    experiments = Path(__file__).resolve().parents[1] / "tests" / "ranks" / "experiments"
    os.environ["ECHOFREE_EXPERIMENTS"] = str(experiments)
    words = ["model=faulty", "data=faulty", "task.metrics=[si_sdr]", "task.sample_rate=16000", "train.batch_size=2"]
    words += [f"data.num_train={4 * 24 * stops}", "train.epochs=1", "train.save_every_steps=1000"]
    two = ["-N2", "--ntasks-per-node=1", "--signal=USR2@60"]
    with tempfile.TemporaryDirectory() as name:
        still, job_dir, high = Path(name) / "still", Path(name) / "job", Path(name) / "high"
        for folder in (still, job_dir, high):
            folder.mkdir()
        until_over(submit(still, [sys.executable, *TRAIN, *words], *two), 600)
        job = submit(job_dir, [sys.executable, *TRAIN, *words, "+model.pace_s=0.05"], *two, "-p", "low", "--exclusive")
        kinds = ["timeout", "preemption"] * stops
        rng.shuffle(kinds)
        for number, kind in enumerate(kinds):
            begin, seen = time.monotonic(), steps_of(job_dir)
            while steps_of(job_dir) < seen + 2 and not over(job):  # it has got somewhere
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 0.3))
            if over(job):
                print(f"ended after {number} stops: {over(job)}\n{(job_dir / f'{job}.out').read_text()[-3000:]}")
                return 1
            if kind == "timeout":
                said("scancel", "--signal=USR2", job)
            else:
                until_over(submit(high, ["true"], "-N2", "-p", "high", "--exclusive"), 120)
            while restarts(job) <= number and not over(job):  # two stops at once would be counted as one
                time.sleep(0.1)
            print(f"{number}: {kind}, {steps_of(job_dir)} steps, {time.monotonic() - begin:.1f} s", flush=True)
        state = until_over(job, 600)
        (record,) = job_dir.glob("outputs/*/*/run.json")
        facts = json.loads(record.read_text())
        equal = curve(still) == curve(job_dir)
        print(
            json.dumps({"state": state, "counts": facts["stop_counts"], "equal": equal, "steps": len(curve(job_dir))})
        )
        wanted = {"timeout": stops, "preemption": stops}
        return int(not (state == "COMPLETED" and facts["stop_counts"] == wanted and equal))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["start", "soak"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks-per-node", type=int, default=2)
    parser.add_argument("--stops", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    return start(asked.rounds, asked.tasks_per_node) if asked.what == "start" else soak(asked.stops, asked.seed)


if __name__ == "__main__":
    sys.exit(main())
