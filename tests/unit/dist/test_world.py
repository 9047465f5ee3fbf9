"""Who am I, and with whom: what the environment says, and meeting only those of the same job."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from echofree.dist.world import JOB_ID, TORCHRUN_NAMES, World, choose_backend, found_in, join
from echofree.errors import ConfigError, EchoFreeError

CPU = torch.device("cpu")
COMPLETE = dict(zip(TORCHRUN_NAMES, ("5", "8", "1", "4", "localhost", "29400"), strict=True))


def test_alone() -> None:
    world = found_in({"PATH": "/bin"})
    assert (world.rank, world.size, world.source, world.is_first, world.num_nodes) == (0, 1, "alone", True, 1)
    assert world.sum([1, 2.5]) == [1.0, 2.5]
    assert world.gather("x") == ["x"]
    assert world.from_first("x") == "x"
    world.barrier()
    assert join(world, "gloo", CPU, 1.0, 1.0) is world
    world.close()


def test_torchrun_and_the_local_launcher() -> None:
    world = found_in(COMPLETE)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert world.source == "torchrun"
    assert not world.is_first
    assert found_in({**COMPLETE, JOB_ID: "abc"}).source == "local"


@pytest.mark.parametrize("gone", TORCHRUN_NAMES)
def test_half_an_environment_is_refused(gone: str) -> None:
    env = {k: v for k, v in COMPLETE.items() if k != gone}
    with pytest.raises(ConfigError, match=rf"but {gone} isn't.*torchrun"):
        found_in(env)


STEP = {
    "SLURM_JOB_ID": "12", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
}  # fmt: skip


def test_a_slurm_step_of_several_tasks() -> None:
    world = found_in(STEP)
    assert (world.rank, world.size, world.local_rank, world.local_size, world.source) == (2, 3, 0, 1, "slurm")
    assert world.job_id == "slurm--12.0-0"
    assert found_in({**STEP, "SLURM_RESTART_COUNT": "1"}).job_id != world.job_id


def test_torchrun_inside_a_slurm_step_counts() -> None:
    world = found_in({**STEP, **COMPLETE, "TORCHELASTIC_RUN_ID": "none"})
    assert world.source == "torchrun"
    assert "12" in world.job_id  # the default id of two jobs is the same


def test_a_slurm_job_of_one_task_or_none() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert found_in({**STEP, **one, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).size == 1
    assert found_in({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}).task is None  # a shell that inherited the id


def test_back_ends() -> None:
    assert choose_backend("auto", CPU) == "gloo"
    assert choose_backend("auto", torch.device("cuda")) == "nccl"
    assert choose_backend("gloo", torch.device("cuda")) == "gloo"
    with pytest.raises(ConfigError, match=r"dist\.backend=gloo"):
        choose_backend("nccl", CPU)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.mark.ranks
def test_exchanges_on_three_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    def work(rank: int, size: int) -> list[Any]:
        world = join(World(rank, size, rank, size), "gloo", CPU, 20.0, 20.0, os.environ["RANKS_INIT_METHOD"])
        answer = [
            world.sum([rank + 0.1, 10.0 * rank]), world.gather({"rank": rank}), world.from_first(f"from {rank}"),
            world.hosts, world.num_nodes, world.backend,
        ]  # fmt: skip
        world.barrier()
        world.close()
        return answer

    first, second, third = run_ranks(work, 3, init=False)
    assert first == second == third, "the same bits everywhere"
    assert first[0] == pytest.approx([3.3, 30.0], rel=1e-15)
    assert first[1:] == [[{"rank": r} for r in range(3)], "from 0", [socket.gethostname()] * 3, 1, "gloo"]


@pytest.mark.ranks
def test_two_jobs_on_one_port_do_not_join_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """Rank 1 of another job knocks at rank 0's port: it is told so, within seconds."""
    port = free_port()

    def work(rank: int, size: int) -> str:
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), JOB_ID: "ab"[rank]})
        try:
            join(World(rank, size, rank, size), "gloo", CPU, 4.0, 4.0)
        except EchoFreeError as error:
            return str(error)
        return "joined"

    mine, other = run_ranks(work, 2, init=False, timeout=40)
    assert "rank 1 of job 'b' met rank 0 of job 'a'" in other
    assert f"localhost:{port}: two jobs share one port" in other
    assert "rank 0 of job 'a' met rank 1 of job 'b': two jobs share one port" in mine


@pytest.mark.ranks
def test_the_same_job_meets_there(run_ranks: Callable[..., list[Any]]) -> None:
    port = free_port()

    def work(rank: int, size: int) -> list[float]:
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), JOB_ID: "a"})
        world = join(World(rank, size, rank, size), "gloo", CPU, 20.0, 20.0)
        total = world.sum([1.0])
        world.barrier()
        return total

    assert run_ranks(work, 2, init=False) == [[2.0], [2.0]]


def test_nobody_comes() -> None:
    """The text says where and how long it waited."""
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())})
    with pytest.raises(EchoFreeError, match=r"dist\.start_timeout_s=1 s"):
        join(World(1, 2, 1, 2), "gloo", CPU, 1.0, 1.0)
