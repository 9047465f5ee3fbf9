"""READ FIRST: the shapes in which the parts of EchoFree meet.

A reader follows a run in six names: train.main -> training.run_config -> Loop.fit -> Loop.step ->
strategy.run(task, ...) -> optimizer.step. Everything a user plugs in satisfies one of the protocols below; nothing is
inherited.

Legend: B batch, T samples, L frames, F bins, K bands. Audio is float32 in [-1, 1], mono, at the model's rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


class Scenario(IntEnum):
    """Who is talking in a clip. The values are stored in files: never renumber."""

    DOUBLE_TALK = 0
    FAR_END = 1  # far-end single talk: only echo at the microphone
    NEAR_END = 2  # near-end single talk: no echo
    SILENCE = 3
    UNKNOWN = 4  # a recording without labels


@dataclass
class Clip:
    """One example as a dataset makes it. Arrays are float32 [T], all of one length.

    Attributes:
        mic: microphone signal = near + echo + noise.
        far: far-end (loopback) signal as captured, not aligned.
        near: the target: near-end speech as it arrives at the microphone; None for recordings without one.
        echo: the true echo at the microphone, or None.
        noise: the noise at the microphone, or None.
        scenario: who is talking.
        delay_samples: samples by which the echo lags the far end; -1 when unknown.
        name: what a person would look for: a file stem or "train/epoch 0/clip 17".
        index: position in the dataset.
        seed: the seed that made it (0 for recordings).
    """

    mic: np.ndarray
    far: np.ndarray
    near: np.ndarray | None
    echo: np.ndarray | None = None
    noise: np.ndarray | None = None
    scenario: Scenario = Scenario.UNKNOWN
    delay_samples: int = -1
    name: str = ""
    index: int = 0
    seed: int = 0


@dataclass
class Batch:
    """Clips stacked, right-padded with zeros to the longest.

    Attributes:
        mic, far, near, echo, noise: [B, T]; `near`, `echo`, `noise` are zeros where unknown.
        has_near: [B] bool, whether `near` is a real target.
        has_echo: [B] bool, whether `echo` (and `noise`) are known.
        num_samples: [B] int64, valid samples of each clip.
        weight: [B] float32, seconds of valid audio; 0 marks a filler that only keeps ranks in step and counts nowhere.
        scenario: [B] int64, see `Scenario`.
        delay_samples: [B] int64, -1 when unknown.
        index: [B] int64, position in the dataset.
        name: B names.
        front: what the model's front end made of (mic, far), if that was done ahead (`Model.ahead`); None: it wasn't.
    """

    mic: Tensor
    far: Tensor
    near: Tensor
    echo: Tensor
    noise: Tensor
    has_near: Tensor
    has_echo: Tensor
    num_samples: Tensor
    weight: Tensor
    scenario: Tensor
    delay_samples: Tensor
    index: Tensor
    name: list[str] = field(default_factory=list)
    front: State | None = None

    def __len__(self) -> int:
        return self.mic.shape[0]

    @property
    def given(self) -> dict[str, Any]:
        """What a model gets beside mic and far: what was done ahead, if anything was."""
        return {} if self.front is None else {"front": self.front}

    def map(self, function: Any) -> Batch:
        """A batch with `function` applied to every tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        front = values.pop("front")
        if front is not None:
            front = {name: function(value) for name, value in front.items()}
        return Batch(**{k: function(v) if isinstance(v, Tensor) else v for k, v in values.items()}, front=front)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self.map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self.map(lambda t: t.pin_memory())


@runtime_checkable
class Dataset(Protocol):
    """A list of clips. `item` is a pure function of (index, epoch) and the dataset's own seed: the worker, the rank and
    the machine never matter. Recordings ignore the epoch."""

    sample_rate: int

    def __len__(self) -> int: ...

    def item(self, index: int, epoch: int) -> Clip: ...


class DataSource(Protocol):
    """What a `data` config builds: the splits of one corpus.

    `fingerprint` names the content (a hash over files, sizes, settings): two runs with equal fingerprints saw equal
    data. `survey` is the table shown before training: rows of (what, value), problems included.
    """

    sample_rate: int

    def split(self, name: str) -> Dataset | None:
        """`name` is train, valid or test; None when this source has no such split."""

    def fingerprint(self) -> str: ...

    def survey(self) -> list[tuple[str, str]]: ...


State = dict[str, Tensor]


class Model(Protocol):
    """An echo canceller (a torch Module).

    Attributes:
        sample_rate: Hz.
        hop_samples: samples consumed and produced by one `step`.
        latency_samples: estimate[n] may depend on inputs up to and including n + latency_samples - 1, never later. A
            sample-by-sample stream of the model (echofree.model.streaming.Stream) is late by exactly this much.

    A model of which devices may each hold a part offers one or both of:
        blocks() -> modules, one tensor [B, L, ...] from each to the next; they hold all trainable weights. With
            `enter(mic, far, details) -> (x, heard)` before them and `leave(raw, latent, heard, details)` behind,
            forward is enter, blocks, leave. `raw` is what the last block made of `latent`; `heard` is a mapping of
            tensors [B, ...] and of what doesn't depend on the clip.
        tensor_plan() -> names of Linear layers, each "colwise" or "rowwise".

    A model that begins with something without weights may offer it as
        ahead() -> a function (mic, far [B, T] on the CPU) -> tensors by name, which the loader's workers call while the
            step before is computed; `forward` (and `enter`) then take the result as `front` and don't do it again.
    """

    sample_rate: int
    hop_samples: int
    latency_samples: int

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor | dict[str, Any]:
        """mic, far [B, T] -> estimate of the near end [B, T], aligned with mic sample by sample.

        With details=True a dict: "est" [B, T] and whatever a loss may ask for by name, for example "gain" [B, L, K],
        "filterbank" (an object with power(x) -> [B, L, K]), "echo" [B, T] (the linear echo estimate), "latent".
        """

    def init_state(self, batch: int) -> State:
        """A fresh stream: float32 tensors by name, first axis `batch`."""

    def step(self, mic: Tensor, far: Tensor, state: State) -> tuple[Tensor, State]:
        """mic, far [B, hop_samples] -> (estimate [B, hop_samples], new state). The concatenated estimates equal
        `forward` delayed by latency_samples - hop_samples. Never changes `state` in place."""


class Loss(Protocol):
    """Returns per-clip values so that any split of a batch over ranks and micro-batches gives the same gradient.

    Attributes:
        needs: names that `forward(details=True)` must return beyond "est"; empty when the wave is enough.
    """

    needs: tuple[str, ...]

    def __call__(self, out: Mapping[str, Any], batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """-> (sum, weight, parts): sum over clips of value x seconds (a scalar with gradient), the seconds counted
        (equal to batch.weight.sum()), and the detached sums of the parts, each over the same weight."""


class Metric(Protocol):
    """Scores one batch.

    Attributes:
        name: the key under which it appears in metrics.jsonl and tables.
        higher_is_better: for best checkpoints.
    """

    name: str
    higher_is_better: bool

    def __call__(self, est: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """est [B, T] -> (values [B] float64, weights [B] float64). weight 0: undefined for this clip (another
        scenario, no target) or a filler. A value that's NaN with weight > 0 means invalid: counted and reported."""


class Task(Protocol):
    """Says what a batch means. Distillation is a task.

    One that gives `Batch.given` to the model says so by an attribute passes_front = True; for others nothing is done
    ahead (see `Model`).
    """

    def weight(self, batch: Batch) -> float:
        """What the batch counts in a step, known before the model ran: seconds of valid audio."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """-> (sum, weight, parts) as in `Loss`."""

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """-> one row per clip that counts: name, index, scenario, seconds, and "loss" and metric name -> float, or None
        where undefined. Fillers give no row."""


class Strategy(Protocol):
    """Says where the work runs. The factor by which a back end averages gradients sits in here, once.

    Attributes:
        data_rank, data_size: which share of the data this rank reads.
        random_rank: which random stream this rank takes; ranks that must drop the same activations share one.
        whole: whether `bare` is the whole model, so that it can be called on one rank alone.
        model: the module to call in training (wrapped or not).
        bare: the module without any wrapper around it; what its state_dict has on "meta" is another rank's.
        parameters: what the optimizer trains, as it sees it: this rank's part of the weights.
        buffers: what a forward pass changes beside the gradients; put back when a step is left out.
    """

    data_rank: int
    data_size: int
    random_rank: int
    whole: bool
    model: torch.nn.Module
    bare: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    buffers: list[Tensor]

    def named(self) -> State:
        """Name -> trainable weight: the `parameters`, by the names of the model."""

    def settle(self) -> None:
        """Before an evaluation: makes equal what may differ between ranks."""

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        """Around one micro-batch: gradients are exchanged only when `last`."""

    def run(self, task: Task, batches: Sequence[Batch], total_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward of one step. The gradient left in the parameters is that of (sum of losses over all
        ranks and micro-batches) / total_weight. -> (sum, parts) of this rank, detached."""

    def evaluate(self, task: Task, batch: Batch) -> list[dict[str, Any]]:
        """`task.evaluate` on this rank's batch; every rank calls it equally often. Ranks that share a batch may give
        its rows or none, but one of them does."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Clips the whole model's gradient; -> the norm before clipping, equal on every rank."""

    def model_state(self) -> State:
        """Whole tensors under the model's own names, whatever the strategy: any other can load them, and a single
        process too. Every rank calls it and gets all."""

    def load_model_state(self, state: State) -> None: ...

    def gather(self, named: State) -> State:
        """This rank's part of something shaped like the `named` weights -> the whole, on every rank."""

    def part(self, named: State) -> State:
        """The reverse of `gather`."""

    def pieces(self, named: State) -> State:
        """What `gather` takes, as tensors that know their place in the whole (DTensors), in the same memory."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """{"state": name of the weight -> what the optimizer remembers}, in whole tensors."""

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None: ...


class Exporter(Protocol):
    """Writes a model for one runtime and runs what it wrote."""

    def write(self, model: torch.nn.Module, example: Batch, folder: str) -> None: ...

    def run(self, folder: str, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]: ...


class Logger(Protocol):
    """Receives what metrics.jsonl receives; rank 0 only. It may warn, it can never end a training."""

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None: ...

    def log(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, status: str) -> None: ...


Rows = Iterable[Mapping[str, Any]]
