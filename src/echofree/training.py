"""A run in a rank that has met the others: everything is built, trained, scored, exported, told, in order."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echofree.errors import OutOfMemory, UserError
from echofree.parts import Parts
from echofree.process import num_threads

if TYPE_CHECKING:
    import torch

    from echofree.config.schema import FrontEndPlace
    from echofree.data.loader import Ahead
    from echofree.dist.watchdog import Pulse
    from echofree.dist.world import World
    from echofree.log import Position, RankLog
    from echofree.loop import Loop, Outcome
    from echofree.rehearsal import Rehearsal
    from echofree.rundir import RunDir
    from echofree.sizing import Size
    from echofree.stop import StopFlag

log = logging.getLogger("echofree")


@dataclass
class Rank:
    """What a rank has once it has met the others.

    Attributes:
        config: the frozen run config.
        run: its directory.
        device: where this rank computes.
        position, rank_log: of its log.
        pulse: where the watchdog sees what it is at.
        parts: what the config names.
    """

    config: Any
    run: RunDir
    world: World
    device: torch.device
    position: Position
    rank_log: RankLog
    pulse: Pulse
    parts: Parts


@dataclass
class Built:
    """A loop and what was learnt while it was built.

    Attributes:
        loop: ready to go.
        size: the batch sizes that it works with.
        rehearsal: makes a dry run's means.
        about: lines on the model; "" but on rank 0.
        held: batch norms whose statistics stay.
    """

    loop: Loop
    size: Size
    rehearsal: Callable[[], Rehearsal]
    about: str
    held: int


def run_config(rank: Rank) -> Outcome:
    """The whole run, in order."""
    import torch

    from echofree.final import write_page
    from echofree.stop import FILE as STOP_FILE
    from echofree.stop import StopFlag, seconds

    config, run, world, parts = rank.config, rank.run, rank.world, rank.parts
    stop = StopFlag(seconds(config.train.max_time), run.folder / STOP_FILE)
    stop.install()
    torch.set_num_threads(config.dist.threads or num_threads(world.local_size, config.data.num_workers))
    settle_algorithms(config.train.deterministic)
    built = build_loop(rank, stop)
    loop = built.loop
    begin(built, parts)
    status = "failed"  # unless all of it is done
    try:
        outcome = carry_out(built, parts)
        status = outcome.status
    except (RuntimeError, MemoryError) as error:
        if text := _without_memory(error, loop):
            raise OutOfMemory(text) from error
        raise
    finally:
        if loop.logger is not None:
            loop.logger.finish(status)
        if world.source == "alone":  # a rank is asked to leave again and again, also while it says why it failed
            stop.restore()
    peaks = [round(peak) for peak in loop.peaks_mb]
    run.note(
        status=outcome.status, end=time.time(), best=loop.state.best, steps=loop.state.step, peak_mem_mb=peaks
    )  # fmt: skip
    if world.is_first and len(peaks) > 1:
        log.info("peak memory by rank: %s MB", ", ".join(map(str, peaks)))
    if world.is_first:
        log.info("%s: %s. Run directory: %s", outcome.status, outcome.why, os.path.relpath(run.folder))
        if outcome.status != "preempted" and not run.facts.get("profile_steps"):
            write_page(run)
    return outcome


def build_loop(rank: Rank, stop: StopFlag) -> Built:
    """Shares the model out, settles the batch size, and puts the loop together."""
    import numpy as np
    import torch

    from echofree.data.loader import Plan, TrainLoader
    from echofree.dist.strategy import Amp, build_strategy
    from echofree.forgetting import build_guard
    from echofree.inherit import hold_statistics
    from echofree.logger.build import build_logger
    from echofree.loop import Loop
    from echofree.model.count import describe
    from echofree.optim import build_optimizer
    from echofree.recompute import recompute
    from echofree.rehearsal import Rehearsal, longest_samples
    from echofree.sizing import settle

    config, run, world, device, parts = rank.config, rank.run, rank.world, rank.device, rank.parts
    source, task = parts.source, parts.task
    # without workers it'd be done at the same place either way, and count as waiting for data
    ahead = early_part(config.train.front_end, parts, device) if config.data.num_workers else None
    model = parts.model.to(device)
    train, valid = source.split("train"), source.split("valid")
    about = describe(model) if world.is_first else ""  # before the strategy: afterwards no rank may call it alone
    if config.train.activation_checkpointing:
        recompute(model)
    amp = Amp(config.train.precision.value, device)
    strategy = build_strategy(config.dist, model, amp, world)
    own_seed = config.seed * 1_000_003 + strategy.random_rank + 1  # other dropout for other clips
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
    if config.train.compile:
        compile_model(model)

    def rehearsal() -> Rehearsal:
        return Rehearsal(config, strategy, task, device, train.sample_rate, longest_samples(train))

    before = world.from_first(run.facts.get("step_size") if world.is_first else None)
    size = settle(config, world, strategy, amp, rehearsal, before)
    config = size.applied(config)  # what was found stands in run.json, the frozen config stays as it was typed
    plan = Plan(len(train), size.batch_size, size.accumulation, strategy.data_size, config.seed)
    held = hold_statistics(strategy.bare) if parts.frozen else 0
    optimizer = build_optimizer(config.optim, strategy.parameters, strategy.named())
    logger = build_logger(config.logger, run.folder, log.info) if world.is_first else None

    def make_loader(start: tuple[int, int]) -> TrainLoader:
        workers = (config.data.num_workers, config.data.prefetch_factor)
        pin = device.type == "cuda"
        return TrainLoader(train, plan, strategy.data_rank, config.train.epochs, start, *workers, pin, ahead)

    loop = Loop(
        config, world, strategy, amp, task, optimizer, plan, make_loader, valid, run, logger, rank.position, stop,
        device, rank.rank_log, rank.pulse
    )  # fmt: skip
    loop.ahead = ahead
    loop.guard = build_guard(config, source, run)
    return Built(loop, size, rehearsal, about, held)


def begin(built: Built, parts: Parts) -> None:
    """Goes on where the run was, looks for space, writes down and tells what begins."""
    import torch

    from echofree.banner import banner
    from echofree.config import frozen
    from echofree.inherit import tell
    from echofree.restart import go_on

    loop = built.loop
    config, run, world, task = loop.config, loop.run, loop.world, parts.task
    fingerprint = parts.source.fingerprint()
    go_on(loop, run, fingerprint)
    enough_space(loop, run)
    run.note(
        status="running", start=time.time(), end=None, error=None, data_fingerprint=fingerprint, pid=os.getpid(),
        world={
            "size": world.size, "hosts": world.hosts, "backend": world.backend, "source": world.source,
            "device": str(loop.device), "threads": torch.get_num_threads(),
        },
        step_size=built.size.note(), total_steps=loop.total_steps, **(task.facts() if hasattr(task, "facts") else {}),
        **({"parent": parts.parent} if parts.parent else {}),
    )  # fmt: skip
    if world.is_first:
        banner(config, run, world, loop.device, built.about, parts.source, loop.plan, loop)
        tell(parts.parent, parts.frozen, built.held, len(list(loop.strategy.bare.parameters())))
    if loop.logger is not None:
        loop.logger.start(run.facts, frozen.freeze(config))


def carry_out(built: Built, parts: Parts) -> Outcome:
    """Trains, then judges what was forgotten, scores the test clips and exports, as far as each is asked for."""
    from echofree.follow import follow
    from echofree.profile import measure
    from echofree.rehearsal import dry_run, wants_dry_run

    loop = built.loop
    config, run, pulse = loop.config, loop.run, loop.pulse
    if wants_dry_run(config.train, loop.device):
        dry_run(loop, built.rehearsal())
    steps = run.facts.get("profile_steps")
    if asked := run.facts.get("parity"):
        outcome = follow(loop, asked["reference"])
    else:
        outcome = measure(loop, steps) if steps else loop.fit()
    over = outcome.status == "preempted" or bool(steps)
    if loop.guard is not None and not over:
        loop.guard.end(loop.state.best, config.init_from)
    pulse.at("end")
    pulse.warm = False  # what rank 0 still has to do may take its time
    if over:
        return outcome
    if config.train.final_test:
        _score_test_clips(loop, parts)
    if config.export.targets:
        from echofree.export.after import export_best

        run.note(best=loop.state.best, steps=loop.state.step)
        export_best(config.export, run, loop.world, lambda: pulse.at("export"))
    return outcome


def _score_test_clips(loop: Loop, parts: Parts) -> None:
    import torch

    from echofree.config.build import build_model
    from echofree.final import final_scores

    # the loader's cores are free now
    torch.set_num_threads(loop.config.dist.threads or num_threads(loop.world.local_size, 0))
    bar = loop.bar(None, "test clips")
    # shards can't be called clip by clip: then every rank scores its clips with a model of its own
    scored = loop.strategy.bare if loop.strategy.whole else build_model(loop.config).to(loop.device)

    def scored_one(n: int) -> None:
        bar.update(n)
        loop.pulse.at("score")

    final_scores(loop.config, scored, parts.source, loop.run, loop.world, str(loop.device), scored_one)
    bar.close()


def compile_model(model: torch.nn.Module) -> None:
    """torch.compile in place, but for the methods that a part names in `eager`: those are better run as they are."""
    import torch

    for part in model.modules():
        for name in getattr(part, "eager", ()):
            setattr(part, name, torch.compiler.disable(getattr(part, name)))
    model.compile()


def settle_algorithms(everything: bool) -> None:
    """Deterministic algorithms: those that cost little always, all of them when asked. What a GPU adds up in any order
    (scatter, some gradients) then raises or takes a slower way."""
    import torch

    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if everything:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    if everything or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(everything)  # imports the compiler, half a second


def enough_space(loop: Loop, run: RunDir) -> None:
    """Whether the disk holds all that the rest of the run will keep; a whole night earlier than the first save that
    doesn't fit.

    Raises:
        UserError: it doesn't, on every rank; with checkpoint.on_full=wait it is only told.
    """
    from echofree import checkpoint, space
    from echofree.config.schema import OnFull

    why = ""
    if loop.world.is_first:
        there = checkpoint.complete(run.checkpoints)
        count = space.count(loop.config, loop.total_steps, loop.plan.steps_per_epoch) - len(there)
        files = (8 + loop.world.size) * max(count, 1)
        why = space.problem(run.checkpoints, loop.checkpoint_bytes * max(count, 1), files)
        why = why and f"the {max(count, 1)} checkpoints that this run still adds don't fit: {why}"
    why = loop.world.from_first(why)
    if why and loop.config.checkpoint.on_full is OnFull.stop:
        raise UserError(
            f"{why}. Free some, type output_root=<dir on a bigger disk>, or keep fewer: checkpoint.keep_last=1. "
            "checkpoint.on_full=wait starts anyway and waits for space"
        )
    if why:
        log.warning("%s", why)


def _without_memory(error: RuntimeError | MemoryError, loop: Loop) -> str:
    """What to say when `error` means that memory has run out; "" when it means something else."""
    from echofree import oom

    rank, step = loop.world.rank, loop.state.step + 1
    if oom.is_out_of_memory(error):
        size = loop.strategy.data_size
        return oom.describe(error, loop.config, rank, step, loop.pulse.phase, loop.shapes, loop.device, size)
    if oom.is_killed_worker(error):
        return oom.describe_worker(error, loop.config, rank, step)
    return ""


def early_part(where: FrontEndPlace, parts: Parts, device: torch.device) -> Ahead | None:
    """What the loader's workers do of the model while the step before is computed; None: nothing.

    A GPU gets through a large batch hop by hop faster than a few cores do; a CPU has the workers' cores beside."""
    from echofree.config.schema import FrontEndPlace

    ask = getattr(parts.model, "ahead", None)
    if ask is None or not getattr(parts.task, "passes_front", False):
        return None
    if where is FrontEndPlace.auto:
        where = FrontEndPlace.device if device.type == "cuda" else FrontEndPlace.workers
    return ask() if where is FrontEndPlace.workers else None


def choose_device(asked: str, world: World) -> torch.device:
    """`train.device` for this rank, made current where it is a GPU.

    Raises:
        UserError: no GPU, or none for this rank.
    """
    import torch

    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"train.device={asked}, but torch finds no CUDA device here. Type train.device=cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {world.local_rank} needs an own GPU, but this machine shows {torch.cuda.device_count()}. Type "
            f"dist.num_procs={torch.cuda.device_count()}"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device
