"""Does a run survive being killed at any moment? Hundreds of kills, each followed by a resume, and a comparison.

    python benchmarks/soak.py [--kills 200] [--ranks 1|2] [--dist ddp|fsdp] [--steps 60] [--seed N] [--terms 0.15]
                              [--folder DIR]

A small run (dropout, batch norm, moving average, cosine, accumulation, early-stop counters, retention, archive; saves
in the background in every other run) is started again and again in forked ranks. Each life ends by SIGKILL after a
random time, by SIGKILL in the n-th call of something that touches the disk (fsync, rename, remove, torch.save,
checksum, archive), or by TERM. After each: an undamaged checkpoint is found whenever there was one, and none is older
than before. When a run gets through, its records, weights, averages and moments are compared bit for bit with those of
a run that was never touched. Exit code 0 only if all are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer step imports it, in every forked rank anew
from torch import Tensor, nn

from echofree import checkpoint, compare, durable, restart, retention, rundir, train
from echofree.config import frozen
from echofree.config.compose import compose
from echofree.contracts import Batch, Clip
from echofree.process import die_with

HERE = "experiments.soak"  # the name under which the config finds the classes below
RATE_HZ, SAMPLES = 16000, 400
SAVE_EVERY = 4
GRACE_S = 20.0  # for the other rank to end by itself


class SoakModel(nn.Module):
    """mic, far [B, T] -> [B, T]."""

    sample_rate, hop_samples, latency_samples = RATE_HZ, 1, 3

    def __init__(self, hidden: int = 8):
        super().__init__()
        self.wide = nn.Conv1d(2, hidden, 5, padding=2)
        self.norm, self.drop = nn.BatchNorm1d(hidden), nn.Dropout(0.2)
        self.out = nn.Conv1d(hidden, 1, 1)

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.wide(torch.stack([mic, far], 1)))))  # [B, H, T]
        out: Tensor = self.out(x)[:, 0]  # [B, T]
        return out


class SoakLoss:
    """Mean square error of each clip times its seconds."""

    needs: tuple[str, ...] = ()

    def __call__(self, out: dict[str, Any], batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = ((out["est"] - batch.near).square().mean(1) * batch.weight).sum()
        return total, batch.weight.sum(), {"mse": total.detach()}


class SoakClips:
    """Noise that is a function of (seed, epoch, index)."""

    sample_rate = RATE_HZ

    def __init__(self, num: int, seed: int):
        self.num, self.seed = num, seed

    def __len__(self) -> int:
        return self.num

    def item(self, index: int, epoch: int) -> Clip:
        rng = np.random.default_rng([self.seed, epoch, index])
        near, far = (rng.standard_normal((2, SAMPLES)) * 0.3).astype(np.float32)
        return Clip(near + far, far, near, name=f"clip {index}", index=index)


class SoakData:
    sample_rate = RATE_HZ

    def split(self, name: str) -> SoakClips | None:
        return {"train": SoakClips(50, 1), "valid": SoakClips(5, 2)}.get(name)

    def fingerprint(self) -> str:
        return "soak"

    def survey(self) -> list[tuple[str, str]]:
        return []


def make(folder: Path, ranks: int, dist: str, steps: int, background: bool, archive: Path | None) -> Path:
    """A run directory, ready to start."""
    words = [
        f"train.max_steps={steps}", "train.epochs=999", "train.batch_size=2", "train.gradient_accumulation_steps=2",
        f"train.save_every_steps={SAVE_EVERY}", "train.save_interval=0", "train.eval_interval=1", "train.log_every=3",
        "train.ema_decay=0.9", "train.final_test=false", "train.device=cpu", "train.early_stop_patience=900",
        "optim.warmup_steps=5", f"checkpoint.async_save={str(background).lower()}", "task.metrics=[]",
        f"checkpoint.keep_every_steps={5 * SAVE_EVERY}", "logger.level=warning", "dist.threads=1", "seed=7",
        f"dist={dist}", f"dist.num_procs={ranks}", "dist.timeout_s=60",
    ]  # fmt: skip
    if archive is not None:
        words.append(f"checkpoint.archive_dir={archive}")
    config = frozen.freeze(compose(words).config)
    config["model"] = {"_target_": f"{HERE}.SoakModel", "hidden": 8}
    config["loss"] = {"_target_": f"{HERE}.SoakLoss"}
    config["data"] = {"_target_": f"{HERE}.SoakData", "num_workers": 0, "prefetch_factor": 2}
    rundir.create_at(folder, frozen.dump(config), ["soak"], 7)
    return folder


# --- one life -------------------------------------------------------------------------------------------------------

DEADLY: dict[str, tuple[Any, str]] = {
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "remove": (shutil, "rmtree"),
    "save": (torch, "save"),
    "checksum": (durable, "sha256"),
    "text": (durable, "sync_text"),
    "retention": (checkpoint, "remove"),
    "archive": (retention, "archive"),
}


def arm(where: str, nth: int) -> None:
    """This process kills itself in call `nth` of a function, before or after it did its work."""
    module, name = DEADLY[where]
    real, count, after = getattr(module, name), [0], nth % 2

    def deadly(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == nth and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if count[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, deadly)


def start(folder: Path, ranks: int, prepare: Callable[[int], None]) -> list[int]:
    """Forks the ranks; -> their processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parent, pids = os.getpid(), []
    for rank in range(ranks):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        try:
            die_with(parent)
            with open(folder / "logs" / f"soak{rank}.txt", "a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if ranks > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
                os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ |= {"TORCHELASTIC_RUN_ID": f"soak-{port}"}
            prepare(rank)
            train.leave(train.work(folder))
        finally:
            os._exit(1)
    return pids


def live(folder: Path, ranks: int, plan: tuple[str, float], rng: random.Random, limit_s: float) -> list[int]:
    """One life of the run, ended as `plan` says. -> wait statuses (negative: the signal that ended a rank)"""
    how, amount = plan
    victim = rng.randrange(ranks)
    pids = start(folder, ranks, lambda rank: arm(how, int(amount)) if how in DEADLY and rank == victim else None)
    began, asked, codes = time.monotonic(), False, dict.fromkeys(pids, 0)
    left, first_end = set(pids), None
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
                first_end = first_end or time.monotonic()
        now = time.monotonic()
        if not asked and how in ("time", "all", "term") and now - began > amount:
            asked = True
            for pid in [pids[victim]] if how == "time" else pids:
                if pid in left:
                    os.kill(pid, signal.SIGTERM if how == "term" else signal.SIGKILL)
        if (first_end and now - first_end > GRACE_S) or now - began > limit_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            if now - began > limit_s:
                raise SystemExit(f"a life took more than {limit_s:g} s: {folder}")
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def resume(folder: Path, ranks: int) -> None:
    """What `resume=<folder>` does before the ranks start."""
    config = frozen.load(folder)
    config.resume_allow = ["code"]  # the source may be worked on meanwhile
    restart.prepare(rundir.RunDir(folder, is_first=True), config, None, ranks, [])


# --- the soak -------------------------------------------------------------------------------------------------------


def soak(root: Path, kills: int, ranks: int, dist: str, steps: int, terms: float, seed: int) -> dict[str, Any]:
    rng, counts = random.Random(seed), Counter[str]()
    reference = make(root / "untouched", ranks, dist, steps, False, None)
    began = time.monotonic()
    codes = live(reference, ranks, ("none", 0), rng, 600.0)
    full_s = time.monotonic() - began
    if any(codes):
        raise SystemExit(f"the run that nobody touches ended with {codes}: see {reference}/logs")
    print(f"untouched: {full_s:.1f} s, {steps} steps, {ranks} rank(s)", flush=True)
    folder, newest, run, wrong = None, 0, 0, []
    while counts["kills"] < kills or folder is not None:
        resumed = folder is not None
        if folder is None:
            run += 1
            archive = root / "archive" if run % 3 == 0 else None
            folder, newest = make(root / f"run{run}", ranks, dist, steps, run % 2 == 0, archive), 0
        else:
            resume(folder, ranks)
        over = counts["kills"] >= kills
        codes = live(folder, ranks, ("none", 0) if over else plan(rng, full_s, terms), rng, 20 * full_s + 120)
        if any(code < 0 for code in codes):
            counts["kills"] += 1
        found = checkpoint.newest_good(folder / "checkpoints")
        step = 0 if found is None else int(checkpoint.manifest(found)["step"])
        if step < newest:
            wrong.append(f"{folder.name}: a kill lost a checkpoint: {newest} before, {step} after")
        newest = max(newest, step)
        counts["lives"] += 1
        counts["resumes"] += resumed
        counts["terms that saved"] += int(codes[0] == 75)
        if all(code == 0 for code in codes):
            problem = differs(reference, folder, steps)
            wrong += [f"{folder.name}: {problem}"] if problem else []
            counts["runs"] += 1
            counts["equal"] += not problem
            print(f"{folder.name}: {problem or 'equal'}; {dict(counts)}", flush=True)
            if not problem:
                shutil.rmtree(folder)
            folder = None
    return {
        "ranks": ranks,
        "dist": dist,
        "seed": seed,
        **counts,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began),
    }


def plan(rng: random.Random, full_s: float, terms: float) -> tuple[str, float]:
    """How the next life ends: (what, after how many seconds or in which call)."""
    draw = rng.random()
    if draw < terms:
        return "term", rng.uniform(0.1, 0.8) * full_s
    if draw < 0.5:
        return rng.choice(["time", "all"]), rng.uniform(0.0, 0.9) * full_s
    return rng.choice(list(DEADLY)), float(rng.randint(1, 24))


def differs(reference: Path, folder: Path, steps: int) -> str:
    """The first difference from the untouched run; "" for none."""
    where = compare.in_records(compare.records(reference, steps), compare.records(folder, steps), 0.0)
    if where is not None:
        return str(where)
    kept = [[p.name for p in checkpoint.complete(f / "checkpoints")] for f in (reference, folder)]
    missing = [n for n in kept[0] if n not in kept[1]]
    extra = [n for n in kept[1] if n not in kept[0]]  # saved at a stop: it takes the place of one of the last
    if len(missing) > len(extra) or any(n > max(extra) for n in missing):
        return f"kept {kept[1]} and not {kept[0]}"
    for a, b in compare.common_checkpoints(reference, folder, steps):
        where, _ = compare.in_weights(a, b, 0.0)
        if where is not None:
            return str(where)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dist", default="ddp", choices=["ddp", "fsdp"], help="fsdp: checkpoints in parts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--terms", type=float, default=0.15, help="share of lives that end by TERM")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", default=None, help="where the runs go; left out: a temporary folder")
    args = parser.parse_args()
    sys.modules[HERE] = sys.modules[__name__]
    torch.set_num_threads(1)
    root = Path(args.folder or tempfile.mkdtemp(prefix="soak-")).resolve()
    result = soak(root, args.kills, args.ranks, args.dist, args.steps, args.terms, args.seed)
    print(json.dumps(result))
    if not result["wrong"] and args.folder is None:
        shutil.rmtree(root)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
