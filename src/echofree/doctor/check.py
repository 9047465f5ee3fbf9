"""The verdict on one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Status(IntEnum):
    passed = 0
    warn = 1
    fail = 2

    def __str__(self) -> str:
        return "pass" if self is Status.passed else self.name


@dataclass(frozen=True)
class Check:
    """name: what was looked at; found: what is there; remedy: what to do, "" when nothing has to be done."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def passed(name: str, found: str) -> Check:
    return Check(name, Status.passed, found)


def warn(name: str, found: str, remedy: str) -> Check:
    return Check(name, Status.warn, found, remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    return Check(name, Status.fail, found, remedy)
