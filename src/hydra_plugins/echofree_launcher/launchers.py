"""The two classes that Hydra instantiates. All that they do stands in `echofree.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class LocalLauncher(Launcher):
    """Jobs beside each other on this machine."""

    def __init__(self, **settings: Any):
        self.settings = _plain(settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from echofree.config.launching import launch

        return launch("local", self.settings, self.context, self.config, self.task, job_overrides, initial_job_idx)


class SlurmLauncher(Launcher):
    """Jobs of a SLURM cluster."""

    def __init__(self, **settings: Any):
        self.settings = _plain(settings)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from echofree.config.launching import launch

        return launch("slurm", self.settings, self.context, self.config, self.task, job_overrides, initial_job_idx)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for k, v in settings.items()}
