"""The queues by name: this machine's and SLURM's. A sweep may have jobs in both, when it was gone on with elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.launch import local, request, share
from echofree.launch import ticket as tickets
from echofree.launch.batch import Slurm
from echofree.launch.ticket import Ticket
from echofree.launch.view import Seen

if TYPE_CHECKING:
    from echofree.launch.start import Job

Plan = tuple[dict[str, Any], list[str], list[str]]


class Queues:
    """All there are. One for as long as somebody watches: it remembers when the scheduler was asked last."""

    def __init__(self) -> None:
        self.slurm = Slurm()

    def plan(self, kind: str, jobs: Sequence[Job], settings: Mapping[str, Any]) -> Plan:
        """Gives each job its ticket. -> (settings of the whole sweep, what to tell, problems)"""
        return request.plan(jobs) if kind == "slurm" else share.plan(jobs, settings)

    def submit(self, kind: str, sweep: Path, jobs: Sequence[Ticket]) -> None:
        """Hands the jobs over.

        Raises:
            UserError: the scheduler doesn't want one of them; then it has none.
        """
        if kind == "slurm":
            self.slurm.submit(sweep, jobs)
        else:
            local.submit(sweep, jobs)

    def look(self, sweep: Path, jobs: Sequence[Ticket]) -> dict[int, Seen]:
        """How the jobs stand; a scheduler isn't asked more often than it likes."""
        here = [job for job in jobs if job.queue == "local"]
        there = [job for job in jobs if job.queue == "slurm"]
        return (local.look(sweep, here) if here else {}) | (self.slurm.look(sweep, there) if there else {})

    @property
    def trouble(self) -> str:
        """Why the scheduler didn't answer the last time; "" when it did."""
        return self.slurm.scheduler.trouble

    def cancel(self, sweep: Path, numbers: Sequence[int]) -> None:
        """Waiting jobs never start; running ones save and end."""
        jobs = [job for job in tickets.read(sweep) if job.number in numbers]
        if any(job.queue == "local" for job in jobs):
            local.cancel(sweep, numbers)
        there = [job for job in jobs if job.queue == "slurm"]
        if there:
            self.slurm.cancel(sweep, there)
