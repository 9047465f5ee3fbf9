"""A rank that is slow, but moves: all others wait for it in every step, and nothing fails.

Each rank's own time is that of a step without its waits in collectives: at the agreement before a step, and between its
last gradient and the end of the exchange. At every logging step the ranks compare; who needs far more than the others
for several windows in a row is named, with what it costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

RATIO = 1.5  # of the median of the others
SHARE = 0.05  # of a step; less isn't worth a word
WINDOWS = 3  # in a row, so that a garbage collection or a page cache isn't a straggler
REPEAT = 50  # windows between two warnings about the same rank


class GradientClock:
    """Measures the time between this rank's last gradient and the end of their exchange.

    Which parameter's gradient comes last is learnt in the first backward pass; afterwards it alone has a hook.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device):
        self._cuda = device.type == "cuda"
        self._ready: float | torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited_s = 0.0
        self._last: nn.Parameter | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._learn) for p in parameters]

    def _learn(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._last = parameter
        self._mark(parameter)

    def _mark(self, parameter: Tensor) -> None:
        self._ready = self._now()

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """After the last backward pass of a step."""
        ready, end, self._ready = self._ready, self._now(), None
        if isinstance(ready, float) and isinstance(end, float):
            self._waited_s += end - ready
        elif isinstance(ready, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._waits.append((ready, end))
        if self._hooks and self._last is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._last.register_post_accumulate_grad_hook(self._mark)

    def take_s(self) -> float:
        """Seconds waited since the last call; on CUDA after the device has been waited for."""
        waited_s = self._waited_s + sum(ready.elapsed_time(end) for ready, end in self._waits) / 1e3
        self._waited_s, self._waits = 0.0, []
        return waited_s


class Stragglers:
    """Compares the ranks, window by window."""

    def __init__(self, hosts: Sequence[str]):
        self.hosts = hosts
        self._count = [0] * len(hosts)

    def slots(self, rank: int, own_s: float, data_s: float) -> list[float]:
        """What a rank adds to a sum over ranks so that all learn every rank's two numbers (seconds a step)."""
        values = [0.0] * (2 * len(self.hosts))
        values[2 * rank : 2 * rank + 2] = [own_s, data_s]
        return values

    def compare(self, told: Sequence[float], step_s: float) -> list[str]:
        """The sums of all slots -> warnings, mostly none."""
        own, data = list(told[::2]), list(told[1::2])
        found = []
        for rank, mine in enumerate(own):
            others = statistics.median(own[:rank] + own[rank + 1 :])
            slow = mine > RATIO * others and mine - others > SHARE * step_s
            self._count[rank] = self._count[rank] + 1 if slow else 0
            if slow and self._count[rank] % REPEAT == WINDOWS:
                found.append(
                    f"rank {rank} on {self.hosts[rank]} is slow: its own work takes {1e3 * mine:.0f} ms a step "
                    f"({1e3 * data[rank]:.0f} ms of it waiting for data), that of the others {1e3 * others:.0f} ms; "
                    f"they wait for it {100 * min(1.0, (mine - others) / step_s):.0f} % of the time. Look for other "
                    "load, heat or a slow disk on that machine"
                )
        return found
