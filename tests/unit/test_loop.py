"""The rules of the loop in one process; tests/ranks shows them on several."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echofree import checkpoint
from echofree.contracts import Batch
from echofree.data.collate import collate
from echofree.dist.strategy import Amp
from echofree.errors import NonFiniteError
from echofree.loop import Loop, mean_scores
from toy import CPU, SAMPLE_RATE, Toy, ToyData, ToyModel, ToyTask, gradients, records, weights


def whole_gradient(loop: Loop, data: ToyData, epoch: int, indices: list[int]) -> dict[str, Tensor]:
    """The gradient of (sum of clip losses x seconds / total seconds) in one go: what any split has to equal."""
    batch = collate([data.item(i, epoch) for i in indices], SAMPLE_RATE)
    loop.strategy.bare.zero_grad()
    loss, weight, _ = ToyTask().loss(loop.strategy.bare, batch)
    (loss / weight).backward()
    result = gradients(loop)
    loop.strategy.bare.zero_grad()
    return result


def watch_steps(loop: Loop, before: Callable[[int], None]) -> None:
    """Calls before(step) when the gradient of that step is ready, before the optimizer uses it."""
    update = loop.amp.update

    def watched(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        before(loop.state.step)
        update(optimizer, norm)

    loop.amp.update = watched  # type: ignore[method-assign]


# --- rule 1: what the gradient is -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_gradient_is_that_of_the_whole_batch(tmp_path: Path, batch_size: int, accumulation: int) -> None:
    """21 uneven clips, global batch 8: two full steps and one of 5, whose last micro-batch is partial."""
    data = ToyData(21, seed=3)
    keys = {"train.batch_size": batch_size, "train.gradient_accumulation_steps": accumulation, "train.epochs": 2}
    loop = Toy(tmp_path, data=data, keys=keys).loop()
    seen: list[int] = []

    def compare(step: int) -> None:
        epoch, at = divmod(step, 3)
        clips = loop.plan.order(epoch)[at * 8 : at * 8 + 8].tolist()
        got = gradients(loop)
        # the graph of the micro-batches is gone, so the reference may use the same parameters
        expected = whole_gradient(loop, data, epoch, clips)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
        for name, parameter in loop.strategy.bare.named_parameters():
            parameter.grad = got[name]
        seen.append(len(clips))

    watch_steps(loop, compare)
    loop.fit()
    assert seen == [8, 8, 5, 8, 8, 5]


def test_seven_batches_in_groups_of_three_are_three_steps(tmp_path: Path) -> None:
    keys = {"train.batch_size": 2, "train.gradient_accumulation_steps": 3, "train.epochs": 2}
    loop = Toy(tmp_path, data=ToyData(14), keys=keys).loop()
    sizes: list[list[int]] = []
    step = loop.step

    def watched(batches: list[Batch], total: float) -> None:
        assert all(p.grad is None for p in loop.strategy.parameters), "a gradient leaked in from the step before"
        assert total == pytest.approx(sum(float(b.weight.sum()) for b in batches))
        sizes.append([len(b) for b in batches])
        step(batches, total)

    loop.step = watched  # type: ignore[method-assign]
    assert loop.total_steps == 6
    assert loop.fit().status == "done"
    assert sizes == [[2, 2, 2], [2, 2, 2], [2]] * 2
    assert [r["epoch"] for r in records(loop)] == [0, 0, 0, 1, 1, 1]


def test_logged_loss_is_the_mean_over_seconds_of_the_window(tmp_path: Path) -> None:
    data = ToyData(12)
    keys = {"train.log_every": 3, "train.epochs": 1, "optim.lr": 1e-12}
    loop = Toy(tmp_path, data=data, keys=keys).loop()
    batch = collate([data.item(i, 0) for i in range(12)], SAMPLE_RATE)
    total, seconds, _ = ToyTask().loss(loop.strategy.bare, batch)
    loop.fit()
    (record,) = records(loop)
    assert record["loss"] == pytest.approx(float(total.detach() / seconds), rel=1e-5)
    assert record["loss_mse"] == pytest.approx(record["loss"], rel=1e-6)


# --- rule 3: order within a step, loss scale ------------------------------------------------------------------------


class ScaledInFloat32(Amp):
    """A loss scale of 1024 without the rounding of float16, so that only the scale's handling can make a difference."""

    def __init__(self) -> None:
        super().__init__("fp32", CPU)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_loss_scale_changes_neither_the_update_nor_the_norm(tmp_path: Path, name: str) -> None:
    keys = {"optim.name": name, "train.clip_norm": 0.1, "train.max_steps": 4}
    plain = Toy(tmp_path / "plain", keys=keys).loop()
    scaled = Toy(tmp_path / "scaled", keys=keys, amp=ScaledInFloat32()).loop()
    for loop in (plain, scaled):
        loop.fit()
    assert records(scaled)[0]["loss_scale"] == 1024.0
    assert all(r["grad_norm"] > 0.1 for r in records(plain)), "clipping has to matter here"
    for a, b in zip(records(plain), records(scaled), strict=True):
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(scaled)[key], value, rtol=1e-5, atol=1e-6)


def test_clipping_happens_on_unscaled_gradients(tmp_path: Path) -> None:
    loop = Toy(tmp_path, keys={"train.clip_norm": 0.1, "train.max_steps": 2}, amp=ScaledInFloat32()).loop()
    norms: list[float] = []
    watch_steps(loop, lambda step: norms.append(float(torch.nn.utils.get_total_norm(gradients(loop).values()))))
    loop.fit()
    assert norms == pytest.approx([0.1, 0.1], rel=1e-4)


def test_an_overflow_of_the_loss_scale_is_skipped_and_no_reason_to_stop(tmp_path: Path) -> None:
    """The scale is lowered until the gradients fit; that isn't a fault of the data."""
    amp = ScaledInFloat32()
    amp.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    keys = {"train.max_steps": 16, "train.nonfinite": "stop", "train.epochs": 4}
    loop = Toy(tmp_path, keys=keys, amp=amp).loop()
    for parameter in loop.strategy.parameters:
        parameter.register_hook(lambda g: g.half().float())  # float16 ends at 65504
    first = weights(loop)
    assert loop.fit().status == "done"
    assert 0 < loop.state.skipped < 16
    assert not all(torch.equal(first[k], v) for k, v in weights(loop).items())
    assert not (tmp_path / "logs" / "nonfinite.jsonl").exists()


def test_the_rate_follows_optimizer_steps(tmp_path: Path) -> None:
    """Warm-up of 2, then half a cosine over the other 4 steps, with accumulation 2."""
    keys = {
        "train.gradient_accumulation_steps": 2, "train.epochs": 3, "optim.lr": 0.5, "optim.schedule": "cosine",
        "optim.warmup_steps": 2, "optim.min_lr_ratio": 0.1,
    }  # fmt: skip
    loop = Toy(tmp_path, num_clips=16, keys=keys).loop()
    loop.fit()
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert [r["lr"] for r in records(loop)] == pytest.approx([0.25, 0.5, *(0.5 * c for c in cosine)])


# --- rule 4: steps that aren't finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_first_step_that_is_nan_leaves_no_trace(tmp_path: Path, name: str) -> None:
    """The step is left out whole: weights, running statistics and the optimizer's own state; the next ones train."""
    keys = {"optim.name": name, "train.epochs": 1, "train.batch_size": 1, "train.clip_norm": 1.0, "optim.lr": 0.1}
    probe = Toy(tmp_path / "probe", num_clips=4, keys=keys).loop()
    bad, *good = probe.plan.order(0).tolist()

    loop = Toy(tmp_path / "nan", data=ToyData(4, nan_at=(bad,)), model=lambda: ToyModel(norm=True), keys=keys).loop()
    start = weights(loop)
    after: list[dict[str, Tensor]] = []
    step = loop.step

    def watched(batches: list[Batch], total: float) -> None:
        step(batches, total)
        after.append(weights(loop))

    loop.step = watched  # type: ignore[method-assign]
    loop.fit()
    for key, value in start.items():
        torch.testing.assert_close(after[0][key], value, rtol=0, atol=0, msg=f"{key} changed in the skipped step")

    clean = Toy(tmp_path / "clean", num_clips=4, model=lambda: ToyModel(norm=True), keys=keys).loop()
    data, task = ToyData(4), ToyTask()
    clean.strategy.model.train()
    for index in good:
        batch = collate([data.item(index, 0)], SAMPLE_RATE)
        clean.step([batch], task.weight(batch))
    for key, value in weights(clean).items():
        torch.testing.assert_close(weights(loop)[key], value, rtol=0, atol=0, msg=key)
    assert loop.state.skipped == 1
    assert [r["skipped_steps"] for r in records(loop)] == [1, 1, 1, 1]
    listed = [json.loads(line) for line in (tmp_path / "nan/logs/nonfinite.jsonl").read_text().splitlines()]
    assert listed == [{"step": 1, "clip": f"epoch 0/clip {bad}"}]


def test_policy_stop_raises_with_the_step_and_the_file(tmp_path: Path) -> None:
    keys = {"train.nonfinite": "stop", "train.log_every": 4}
    loop = Toy(tmp_path, data=ToyData(16, nan_at=(5,)), keys=keys).loop()
    step = next(k for k in range(4) if 5 in loop.plan.order(0)[4 * k : 4 * k + 4]) + 1
    with pytest.raises(NonFiniteError, match=rf"first is step {step};.*nonfinite\.jsonl.*train\.nonfinite=skip"):
        loop.fit()
    # what was seen is on disk, in JSON that everybody reads
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_metrics_are_strict_json_when_every_step_was_bad(tmp_path: Path) -> None:
    loop = Toy(tmp_path, data=ToyData(8, nan_at=tuple(range(8))), valid=ToyData(3, nan_at=(1,))).loop()
    loop.fit()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    lines = [json.loads(x, parse_constant=refuse) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(r["loss"] is None and r["grad_norm"] is None for r in lines if r["kind"] == "train")
    (scores,) = (r for r in lines if r["kind"] == "eval")
    assert scores["clips"] == 3
    assert scores["invalid_clips"] == 1
    assert math.isfinite(scores["loss"])


def test_early_stop_saves_and_stays_stopped(tmp_path: Path) -> None:
    keys = {"train.eval_interval": 1, "train.epochs": 9, "train.early_stop_patience": 2, "checkpoint.metric": "place"}
    toy = Toy(tmp_path, valid_clips=4, keys=keys)  # "place" never gets better
    loop = toy.loop()
    outcome = loop.fit()
    assert outcome.status == "stopped"
    assert loop.state.epoch == 3
    assert checkpoint.manifest(checkpoint.complete(tmp_path / "checkpoints")[-1])["step"] == loop.state.step
    again = toy.loop()
    again.load(checkpoint.newest_good(tmp_path / "checkpoints"))  # type: ignore[arg-type]
    assert again.fit().status == "stopped"
    assert again.state.step == loop.state.step


# --- rule 5: nothing is read back -----------------------------------------------------------------------------------


class CountReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: item(), bool(), float(), nonzero()."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True])
def test_no_value_is_read_back_between_logging_steps(tmp_path: Path, scaled: bool) -> None:
    keys = {
        "train.log_every": 100,
        "train.clip_norm": 0.1,
        "train.ema_decay": 0.9,
        "train.gradient_accumulation_steps": 2,
    }
    amp = ScaledInFloat32() if scaled else None
    loop = Toy(tmp_path, keys=keys, model=lambda: ToyModel(norm=True), amp=amp).loop()
    loop.strategy.model.train()
    loader = loop.make_loader((0, 0))
    steps = [loader.next_step(k) for k in range(2)]
    loop.step(steps[0], 8.0)  # the first one makes the optimizer's state
    with CountReads() as counter:
        loop.step(steps[1], 8.0)
        assert counter.reads == []
        loop._log_step()
        assert counter.reads, "the counter has to see the reads of a logging step"


# --- rule 6: evaluation ---------------------------------------------------------------------------------------------


def test_every_clip_is_scored_once_with_the_averaged_weights(tmp_path: Path) -> None:
    loop = Toy(tmp_path, num_clips=8, valid_clips=11, keys={"train.ema_decay": 0.5}).loop()
    loop.fit()
    live = weights(loop)
    rows = loop.evaluate(loop.valid)  # type: ignore[arg-type]
    assert [row["index"] for row in rows] == list(range(11))
    assert mean_scores(rows)["place"] == 5.0
    assert all(torch.equal(live[k], v) for k, v in weights(loop).items()), "evaluation gives the live weights back"
    assert loop.strategy.bare.training
    assert loop.ema is not None
    loop.strategy.bare.load_state_dict(loop.ema.shadow)
    loop.ema = None
    assert loop.evaluate(loop.valid) == rows  # type: ignore[arg-type]


def test_a_dataset_that_leaves_the_index_out_is_scored_whole(tmp_path: Path) -> None:
    class Careless(ToyData):
        def item(self, index: int, epoch: int) -> Any:
            clip = super().item(index, epoch)
            clip.index = 0
            return clip

    loop = Toy(tmp_path, valid=Careless(7)).loop()
    assert [row["index"] for row in loop.evaluate(loop.valid)] == list(range(7))  # type: ignore[arg-type]


def test_mean_scores_by_hand() -> None:
    rows = [
        {"name": "a", "index": 0, "scenario": "x", "seconds": 1.0, "loss": 1.0, "erle": 10.0, "stoi": None},
        {"name": "b", "index": 1, "scenario": "x", "seconds": 3.0, "loss": 2.0, "erle": 20.0, "stoi": None},
        {"name": "c", "index": 2, "scenario": "x", "seconds": 4.0, "loss": math.nan, "erle": None, "stoi": None},
        {"name": "d", "index": 3, "scenario": "x", "seconds": 4.0, "loss": 2.0, "erle": math.inf, "stoi": None},
        {"name": "e", "index": 4, "scenario": "x", "seconds": 4.0, "loss": 2.0, "erle": -math.inf, "stoi": None},
    ]
    assert mean_scores(rows) == {
        "loss": (1 * 1 + 2 * 3 + 2 * 4 + 2 * 4) / 12, "erle": 15.0, "clips": 5, "invalid_clips": 3
    }  # fmt: skip
    assert mean_scores([]) == {"clips": 0}


# --- rule 8: a resume is the same run -------------------------------------------------------------------------------

EVERYTHING = {
    "train.batch_size": 3, "train.gradient_accumulation_steps": 2, "train.epochs": 3, "train.log_every": 3,
    "train.ema_decay": 0.9, "train.clip_norm": 0.5, "train.save_every_steps": 4, "train.eval_every_steps": 5,
    "optim.schedule": "cosine", "optim.warmup_steps": 3, "checkpoint.keep_last": 99,
}  # fmt: skip


def made(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("workers", "name"), [(0, "sgd"), (2, "adamw")])
def test_a_resume_is_bit_equal_to_the_uncut_run(tmp_path: Path, workers: int, name: str) -> None:
    """20 clips, global batch 6: 4 steps an epoch. The save at step 8 is an epoch's end, the one at 5 (better scores)
    lies within one. Python's and numpy's generators are part of the state too."""

    class Noisy(ToyTask):
        def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, weight, parts = super().loss(model, batch)
            factor = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
            return total * factor, weight, parts

    def toy(folder: str) -> Toy:
        return Toy(
            tmp_path / folder, data=ToyData(20), valid=ToyData(5, seed=1), task=Noisy(), workers=workers,
            model=lambda: ToyModel(norm=True, dropout=0.3), keys={**EVERYTHING, "optim.name": name},
        )  # fmt: skip

    random.seed(0)
    np.random.seed(0)
    uncut = toy("uncut").loop()
    assert uncut.fit().status == "done"
    saved = {checkpoint.manifest(p)["step"]: p for p in checkpoint.complete(tmp_path / "uncut/checkpoints")}
    assert {4, 5, 8, 12} <= set(saved)
    for step in (4, 5, 8):
        torch.manual_seed(999)  # the process that goes on has another past
        random.seed(999)
        np.random.seed(999)
        again = toy(f"from{step}").loop()
        again.load(saved[step])
        assert again.fit().status == "done"
        tail = [r for r in records(uncut) if r["step"] > step]
        assert records(again) == tail, f"records after step {step}"
        for key, value in weights(uncut).items():
            assert torch.equal(weights(again)[key], value), f"{key} after a resume from step {step}"
        assert again.ema is not None
        assert uncut.ema is not None
        assert again.ema.count == uncut.ema.count
        assert all(torch.equal(again.ema.shadow[k], v) for k, v in uncut.ema.shadow.items())
        mine, theirs = again.optimizer.state_dict(), uncut.optimizer.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        for index, state in theirs["state"].items():
            assert all(torch.equal(mine["state"][index][k], v) for k, v in state.items() if isinstance(v, Tensor))
        assert again.state == uncut.state


def test_the_order_of_the_clips_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stop after step 3 of epoch 1: the rest of that epoch and the next one hold the same clips in the same order."""

    def run(folder: str, load: Path | None, log: str) -> Loop:
        data = ToyData(30, log=str(tmp_path / log))
        loop = Toy(tmp_path / folder, data=data, keys={"train.epochs": 3, "train.save_every_steps": 11}).loop()
        if load is not None:
            loop.load(load)
        loop.fit()
        return loop

    run("uncut", None, "uncut.log")
    run("again", tmp_path / "uncut/checkpoints/step-000011", "again.log")
    uncut, again = made(tmp_path / "uncut.log"), made(tmp_path / "again.log")
    assert len(uncut) == 90
    assert again == uncut[30 + 3 * 4 :]  # 8 steps an epoch
    for epoch in range(3):
        assert sorted(int(x.split()[1]) for x in uncut[30 * epoch : 30 * epoch + 30]) == list(range(30))
    orders = [tuple(x.split()[1] for x in uncut[30 * e : 30 * e + 30]) for e in range(3)]
    assert len(set(orders)) == 3, "every epoch has an own order"


def test_files_are_plain_and_names_carry_no_wrapper(tmp_path: Path) -> None:
    keys = {"train.ema_decay": 0.9, "train.max_steps": 2, "train.compile": True}
    loop = Toy(tmp_path, valid_clips=3, keys=keys).loop()
    loop.fit()
    (folder,) = checkpoint.complete(tmp_path / "checkpoints")
    assert {p.name for p in folder.glob("*.pt")} == {"model.pt", "optimizer.pt", "train.pt", "ema.pt", "rank0.pt"}
    for path in folder.glob("*.pt"):
        torch.load(path, weights_only=True)
    names = list(torch.load(folder / "model.pt")) + list(torch.load(folder / "ema.pt")["shadow"])
    assert names == list(ToyModel().state_dict()) * 2


def test_new_optimizer_settings_are_not_overruled_by_the_checkpoint(tmp_path: Path) -> None:
    """Whether they may change is the config's business; once allowed they have to count."""
    first = Toy(tmp_path / "a", keys={"train.max_steps": 2, "optim.weight_decay": 0.1}).loop()
    first.fit()
    keys = {"train.max_steps": 3, "optim.lr": 0.5, "optim.weight_decay": 0.2, "optim.beta1": 0.5}
    second = Toy(tmp_path / "b", keys=keys).loop()
    second.load(tmp_path / "a/checkpoints/step-000002")
    second.fit()
    group = second.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"][0]) == (0.5, 0.2, 0.5)


def test_going_back_to_an_earlier_checkpoint_leaves_the_later_ones_behind(tmp_path: Path) -> None:
    """Else the next automatic resume would jump to a step of the branch that was given up."""
    toy = Toy(tmp_path, keys={"train.save_every_steps": 2, "checkpoint.keep_last": 9, "train.log_every": 1})
    toy.loop().fit()
    root = tmp_path / "checkpoints"
    assert [p.name for p in checkpoint.complete(root)] == [f"step-{k:06d}" for k in (2, 4, 6, 8)]
    loop = toy.loop()
    loop.load(root / "step-000004")
    checkpoint.set_aside(root, "toy", 4)
    assert checkpoint.newest_good(root) == root / "step-000004"
    assert checkpoint.pointed(root, "last") == root / "step-000004"
    assert len(list(root.glob("left-*/manifest.json"))) == 2, "set aside, not removed"
    loop.fit()
    assert [p.name for p in checkpoint.complete(root)] == [f"step-{k:06d}" for k in (2, 4, 6, 8)]


def test_the_state_after_a_stop_and_the_message(tmp_path: Path) -> None:
    toy = Toy(tmp_path, keys={"train.log_every": 100})
    loop = toy.loop()
    step = loop.step

    def watched(batches: list[Batch], total: float) -> None:
        step(batches, total)
        if loop.state.step == 3:
            toy.stop.reason = "signal SIGTERM"

    loop.step = watched  # type: ignore[method-assign]
    outcome = loop.fit()
    assert (outcome.status, outcome.why) == ("preempted", "signal SIGTERM")
    assert checkpoint.pointed(tmp_path / "checkpoints", "last") == tmp_path / "checkpoints/step-000003"
    assert records(loop) == [], "the window is still open and travels with the checkpoint"


def test_stops_between_records_leave_no_trace_in_them(tmp_path: Path) -> None:
    """Two stops in one epoch, both in the middle of a window and of a period between saves: every record, and the
    weights, are those of the uncut run."""
    keys = {"train.log_every": 5, "train.ema_decay": 0.5, "train.save_every_steps": 6, "train.epochs": 2}

    def toy(folder: str) -> Toy:
        return Toy(tmp_path / folder, num_clips=40, model=lambda: ToyModel(dropout=0.3), keys=keys)

    uncut = toy("uncut").loop()
    uncut.fit()
    assert len(records(uncut)) > 3
    for stop_at in (3, 7, None):
        again = toy("cut")
        loop = again.loop()
        if stop_at != 3:
            found = checkpoint.newest_good(tmp_path / "cut/checkpoints")
            assert found is not None
            loop.load(found)
        if stop_at is not None:
            again.stop.file = tmp_path / "cut/stop"
            again.stop.file.write_text(f"{stop_at}\n")
        assert loop.fit().status == ("done" if stop_at is None else "preempted")
        assert stop_at is None or loop.state.step == stop_at
        assert not (tmp_path / "cut/stop").exists(), "or the next start would stop at once"
    assert records(loop) == records(uncut)
    assert all(torch.equal(weights(loop)[k], v) for k, v in weights(uncut).items())


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    loop = Toy(tmp_path).loop()
    loop.fit()
    assert loop.fit().why == "all 8 steps were done already"


# --- hints ----------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_move_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Toy(tmp_path, keys={"optim.lr": 0.0, "optim.weight_decay": 0.0}).loop().fit()
    assert "the weights have not moved after 1 steps" in caplog.text


def test_a_late_batch_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echofree.loop.FIRST_BATCH_LATE_S", 0.05)

    class Slow(ToyData):
        def item(self, index: int, epoch: int) -> Any:
            import time

            if index == 0 and epoch == 0:
                time.sleep(0.2)
            return super().item(index, epoch)

    loop = Toy(tmp_path, data=Slow(4), keys={"train.epochs": 1}).loop()
    loop.fit()
    assert "a batch has not come" in caplog.text
    assert "data.num_workers=0" in caplog.text


# --- a training in rounds ---------------------------------------------------------------------------------------------


def test_steps_taken_in_rounds_are_those_of_a_fit(tmp_path: Path) -> None:
    """10 clips in batches of 4: three steps an epoch; rounds of four steps end in the middle of one."""
    keys = {"optim.schedule": "cosine", "train.epochs": 4}
    whole = Toy(tmp_path / "whole", num_clips=10, keys=keys).loop()
    whole.fit()
    pieces = Toy(tmp_path / "pieces", num_clips=10, keys=keys).loop()
    for count in (4, 4, 4):
        pieces.stop.reason = "asked"
        assert not pieces.take(count)
        pieces.stop.reason = None
        assert pieces.take(count)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(pieces).items())
    assert records(pieces) == records(whole)
    assert not list(pieces.run.checkpoints.iterdir()), "a round saves nothing"
    assert (pieces.state.epoch, pieces.state.step_in_epoch, pieces.state.step) == (4, 0, 12)
