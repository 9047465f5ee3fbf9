"""Checkpoints of which every rank writes its own part: one writer per file, exact to go on from, open to other numbers
of ranks, and closed to what is damaged or does more than it should."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from echofree import checkpoint, compare, durable, restart, space
from echofree.dist import parts
from echofree.errors import CheckpointError, SaveFailed
from ranks.sharing import base, difference, run_of
from toy import Toy, ToyModel, meet, weights

pytestmark = pytest.mark.ranks

Ranks = Callable[..., list[Any]]
DATA = {"ddp": 1, "fsdp": 1, "tensor": 0, "pipeline": 0}  # whether the ranks read different clips


def build(folder: Path, rank: int, size: int, name: str, dropout: float = 0.0, **keys: Any) -> Any:
    """Global batch 8, whatever the number of ranks."""
    settings = {
        "dist.name": name, "train.batch_size": 8 // (size if DATA[name] else 1), "train.ema_decay": 0.9,
        "train.epochs": 1, "train.max_steps": 4, "checkpoint.keep_last": 9, "optim.schedule": "cosine",
        **{key.replace("__", "."): value for key, value in keys.items()},
    }  # fmt: skip
    loop = run_of(folder, meet(rank, size), lambda: base(dropout=dropout), settings).loop()
    torch.manual_seed(50 + loop.strategy.random_rank)
    return loop


def stopped_at(loop: Any, step: int, rank: int) -> None:
    loop.stop.file = loop.run.folder / f"stop{rank}"
    loop.stop.file.write_text(str(step))
    assert loop.fit().status == "preempted"


CASES = [("fsdp", True), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("tensor", False), ("pipeline", True)))]


@pytest.mark.parametrize(("name", "background"), CASES)
def test_going_on_is_exact(name: str, background: bool, run_ranks: Ranks, tmp_path: Path) -> None:
    """With dropout, a moving average and a schedule: the same bits as a run that nobody stopped."""

    def uncut(rank: int, size: int) -> None:
        assert build(tmp_path / "uncut", rank, size, name, dropout=0.3).fit().status == "done"

    def cut(rank: int, size: int) -> None:
        keys = {"checkpoint__async_save": background}
        stopped_at(build(tmp_path / "cut", rank, size, name, dropout=0.3, **keys), 2, rank)

    def go_on(rank: int, size: int) -> None:
        loop = build(tmp_path / "cut", rank, size, name, dropout=0.3)
        loop.run.note(resume=True)
        loop.world.barrier()
        torch.manual_seed(99)
        restart.go_on(loop, loop.run, "any")
        assert loop.state.step == 2
        assert loop.fit().status == "done"

    for work in (uncut, cut, go_on):
        run_ranks(work, 2, init=False, timeout=120)
    a, b = tmp_path / "uncut", tmp_path / "cut"
    assert compare.in_records(compare.records(a, 99), compare.records(b, 99), 0.0) is None
    pairs = compare.common_checkpoints(a, b, 99)
    assert [x.name for x, _ in pairs] == ["step-000004"]
    where, count = compare.in_weights(*pairs[0], 0.0)
    assert where is None
    assert count > 150


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["fsdp", "tensor"])
def test_two_ranks_become_another_number(name: str, size: int, run_ranks: Ranks, tmp_path: Path) -> None:
    """Each rank reads its part of what two others wrote. The weights are those of the run on two ranks, but for
    rounding."""

    def uncut(rank: int, ranks: int) -> dict[str, torch.Tensor]:
        loop = build(tmp_path / "uncut", rank, ranks, name)
        loop.fit()
        return weights(loop)

    def cut(rank: int, ranks: int) -> None:
        stopped_at(build(tmp_path / "cut", rank, ranks, name), 2, rank)

    def go_on(rank: int, ranks: int) -> dict[str, torch.Tensor]:
        loop = build(tmp_path / "cut", rank, ranks, name)
        loop.run.note(resume=True)
        loop.world.barrier()
        with pytest.raises(CheckpointError, match=rf"saved by 2 rank\(s\), this start has {ranks}"):
            restart.go_on(loop, loop.run, "any")
        loop.run.note(resume_allow=["world_size"])
        loop.world.barrier()
        restart.go_on(loop, loop.run, "any")
        loop.fit()
        return weights(loop)

    run_ranks(cut, 2, init=False, timeout=120)
    expected = run_ranks(uncut, 2, init=False, timeout=120)[0]
    got = run_ranks(go_on, size, init=False, timeout=120)[0]
    assert difference(got, expected) < 1e-6


def test_one_writer_per_file_and_no_byte_too_many(run_ranks: Ranks, tmp_path: Path) -> None:
    """What lies there is what space.expected said; each tensor lies there once; torch's own tools read it."""

    def work(rank: int, size: int, name: str) -> tuple[int, int]:
        writers: list[str] = []
        real = parts.Writing.write

        def noted(self: Any) -> Any:
            writers.append(self.file)
            return real(self)

        parts.Writing.write = noted  # type: ignore[method-assign]
        keys = {"train__max_steps": 1, "checkpoint__format": "parts"}
        loop = build(tmp_path / name, rank, size, name, **keys)
        loop.fit()
        assert writers == [f"__{rank}_0.distcp"]
        return loop.checkpoint_bytes, space.size(dict(loop.strategy.named()))

    plain = base()
    for kind in DATA:
        told = run_ranks(work, 2, init=False, timeout=120, args=(kind,))
        folder = tmp_path / kind / "checkpoints/step-000001"
        assert checkpoint.damage(folder) == ""
        listed = checkpoint.manifest(folder)["files"]
        assert sorted(listed) == [
            ".metadata", "__0_0.distcp", "__1_0.distcp", "parts.pt", "rank0.pt", "rank1.pt", "train.pt"
        ]  # fmt: skip
        assert {p.name for p in folder.iterdir()} == {*listed, checkpoint.MANIFEST}
        size = sum(p.stat().st_size for p in folder.iterdir())
        tensors = space.size(checkpoint.load(folder, "model")) + 3 * space.size(list(plain.parameters()))
        assert tensors < size < told[0][0] < tensors + 3 * space.SLACK_BYTES
        assert told[0][0] == told[1][0]
        sizes = [listed[f"__{rank}_0.distcp"]["bytes"] for rank in (0, 1)]
        assert max(sizes) < 0.75 * sum(sizes), "the work is shared"
        dcp_to_torch_save(folder, tmp_path / "one.pt")
        model = torch.load(tmp_path / "one.pt", weights_only=True)
        name = next(name for name, _ in plain.named_parameters())
        assert torch.equal(model[f"model/{name}"], checkpoint.load(folder, "model")[name])


def test_a_weight_with_fewer_rows_than_ranks(run_ranks: Ranks, tmp_path: Path) -> None:
    """The second rank holds nothing of it."""
    keys = {"dist.name": "fsdp", "train.max_steps": 2, "train.save_every_steps": 1, "checkpoint.keep_last": 9}

    def first(rank: int, size: int) -> dict[str, torch.Tensor]:
        loop = Toy(tmp_path, world=meet(rank, size), keys=keys).loop()
        assert any(p.numel() == 0 for p in loop.strategy.parameters) == (rank == 1)
        loop.fit()
        return weights(loop)

    def again(rank: int, size: int) -> dict[str, torch.Tensor]:
        loop = Toy(tmp_path, world=meet(rank, size), keys=keys).loop()
        loop.load(tmp_path / "checkpoints/step-000001")
        loop.fit()
        return weights(loop)

    expected, got = run_ranks(first, 2, init=False)[0], run_ranks(again, 2, init=False)[0]
    assert difference(got, expected) == 0
    model = ToyModel()
    model.load_state_dict(checkpoint.load(tmp_path / "checkpoints/step-000002", "model"))


# --- what can go wrong ------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    keys = {"checkpoint.format": "parts", "train.max_steps": 2, "train.save_every_steps": 1, "train.ema_decay": 0.9}
    Toy(tmp_path, keys=keys).loop().fit()
    return tmp_path / "checkpoints/step-000002"


def test_one_process_can_write_parts_too(saved: Path) -> None:
    assert checkpoint.in_parts(saved) == ["ema", "model", "optimizer"]
    assert checkpoint.find(saved) == saved
    shadow = checkpoint.load(saved, "ema")["shadow"]
    assert all(torch.equal(checkpoint.weights(saved)[name], value) for name, value in shadow.items())
    assert checkpoint.load(saved, "ema")["count"] == 2


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "parts.pt"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_part_is_passed_over(file: str, how: str, saved: Path) -> None:
    path = saved / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content if how == "flipped" else content[:-1])
    assert file in checkpoint.damage(saved)
    assert checkpoint.newest_good(saved.parent) == saved.parent / "step-000001"


@pytest.mark.parametrize("where", ["whole", "inside"])
def test_a_table_of_contents_runs_nothing(
    where: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table: Any = pickle.loads((saved / ".metadata").read_bytes())
    table.planner_data = Evil()
    (saved / ".metadata").write_bytes(pickle.dumps(Evil() if where == "whole" else table))
    with pytest.raises(CheckpointError, match=r"can't be loaded: it names posix\.system"):
        checkpoint.load(saved, "model")
    assert not (tmp_path / "evil").exists()


def test_a_table_of_contents_names_tensors_of_this_folder_only(saved: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    content = (saved / ".metadata").read_bytes()
    table: Any = pickle.loads(content)
    table.state_dict_metadata["model/extra"] = BytesStorageMetadata()  # torch would unpickle it
    (saved / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=r"it names .*\.BytesStorageMetadata, which is no part"):
        checkpoint.load(saved, "model")
    table = pickle.loads(content)
    next(iter(table.storage_data.values())).relative_path = "../elsewhere"
    (saved / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=r"\.\./elsewhere is no file of this checkpoint"):
        checkpoint.load(saved, "model")


def test_another_model_is_told_by_name(saved: Path, tmp_path: Path) -> None:
    loop = Toy(tmp_path / "other", model=lambda: ToyModel(norm=True)).loop()
    with pytest.raises(CheckpointError, match=r"of another model: norm\.weight is missing"):
        loop.load(saved)


@pytest.mark.parametrize("background", [False, True])
def test_one_full_disk_ends_both_ranks_with_the_same_error(run_ranks: Ranks, tmp_path: Path, background: bool) -> None:
    def work(rank: int, size: int) -> str:
        keys = {"checkpoint__async_save": background, "train__save_every_steps": 1}
        loop = build(tmp_path / "run", rank, size, "fsdp", **keys)
        real = parts.FileSystemWriter.write_data

        def refuse(self: Any, plan: Any, planner: Any) -> Any:
            if rank == 1 and "step-000002" in str(self.path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(self, plan, planner)

        parts.FileSystemWriter.write_data = refuse  # type: ignore[method-assign]
        with pytest.raises(SaveFailed) as caught:
            loop.fit()
        assert caught.value.full
        return str(caught.value)

    first, second = run_ranks(work, 2, init=False, timeout=120)
    assert first == second
    assert "rank 1: [Errno 28] No space left on device" in first
    root = tmp_path / "run/checkpoints"
    assert [p.name for p in root.iterdir() if p.is_dir()] == ["step-000001"]
    assert durable.sha256(root / "step-000001/__1_0.distcp")
