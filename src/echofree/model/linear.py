"""The `linear` model: the front end alone. Nothing to train; the bar that every network has to clear.

Legend: B batch, T samples, M hop.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from echofree.contracts import State
from echofree.model.frontend import FrontEnd


class Linear(nn.Module):
    """Microphone minus the echo estimate of a Kalman filter.

    Args:
        sample_rate: Hz, a multiple of 4000.
        hop_samples: M; also the latency.
        num_partitions: the filter spans num_partitions x M samples behind the estimated delay.
        transition: just below 1: higher converges deeper, lower follows changes faster.
        output: "posterior" or "prior", see `KalmanFilter`.
        max_delay_ms: bulk delays up to here are found and taken out.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        hop_samples: int = 256,
        num_partitions: int = 10,
        transition: float = 0.999,
        output: str = "posterior",
        max_delay_ms: float = 1000.0,
    ):
        super().__init__()
        self.front = FrontEnd(
            sample_rate=sample_rate,
            hop_samples=hop_samples,
            num_partitions=num_partitions,
            transition=transition,
            output=output,
            max_delay_ms=max_delay_ms,
        )
        self.sample_rate, self.hop_samples, self.latency_samples = sample_rate, hop_samples, hop_samples

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor | dict[str, Any]:
        """mic, far [B, T] -> estimate [B, T]; with details also "echo" [B, T] and the front end's "flags"."""
        out = self.front(mic, far, details=details)
        if not details:
            return out["error"]
        return {"est": out["error"], "echo": out["echo"], "mic": out["mic"], "flags": out["flags"]}

    def init_state(self, batch: int) -> State:
        """A fresh stream, see `FrontEnd.init_state`."""
        return self.front.init_state(batch)

    def step(self, mic: Tensor, far: Tensor, state: State) -> tuple[Tensor, State]:
        """mic, far [B, M] -> (estimate [B, M] of the same samples, new state)."""
        out, state = self.front.step(mic, far, state)
        return out["error"], state

    def graph(self) -> None:
        """Nothing of it is exported as a graph: the runtime's own linear stage is all of it."""
        return
