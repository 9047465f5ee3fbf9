"""What the local queue starts: the run whose directory is named, with all its ranks. Not a command for people."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from echofree.errors import ExitCode, UserError


def main() -> None:
    # until the run listens for itself: nothing is lost yet, so it can simply be started again
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(int(ExitCode.PREEMPTED)))
    from echofree.train import leave, run_prepared

    try:
        code = run_prepared(Path(sys.argv[1]))
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        code = int(error.exit_code)
    leave(code)


if __name__ == "__main__":
    main()
