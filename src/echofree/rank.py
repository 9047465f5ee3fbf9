"""What the local launcher starts: one rank of the run whose directory is named. Not a command for people."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from echofree.errors import ExitCode


def main() -> None:
    # until the run listens for itself; a traceback out of the middle of an import tells nobody anything
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(ExitCode.INTERRUPTED))
    from echofree.dist.local import follow_launcher

    follow_launcher()
    from echofree.train import leave, work

    leave(work(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
