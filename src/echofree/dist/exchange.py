"""A trial of the collective back end: two small processes that sum a tensor. For the doctor.

They are started at once and asked for their result later, since importing torch takes most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZE_MB = 8
REPEATS = 5
GROUP_S = 15.0  # for one collective


@dataclass(frozen=True)
class Result:
    """mb_per_s: bytes of the tensor over the time of one all-reduce; error: why there is none."""

    backend: str
    mb_per_s: float = 0.0
    small_ms: float = 0.0
    error: str = ""


def backends() -> tuple[bool, str | None]:
    """-> (whether gloo is there, NCCL's version or None)."""
    nccl = None
    if dist.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call,unused-ignore]
        nccl = ".".join(map(str, version))
    return dist.is_gloo_available(), nccl


class Exchange:
    """Two ranks of this machine at work, in processes of their own."""

    def __init__(self, backend: str = "gloo"):
        self.backend = backend
        self._folder = tempfile.TemporaryDirectory(prefix="echofree-doctor-")
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "echofree.dist.exchange", backend, str(rank), self._folder.name],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(2)
        ]

    def result(self, limit_s: float) -> Result:
        """What they measured; after `limit_s` they are ended."""
        end = time.monotonic() + limit_s
        said = []
        try:
            for rank in self._ranks:
                try:
                    _, text = rank.communicate(timeout=max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return Result(self.backend, error=f"two ranks of this machine didn't meet within {limit_s:g} s")
                said.append((rank.returncode, text.strip().splitlines()[-1:]))
            for code, last in said:
                if code:
                    return Result(self.backend, error=last[0] if last else f"exit code {code}")
            return Result(self.backend, *json.loads((Path(self._folder.name) / "result").read_text()))
        finally:
            self.close()

    def close(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
            if rank.stderr is not None:
                rank.stderr.close()
        self._folder.cleanup()


def work(backend: str, rank: int, folder: str) -> None:
    """One rank of the trial."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=GROUP_S)
    )
    times = []
    for count in (256, SIZE_MB * 2**18):
        tensor = torch.full((count,), rank + 1.0, device=device)
        dist.all_reduce(tensor)
        if tensor[-1].item() != 3.0:
            raise RuntimeError(f"1 + 2 made {tensor[-1].item()}")
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # waits for the device
            taken.append(time.perf_counter() - began)
        times.append(sorted(taken)[REPEATS // 2])
    dist.barrier()
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps([SIZE_MB / times[1], 1e3 * times[0]]))
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # gloo may abort an interpreter that is torn down
