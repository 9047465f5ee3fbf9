"""python -m echofree.train: compose, check, freeze, launch, meet the other ranks, tell how it ended. What a rank does
in between is `training.run_config`."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import (
    ConfigError,
    EchoFreeError,
    ExitCode,
    Interrupted,
    Preempted,
    UserError,
)
from echofree.parts import Parts, build, check_fit
from echofree.slurm import again, env, guard
from echofree.training import Rank, choose_device, run_config

if TYPE_CHECKING:
    import torch

    from echofree.config.compose import Composed
    from echofree.dist.local import Ended
    from echofree.dist.world import World
    from echofree.log import Position, RankLog
    from echofree.loop import Outcome
    from echofree.rundir import RunDir

log = logging.getLogger("echofree")


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if (task := guard.wanted(os.environ)) is not None and not {"-m", "--multirun"} & set(words):
            return guard.guarded(task, lambda: _main(words), alone="RANK" in os.environ)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    return _main(words)


def _main(words: list[str]) -> int:
    if _is_follower(words):
        return _follow()
    if own := [word for word in words if word.startswith("federated.")]:
        print(f"{own[0]}: train has no clients. Type: python -m echofree.federate {' '.join(words)}", file=sys.stderr)
        return int(ExitCode.USER)
    from echofree.config.compose import main_config, report

    try:
        composed = main_config(words, run_job=job)
        return start(composed)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted before the run had started", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)


def job(composed: Composed) -> float | None:
    """One job of a sweep; -> the best value of `checkpoint.metric`.

    Raises:
        EchoFreeError: the job failed.
    """
    from echofree.launch.start import standing
    from echofree.machines import refuse_sweep

    refuse_sweep(composed)
    assert composed.run_dir is not None
    under_submitit(os.environ)
    if int(os.environ.get("RANK", "0")) == 0:  # the others are told by the first
        state = standing(composed)
        if state == "done" and "RANK" not in os.environ:
            log.info("done already: %s", composed.run_dir)
            return best_of(composed.run_dir)
        composed.resumed = state == "again"
    code = start(composed)
    if code != ExitCode.DONE:
        kinds = {kind.exit_code: kind for kind in (UserError, Preempted, Interrupted)}
        raise kinds.get(ExitCode(code), EchoFreeError)(f"the job in {composed.run_dir} ended with exit code {code}")
    return best_of(composed.run_dir)


def best_of(run_dir: Path) -> float | None:
    """The best value of `checkpoint.metric` that a run has reached."""
    result: float | None = json.loads((run_dir / "run.json").read_text()).get("best")
    return result


def under_submitit(env: MutableMapping[str, str]) -> None:
    """Several tasks of Hydra's submitit_local become ranks of one run, as torchrun would name them."""
    if env.get("SUBMITIT_EXECUTOR") == "local" and int(env.get("SUBMITIT_LOCAL_NTASKS", "1")) > 1:
        import submitit

        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


def start(composed: Composed) -> int:
    """Freezes the config into a run directory and runs it: here, in ranks started here, or as the rank that torchrun
    made of this process. -> the exit code"""
    from echofree.dist.world import found_in

    world = found_in(os.environ)
    own_ranks = composed.config.dist.rendezvous is not None  # a task of SLURM's may be a launcher
    if world.source == "torchrun" or (world.source == "slurm" and not own_ranks):
        code = _work_as_rank(composed, world)
        if code == ExitCode.DONE and "SUBMITIT_EXECUTOR" in os.environ:
            return code  # submitit writes the result before it ends the process
        leave(code)
    # what's wrong with the data or the model is said before any directory is made
    parts = build(composed.config, composed.resumed)
    dist, count = composed.config.dist, num_ranks(composed.config)
    check_fit(composed.config, parts.model, count * dist.num_nodes)
    if dist.num_nodes > 1:
        from echofree import machines

        del parts
        return machines.run(composed, count, machines.Steps(prepare, _verdict, _note_restart))
    kept = parts if count == 1 and not dist.max_restarts else None
    del parts  # several ranks build their own
    found = again.first_or_again(composed, count, lambda: prepare(composed, count))
    if isinstance(found, int):
        return found
    guard.tell(found)
    return run_prepared(found, kept)


def num_ranks(config: Any) -> int:
    """Ranks that `dist` asks for on one machine, looked at here."""
    from echofree.dist.local import how_many

    return 1 if config.dist.name.value == "single" else how_many(config.dist.num_procs, config.train.device)


def run_prepared(run_dir: Path, parts: Parts | None = None) -> int:
    """Runs what is frozen in `run_dir` with all its ranks on this machine. -> the exit code

    Args:
        parts: already built from the same config, for a run of one rank.
    """
    from echofree.config import frozen
    from echofree.dist.local import launch

    config = frozen.load(run_dir)
    dist, count = config.dist, num_ranks(config)
    if count == 1 and not dist.max_restarts:
        return work(run_dir, parts=parts)
    code = _verdict(run_dir, launch(count, run_dir, dist.start_timeout_s, interface=dist.interface))
    for number in range(1, dist.max_restarts + 1):
        if code != ExitCode.FAILED:
            break
        _note_restart(run_dir, number, dist.max_restarts)
        code = _verdict(run_dir, launch(count, run_dir, dist.start_timeout_s, interface=dist.interface))
    return code


def _note_restart(run_dir: Path, number: int, limit: int) -> None:
    """All ranks start again from the last complete checkpoint, in the same directory."""
    from echofree import checkpoint, rundir

    run = rundir.RunDir(run_dir, is_first=True)
    facts, failure = run.facts, run.first_failure() or {}
    good = checkpoint.newest_good(run.checkpoints)
    entry = {
        "number": number, "time": time.time(), "rank": failure.get("rank"), "kind": failure.get("kind"),
        "why": str(failure.get("traceback", "unknown")).strip().splitlines()[-1],
        "from": None if good is None else good.name,
    }  # fmt: skip
    run.clear_failure()
    run.note(status="restarting", resume=True, resumed_from=None, restarts=[*facts.get("restarts", []), entry])
    begin = "the beginning" if good is None else good.name
    print(f"restart {number} of {limit} (dist.max_restarts) from {begin}", file=sys.stderr, flush=True)


def prepare(composed: Composed, size: int) -> Path:
    """The run directory, ready: a new one, or the one that is gone on with by `size` ranks."""
    from echofree import restart, rundir
    from echofree.config import frozen
    from echofree.config.override import flat

    config = composed.config
    if composed.resumed:
        assert composed.run_dir is not None
        run = rundir.RunDir(composed.run_dir, is_first=True)
        restart.prepare(run, config, composed.checkpoint, size, sorted(composed.changed))
        return composed.run_dir
    text = frozen.dump(config)
    if composed.run_dir is None:
        parent = Path(config.output_root) / config.name
        run_dir = rundir.create(parent, text, rundir.command_line(), config.seed)
    else:
        run_dir = rundir.create_at(composed.run_dir, text, rundir.command_line(), config.seed)
    after = flat(frozen.freeze(config))
    settings = {key: after[key] for key in sorted(composed.changed) if key in after}
    rundir.RunDir(run_dir, is_first=True).note(
        changed=sorted(composed.changed),
        settings=settings,
        notes=composed.notes,
        profile_steps=composed.profile_steps,
        metric=config.checkpoint.metric,
    )
    composed.run_dir = run_dir
    return run_dir


def _work_as_rank(composed: Composed, world: World) -> int:
    """One of the ranks that torchrun or srun has started. -> its exit code"""
    from echofree.process import die_with

    if world.source == "torchrun":
        die_with(os.getppid())
    parts: Parts | None = None

    def decide() -> Path:
        nonlocal parts
        parts = build(composed.config, composed.resumed)
        check_fit(composed.config, parts.model, world.size)
        return prepare(composed, world.size)

    found = _agree(composed.config, world, lambda: again.first_or_again(composed, world.size, decide))
    return found if isinstance(found, int) else _work_joined(found, world, parts)


def _is_follower(words: Sequence[str]) -> bool:
    """Whether this is a task of srun that needs no config of its own: rank 0 composes and decides. Thousands of ranks
    that compose the same would only find out whether their files are the same."""
    task = env.found_in(os.environ)
    if task is None or task.rank == 0 or "RANK" in os.environ:
        return False
    return not any(word.startswith(("-", "dist.rendezvous=")) for word in words)


def _follow() -> int:
    """A rank above 0 of a SLURM step. -> its exit code"""
    from echofree.dist.world import found_in

    found = _agree(None, world := found_in(os.environ))
    return found if isinstance(found, int) else _work_joined(found, world)


def work_in_step(run_dir: Path) -> int:
    """One task of a job whose run directory was prepared at its submission. -> its exit code"""
    from echofree.config import frozen
    from echofree.dist.world import found_in

    world = found_in(os.environ)
    if world.size > 1 and world.rank > 0:
        return _follow()
    config = frozen.load(run_dir)
    if world.size == 1:
        ended = again.begin_or_again(run_dir, num_ranks(config))
        guard.tell(run_dir)
        return run_prepared(run_dir) if ended is None else ended

    def decide() -> Path | int:
        ended = again.begin_or_again(run_dir, world.size)
        return run_dir if ended is None else ended

    found = _agree(config, world, decide)
    return found if isinstance(found, int) else _work_joined(found, world)


def _agree(config: Any, world: World, decide: Callable[[], Path | int] | None = None) -> Path | int:
    """Meets the other ranks; rank 0 decides where the run is. -> that, or the exit code when there is nothing to run

    Args:
        config: of this rank; a rank above 0 of a SLURM step has none.
    """
    try:
        if config is not None and config.dist.max_restarts:
            raise ConfigError(
                f"dist.max_restarts={config.dist.max_restarts} is for ranks that EchoFree starts itself; "
                "torchrun has --max-restarts, SLURM requeues. Leave it out"
            )
        if world.source == "slurm":
            _join_step(config, world)
        else:
            _join(config.dist, world, choose_device(config.train.device, world))
        # a user error of rank 0 must reach all, or the others would wait for its decision
        answer: Any = None
        if world.is_first and decide is not None:
            try:
                answer = decide()
            except UserError as error:
                answer = error
        answer = world.from_first(answer)
        if isinstance(answer, UserError):
            raise answer
    except UserError as error:
        if world.is_first:
            print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    found: Path | int = answer
    return found


def _join_step(config: Any, world: World) -> None:
    """The ranks that srun has started: rank 0 says what holds."""
    from echofree.dist import step
    from echofree.dist.world import check_interface, choose_backend, join

    assert world.task is not None
    if config is None:
        world.met, settings = step.follow(world.task)
    else:
        dist = config.dist
        env.check(dist, world.task)
        check_interface(dist.interface)
        settings = step.Settings(
            dist.backend.value, dist.interface, dist.init_method, dist.timeout_s, dist.start_timeout_s,
            config.train.device,
        )  # fmt: skip
        world.met = step.lead(world.task, settings)
    device = choose_device(settings.device, world)
    backend = choose_backend(settings.backend, device)
    join(world, backend, device, settings.start_timeout_s, settings.timeout_s, settings.init_method)


def _work_joined(run_dir: Path, world: World, parts: Parts | None = None) -> int:
    from echofree.rundir import RunDir

    guard.tell(run_dir)
    code = work(run_dir, world, parts)
    if world.is_first and code not in (ExitCode.DONE, ExitCode.PREEMPTED):
        _show_failure(RunDir(run_dir, is_first=True))
    return code


def _verdict(run_dir: Path, ended: Ended) -> int:
    """What the launcher says at the end: the first failing rank's traceback is what the user sees."""
    from echofree import place, rundir

    if ended.code and place.trouble(run_dir):
        return int(ExitCode.FAILED)  # rank 0 has said it, and nothing can be read or noted there

    run = rundir.RunDir(run_dir, is_first=True)
    said = run.facts["status"]
    if said in ("done", "stopped") and ended.code == 0:
        return int(ExitCode.DONE)
    if said == "preempted":
        return int(ExitCode.PREEMPTED)
    failure = run.first_failure()
    if said == "interrupted" or ended.interrupted or (ended.by_hand and failure is None):
        run.note(status="interrupted", end=time.time())
        return int(ExitCode.INTERRUPTED)
    if ended.asked and failure is None:
        print("asked to stop before the first step: nothing to save", file=sys.stderr, flush=True)
        run.note(status="preempted", end=time.time())
        return int(ExitCode.PREEMPTED)
    if ended.text and (failure is None or failure["kind"] in ("victim", "gone")):
        run.note_failure(ended.rank, ended.text, kind="killed")
        failure = run.first_failure()
    _show_failure(run)
    if failure is None:
        print(f"a rank ended with exit code {ended.code}. See {run_dir}/logs", file=sys.stderr)
    run.note(status="failed", end=time.time(), error=failure or {"traceback": f"exit code {ended.code}"})
    return int(ExitCode.USER if failure is not None and failure["kind"] == "user" else ExitCode.FAILED)


def _show_failure(run: RunDir) -> None:
    failure = run.first_failure()
    if failure is not None and not failure["shown"]:  # rank 0's own traceback is on the console already
        head = {"hang": "", "killed": "", "gone": ""}.get(
            failure["kind"], f"rank {failure['rank']} on {failure['host']} failed first:\n"
        )
        print(f"{head}{failure['traceback']}", file=sys.stderr, flush=True)


def leave(code: int) -> None:
    """Ends a rank. Not by sys.exit: gloo's worker threads can abort an interpreter that is being torn down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def work(run_dir: Path, world: World | None = None, parts: Parts | None = None) -> int:
    """One rank of the run in `run_dir`, from the open log to the exit code; errors are caught, told and noted here.

    Args:
        world: already joined; else it is found in the environment.
        parts: already built from the same config.
    """
    from echofree.config import frozen
    from echofree.dist.cause import tell
    from echofree.dist.world import found_in
    from echofree.log import Position, RankLog, quiet_native
    from echofree.rundir import RunDir

    config = frozen.load(run_dir)
    joined = world is not None
    world = world or found_in(os.environ)
    run = RunDir(run_dir, world.is_first)
    position = Position(rank=world.rank)
    log_file = run_dir / "logs" / f"rank{world.rank}.log"
    if world.rank > 0:
        quiet_native(log_file)
    rank_log = RankLog(log_file, position, console=world.is_first, level=config.logger.level)
    try:
        if world.is_first:
            run.lock()
    except UserError as error:  # the directory is another process's: nothing of ours goes into its run.json
        log.error("%s", error)
        rank_log.close()
        return int(error.exit_code)
    try:
        outcome = run_joined(config, run, world, position, rank_log, joined, parts)
        return int(ExitCode.PREEMPTED if outcome.status == "preempted" else ExitCode.DONE)
    except BaseException as error:
        return tell(error, run, world, rank_log)
    finally:
        run.unlock()
        rank_log.close()


def run_joined(
    config: Any, run: RunDir, world: World, position: Position, rank_log: RankLog, joined: bool, parts: Parts | None
) -> Outcome:
    """Meets the other ranks, runs, and leaves the group in the order that gloo needs: model freed, then destroyed."""
    from echofree.dist.watchdog import Pulse, Watchdog

    device = choose_device(config.train.device, world)
    if not joined:
        _join(config.dist, world, device)
    pulse = Pulse()
    limits = (config.dist.timeout_s, config.dist.start_timeout_s)
    watchdog = Watchdog(pulse, position, world, run, *limits, rank_log.path)
    watchdog.start()
    try:
        parts = parts or build(config, begun(run))
        outcome = run_config(Rank(config, run, world, device, position, rank_log, pulse, parts))
        world.barrier()  # a preempted rank's exit code ends the others: rank 0 has to be through with its notes
    except BaseException:
        watchdog.stop(failed=True)
        raise
    watchdog.stop()
    gc.collect()
    world.close()
    return outcome


def begun(run: RunDir) -> bool:
    """Whether a checkpoint of its own is there to go on from."""
    from echofree import checkpoint

    return bool(run.facts.get("resume")) and bool(checkpoint.complete(run.checkpoints))


def _join(dist: Any, world: World, device: torch.device) -> None:
    from echofree.dist.world import choose_backend, join, use_interface

    use_interface(dist.interface, world)
    backend = dist.backend.value
    join(world, choose_backend(backend, device), device, dist.start_timeout_s, dist.timeout_s, dist.init_method)


if __name__ == "__main__":
    sys.exit(main())
