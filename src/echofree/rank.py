"""What the local launcher starts: one rank of the run whose directory is named. Not a command for people."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from echofree.dist.local import follow_launcher

    follow_launcher()
    from echofree.train import leave, work

    leave(work(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
