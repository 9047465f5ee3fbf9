"""Every exception EchoFree raises on purpose, with the exit code it leads to.

EchoFreeError               1  something failed while running
├── UserError               2  the user's input was wrong; said before anything started
│   ├── ConfigError         2  a key, a value or a combination of the run config
│   ├── DataError           2  a folder, a file or its contents
│   ├── CheckpointError     2  a checkpoint or run directory that can't be used
│   └── MissingExtra        2  an optional package that isn't installed
├── NonFiniteError          1  the loss or the gradient became NaN or infinite and the policy is to stop
├── OutOfMemory             1  a rank ran out of memory
├── RankFailed              1  a rank of this run failed
├── SaveFailed              1  a checkpoint couldn't be written; the earlier ones are as they were
└── Preempted              75  stopped by a signal or the time limit, state saved: start again to go on
Interrupted               130  stopped by Ctrl-C
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns; part of the promise to users and scripts."""

    DONE = 0
    FAILED = 1
    USER = 2
    PREEMPTED = 75
    INTERRUPTED = 130


class EchoFreeError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = ExitCode.FAILED


class UserError(EchoFreeError):
    """The input was wrong. The text says what is wrong, what would be right, and what to type."""

    exit_code = ExitCode.USER


class ConfigError(UserError):
    """One or more problems of a config, reported together.

    Args:
        problems: one text per problem, each naming key, value and remedy.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "The config has 1 problem:" if count == 1 else f"The config has {count} problems:"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))


class DataError(UserError):
    """A data folder or file can't be used."""


class CheckpointError(UserError):
    """A checkpoint or run directory can't be used."""


class MissingExtra(UserError):
    """An optional package is missing.

    Args:
        package: the import name that failed.
        extra: the extra of EchoFree that brings it.
        purpose: what it was needed for.
    """

    def __init__(self, package: str, extra: str, purpose: str):
        self.package, self.extra = package, extra
        super().__init__(
            f"{purpose} needs the package {package!r}, which isn't installed. Type: pip install 'echofree[{extra}]'"
        )


class NonFiniteError(EchoFreeError):
    """The loss or the gradient norm became NaN or infinite and train.nonfinite=stop."""


class OutOfMemory(EchoFreeError):
    """A rank ran out of memory; says where, with which shapes, and what helps."""


class RankFailed(EchoFreeError):
    """A rank failed; carries its traceback text."""


class SaveFailed(EchoFreeError):
    """A checkpoint couldn't be written; the earlier ones are as they were.

    Args:
        text: what happened and what to do.
        full: whether for want of space, so that it may succeed later.
    """

    def __init__(self, text: str, full: bool = False):
        self.full = full
        super().__init__(text)


class Preempted(EchoFreeError):
    """Stopped early with the state saved."""

    exit_code = ExitCode.PREEMPTED


class Interrupted(EchoFreeError):
    """Stopped by the user."""

    exit_code = ExitCode.INTERRUPTED
