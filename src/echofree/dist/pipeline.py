"""Layers laid out over ranks, each of which hands its result on (torch.distributed.pipelining).

A batch of `train.batch_size` clips is cut into `dist.microbatches` parts that follow one another through the stages.
What stands before the blocks (`model.enter`: front end and features, nothing of it trains) is computed for the whole
batch on the first stage, which needs the features, and on the last, which needs the spectra for the estimate and the
loss: at the same time, so that nothing waits for it and no audio travels. The last stage shows a task a model whose
forward begins with what came in from the stage before (`Tail`); neither task nor loop knows more.

Legend: B batch, T samples, L frames.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from echofree.config.schema import DistConfig
from echofree.contracts import Batch, State, Task
from echofree.dist import fit, shard, stages
from echofree.dist.mesh import Grid
from echofree.dist.strategy import Amp, saved_buffers

log = logging.getLogger("echofree")

KEPT_SCHEDULES = 4  # each holds buffers for what it receives, made for one shape


class Tail(nn.Module):
    """What a task sees as the model: the last stage's part of it, from a received activation to the estimate."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.__dict__["inner"] = model  # not a submodule: its weights belong to other stages
        self.blocks = nn.ModuleList(blocks)
        self.received: Tensor | None = None
        self.heard: Mapping[str, Any] | None = None
        self.details: bool | None = None  # what the task asked for last: so it will be prepared next time

    def forward(self, mic: Tensor, far: Tensor, details: bool = False, **given: Any) -> Tensor | dict[str, Any]:
        heard, x = self.heard, self.received
        assert x is not None, "set before the task is asked"
        if heard is None or self.details is not details:
            heard, self.details = self.inner.enter(mic, far, details, **given)[1], details
        latent = x
        for block in self.blocks:
            latent, x = x, block(x)
        result: Tensor | dict[str, Any] = self.inner.leave(x, latent, heard, details)
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)


class Part(nn.Module):
    """One stage, as torch's schedules call it: its blocks, and on the last one the task as well."""

    def __init__(self, owner: Pipeline, blocks: Sequence[nn.Module], is_last: bool):
        super().__init__()
        self.loss, self.autocast = owner.loss, owner.amp.autocast
        self.blocks = nn.ModuleList(blocks)
        self.is_last = is_last

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """x [b, L, ...] of micro-batch `index` -> the same for the next stage, or the loss."""
        with self.autocast():
            if self.is_last:
                return self.loss(x, int(index))
            for block in self.blocks:
                x = block(x)
            return x


class Pipeline:
    """Every rank holds some of the blocks; all ranks of a pipeline read the same clips. With `data` in the mesh, the
    pipelines read different clips and add their gradients up."""

    whole = False  # no rank holds the whole model

    def __init__(self, model: nn.Module, amp: Amp, grid: Grid, config: DistConfig):
        self.data_rank, self.data_size = grid.data_rank, grid.data_size
        self.random_rank = dist.get_rank()  # each stage drops activations of its own
        self.amp, self.grid, self.config, self.device = amp, grid, config, grid.device
        self.group = grid.group("pipeline")
        self.size, self.rank = grid.axes["pipeline"], grid.place["pipeline"]
        self.num_stages = fit.num_stages(config, self.size)
        cuts = stages.cut(config, model, self.num_stages)
        blocks: list[nn.Module] = list(model.blocks())  # type: ignore[operator]
        names = fit.block_names(model, blocks)
        for stage, part in enumerate(cuts):
            held = names[part[0]] if len(part) == 1 else f"{names[part[0]]} to {names[part[-1]]}"
            log.info("pipeline: stage %d on rank %d holds %s", stage, stage % self.size, held)
        mine = range(self.rank, self.num_stages, self.size)
        kept = {id(blocks[i]) for stage in mine for i in cuts[stage]}
        for block in blocks:
            if id(block) not in kept:
                block.to("meta")  # another rank's: the names stay, the memory goes
        self.bare = self.model = model
        self.first, self.last = 0 in mine, self.num_stages - 1 in mine
        self.tail = Tail(model, [blocks[i] for i in cuts[-1]]) if self.last else None
        self.parts = {s: Part(self, [blocks[i] for i in cuts[s]], s == self.num_stages - 1) for s in mine}
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad and not p.is_meta}
        self.parameters = list(self._named.values())
        self.buffers = [b for b in saved_buffers(model) if not b.is_meta]
        self._frames: dict[int, int] = {}  # samples of a clip -> frames between the blocks
        self._between: dict[bool, list[tuple[torch.Size, torch.dtype]]] = {}  # under autocast or not: what each sends
        self._schedules: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._names: list[str] = []  # of the loss's parts, which only the last stage knows by itself
        self._task: Task | None = None
        self._pieces: list[Batch] = []
        self._heard: Mapping[str, Any] | None = None
        self._seen: list[tuple[Tensor, dict[str, Tensor]]] = []

    def named(self) -> dict[str, Tensor]:
        return dict(self._named)

    def settle(self) -> None:
        """Nothing can differ: models with running statistics were refused."""

    def micro(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # nothing is exchanged between data ranks before `run` ends

    # --- one step -----------------------------------------------------------------------------------------------------

    def run(self, task: Task, batches: Sequence[Batch], total_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        self._task, self._seen = task, []
        self.amp.scaler.scale(torch.zeros((), device=self.device))  # makes the scale known where no loss is scaled
        for batch in batches:
            with _own_errors():
                self._step(batch, 1.0 / total_weight)
        if "data" in self.grid.axes:
            shard.sum_gradients(self.parameters, self.grid.group("data"), self.config.bucket_cap_mb)
        return self._tell()

    def _step(self, batch: Batch, factor: float) -> None:
        """Forward and backward of one batch through all stages."""
        batch = fill(batch, self.config.microbatches)
        count = self.config.microbatches
        with torch.no_grad(), self.amp.autocast():
            packed = self._enter(batch)
        size = len(batch) // count
        self._pieces = [_clips(batch, i * size, size) for i in range(count)] if self.last else []
        index = torch.arange(count)
        schedule = self._schedule(size, self._num_frames(batch, packed), packed)
        schedule._loss_fn = lambda output, target: self.amp.scaler.scale(output * factor)
        schedule.step(*([packed] if self.first else []), index=index, target=index, return_outputs=False)
        self._pieces, self._heard = [], None

    def loss(self, x: Tensor, index: int) -> Tensor:
        """The task's loss of micro-batch `index`, whose activation before the last stage is x."""
        assert self.tail is not None
        assert self._task is not None
        piece = self._pieces[index]
        self.tail.received = x
        self.tail.heard = _slice(self._heard, index * len(piece), len(piece), len(piece) * len(self._pieces))
        loss, _, parts = self._task.loss(self.tail, piece)
        self._seen.append((loss.detach(), {name: value.detach() for name, value in parts.items()}))
        self.tail.received = self.tail.heard = None
        return loss

    def _enter(self, batch: Batch) -> Tensor | None:
        """What stands before the blocks, where it's needed: -> what the first block takes; None elsewhere."""
        details = self.tail.details if self.tail is not None else False
        if not self.first and details is None:
            return None  # the task hasn't said yet what it needs; it will ask for each piece
        if not self.first and not self.last:
            return None
        packed: Tensor
        enter: Any = self.model.enter
        packed, heard = enter(batch.mic, batch.far, bool(details), **batch.given)
        self._heard = heard if self.last else None
        return packed if self.first else None

    def _tell(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The last stage's sums, on every rank of the pipeline."""
        source = dist.get_global_rank(self.group, self.size - 1)
        if not self._names:
            box = [list(self._seen[0][1])] if self.last else [None]
            dist.broadcast_object_list(box, source, group=self.group)
            assert box[0] is not None
            self._names = box[0]
        values = torch.zeros(1 + len(self._names), device=self.device)
        if self.last:
            rows = [torch.stack([loss.float(), *(parts[n].float() for n in self._names)]) for loss, parts in self._seen]
            values = torch.stack(rows).sum(0)
        dist.broadcast(values, source, group=self.group)
        self._seen = []
        return values[0], dict(zip(self._names, values[1:], strict=True))

    # --- torch's schedules --------------------------------------------------------------------------------------------

    def _schedule(self, size: int, frames: int, packed: Tensor | None) -> Any:
        """The schedule for parts of `size` clips and `frames` frames, with its receive buffers."""
        between = self._learn(self.amp.dtype is not None, packed)
        key = (size, frames)
        if key not in self._schedules:
            own = []
            for stage, module in self.parts.items():
                shapes = [between[stage - 1] if stage else None, between[stage] if not module.is_last else None]
                given = _example(shapes[0], size, frames, True) if stage else packed[:size].to("meta")  # type: ignore[index]
                made = _example(shapes[1], size, frames, True)
                own.append(
                    PipelineStage(
                        module,
                        stage,
                        self.num_stages,
                        self.device,
                        input_args=given,
                        output_args=made,
                        group=self.group,
                    )
                )
            self._schedules[key] = self._build(own)
            if len(self._schedules) > KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _build(self, own: list[PipelineStage]) -> Any:
        count, loss = self.config.microbatches, _unset
        if self.config.schedule == "interleaved":
            return ScheduleInterleaved1F1B(own, count, loss, scale_grads=False)  # type: ignore[arg-type]
        kind = ScheduleGPipe if self.config.schedule == "gpipe" else Schedule1F1B
        return kind(own[0], count, loss, scale_grads=False)

    def _num_frames(self, batch: Batch, packed: Tensor | None) -> int:
        """Frames of this batch. Ranks in the middle are told once for every length of clip."""
        num_samples = batch.mic.shape[1]
        if num_samples not in self._frames:
            box = [packed.shape[1] if packed is not None else 0]
            dist.broadcast_object_list(box, dist.get_global_rank(self.group, 0), group=self.group)
            self._frames[num_samples] = box[0]
        return self._frames[num_samples]

    @torch.no_grad()
    def _learn(self, mixed: bool, packed: Tensor | None) -> list[tuple[torch.Size, torch.dtype]]:
        """Sizes behind [B, L] and type of what each stage sends: tried once, and told to all."""
        if mixed in self._between:
            return self._between[mixed]
        found: list[tuple[torch.Size, torch.dtype]] = []
        x = packed[:1] if packed is not None else torch.zeros(0)
        with self.amp.autocast() if mixed else nullcontext():
            for stage in range(self.num_stages - 1):
                box: list[Any] = [None]
                if stage in self.parts:
                    if stage:
                        shape, dtype = found[-1]
                        x = torch.zeros(1, 2, *shape, dtype=dtype, device=self.device)
                    part = self.parts[stage]
                    training = part.training
                    part.eval()  # no random numbers are used up
                    for block in part.blocks:
                        x = block(x)
                    part.train(training)
                    box = [(x.shape[2:], x.dtype)]
                dist.broadcast_object_list(box, dist.get_global_rank(self.group, stage % self.size), group=self.group)
                found.append(box[0])
        self._between[mixed] = found
        return found

    # --- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, task: Task, batch: Batch) -> list[dict[str, Any]]:
        """The last stage gives the rows, the others none."""
        packed = self._enter(batch)
        between = self._learn(False, packed)
        frames = self._num_frames(batch, packed)
        rows: list[dict[str, Any]] = []
        for stage, part in self.parts.items():
            if stage:
                shape, dtype = between[stage - 1]
                x = torch.empty(len(batch), frames, *shape, dtype=dtype, device=self.device)
                dist.recv(x, dist.get_global_rank(self.group, (stage - 1) % self.size), group=self.group)
            else:
                assert packed is not None
                x = packed
            if part.is_last:
                assert self.tail is not None
                self.tail.received, self.tail.heard = x, self._heard
                rows = task.evaluate(self.tail, batch)
                self.tail.received = self.tail.heard = None
            else:
                for block in part.blocks:
                    x = block(x)
                dist.send(x.contiguous(), dist.get_global_rank(self.group, (stage + 1) % self.size), group=self.group)
        self._heard = None
        return rows

    # --- gradients and state ------------------------------------------------------------------------------------------

    def clip(self, max_norm: float | None) -> Tensor:
        norm = shard.total_norm(self._named, self._named, self.device, apart=self.group)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return norm

    def model_state(self) -> State:
        own = self.model.state_dict()
        found = self._collect({name: tensor for name, tensor in own.items() if not tensor.is_meta})
        return {name: found[name] for name in own}

    def load_model_state(self, state: State) -> None:
        own = self.model.state_dict()
        shard.check_names(own, state)
        with torch.no_grad():
            for name, tensor in own.items():
                if not tensor.is_meta:
                    tensor.copy_(state[name])

    def gather(self, named: State) -> State:
        found = self._collect(named)
        return {name: found[name] for name in self.model.state_dict() if name in found}

    def part(self, named: State) -> State:
        return {name: tensor for name, tensor in named.items() if name in self._named}

    def pieces(self, named: State) -> State:
        return named  # whole, each on one rank

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        own = shard.named_state(optimizer, self._named)
        flat = {f"{name} {key}": value for name, values in own.items() for key, value in values.items()}
        state: dict[str, dict[str, Any]] = {}
        for label, value in self._collect({k: v for k, v in flat.items() if isinstance(v, Tensor)}).items():
            name, _, key = label.partition(" ")
            state.setdefault(name, {})[key] = value
        return {"state": {name: state[name] for name in self.model.state_dict() if name in state}}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        shard.load_named_state(optimizer, state["state"], self._named)

    def _collect(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages, on the CPU of every rank of the pipeline. What several have is equal."""
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, {n: (t.shape, t.dtype) for n, t in mine.items()}, group=self.group)
        found: dict[str, Tensor] = {}
        for rank, facts in enumerate(told):
            source = dist.get_global_rank(self.group, rank)
            for name, (shape, dtype) in facts.items():
                if name in found:
                    continue
                held = rank == self.rank
                tensor = mine[name].detach() if held else torch.empty(shape, dtype=dtype)
                tensor = tensor.to(self.device).contiguous()
                dist.broadcast(tensor, source, group=self.group)
                found[name] = tensor.cpu()
        return found


def fill(batch: Batch, count: int) -> Batch:
    """The batch with copies of its first clip that count nowhere, until `count` divides it."""
    missing = math.ceil(len(batch) / count) * count - len(batch)
    if not missing:
        return batch
    longer = batch.map(lambda t: torch.cat([t, t[:1].expand(missing, *t.shape[1:])]))
    longer.weight[len(batch) :] = 0
    return replace(longer, name=[*batch.name, *batch.name[:1] * missing])


def _clips(batch: Batch, start: int, length: int) -> Batch:
    return replace(batch.map(lambda t: t[start : start + length]), name=batch.name[start : start + length])


def _slice(value: Any, start: int, length: int, total: int) -> Any:
    """The clips [start, start + length) of whatever `enter` returned; what isn't per clip stays whole."""
    if isinstance(value, Tensor):
        return value[start : start + length] if value.dim() and value.shape[0] == total else value
    if isinstance(value, Mapping):
        return {name: _slice(item, start, length, total) for name, item in value.items()}
    return value


def _example(facts: tuple[torch.Size, torch.dtype] | None, size: int, frames: int, grad: bool) -> Tensor:
    """What passes between two stages, without memory; a number behind the last one."""
    if facts is None:
        return torch.empty((), device="meta", requires_grad=grad)
    return torch.empty(size, frames, *facts[0], dtype=facts[1], device="meta", requires_grad=grad)


def _unset(output: Tensor, target: Tensor) -> Tensor:
    raise AssertionError("the loss is set before each step")


@contextmanager
def _own_errors() -> Iterator[None]:
    """torch wraps what a stage raises: out of memory, or a user's mistake, must be seen as what it is."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and "failed to run forward" in str(error):
            raise error.__cause__ from None
        raise
