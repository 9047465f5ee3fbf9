"""Devices and slots of a local sweep, on a machine that has GPUs only in the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echofree.config.compose import Composer, compose
from echofree.launch import share
from echofree.launch.start import Job

SETTINGS = {"devices": "auto", "max_parallel": "auto", "gpus_per_job": None}


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def planned(composer: Composer, words: list[str], gpus: int, monkeypatch: Any, jobs: int = 4, **settings: Any) -> Any:
    monkeypatch.setattr(share, "found_devices", lambda asked: ([str(i) for i in range(gpus)], []))
    made = []
    for number in range(jobs):
        composed = compose(words, composer)
        composed.run_dir = Path(f"/nowhere/{number}")
        made.append(Job(number, [], composed, {}))
    total, _, problems = share.plan(made, {**SETTINGS, **settings})
    return total["max_parallel"], [job.ticket.resources["devices"] for job in made], made[0].ticket.ranks, problems


@pytest.mark.parametrize(
    ("words", "settings", "slots", "devices", "ranks"),
    [
        ([], {}, 4, 1, 1),
        ([], {"max_parallel": 3}, 3, 1, 1),
        (["dist=ddp", "dist.num_procs=2"], {}, 2, 2, 2),
        (["dist=ddp"], {}, 1, 4, 4),
        (["dist=ddp"], {"max_parallel": 2}, 2, 2, 2),
        (["dist=ddp"], {"gpus_per_job": 1}, 4, 1, 1),
    ],
)
def test_gpus_are_shared_out(composer, monkeypatch, words, settings, slots, devices, ranks):
    assert planned(composer, words, 4, monkeypatch, **settings) == (slots, [devices] * 4, ranks, [])


def test_cpu_jobs_take_no_gpu(composer, monkeypatch):
    slots, devices, ranks, problems = planned(composer, ["train.device=cpu"], 4, monkeypatch)
    assert (devices, ranks, problems) == ([0] * 4, 1, [])
    assert slots >= 1


def test_more_ranks_than_gpus_is_told_with_the_sum(composer, monkeypatch):
    _, _, _, problems = planned(composer, ["dist=ddp", "dist.num_procs=8"], 4, monkeypatch, jobs=1)
    assert problems == [
        "job 0: 8 ranks x 1 GPU = 8 GPUs, and this machine has 4. Type: dist.num_procs=4",
    ]


def test_wrong_numbers_are_told(composer, monkeypatch):
    _, _, _, problems = planned(composer, [], 0, monkeypatch, jobs=1, max_parallel=0)
    assert "hydra.launcher.max_parallel=0" in problems[0]


def test_a_gpu_that_is_not_here():
    names, problems = share.found_devices([99])
    assert "99" not in names
    assert "there is no GPU 99 here" in problems[0]
