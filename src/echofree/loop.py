"""The loop: fit, step, evaluate, save, stop. It knows neither the task nor the strategy by name.

Decisions that all ranks must share (stop, best, early stop, a step that isn't finite) are made from numbers that all
ranks have: sums over the control group, or a gradient norm that is equal everywhere. Nothing is read back from the
device except on a logging step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from echofree import __version__, checkpoint, snapshot, space
from echofree.config.schema import Mode
from echofree.contracts import Batch, Dataset, Logger, Task
from echofree.data.loader import Ahead, Plan, TrainLoader, board, eval_batches, eval_loader
from echofree.dist.straggler import Stragglers
from echofree.dist.strategy import Amp
from echofree.dist.watchdog import Pulse
from echofree.dist.world import World
from echofree.forgetting import Guard
from echofree.log import Position, RankLog
from echofree.meter import peak_mb
from echofree.optim import Ema, Schedule
from echofree.progress import Progress
from echofree.rundir import RunDir
from echofree.saver import Saver
from echofree.signs import Signs, not_finite
from echofree.stop import StopFlag
from echofree.window import Window

log = logging.getLogger("echofree")

FIRST_BATCH_LATE_S = 15.0


@dataclass
class State:
    """Everything about the progress of a run that isn't weights. Plain numbers, saved as they are."""

    step: int = 0  # finished optimizer steps
    epoch: int = 0  # of the next step
    step_in_epoch: int = 0  # of the next step
    best: float | None = None
    best_step: int = 0
    stale: int = 0  # evaluations since the best
    scores: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    skipped: int = 0  # steps left out because they weren't finite
    shift: int = 0  # steps more than epochs say, since the global batch changed in a resume


@dataclass
class Outcome:
    """How the loop ended: done, preempted (state saved) or stopped (early)."""

    status: str
    why: str


class Loop:
    """One training run in one rank.

    Args:
        config: the frozen run config, attribute access.
        strategy: where the work runs; `amp` holds its precision.
        plan: the order of the training clips.
        make_loader: (epoch, step in it) -> loader that begins there.
        run: the run directory; only rank 0 writes into its metrics and run.json.
        pulse: where the watchdog sees what this rank is at.
    """

    def __init__(
        self,
        config: Any,
        world: World,
        strategy: Any,
        amp: Amp,
        task: Task,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        make_loader: Callable[[tuple[int, int]], TrainLoader],
        valid: Dataset | None,
        run: RunDir,
        logger: Logger | None,
        position: Position,
        stop: StopFlag,
        device: torch.device,
        rank_log: RankLog | None = None,
        pulse: Pulse | None = None,
    ):
        self.config, self.world, self.strategy, self.amp, self.task = config, world, strategy, amp, task
        self.optimizer, self.plan = optimizer, plan
        self.make_loader, self.valid, self.run, self.logger = make_loader, valid, run, logger
        self.position, self.stop, self.device = position, stop, device
        self.pulse = pulse or Pulse()
        self.shapes: list[tuple[int, ...]] = []  # of the micro-batches of the latest step, for the text on memory
        self.run_id = str(run.facts["id"])
        self.state = State()
        self._saved_at = -1
        self.clips_again = 0  # of this epoch, after a resume with another global batch
        self.replicas = world.size // strategy.data_size  # ranks that see the same batch
        self.window = Window()
        self.peaks_mb: list[float] = []  # the most memory each rank has held, at the latest logging step
        self.signs: Signs | None = None  # from the first step on
        self.schedule = Schedule(optimizer, config.optim, self.total_steps)
        decay = config.train.ema_decay
        self.ema = Ema(strategy.named(), decay) if decay else None
        self.rank_log = rank_log
        self.guard: Guard | None = None
        self.ahead: Ahead | None = None  # what the loader's workers do of the model
        self.stragglers = Stragglers(world.hosts)
        self.progress = self.bar(self.total_steps, "train")
        self.in_parts = snapshot.is_in_parts(config.checkpoint.format, strategy)
        writers = world.size if self.in_parts else 1
        self.checkpoint_bytes = space.expected(strategy.bare, config.optim, self.ema is not None, writers)
        rule = config.checkpoint
        self.saver = Saver(run.checkpoints, self.run_id, rule, world, self.pulse, stop, self.checkpoint_bytes)

    @property
    def total_steps(self) -> int:
        steps = self.config.train.epochs * self.plan.steps_per_epoch + self.state.shift
        limit = self.config.train.max_steps
        return steps if limit is None else min(steps, limit)

    def bar(self, total: int | None, label: str) -> Progress:
        """A bar on rank 0's terminal. Elsewhere none, since every logging step is a plain line already."""
        stream = self.rank_log.terminal if self.rank_log is not None else None
        wanted = self.config.logger.progress if self.world.is_first and stream is not None else "off"
        if wanted == "auto" and not (stream is not None and stream.isatty()):
            wanted = "off"
        bar = Progress(total, label, wanted, stream=stream)
        if self.rank_log is not None:
            self.rank_log.before_console = bar.hide
        return bar

    # --- the run ----------------------------------------------------------------------------------------------------

    def fit(self) -> Outcome:
        """Trains from the current state to the end, a stop, or an error."""
        state = self.state
        if state.step >= self.total_steps:
            return Outcome("done", f"all {self.total_steps} steps were done already")
        if self._stale():
            return Outcome("stopped", self._why_stopped())
        outcome = self._fit()
        self.saver.finish()
        if outcome.status == "preempted" and self.world.is_first:
            self.stop.obeyed()
        return outcome

    def _fit(self) -> Outcome:
        state, train = self.state, self.config.train
        loader = self._open()
        self.progress.done = self.progress.initial = state.step
        if self.guard is not None and self.guard.before is None:
            self.guard.begin(mean_scores(self.evaluate(self.guard.dataset)))
        if not self.window.loss:
            self.window = Window()  # the clock starts now
        try:
            while state.step < self.total_steps:
                if self.turn(loader):
                    if self._saved_at != state.step:
                        self.save()  # with the window that is still open
                    return Outcome("preempted", self.stop.reason or "another rank was asked to stop")
                self.pulse.warm = True
                if state.step % train.log_every == 0 or state.step == self.total_steps:
                    self._log_step()
                if self._after_step():
                    return Outcome("stopped", self._why_stopped())
        finally:
            loader.close()
            self.progress.close()
        return Outcome("done", f"{state.step} steps")

    def _open(self) -> TrainLoader:
        """The loader of the current state, with all else ready to train from it."""
        state = self.state
        loader = self.make_loader((state.epoch, state.step_in_epoch))
        self.pulse.board = loader.board
        self.strategy.model.train()
        self.signs = self.signs or Signs(self.strategy.parameters if state.step == 0 else ())
        return loader

    def take(self, count: int) -> bool:
        """`count` steps from the current state, logged, with neither an evaluation nor a save: a round of a training
        whose other rounds may be elsewhere. -> False when it was asked to stop before"""
        state, train = self.state, self.config.train
        loader = self._open()
        self.window = Window()  # the clock starts now
        try:
            for _ in range(count):
                if self.turn(loader):
                    return False
                self.pulse.warm = True
                if state.step % train.log_every == 0:
                    self._log_step()
                self._end_epoch()
        finally:
            loader.close()
            self.progress.close()
        self._flush_window()
        return True

    def turn(self, loader: TrainLoader) -> bool:
        """The next batches, the agreement of all ranks about them, one step; -> True: asked to stop instead."""
        batches = self._next(loader)
        weight = math.fsum(self.task.weight(batch) for batch in batches)
        self.pulse.at("agree")
        began = time.perf_counter()
        total, stops = self.world.sum([weight / self.replicas, float(self.stop.wanted(self.state.step))])
        self.window.agree_s += time.perf_counter() - began
        if stops:
            return True
        self.step(batches, total)
        return False

    def _why_stopped(self) -> str:
        return f"no better {self.config.checkpoint.metric} for {self.state.stale} evaluations"

    def step(self, batches: list[Batch], total_weight: float) -> None:
        """One optimizer step over this rank's micro-batches; `total_weight` is that of all ranks, in seconds."""
        state = self.state
        self.pulse.at("forward and backward")
        self.shapes = [tuple(batch.mic.shape) for batch in batches]
        lr = self.schedule.apply(state.step)
        before = [b.clone() for b in self.strategy.buffers]
        loss, parts = self.strategy.run(self.task, batches, max(total_weight, 1e-9))
        self.pulse.at("step")
        self.amp.scaler.unscale_(self.optimizer)
        norm = self.strategy.clip(self.config.train.clip_norm)
        self.amp.update(self.optimizer, norm)
        finite = torch.isfinite(norm)
        for buffer, old in zip(self.strategy.buffers, before, strict=True):  # a NaN would stay in running statistics
            buffer.copy_(torch.where(finite, buffer, old))
        if self.ema is not None:
            self.ema.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.window.add(state.step + 1, loss, parts, total_weight, finite, batches)
        self.window.clips += self._global_clips()
        self.lr, self.norm = lr, norm
        state.step += 1
        state.step_in_epoch += 1
        self.progress.update(1)
        self.position.step = state.step

    def _after_step(self) -> bool:
        """Evaluates, saves and turns the epoch where it is time; -> whether to stop early."""
        state, train = self.state, self.config.train
        ended = self._end_epoch()
        last = state.step >= self.total_steps
        due_eval = (
            last or _due(state.step, train.eval_every_steps) or (ended and _due(state.epoch, train.eval_interval))
        )
        due_save = (
            last or _due(state.step, train.save_every_steps) or (ended and _due(state.epoch, train.save_interval))
        )
        if not (due_eval or due_save):
            return False
        self._flush_window()  # the record of a window must not depend on whether the run was cut at this checkpoint
        began = time.perf_counter()
        better = self._validate() if due_eval and self.valid is not None else False
        if due_save or better or self._stale():
            self.save(better)
        self.window.paused_s += time.perf_counter() - began
        return self._stale()

    def _end_epoch(self) -> bool:
        """Turns the epoch where its last step is done; -> whether it was."""
        state = self.state
        ended = state.step_in_epoch == self.plan.steps_per_epoch
        if ended:
            state.epoch, state.step_in_epoch = state.epoch + 1, 0
            self.position.epoch = state.epoch
        return ended

    def _stale(self) -> bool:
        return 0 < self.config.train.early_stop_patience <= self.state.stale

    # --- data -------------------------------------------------------------------------------------------------------

    def _next(self, loader: TrainLoader) -> list[Batch]:
        began = time.perf_counter()
        self.pulse.at("data")
        if self.state.step == 0 or not self.window.names:
            alarm = threading.Timer(FIRST_BATCH_LATE_S, self._late, [loader, began])
            alarm.daemon = True
            alarm.start()
        else:
            alarm = None
        try:
            batches = loader.next_step(self.state.step_in_epoch)
        finally:
            if alarm is not None:
                alarm.cancel()
        self.window.wait_s += time.perf_counter() - began
        return [batch.to(self.device, non_blocking=True) for batch in batches]

    def _late(self, loader: TrainLoader, began: float) -> None:
        log.warning(
            "a batch has not come for %.0f s: %s. A slow disk or a dataset that decodes long files does this; "
            "data.num_workers=0 "
            "shows the loader's own error or pace",
            time.perf_counter() - began,
            loader.doing(),
        )

    def _global_clips(self) -> int:
        left = self.plan.num_items - self.state.step_in_epoch * self.plan.global_batch
        return min(left, self.plan.global_batch)

    # --- logging ----------------------------------------------------------------------------------------------------

    def _flush_window(self) -> None:
        """Steps that haven't been logged yet are."""
        if self.window.loss:
            self._log_step()

    def _log_step(self) -> None:
        self.pulse.at("log")
        window, self.window = self.window, Window()
        state = self.state
        finite = torch.stack(window.finite).cpu()
        local = torch.stack(window.loss)
        keep = finite.to(local.device)
        sums = [float(torch.where(keep, local, 0).sum())]
        names = list(window.parts[0])
        sums += [float(torch.where(keep, torch.stack([p[n] for p in window.parts]), 0).sum()) for n in names]
        sums = [s / self.replicas for s in sums]
        wall = time.perf_counter() - window.start - window.paused_s
        peaks_mb = [0.0] * self.world.size
        peaks_mb[self.world.rank] = peak_mb(self.device)
        totals, told = self._sum_and_tell([*peaks_mb, *sums, window.wait_s, wall], window, wall / len(finite))
        self.peaks_mb, totals = totals[: self.world.size], totals[self.world.size :]
        if not self.world.is_first:  # rank 0's is in its line
            log.info("peak memory of this rank: %.0f MB", self.peaks_mb[self.world.rank])
        weight = math.fsum(w for w, ok in zip(window.weight, finite.tolist(), strict=True) if ok)
        bad = len(finite) - int(finite.sum())
        state.skipped += bad
        loss = totals[0] / weight if weight else math.nan
        record: dict[str, Any] = {
            "kind": "train",
            "step": state.step,
            "epoch": state.epoch,
            "loss": _number(loss),
            **{f"loss_{n}": _number(v / weight) for n, v in zip(names, totals[1:-2], strict=True) if weight},
            "lr": self.lr,
            "grad_norm": _number(float(self.norm)),
            "step_s": wall / len(finite),
            "samples_per_s": window.clips / wall,
            "audio_s_per_s": window.audio_s / wall,
            "data_wait_share": totals[-2] / totals[-1],
            "peak_mem_mb": max(self.peaks_mb),
            "skipped_steps": state.skipped,
        }
        if self.amp.scaler.is_enabled():
            record["loss_scale"] = self.amp.scaler.get_scale()
        if stall_s := self.saver.take_stall_s():
            record["save_stall_s"] = stall_s
        self._write(record)
        for text in self.stragglers.compare(told, wall / len(finite)) if told else []:
            log.warning("%s", text)
        if bad:
            steps = [i for i, ok in enumerate(finite.tolist()) if not ok]
            scale = self.amp.scaler.get_scale() if self.amp.scaler.is_enabled() else None
            folder, do = self.run.folder / "logs", self.config.train.nonfinite
            not_finite(window, steps, local.isfinite().cpu(), scale, self.world, folder, do)
        if weight and self.signs is not None:
            self.signs.look(self.strategy.parameters, loss, state.step, self.lr)
        self.saver.watch(self.checkpoint_bytes)

    def _sum_and_tell(self, sums: list[float], window: Window, step_s: float) -> tuple[list[float], list[float]]:
        """The sums over all ranks, and each rank's own time; no numbers of the latter where they can't be told."""
        clock = getattr(self.strategy, "clock", None)  # a strategy that exchanges all the time has none
        if clock is None:
            return self.world.sum(sums), []
        steps = len(window.finite)
        own_s = max(0.0, step_s - (window.agree_s + clock.take_s()) / steps)
        slots = self.stragglers.slots(self.world.rank, own_s, window.wait_s / steps)
        totals = self.world.sum([*sums, *slots])
        return totals[: len(sums)], totals[len(sums) :]

    def _write(self, record: dict[str, Any]) -> None:
        self.saver.patient(lambda: self.run.write_metrics(record))
        if self.logger is not None:
            self.logger.log(record)
        if record["kind"] == "train":
            self.progress.update(0, loss=record["loss"], lr=record["lr"])

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Scores the validation clips; -> whether this is the best so far. The same on every rank."""
        state, wanted = self.state, self.config.checkpoint
        rows = self.evaluate(self.valid)  # type: ignore[arg-type]
        state.scores = mean_scores(rows)
        state.evaluated_at = state.step
        self._write({"kind": "eval", "split": "valid", "step": state.step, "epoch": state.epoch, **state.scores})
        held = self._guarded()
        value = state.scores.get(wanted.metric)
        if value is None or not math.isfinite(value):
            log.warning("checkpoint.metric=%s has no finite value on the validation clips at this step", wanted.metric)
            state.stale += 1
            return False
        self.schedule.evaluated(value if wanted.mode is Mode.min else -value)
        better = state.best is None or (value < state.best if wanted.mode is Mode.min else value > state.best)
        better = better and held
        if better:
            state.best, state.best_step, state.stale = value, state.step, 0
        else:
            state.stale += 1
        return better

    def _guarded(self) -> bool:
        """Whether the old data's scores let this step be the best. The same on every rank."""
        if self.guard is None:
            return True
        state, scores = self.state, mean_scores(self.evaluate(self.guard.dataset))
        self._write({"kind": "eval", "split": "old", "step": state.step, "epoch": state.epoch, **scores})
        return self.guard.holds(scores, state.step)

    @torch.no_grad()
    def evaluate(self, dataset: Dataset) -> list[dict[str, Any]]:
        """Rows of every clip of `dataset`, in order, on every rank; with the averaged weights where there are any."""
        data = self.config.data
        batches = eval_batches(
            len(dataset), self.config.train.batch_size, self.strategy.data_rank, self.strategy.data_size
        )
        loader = eval_loader(
            dataset, batches, data.num_workers, data.prefetch_factor, self.device.type == "cuda", self.ahead
        )
        model = self.strategy.bare
        self.pulse.at("evaluate")
        training, self.pulse.board = self.pulse.board, board(loader)
        self.strategy.settle()
        if self.ema is not None:
            self.ema.swap()
        model.eval()
        rows: list[dict[str, Any]] = []
        try:
            for batch in loader:
                self.pulse.at("evaluate")
                rows += self.strategy.evaluate(self.task, batch.to(self.device))
        finally:
            self.pulse.board = training
            model.train()
            if self.ema is not None:
                self.ema.swap()
        self.pulse.at("gather")
        gathered = self.world.gather(rows)
        unique = {row["index"]: row for part in gathered for row in part}
        return [unique[i] for i in sorted(unique)]

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, better: bool = False) -> Path:
        """Writes a checkpoint of this step, points `last` (and `best`) at it, and applies retention."""
        state = self.state
        self.pulse.at("save")
        shared = {
            "train": {
                "state": asdict(state),
                "schedule": self.schedule.state_dict(),
                "scaler": self.amp.scaler.state_dict(),
                "plan": asdict(self.plan),
            },
        }
        parts = snapshot.parts(self.strategy, self.optimizer, self.ema) if self.in_parts else None
        if parts is None:
            shared |= snapshot.whole(self.strategy, self.optimizer, self.ema)
        about = {
            "run_id": self.run_id,
            "version": __version__,
            "step": state.step,
            "epoch": state.epoch,
            "scores": state.scores if state.evaluated_at == state.step else {},
            "world_size": self.world.size,
            "best_step": state.best_step,
        }
        own = {**checkpoint.random_state(), "window": self.window.state_dict()}
        self.run.sync_metrics()  # a checkpoint never knows of a step whose record a power cut could take
        self._saved_at = state.step
        return self.saver.save(shared, own, about, better, parts)

    def load(self, folder: Path) -> None:
        """Goes back to the state of a checkpoint of this run: exactly, when the same number of ranks saved it."""
        snapshot.restore(folder, self.strategy, self.optimizer, self.ema)
        saved = checkpoint.load(folder, "train")
        self.state = State(**saved["state"])
        self.schedule.load_state_dict(saved["schedule"])
        if self.amp.scaler.is_enabled():
            self.amp.scaler.load_state_dict(saved["scaler"])
        if checkpoint.manifest(folder)["world_size"] == self.world.size:
            own = checkpoint.load(folder, f"rank{self.world.rank}")
            checkpoint.restore_random_state(own)
            if "window" in own:
                self.window.load_state_dict(own["window"], self.device)
        self._rescale(int(Plan(**saved["plan"]).global_batch))
        self.position.epoch, self.position.step = self.state.epoch, self.state.step

    def _rescale(self, old_global_batch: int) -> None:
        """The place in the epoch in steps of another global batch: clips seen before are rather seen twice than others
        never."""
        state, new = self.state, self.plan.global_batch
        if old_global_batch == new:
            return
        clips = state.step_in_epoch * old_global_batch
        state.step_in_epoch = clips // new
        self.clips_again = clips - state.step_in_epoch * new
        state.shift = state.step - (state.epoch * self.plan.steps_per_epoch + state.step_in_epoch)
        self.schedule.total_steps = self.total_steps
        self.progress.total = self.total_steps


def mean_scores(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the clips where a score is defined: the loss weighted by seconds, metrics clip by clip. A clip that is
    invalid (NaN or infinite) is counted under "invalid" and left out of the mean of that metric only."""
    skip = {"name", "index", "scenario", "seconds"}
    scores: dict[str, float] = {}
    invalid = set()
    for key in sorted({k for row in rows for k in row} - skip):
        values = [(row[key], row["seconds"], row["index"]) for row in rows if row.get(key) is not None]
        values = [v for v in values if isinstance(v[0], int | float)]
        invalid |= {index for value, _, index in values if not math.isfinite(value)}
        good = [(v, s) for v, s, _ in values if math.isfinite(v)]
        if good and key == "loss":
            scores[key] = math.fsum(v * s for v, s in good) / max(math.fsum(s for _, s in good), 1e-9)
        elif good:
            scores[key] = math.fsum(v for v, _ in good) / len(good)
    scores["clips"] = len(rows)
    if invalid:
        scores["invalid_clips"] = len(invalid)
    return scores


def _due(count: int, every: int) -> bool:
    return every > 0 and count % every == 0


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
