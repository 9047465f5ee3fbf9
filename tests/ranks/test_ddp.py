"""Several ranks are one process: gradients, norms, statistics, resumes. Two ranks over gloo on the toy run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echofree import checkpoint
from echofree.dist.batchnorm import SyncBatchNorm
from echofree.dist.strategy import Ddp, Single
from echofree.loop import Loop
from toy import Toy, ToyData, ToyModel, gradients, meet, records, weights

pytestmark = pytest.mark.ranks
Ranks = Callable[..., list[Any]]


def grads_of_run(toy: Toy) -> dict[str, Any]:
    """Trains; -> the gradient before each optimizer step, the records and the last weights."""
    loop = toy.loop()
    seen: list[dict[str, Tensor]] = []
    update = loop.amp.update

    def watched(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        seen.append(gradients(loop))
        update(optimizer, norm)

    loop.amp.update = watched  # type: ignore[method-assign]
    loop.fit()
    toy.world.barrier()
    return {"gradients": seen, "records": records(loop), "weights": weights(loop), "kind": type(loop.strategy)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_ranks_have_the_gradient_of_one_process(run_ranks: Ranks, tmp_path: Path, accumulation: int) -> None:
    """Global batch 8 as 1x8 and as 2 ranks x 4 (or x 2 with accumulation 2); 21 uneven clips, so that the last step
    holds 5. Plain SGD: Adam would turn rounding into differences of its own."""
    data = ToyData(21, seed=5)
    keys = {"train.epochs": 2, "optim.name": "sgd", "train.clip_norm": 0.5}

    def work(rank: int, size: int) -> dict[str, Any]:
        split = {"train.batch_size": 4 // accumulation, "train.gradient_accumulation_steps": accumulation}
        return grads_of_run(Toy(tmp_path / "two", world=meet(rank, size), data=data, keys={**keys, **split}))

    one = grads_of_run(Toy(tmp_path / "one", data=data, keys={**keys, "train.batch_size": 8}))
    both = run_ranks(work, 2, init=False)
    assert one["kind"] is Single
    for rank in both:
        assert rank["kind"] is Ddp
        assert len(rank["gradients"]) == len(one["gradients"]) == 6
        for mine, expected in zip(rank["gradients"], one["gradients"], strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)
        for name, value in one["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(both[0]["weights"][n], v) for n, v in both[1]["weights"].items())
    for mine, expected in zip(both[0]["records"], one["records"], strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_gradients_are_exchanged_on_the_last_micro_batch_only(run_ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int) -> list[int]:
        keys = {"train.batch_size": 2, "train.gradient_accumulation_steps": 3, "train.epochs": 1}
        loop = Toy(tmp_path, world=meet(rank, size), data=ToyData(26), keys=keys).loop()
        exchanges = [0]

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
            exchanges[0] += 1
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / size)

        loop.strategy.model.register_comm_hook(None, hook)
        loop.fit()
        assert loop.state.step == 3  # 12 + 12 + 2 clips
        return exchanges

    assert run_ranks(work, 2, init=False) == [[3], [3]]  # one bucket in each step, whatever the number of micro-batches


def test_dropout_differs_between_ranks_and_the_weights_do_not(run_ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int) -> tuple[Tensor, dict[str, Tensor]]:
        toy = Toy(tmp_path, world=meet(rank, size), num_clips=16, model=lambda: ToyModel(dropout=0.5))
        loop = toy.loop()
        mask = loop.strategy.bare.drop(torch.ones(64))
        loop.fit()
        return mask, weights(loop)

    (mask0, weights0), (mask1, weights1) = run_ranks(work, 2, init=False)
    assert not torch.equal(mask0, mask1)
    assert all(torch.equal(weights0[k], v) for k, v in weights1.items())


def test_a_resume_on_two_ranks_is_bit_equal(run_ranks: Ranks, tmp_path: Path) -> None:
    """With dropout that differs by rank, synchronised batch norm, a moving average, accumulation and a schedule; from
    the middle of an epoch and from its end."""
    keys = {
        "train.batch_size": 2, "train.gradient_accumulation_steps": 2, "train.epochs": 3, "train.log_every": 2,
        "train.ema_decay": 0.9, "train.save_every_steps": 2, "train.eval_interval": 1, "checkpoint.keep_last": 99,
        "optim.schedule": "cosine", "optim.warmup_steps": 2, "dist.sync_batchnorm": "auto",
    }  # fmt: skip

    def build(rank: int, size: int, folder: str) -> Loop:
        return Toy(
            tmp_path / folder, world=meet(rank, size), data=ToyData(20, log=str(tmp_path / f"{folder}.{rank}")),
            valid_clips=5, model=lambda: ToyModel(norm=True, dropout=0.3), keys=keys,
        ).loop()  # fmt: skip

    def finish(loop: Loop, size: int) -> tuple[Any, ...]:
        assert any(isinstance(m, SyncBatchNorm) for m in loop.strategy.bare.modules())
        loop.fit()
        assert loop.ema is not None
        state = loop.optimizer.state_dict()["state"]
        moments = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items()}
        return weights(loop), dict(loop.ema.shadow), moments, records(loop), torch.rand(8)

    def uncut(rank: int, size: int) -> tuple[Any, ...]:
        return finish(build(rank, size, "uncut"), size)

    def again(rank: int, size: int, step: int) -> tuple[Any, ...]:
        loop = build(rank, size, f"from{step}")
        loop.load(tmp_path / f"uncut/checkpoints/step-{step:06d}")
        return finish(loop, size)

    expected = run_ranks(uncut, 2, init=False)
    assert not torch.equal(expected[0][-1], expected[1][-1]), "every rank has a random stream of its own"
    for step in (4, 6):  # 3 steps an epoch; 20 clips = 8 + 8 + 4
        got = run_ranks(again, 2, init=False, args=(step,))
        for rank in range(2):
            for mine, theirs in zip(got[rank][:3], expected[rank][:3], strict=True):
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[k], v) for k, v in theirs.items()), f"rank {rank}, from step {step}"
            assert torch.equal(got[rank][-1], expected[rank][-1]), "the random state at the end"
            before, after = (tmp_path / f"{f}.{rank}" for f in ("uncut", f"from{step}"))
            assert before.read_text().endswith(after.read_text())
            assert after.read_text()
        assert got[0][3] == [r for r in expected[0][3] if r["step"] > step]


def test_names_carry_no_wrapper_and_every_rank_has_its_file(run_ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int) -> None:
        Toy(tmp_path, world=meet(rank, size), keys={"train.max_steps": 1}).loop().fit()

    run_ranks(work, 2, init=False)
    folder = tmp_path / "checkpoints/step-000001"
    assert checkpoint.damage(folder) == ""
    assert sorted(p.name for p in folder.glob("rank*.pt")) == ["rank0.pt", "rank1.pt"]
    assert list(checkpoint.load(folder, "model")) == list(ToyModel().state_dict())
    assert checkpoint.manifest(folder)["world_size"] == 2


def test_a_full_disk_ends_all_ranks_and_leaves_the_old_checkpoint(run_ranks: Ranks, tmp_path: Path) -> None:
    """ENOSPC on either rank: nobody is left waiting in an exchange that the other skipped."""

    def work(rank: int, size: int, full: int) -> str:
        import errno

        from echofree.errors import EchoFreeError

        loop = Toy(tmp_path / str(full), world=meet(rank, size), keys={"train.max_steps": 1}).loop()
        loop.fit()
        write = checkpoint._write

        def refuse(path: Path, content: Any) -> None:
            if rank == full:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, content)

        checkpoint._write = refuse
        loop.state.step = 2
        try:
            loop.save()
        except EchoFreeError as error:
            return str(error)
        return "saved"

    for full in range(2):
        texts = run_ranks(work, 2, init=False, args=(full,), timeout=30)
        root = tmp_path / str(full) / "checkpoints"
        assert texts[0] == texts[1]
        assert f"rank {full}: " in texts[0]
        assert "No space left on device" in texts[0]
        assert checkpoint.newest_good(root) == root / "step-000001"
        assert sorted(p.name for p in root.iterdir()) == ["best", "last", "step-000001"]


# --- batch norm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_batch_norm_of_two_ranks_is_that_of_the_whole_batch(
    run_ranks: Ranks, rng: np.random.Generator, mean: float
) -> None:
    """Output, gradient and running statistics against float64 in one process, ranks with 3 and 5 clips. With a mean
    1000 times the deviation a plain sum of squares is wrong in the second digit."""
    x = torch.from_numpy(mean + rng.standard_normal((8, 3, 20))).float()
    up = torch.from_numpy(rng.standard_normal((8, 3, 20))).float()
    norm = nn.BatchNorm1d(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))

    def work(rank: int, size: int) -> tuple[Tensor, ...]:
        layer = SyncBatchNorm(norm)
        part = slice(0, 3) if rank == 0 else slice(3, 8)
        mine = x[part].clone().requires_grad_()
        for _ in range(2):
            y = layer(mine)
        (y * up[part]).sum().backward()
        assert mine.grad is not None
        grads = torch.stack([layer.weight.grad, layer.bias.grad])
        dist.all_reduce(grads)  # parameters are summed by whoever owns them
        return y.detach(), mine.grad, grads, layer.running_mean, layer.running_var, layer.num_batches_tracked

    ranks = run_ranks(work, 2)
    reference = nn.BatchNorm1d(3).double()
    reference.load_state_dict(norm.state_dict())
    wide = x.double().requires_grad_()
    for _ in range(2):
        y = reference(wide)
    (y * up).sum().backward()
    assert wide.grad is not None
    assert reference.weight.grad is not None
    assert reference.bias.grad is not None
    params = torch.stack([reference.weight.grad, reference.bias.grad])
    close = {"rtol": 1e-5, "atol": 1e-6 if mean == 0 else 5e-6, "check_dtype": False}
    torch.testing.assert_close(torch.cat([r[0] for r in ranks]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([r[1] for r in ranks]), wide.grad, **close)
    for r in ranks:
        torch.testing.assert_close(r[2], params, rtol=1e-5, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(r[3], reference.running_mean, **close)
        torch.testing.assert_close(r[4], reference.running_var, **close)
        assert r[5] == 2


@pytest.mark.parametrize("name", ["sgd"])
def test_training_with_batch_norm_is_the_same_on_two_ranks(run_ranks: Ranks, tmp_path: Path, name: str) -> None:
    data = ToyData(16, uneven=False)
    keys = {"optim.name": name, "train.epochs": 2}

    def model() -> nn.Module:
        return ToyModel(norm=True)

    def work(rank: int, size: int) -> dict[str, Tensor]:
        loop = Toy(tmp_path / "two", world=meet(rank, size), data=data, model=model, keys=keys).loop()
        loop.fit()
        return weights(loop)

    one = Toy(tmp_path / "one", data=data, model=model, keys={**keys, "train.batch_size": 8}).loop()
    one.fit()
    for rank in run_ranks(work, 2, init=False):
        for key, value in weights(one).items():
            torch.testing.assert_close(rank[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_buffers_that_are_not_synchronised_are_rank_0s(run_ranks: Ranks, tmp_path: Path) -> None:
    """Each rank gathers its own between two steps; what is scored and saved has to be one model."""

    class Counting(ToyModel):
        level: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.zeros(()))

        def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor:
            if self.training:
                self.level.lerp_(mic.abs().mean(), 0.5)
            return super().forward(mic, far) / (1 + self.level.detach())

    def work(rank: int, size: int, model: Callable[[], nn.Module], norm: str) -> dict[str, Tensor]:
        keys = {"dist.sync_batchnorm": norm}
        toy = Toy(tmp_path / f"{norm}{model.__name__}", world=meet(rank, size), valid_clips=1, model=model, keys=keys)
        loop = toy.loop()
        loop.fit()
        return weights(loop)

    def plain_norm() -> nn.Module:
        return ToyModel(norm=True)

    for model, norm in ((Counting, "auto"), (plain_norm, "off")):
        a, b = run_ranks(work, 2, init=False, args=(model, norm))
        for key, value in a.items():
            assert torch.equal(b[key], value), key
        assert a.keys() & {"level", "norm.running_mean"}
