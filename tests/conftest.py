"""What every test gets: a clean environment, fresh random inputs that can be repeated, and the helpers by name."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if find_spec("tqdm"):  # some packages show its bars; its thread would stay, and ranks are forked from this process
    from tqdm import tqdm

    tqdm.monitor_interval = 0

ROOT = Path(__file__).resolve().parents[1]
SEED_VARIABLE = "ECHOFREE_TEST_SEED"
BASE_SEED = int(os.environ.setdefault(SEED_VARIABLE, str(secrets.randbelow(2**31))))

# Left by a launcher or a shell, these change what a run does. SLURM_CONF stays: the slurm tests need it.
FOREIGN = ("SLURM_", "SUBMITIT_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
FOREIGN += ("WANDB_", "HYDRA_", "ECHOFREE_", "NCCL_", "GLOO_")
KEPT = {"SLURM_CONF", "ECHOFREE_SHARED_AUDIO", SEED_VARIABLE}


def pytest_report_header() -> str:
    return f"random inputs: {SEED_VARIABLE}={BASE_SEED} repeats them"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run when a marker expression or a test's own name asks for them; the rest skips with a reason."""
    named = any("::" in argument for argument in config.args)
    if not named and "slow" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slurm") and not os.environ.get("SLURM_CONF"):
            item.add_marker(pytest.mark.skip(reason="needs a Slurm cluster: SLURM_CONF isn't set"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """No variable of a launcher reaches a test, and nothing that a test sets reaches the next one."""
    before, folder = dict(os.environ), os.getcwd()
    for name in before:
        if name.startswith(FOREIGN) and name not in KEPT:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)
    os.chdir(folder)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ from run to run and from test to test; the report's first lines say how to repeat."""
    return np.random.default_rng([BASE_SEED, *request.node.nodeid.encode()])


@pytest.fixture(scope="session")
def shared_audio() -> Path:
    """The folder of real recordings, or a skip that says where it was looked for. Read only, never for training."""
    folder = Path(os.environ.get("ECHOFREE_SHARED_AUDIO") or ROOT.parent / "shared" / "audio")
    if not folder.is_dir():
        pytest.skip(f"no recordings: {folder} isn't there (set ECHOFREE_SHARED_AUDIO)")
    return folder


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Any]:
    """cli("train", "train.max_steps=2", timeout=60) runs the verb in an empty folder; see tests/cli/command.py."""
    from cli.command import run_verb

    def run(*args: str, cwd: Path | None = None, timeout: float = 120.0, env: dict[str, str] | None = None) -> Any:
        return run_verb(*args, cwd=tmp_path / "empty" if cwd is None else cwd, timeout=timeout, env=env)

    return run


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """run_ranks(fn, n, timeout): fn(rank, n, *args) on n forked ranks; see tests/ranks/harness.py."""
    from ranks.harness import run_ranks as run

    return run
