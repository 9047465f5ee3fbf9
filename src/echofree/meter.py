"""How much memory tensors take, operation by operation, and what a process and a device have at most.

`Meter` counts storages from the operation that makes them to their last reference, on any device, without a profiler.
What an operation takes for itself while it runs isn't seen, nor what an allocator keeps back.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echofree import resident

MB = 2**20
CGROUPS = (  # limit and use, of version 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Meter(TorchDispatchMode):
    """Inside `with`, follows every tensor that operations of this thread make, the backward pass on a CPU included.

    Args:
        apart: tensors that were there before and don't count, their views neither.
    """

    def __init__(self, apart: Iterable[Tensor] = ()):
        super().__init__()
        self.live = 0  # bytes
        self.timeline: list[int] = []  # bytes alive behind each operation
        self._known = {t.untyped_storage()._cdata for t in apart}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper(kind) for kind in types):
            return NotImplemented  # a sharded tensor turns into operations on its parts, which come here again
        out = func(*args, **(kwargs or {}))
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        self.timeline.append(self.live)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self._refs[key] = weakref.ref(storage, partial(self._gone, key, size))

    def _gone(self, key: int, size: int, _: Any) -> None:
        del self._refs[key]
        self._known.discard(key)
        self.live -= size

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(self.timeline, default=0)


def is_traceable_wrapper(kind: type) -> bool:
    """Whether tensors of this class stand for others, as a sharded one does for its part."""
    return hasattr(kind, "__tensor_flatten__")


def peak_mb(device: torch.device) -> float:
    """The most that this process has held so far: on CUDA in tensors on the device, else in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MB
    return resident.peak_mb()


def available(device: torch.device, sharers: int) -> int:
    """Bytes that one of `sharers` processes of this machine may still take on `device`.

    On a CPU the least of what the kernel, the control group and `ulimit -v` leave; there no error comes when it's
    exceeded, the kernel ends the process.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    limits = [int(lines["MemAvailable"].split()[0]) * 1024]
    for limit, used in CGROUPS:
        if Path(limit).is_file() and (text := Path(limit).read_text().strip()).isdigit():
            limits.append(int(text) - int(Path(used).read_text()))
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    found = min(limits) // sharers
    if own != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        found = min(found, own - pages * resource.getpagesize())
    return max(0, found)
