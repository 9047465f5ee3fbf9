"""`srun python -m echofree.slurm RUN_DIR`: what the script of a launcher's job starts in every task. The run that is
frozen in RUN_DIR begins, or goes on when it has begun before. Not a command for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from echofree.errors import ConfigError, ExitCode, UserError
from echofree.slurm import env, guard


def main() -> int:
    try:
        task = env.found_in(os.environ)
        if task is None or len(sys.argv) != 2:
            raise ConfigError("only for tasks of a SLURM job. Type: srun python -m echofree.slurm RUN_DIR")
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    return guard.guarded(task, lambda: work(Path(sys.argv[1])))


def work(run_dir: Path) -> int:
    """-> the exit code of this rank"""
    from echofree.train import work_in_step

    try:
        return work_in_step(run_dir)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
