"""Which of several failures is the cause. When one rank dies, the others fail too, with a broken connection, often
before the first has written anything; what the user has to see is the first one's error."""

from __future__ import annotations

import logging
import time
import traceback

from echofree.dist.world import World
from echofree.errors import ExitCode, NonFiniteError, SaveFailed, UserError
from echofree.log import RankLog
from echofree.place import trouble
from echofree.rundir import RunDir

log = logging.getLogger("echofree")

WAIT_S = 2.0  # for a more original error of another rank
POLL_S = 0.05

# How gloo, NCCL and the store say that somebody else is gone.
BROKEN = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh failed",
    "Timed out waiting",
    "Socket closed",
    "ncclRemoteError",
    "ncclSystemError",
    "remote process exited",
    "failed to recv, got 0 bytes",
)


def tell(error: BaseException, run: RunDir, world: World, rank_log: RankLog) -> int:
    """Notes and says why this rank ends; -> its exit code."""
    first = world.is_first
    if isinstance(error, OSError | SaveFailed) and (why := trouble(run.folder)):
        log.error("%s", why)  # nothing can be noted; whoever reads run.json sees that the process is gone
        rank_log.keep("".join(traceback.format_exception(error)))
        return int(ExitCode.FAILED)
    if isinstance(error, KeyboardInterrupt):
        run.note(status="interrupted", end=time.time())
        log.error("interrupted")
        return int(ExitCode.INTERRUPTED)
    if isinstance(error, UserError):
        run.note_failure(world.rank, str(error), kind="user", shown=first)
        log.error("%s", error)
    elif is_victim(error, world):
        text = _note_victim(run, world, error)
        rank_log.keep("".join(traceback.format_exception(error)))
        log.error("%s", text)
    else:
        expected = isinstance(error, NonFiniteError | SaveFailed)
        text = str(error) if expected else "".join(traceback.format_exception(error))
        run.note_failure(world.rank, text, shown=first)
        log.error("rank %d failed:\n%s", world.rank, text)
    run.note(status="failed", end=time.time(), error=run.first_failure())
    return int(error.exit_code if isinstance(error, UserError) else ExitCode.FAILED)


def is_victim(error: BaseException, world: World) -> bool:
    """Whether `error` says that another rank is gone, rather than what is wrong here."""
    return world.size > 1 and isinstance(error, RuntimeError) and any(text in str(error) for text in BROKEN)


def _note_victim(run: RunDir, world: World, error: BaseException) -> str:
    """Leaves the claim to be first to another rank, if there is one within WAIT_S; -> what to say.

    A rank that was killed can't write anything: then its process is gone, and that is the cause.
    """
    end = time.monotonic() + WAIT_S
    first = run.first_failure()
    while first is None and time.monotonic() < end:
        time.sleep(POLL_S)
        first = run.first_failure()
    gone = world.gone()
    if first is not None:
        text = f"rank {world.rank} lost its connection: rank {first['rank']} had failed before"
        run.note_failure(world.rank, f"{text}\n{error}", kind="victim")
    elif gone:
        who = ", ".join(f"rank {r} (process {world.pids[r]} on {world.hosts[r]})" for r in gone)
        text = (
            f"{who} is gone without a word: killed (out of memory? see dmesg), ended by os._exit, or crashed in native "
            f"code; the end of logs/rank{gone[0]}.log may say more"
        )
        run.note_failure(gone[0], text, kind="gone", shown=world.is_first)
    else:
        text = f"rank {world.rank} lost its connection to the others, and no rank has said why: {error}"
        run.note_failure(world.rank, text, kind="victim", shown=world.is_first)
    return text
