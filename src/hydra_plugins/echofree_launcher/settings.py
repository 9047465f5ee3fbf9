"""The keys of the two launchers, with their types. Presets are files in conf/hydra/launcher/.

No `from __future__ import annotations`: Hydra loads plugins in a way in which dataclasses couldn't resolve them.
"""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf


@dataclass
class LocalSettings:
    """hydra/launcher=local: this machine."""

    _target_: str = "hydra_plugins.echofree_launcher.launchers.LocalLauncher"
    max_parallel: Any = "auto"  # jobs at once; auto: as many as there are GPUs, or cores, for
    devices: Any = "auto"  # GPUs to hand out, such as [0,1]; auto: all that are visible
    gpus_per_job: int | None = None  # with dist.num_procs=auto; null: all, divided by max_parallel
    on_failure: str = "continue"  # continue | stop: no further job starts after one has failed
    on_interrupt: str = "ask"  # what Ctrl-C does to the jobs: ask | leave | cancel
    detach: bool = False  # return once the jobs are under way; python -m echofree.sweep DIR watches
    snapshot: bool = False  # the jobs run a copy of the code as it is now


@dataclass
class SlurmSettings(SlurmQueueConf):
    """hydra/launcher=slurm: the keys of submitit_slurm under their names, and these.

    Mappings are null by default, since Hydra lets nobody put a key into an empty one.
    """

    _target_: str = "hydra_plugins.echofree_launcher.launchers.SlurmLauncher"
    submitit_folder: str = "${hydra.sweep.dir}/.slurm"  # for job scripts and what SLURM writes
    name: str = "${hydra.job.name}"  # of the job in the queue
    max_num_timeout: int | None = None  # how often a job may run out of time and go on; null: as often as needed
    stderr_to_stdout: bool = True
    array_parallelism: int = 256  # jobs of one array at once
    srun_args: list[str] | None = None  # further words for srun
    teardown: list[str] | None = None  # lines after srun
    nodelist: str | None = None
    exclusive: Any = None
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    wckey: str | None = None
    additional_parameters: Any = None  # any other option of sbatch, such as {reservation: night}
    by_model: Any = None  # of jobs with that model: {base: {nodes: 4}}
    on_failure: str = "continue"  # continue | stop: what still waits is cancelled after the first failure
    on_interrupt: str = "ask"  # what Ctrl-C does to the jobs: ask | leave | cancel
    detach: bool = False  # return once the jobs are submitted; python -m echofree.sweep DIR watches
    snapshot: bool = False  # the jobs run a copy of the code as it is now


store = ConfigStore.instance()
store.store(group="hydra/launcher", name="local_settings", node=LocalSettings, provider="echofree_launcher")
store.store(group="hydra/launcher", name="slurm_settings", node=SlurmSettings, provider="echofree_launcher")
