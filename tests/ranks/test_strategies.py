"""Whatever shares out the work, the model learns the same: `base` cut to test size after eight steps of AdamW in
float32, with accumulation, clipping and clips of unequal length, the last group of an epoch partial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echofree import checkpoint
from echofree.dist.world import World
from ranks.sharing import Noise, base, difference, run_of, small, tiny
from toy import meet, records, weights

pytestmark = pytest.mark.ranks
Ranks = Callable[..., list[Any]]
TOLERANCE = 1e-6

# name, keys, ranks that read different clips
TWO = [
    ("ddp", {}, 2),
    ("fsdp", {}, 2),
    ("fsdp", {"dist.reshard_after_forward": False}, 2),
    ("tensor", {}, 1),
    ("pipeline", {"dist.schedule": "1f1b"}, 1),
    ("pipeline", {"dist.schedule": "gpipe"}, 1),
    ("pipeline", {"dist.schedule": "interleaved"}, 1),
    ("pipeline", {"dist.stages": ["layers.2"]}, 1),
]
FOUR = [
    ("ddp", {}, 4),
    ("fsdp", {}, 4),
    ("fsdp", {"dist.mesh": {"replicate": 2, "data": 2}}, 4),
    ("fsdp", {"dist.mesh": {"data": 2, "tensor": 2}}, 2),
    ("tensor", {}, 1),
    ("tensor", {"dist.mesh": {"data": 2, "tensor": 2}}, 2),
    ("pipeline", {"dist.microbatches": 4}, 1),
    ("pipeline", {"dist.mesh": {"data": 2, "pipeline": 2}}, 2),
]


def split(data_size: int, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Global batch 8 in two accumulated parts over `data_size` ranks."""
    return {"dist.name": name, "train.batch_size": 4 // data_size, "train.gradient_accumulation_steps": 2, **keys}


def outcome(toy: Any) -> dict[str, Any]:
    loop = toy.loop()
    first = weights(loop)
    loop.fit()
    result = {"first": first, "weights": weights(loop), "records": records(loop), "kind": type(loop.strategy).__name__}
    toy.world.barrier()
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(run_of(tmp_path_factory.mktemp("alone"), World(), base, split(1, "single", {})))


def case(size: int, name: str, keys: dict[str, Any], data_size: int, quick: bool) -> Any:
    shown = ",".join(f"{k.removeprefix('dist.')}={v}" for k, v in keys.items())
    marks = () if quick else pytest.mark.slow
    return pytest.param(size, name, keys, data_size, marks=marks, id=f"{size}-{name}-{shown}")


QUICK = [c for i, c in enumerate(TWO) if i in (0, 1, 3, 4, 6)] + [FOUR[3], FOUR[7]]
CASES = [case(size, *c, c in QUICK) for size, cases in ((2, TWO), (4, FOUR)) for c in cases]


@pytest.mark.parametrize(("size", "name", "keys", "data_size"), CASES)
def test_equal_to_one_process(
    size: int, name: str, keys: dict[str, Any], data_size: int, alone: dict[str, Any], run_ranks: Ranks, tmp_path: Path
) -> None:
    def work(rank: int, size: int) -> dict[str, Any]:
        return outcome(run_of(tmp_path, meet(rank, size), base, split(data_size, name, keys)))

    ranks = run_ranks(work, size, init=False, timeout=120)
    expected = {"ddp": "Ddp", "fsdp": "Fsdp", "tensor": "TensorParallel", "pipeline": "Pipeline"}[name]
    assert len(alone["records"]) == 8
    assert difference(alone["weights"], alone["first"]) > 100 * TOLERANCE
    for got in ranks:
        assert got["kind"] == expected
        worst = difference(got["weights"], alone["weights"])
        print(f"{name} {keys} on {size} ranks: weights differ by at most {worst:.2e}")
        assert worst < TOLERANCE
    for mine, theirs in zip(ranks[0]["records"], alone["records"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("size", "name", "data_size"), [(1, "single", 1), (2, "pipeline", 1)])
def test_it_does_not_matter_who_runs_the_front_end(
    size: int, name: str, data_size: int, alone: dict[str, Any], run_ranks: Ranks, tmp_path: Path
) -> None:
    """The loader, ahead of the step (as in all other tests here), or the model itself."""
    keys = {"train.front_end": "device"}

    def work(rank: int, size: int) -> dict[str, Any]:
        return outcome(run_of(tmp_path, meet(rank, size), base, split(data_size, name, keys)))

    for got in run_ranks(work, size, init=False, timeout=120):
        worst = difference(got["weights"], alone["weights"])
        assert worst == 0.0 if size == 1 else worst < TOLERANCE


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", [tiny, small])
def test_any_model_can_be_shared_out_by_data(name: str, model: Any, run_ranks: Ranks, tmp_path: Path) -> None:
    """tiny (a GRU) and small (convolutions, a GRU), neither of which offers blocks. Their batch norms see padding
    and fillers, of which each split has its own: so all clips are of one length here, and each group is full. Plain
    SGD: a bias before a batch norm has no gradient but rounding, which Adam would take for one."""

    keys = {"train.epochs": 1, "optim.name": "sgd", "optim.lr": 1.0, "optim.momentum": 0.0}

    def run(folder: str, world: World, kind: str, data_size: int) -> dict[str, Any]:
        toy = run_of(tmp_path / folder, world, model, {**split(data_size, kind, {}), **keys})
        toy.data = Noise(24, even=True)
        return outcome(toy)

    one = run("one", World(), "single", 1)
    for got in run_ranks(lambda rank, size: run("two", meet(rank, size), name, 2), 2, init=False, timeout=120):
        assert difference(got["weights"], one["weights"]) < 4 * TOLERANCE  # with a learning rate of 1
        assert difference(got["weights"], model().state_dict()) > 100 * TOLERANCE


KINDS = ("single", "ddp", "fsdp", "tensor", "pipeline")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "parts"])
def test_a_checkpoint_of_any_strategy_goes_on_in_any_other(form: str, run_ranks: Ranks, tmp_path: Path) -> None:
    """Each strategy trains four steps, with a moving average, and saves; each goes on from each of the checkpoints for
    four more. All 25 end where one process that was never stopped ends."""
    keys = {"train.ema_decay": 0.9, "train.save_interval": 1, "checkpoint.format": form}
    sizes = {"ddp": 2, "fsdp": 2}

    def toy(name: str, folder: Path, world: World, **more: Any) -> Any:
        return run_of(folder, world, base, {**split(sizes.get(name, 1), name, {}), **keys, **more})

    def first(rank: int, size: int, name: str) -> None:
        run = toy(name, tmp_path / name, meet(rank, size), **{"train.max_steps": 4})
        run.loop().fit()
        run.world.barrier()

    def second(rank: int, size: int, name: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        results, world = {}, meet(rank, size)
        for source in KINDS:
            loop = toy(name, tmp_path / f"{source}-{name}", world).loop()
            loop.load(tmp_path / source / "checkpoints/step-000004")
            loop.fit()
            assert loop.state.step == 8
            results[source] = (weights(loop), loop.strategy.gather(loop.ema.shadow))
            world.barrier()
        return results

    whole = toy("single", tmp_path / "whole", World()).loop()
    whole.fit()
    assert whole.ema is not None
    first_alone = toy("single", tmp_path / "single", World(), **{"train.max_steps": 4}).loop()
    first_alone.fit()
    for name in KINDS[1:]:
        run_ranks(first, 2, init=False, timeout=120, args=(name,))
    for name in KINDS:
        assert bool(checkpoint.in_parts(tmp_path / name / "checkpoints/step-000004")) == (form == "parts")
    for name in KINDS:
        got = [second(0, 1, name)] if name == "single" else run_ranks(second, 2, init=False, timeout=200, args=(name,))
        for rank in got:
            for source, (live, averaged) in rank.items():
                assert difference(live, weights(whole)) < TOLERANCE, f"{source} -> {name}"
                assert difference(averaged, whole.ema.shadow) < TOLERANCE, f"{source} -> {name}, averaged"


def test_a_checkpoint_reads_as_whole_tensors_under_the_models_names(run_ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int, name: str) -> None:
        keys = {**split(1, name, {}), "train.max_steps": 1}
        run_of(tmp_path / name, meet(rank, size), base, keys).loop().fit()

    plain = base()
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    for name in ("fsdp", "tensor", "pipeline"):
        run_ranks(work, 2, init=False, timeout=120, args=(name,))
        folder = tmp_path / name / "checkpoints/step-000001"
        assert checkpoint.in_parts(folder) == ["model", "optimizer"]
        model, optimizer = checkpoint.load(folder, "model"), checkpoint.load(folder, "optimizer")
        assert {k: v.shape for k, v in model.items()} == shapes
        assert list(model) == list(shapes)
        assert {type(v) for v in model.values()} == {torch.Tensor}
        plain.load_state_dict(model)
        trained = [k for k, p in plain.named_parameters()]
        assert sorted(optimizer["state"]) == sorted(trained)
        assert all(optimizer["state"][k]["exp_avg"].shape == shapes[k] for k in trained)


@pytest.mark.parametrize("name", ["fsdp", "tensor", "pipeline"])
def test_scores_are_those_of_one_process(name: str, run_ranks: Ranks, tmp_path: Path) -> None:
    """Five clips in batches of two: with two data ranks, one has a filler. In the middle of a training, which goes on
    as if nobody had looked."""
    keys = {"train.eval_every_steps": 2, "train.epochs": 1, "train.ema_decay": 0.5}

    def toy(folder: Path, world: World, kind: str) -> Any:
        run = run_of(folder, world, base, {**split(2 if kind == "fsdp" else 1, kind, {}), **keys})
        run.valid = Noise(5, seed=9)
        return run

    def work(rank: int, size: int) -> dict[str, Any]:
        return outcome(toy(tmp_path / name, meet(rank, size), name))

    one = outcome(toy(tmp_path / "one", World(), "single"))
    expected = [record for record in one["records"] if record["kind"] == "eval"]
    assert len(expected) == 2
    for rank, got in enumerate(run_ranks(work, 2, init=False, timeout=120)):
        assert difference(got["weights"], one["weights"]) < TOLERANCE
        if rank == 0:
            scores = [record for record in got["records"] if record["kind"] == "eval"]
            for mine, theirs in zip(scores, expected, strict=True):
                assert mine["clips"] == theirs["clips"] == 5
                assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
                assert mine["si_sdr"] == pytest.approx(theirs["si_sdr"], abs=1e-3)


@pytest.mark.parametrize("name", ["fsdp", "tensor", "pipeline"])
def test_a_step_that_is_not_finite_is_left_out_everywhere(name: str, run_ranks: Ranks, tmp_path: Path) -> None:
    """One clip of the fifth step is NaN: one decision, although each rank sees another part of the gradient."""

    class Broken(Noise):
        def item(self, index: int, epoch: int) -> Any:
            clip = super().item(index, epoch)
            return replace(clip, near=np.full_like(clip.near, np.nan)) if (index, epoch) == (3, 1) else clip

    def work(rank: int, size: int) -> tuple[int, dict[str, Any]]:
        run = run_of(tmp_path / name, meet(rank, size), base, split(2 if name == "fsdp" else 1, name, {}))
        run.data = Broken(29)
        loop = run.loop()
        loop.fit()
        return loop.state.skipped, weights(loop)

    for skipped, found in run_ranks(work, 2, init=False, timeout=120):
        assert skipped == 1
        assert all(torch.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor", "pipeline"])
def test_half_precision(name: str, run_ranks: Ranks, tmp_path: Path) -> None:
    """bf16: the losses stay within a hundredth of one process in bf16."""
    keys = {"train.precision": "bf16", "train.epochs": 1}

    def work(rank: int, size: int) -> dict[str, Any]:
        size = 2 if name in ("ddp", "fsdp") else 1
        return outcome(run_of(tmp_path / "two", meet(rank, 2), base, {**split(size, name, {}), **keys}))

    one = outcome(run_of(tmp_path / "one", World(), base, {**split(1, "single", {}), **keys}))
    got = run_ranks(work, 2, init=False, timeout=120)[0]
    for mine, theirs in zip(got["records"], one["records"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.01)


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_dropout_keeps_the_ranks_together(name: str, run_ranks: Ranks, tmp_path: Path) -> None:
    """What isn't split is the same on every rank of a tensor group; a pipeline's stages each drop their own."""

    def work(rank: int, size: int) -> dict[str, Any]:
        run = run_of(tmp_path, meet(rank, size), lambda: base(dropout=0.3), split(1, name, {}))
        loop = run.loop()
        torch.manual_seed(loop.strategy.random_rank)
        loop.fit()
        return {k: v.detach().clone() for k, v in loop.strategy.named().items()}

    first, second = run_ranks(work, 2, init=False, timeout=120)
    if name == "tensor":
        alike = [k for k in first if first[k].shape == base().state_dict()[k].shape]
        assert len(alike) > 10
        assert all(torch.equal(first[k], second[k]) for k in alike)
    else:
        assert not set(first) & set(second)
        assert set(first) | set(second) == set(dict(base().named_parameters()))


def test_fsdp_exchanges_on_the_last_micro_batch_only(run_ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int) -> list[str]:
        keys = {"train.batch_size": 2, "train.gradient_accumulation_steps": 3, "train.epochs": 1, "dist.name": "fsdp"}
        loop = run_of(tmp_path, meet(rank, size), base, keys, num_clips=12).loop()
        done: list[str] = []
        original = dist.reduce_scatter_single

        def counted(*args: Any, **more: Any) -> Any:
            done.append("reduced")
            return original(*args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "reduce_scatter_single", counted)
            loop.fit()
        assert loop.state.step == 1
        return done

    for done in run_ranks(work, 2, init=False, timeout=120):
        assert len(done) == len(base().blocks())
