"""The doctor's judgement of machines that this one isn't: facts are made up, checks see nothing else."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from echofree import doctor
from echofree.dist.network import Interface
from echofree.doctor import device, facts, place, show, wire
from echofree.doctor.check import Check, Status
from echofree.doctor.facts import Facts, Gpu, Plan

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH = Interface("eth0", ("10.0.0.5",), speed_mbps=1000)
IB = Interface("ib0", ("10.1.0.5",), speed_mbps=200_000)
DOCKER = Interface("docker0", ("172.17.0.1",))
H100 = Gpu("H100", (9, 0), 80_000, 79_000)
CUDA: dict[str, Any] = {
    "cuda_build": "12.8",
    "driver": "570.86.15",
    "cuda_works": True,
    "gpus": (H100, H100),
    "nccl": "2.29",
}
OLD = dataclasses.replace(H100, capability=(6, 1))
BUSY = dataclasses.replace(H100, free_mb=10_000)
MACHINES = Plan(num_nodes=2, rendezvous="10.0.0.5:29400")


def test_a_sound_laptop_passes_everything() -> None:
    checks = [check(Facts()) for check in (*device.CHECKS, *wire.CHECKS, *place.CHECKS)]
    assert [c for c in checks if c.status is not Status.passed] == []
    assert not any(c.remedy for c in checks)
    assert len({c.name for c in checks}) == len(checks)


# (check, facts that differ from the laptop's, status, words of what is found, words of the remedy)
CASES: list[tuple[Callable[[Facts], Check], dict[str, Any], str, str, str]] = [
    (device.driver, CUDA, "pass", "570.86.15", ""),
    (
        device.driver,
        {**CUDA, "driver": "510.47.03"},
        "fail",
        "510.47.03 is too old",
        "525.60.13 or later, or install a torch built for CUDA 11",
    ),
    (device.driver, {"driver": "570.86.15"}, "warn", "built for CPUs", "CUDA build"),
    (device.driver, {"cuda_build": "12.8"}, "warn", "no NVIDIA driver", "install the driver"),
    (
        device.driver,
        {**CUDA, "cuda_works": False, "cuda_error": "no device"},
        "fail",
        "no device",
        "CUDA_VISIBLE_DEVICES",
    ),
    (device.kernels, {**CUDA, "arch_list": ("sm_80", "sm_90")}, "pass", "9.0", ""),
    (
        device.kernels,
        {**CUDA, "gpus": (OLD,), "arch_list": ("sm_80", "sm_90")},
        "fail",
        "capability 6.1",
        "train.device=cpu",
    ),
    (
        device.kernels,
        {**CUDA, "arch_list": ("sm_80", "compute_80")},
        "warn",
        "compiled at the first start",
        "newer torch",
    ),
    (device.gpus, {**CUDA, "plan": Plan(ranks=4)}, "fail", "4 ranks", "dist.num_procs=2"),
    (device.gpus, {**CUDA, "gpus": (H100, BUSY)}, "warn", "uses GPU 1", "nvidia-smi"),
    (device.links, {**CUDA, "peers": ((0, 1, False),), "links": ("SYS",)}, "warn", "0-1", "NCCL_P2P_DISABLE"),
    (device.links, {**CUDA, "peers": ((0, 1, True),), "links": ("NV18",)}, "pass", "NV18", ""),
    (device.back_ends, {"gloo": False}, "fail", "no gloo", "install"),
    (device.back_ends, {**CUDA, "nccl": None}, "fail", "no NCCL", "CUDA build"),
    (
        wire.interfaces,
        {"environment": {"GLOO_SOCKET_IFNAME": "^lo"}, "interfaces": (LO, ETH)},
        "fail",
        "GLOO_SOCKET_IFNAME=^lo names '^lo', which isn't there (^",
        "unset GLOO_SOCKET_IFNAME, or type dist.interface=eth0",
    ),
    (
        wire.interfaces,
        {"plan": Plan(interface="ib7"), "interfaces": (LO, ETH)},
        "fail",
        "dist.interface=ib7 names 'ib7'",
        "dist.interface=eth0",
    ),
    (
        wire.interfaces,
        {"environment": {"GLOO_SOCKET_IFNAME": "lo"}, "interfaces": (LO, ETH), "plan": MACHINES},
        "fail",
        "lo reaches this machine only",
        "dist.interface=eth0",
    ),
    (
        wire.interfaces,
        {"interfaces": (LO, DOCKER), "plan": MACHINES},
        "fail",
        "no interface leads to other machines",
        "dist.num_nodes=1",
    ),
    (wire.interfaces, {"interfaces": (LO, ETH, DOCKER, IB)}, "pass", "by hand: dist.interface=ib0", ""),
    (wire.host_name, {"host_addresses": ()}, "warn", "leads to no address", "/etc/hosts"),
    (
        wire.host_name,
        {"plan": Plan(num_nodes=2, rendezvous="here:29400")},
        "fail",
        "another machine on each machine",
        "PORT",
    ),
    (wire.ports, {"can_listen": False}, "fail", "can't listen", "lo"),
    (wire.ports, {"plan": MACHINES, "ports_taken": (29400,)}, "fail", "29400", "another port"),
    (wire.ports, {"ports_taken": (29500,)}, "pass", "29500 taken", ""),
    (place.shared_memory, {"shm_mb": None}, "fail", "none", "--shm-size"),
    (place.shared_memory, {"shm_mb": 64}, "fail", "64 MB", "data.num_workers=0"),
    (place.shared_memory, {"shm_mb": 500}, "warn", "500 MB", "--shm-size"),
    (place.shared_memory, {"shm_mb": 64, "plan": Plan(workers=0)}, "pass", "64 MB", ""),
    (place.shared_memory, {"shm_mb": 500, "plan": Plan(front_end="device")}, "pass", "117 MB", ""),
    (place.open_files, {"files_soft": 256, "files_hard": 4096}, "fail", "256", "ulimit -n 4096"),
    (place.open_files, {"files_soft": 1024, "plan": Plan(ranks=16)}, "warn", "16 ranks", "ulimit -n 65536"),
    (place.disk, {"disk_writable": "/x is a file"}, "fail", "/x is a file", "output_root="),
    (place.disk, {"disk_bytes": 10**8}, "fail", "0.1 GB", "output_root="),
    (place.disk, {"disk_files": 10}, "fail", "10 files", "output_root="),
    (place.disk, {"disk_bytes": 5 * 10**9}, "warn", "5.0 GB", "keep_last=1"),
    (place.data, {"data_error": "/nowhere doesn't exist"}, "fail", "/nowhere", "data.root="),
    (place.data, {"decode": (6, 20.0)}, "warn", "20 s of audio", "local disk"),
    (
        place.workers,
        {"plan": Plan(ranks=4, workers=8), "cores": 8},
        "warn",
        "4 rank(s) x 8 workers on 8 cores",
        "data.num_workers=1",
    ),
    (place.memory, {"memory_mb": 1000, "plan": Plan(ranks=2)}, "fail", "1000 MB", "data.num_workers=0"),
    (place.memory, {"memory_mb": 1000}, "warn", "1000 MB", "data.num_workers"),
    (place.threads, {"plan": Plan(ranks=2)}, "pass", "2 rank(s) x 3 threads on 8 cores", ""),
    (place.threads, {"plan": Plan(ranks=9)}, "warn", "9 rank(s) x 1 threads on 8 cores", "dist.num_procs=8"),
    (place.threads, {"plan": Plan(ranks=2, threads=5)}, "warn", "2 rank(s) x 5", "dist.threads=0"),
    (place.slurm, {"slurm_commands": ("sbatch", "sacct")}, "warn", "doesn't answer", "scontrol ping"),
    (place.slurm, {"slurm_commands": ("sbatch",), "slurm_answers": True}, "warn", "no sacct", "accounting"),
    (
        place.slurm,
        {"environment": {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}},
        "warn",
        "job 7",
        "--cpus-per-task=3",
    ),
    (
        place.extras,
        {"extras": {"metrics": (), "sim": ("pyroomacoustics",)}},
        "pass",
        "not installed: sim (room simulation)",
        "",
    ),
]


@pytest.mark.parametrize(("check", "given", "status", "found", "remedy"), CASES)
def test_each_answer(
    check: Callable[[Facts], Check], given: dict[str, Any], status: str, found: str, remedy: str
) -> None:
    told = check(dataclasses.replace(Facts(), **given))
    assert str(told.status) == status, told
    assert found in told.found
    assert remedy in told.remedy
    assert bool(told.remedy) is (told.status is not Status.passed)


def test_the_trial_is_judged_too() -> None:
    assert wire.all_reduce(Facts(), 900.0, 0.2, "gloo", "").status is Status.passed
    assert wire.all_reduce(Facts(), 9.0, 0.2, "gloo", "").status is Status.warn
    broken = wire.all_reduce(Facts(), 0.0, 0.0, "gloo", "two ranks of this machine didn't meet within 40 s")
    assert (broken.status, "didn't meet" in broken.found) == (Status.fail, True)


# --- gathering ------------------------------------------------------------------------------------------------------


def test_the_data_root_is_decoded_or_named(tmp_path: Path) -> None:
    assert "doesn't exist" in facts._data(str(tmp_path / "no"))["data_error"]
    assert "holds no" in facts._data(str(tmp_path))["data_error"]
    soundfile.write(tmp_path / "a.wav", np.zeros(16000, np.float32), 16000)
    tried, speed = facts._data(str(tmp_path))["decode"]
    assert (tried, speed > 1) == (1, True)
    (tmp_path / "b.flac").write_bytes(b"no audio")
    assert "b.flac can't be read" in facts._data(str(tmp_path))["data_error"]


def test_the_kinds_of_links_are_read_from_the_rows_alone() -> None:
    text = "\tGPU0\tGPU1\nGPU0\tX\tNV18\nGPU1\tNV18\tX\n\nLegend:\n  SYS = across sockets\n"
    assert "SYS" not in facts._matrix(text)
    assert "NV18" in facts._matrix(text)


def test_extras_are_those_of_the_package() -> None:
    assert {"metrics", "export", "tensorboard", "dev"} <= set(facts.missing_extras())
    assert set(place.EXTRAS) >= set(facts.missing_extras()), "a line on what each extra brings"


def test_an_outside_command_that_hangs_or_is_missing_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "ASK_S", 0.2)
    began = time.monotonic()
    assert facts.ask("sleep", "20") == facts.ask("no-such-command-anywhere") == ""
    assert time.monotonic() - began < 5
    assert "sleep" in capfd.readouterr().err


# --- the verb -------------------------------------------------------------------------------------------------------


def test_table_and_json_say_the_same() -> None:
    checks = [Check("disk", Status.fail, "x" * 30 + " full", "free some"), Check("memory", Status.passed, "enough")]
    text = show.table(checks, width=50)
    assert "fail   disk" in text
    assert "-> free some" in text
    assert text.endswith("1 pass, 0 warn, 1 fail")
    told = json.loads(show.as_json(checks))
    assert told["status"] == "fail"
    assert told["checks"][1] == {"name": "memory", "status": "pass", "found": "enough", "remedy": ""}


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["format=xml"]) == 2
    assert doctor.main(["formt=json"]) == 2
    assert "Type: format=json" in capsys.readouterr().err
    assert doctor._with_folder(["data.root=/x"]) == ["data=folder", "data.root=/x"]
    assert doctor._with_folder(["data=aec_challenge", "data.root=/x"]) == ["data=aec_challenge", "data.root=/x"]


@pytest.mark.ranks
def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The whole verb, its trial of two ranks included; an output root that is a file fails."""
    (tmp_path / "file").touch()
    words = ["format=json", "dist=ddp", "dist.num_procs=1", "data.num_workers=0", f"output_root={tmp_path / 'file'}"]
    assert doctor.main(words) == 1
    told = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert told["disk"]["status"] == "fail"
    assert told["all-reduce (gloo)"]["found"].startswith("2 ranks of this machine: ")
    assert len(told) >= 17


def test_a_batch_size_that_is_looked_for() -> None:
    from echofree.config.compose import compose
    from echofree.doctor import plan

    plans = [plan(compose([f"train.batch_size={size}"]).config) for size in ("4", "auto", "auto:32")]
    assert [found.batch_size for found in plans] == [4, 16, 32]
