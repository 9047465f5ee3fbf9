"""What SLURM's variables say, and whether `dist` says the same."""

from __future__ import annotations

import pytest

from echofree.errors import ConfigError
from echofree.slurm.env import counts, expand, found_in, problems

STEP = {
    "SLURM_JOB_ID": "120", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4", "SLURM_CLUSTER_NAME": "big",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],gpu-a", ["n08", "n09", "n10", "n12", "gpu-a"]),
        ("r[1-2]n[1,3].x", ["r1n1.x", "r1n3.x", "r2n1.x", "r2n3.x"]),
        ("", []),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_tasks_of_each_node() -> None:
    assert counts("2(x3),1") == [2, 2, 2, 1]
    assert counts("4") == [4]


def test_a_task_of_a_step() -> None:
    task = found_in(STEP)
    assert task is not None
    assert (task.rank, task.size, task.local_rank, task.local_size, task.node) == (2, 4, 0, 2, 1)
    assert (task.nodes, task.per_node, task.name) == (("gpu07", "gpu08"), (2, 2), "120")
    assert task.identity == "slurm-big-120.3-0"


def test_a_task_of_an_array_has_the_name_that_scontrol_takes() -> None:
    task = found_in({**STEP, "SLURM_ARRAY_JOB_ID": "118", "SLURM_ARRAY_TASK_ID": "7", "SLURM_RESTART_COUNT": "2"})
    assert task is not None
    assert (task.name, task.job_id, task.restart) == ("118_7", "120", 2)


def test_a_batch_script_and_an_interactive_shell_are_one_process() -> None:
    batch = {key: STEP[key] for key in ("SLURM_JOB_ID", "SLURM_NTASKS")} | {"SLURM_PROCID": "0"}
    for env in (batch, {**batch, "SLURM_STEP_ID": str(0xFFFFFFFA)}):
        task = found_in(env)
        assert task is not None
        assert (task.size, task.step, task.tasks) == (1, None, 4)


def test_no_job() -> None:
    assert found_in({}) is None
    assert found_in({"SLURM_JOB_ID": "120", "SLURM_NTASKS": "4"}) is None  # salloc's shell


def test_variables_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="4 tasks"):
        found_in({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2,1"})


@pytest.mark.parametrize(
    ("dist", "per_node", "text"),
    [
        (("single", "1", 1), [2, 2], "2 x 2 = 4 tasks on 2 node(s), dist=single"),
        (("ddp", "2", 1), [2, 2], "2 x 2 = 4 tasks on 2 node(s), but dist.num_nodes=1 x dist.num_procs=2 = 2 rank(s)"),
        (("ddp", "4", 2), [2, 2], "dist.num_nodes=2 x dist.num_procs=4 = 8 rank(s)"),
        (("ddp", "4", 1), [3, 2], "3 + 2 = 5 tasks on 2 node(s)"),
        (("ddp", "auto", 3), [2, 2], "but dist.num_nodes=3"),
    ],
)
def test_numbers_that_do_not_fit(dist: tuple[str, str, int], per_node: list[int], text: str) -> None:
    (found,) = problems(*dist, per_node)
    assert text in found
    assert "Type: " in found


@pytest.mark.parametrize(
    ("dist", "per_node"),
    [(("single", "1", 1), [1]), (("ddp", "auto", 1), [3, 1]), (("ddp", "2", 2), [2, 2]), (("ddp", "4", 1), [4])],
)
def test_numbers_that_fit(dist: tuple[str, str, int], per_node: list[int]) -> None:
    assert problems(*dist, per_node) == []
