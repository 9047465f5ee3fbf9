"""Bookkeeping of a sweep; what a user sees of one is tested in tests/cli."""

from __future__ import annotations

from echofree.config.compose import Composer, job_combinations, settings
from echofree.config.sweep import own_folder


def test_two_sweeps_of_one_second_get_two_folders(tmp_path):
    wanted = tmp_path / "multirun" / "run" / "2026-01-01_00-00-00"
    folders = [own_folder(wanted) for _ in range(3)]
    assert [folder.name for folder in folders] == [wanted.name, f"{wanted.name}-2", f"{wanted.name}-3"]
    assert all(folder.is_dir() for folder in folders)


def test_the_combinations_are_those_of_hydra_in_its_order():
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    words = ["optim.lr=1e-3,3e-4", "seed=range(0,3)", "model=tiny,base", "name='x y'"]
    _, right, problems = settings(words, Composer(), multirun=True)
    assert problems == []
    (batch,) = BasicSweeper.split_arguments(right, None)
    ours = job_combinations(right)
    assert len(ours) == 12
    assert [sorted(job) for job in ours] == [sorted(job) for job in batch]


def test_a_search_must_look_for_the_better():
    from omegaconf import OmegaConf

    from echofree.config.schema import Mode
    from echofree.config.sweep import _direction_problems

    def told(direction: str | None, mode: Mode) -> list[str]:
        hydra = {"sweeper": {} if direction is None else {"direction": direction}}
        return _direction_problems(OmegaConf.create({"hydra": hydra, "checkpoint": {"mode": mode, "metric": "erle"}}))

    assert told(None, Mode.max) == told("minimize", Mode.min) == told("maximize", Mode.max) == []
    (text,) = told("minimize", Mode.max)
    assert text.endswith("Type: hydra.sweeper.direction=maximize")
