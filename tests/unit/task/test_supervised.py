"""The supervised task: what it asks of a model, and the rows it gives."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echofree.contracts import Batch, Clip, Scenario
from echofree.data.collate import collate
from echofree.errors import ConfigError
from echofree.loss import SiSdr, Weighted
from echofree.metric.core import si_sdr
from echofree.task.supervised import Supervised

RATE_HZ = 16000


class Scale(nn.Module):
    """est = gain * mic; remembers how it was called."""

    sample_rate = RATE_HZ

    def __init__(self, gain: float = 0.5):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))
        self.calls: list[bool] = []

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor | dict:
        self.calls.append(details)
        est = self.gain * mic
        return {"est": est, "latent": far.mean(1)} if details else est


class NeedsLatent:
    """A loss that asks for more than the wave."""

    needs = ("latent",)

    def __call__(self, out, batch):
        value = out["est"].square().mean(1) + out["latent"]
        return (
            (value * batch.weight).sum(),
            batch.weight.sum(),
            {"latent": (out["latent"] * batch.weight).sum().detach()},
        )


def make_batch(filler: bool = False) -> Batch:
    rng = np.random.default_rng(1)
    clips = []
    for i, scenario in enumerate((Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END)):
        n = 16000 + 1000 * i
        near, echo = (rng.normal(0, 0.05, n).astype(np.float32) for _ in range(2))
        if scenario == Scenario.FAR_END:
            near = np.zeros_like(near)
        if scenario == Scenario.NEAR_END:
            echo = np.zeros_like(echo)
        clips.append(
            Clip(near + echo, 2 * echo, near, echo, np.zeros_like(near), scenario, name=f"clip {i}", index=10 + i)
        )
    return collate(clips, RATE_HZ, [filler and i == 1 for i in range(3)])


def sdr_loss() -> Weighted:
    return Weighted({"sdr": SiSdr(free_scale=False)}, {"sdr": 1.0})


def test_details_are_asked_for_only_when_the_loss_needs_them():
    model, batch = Scale(), make_batch()
    Supervised(sdr_loss(), ["si_sdr"], RATE_HZ).loss(model, batch)
    Supervised(NeedsLatent(), [], RATE_HZ).loss(model, batch)
    assert model.calls == [False, True]


def test_loss_carries_a_gradient_and_the_weight_is_known_beforehand():
    model, batch = Scale(), make_batch(filler=True)
    task = Supervised(sdr_loss(), [], RATE_HZ)
    total, weight, parts = task.loss(model, batch)
    total.backward()
    assert model.gain.grad.abs() > 0
    assert weight.item() == pytest.approx(task.weight(batch)) == pytest.approx(34000 / RATE_HZ)
    assert parts["sdr"].item() == pytest.approx(total.item())


def test_rows_say_what_each_clip_scored():
    batch = make_batch()
    rows = Supervised(sdr_loss(), ["si_sdr", "erle", "near_gain"], RATE_HZ).evaluate(Scale(0.5), batch)
    assert [r["name"] for r in rows] == ["clip 0", "clip 1", "clip 2"]
    assert [r["index"] for r in rows] == [10, 11, 12]
    assert [r["scenario"] for r in rows] == ["double_talk", "far_end", "near_end"]
    assert [r["seconds"] for r in rows] == [pytest.approx(n / RATE_HZ) for n in (16000, 17000, 18000)]
    assert rows[0]["erle"] is None
    assert rows[1]["erle"] == pytest.approx(6.02, abs=0.01)
    assert rows[1]["si_sdr"] is None
    assert rows[2]["near_gain"] == pytest.approx(-6.02, abs=0.01)
    expected = si_sdr(batch.mic[0, :16000].double().numpy(), batch.near[0, :16000].double().numpy())
    assert rows[0]["si_sdr"] == pytest.approx(expected, abs=1e-6)


def test_row_losses_add_up_to_the_loss_of_the_batch():
    model, batch = Scale(0.3), make_batch(filler=True)
    for loss in (sdr_loss(), NeedsLatent()):
        task = Supervised(loss, [], RATE_HZ)
        rows = task.evaluate(model, batch)
        assert len(rows) == 2  # the filler gives no row
        total, weight, _ = task.loss(model, batch)
        assert sum(r["loss"] * r["seconds"] for r in rows) == pytest.approx(total.item(), rel=1e-5)
        assert sum(r["seconds"] for r in rows) == pytest.approx(weight.item())


def test_evaluation_leaves_no_graph_and_names_invalid_clips():
    model, batch = Scale(0.0), make_batch()
    task = Supervised(sdr_loss(), ["si_sdr"], RATE_HZ)
    rows = task.evaluate(model, batch)
    assert model.gain.grad is None
    assert math.isnan(rows[0]["si_sdr"])
    assert rows[1]["si_sdr"] is None
    assert len(task.metrics[0].failures) == 2


def test_a_model_that_returns_too_little_is_named():
    class Wave(Scale):
        def forward(self, mic, far, details=False):
            return {"est": mic} if details else mic

    with pytest.raises(ConfigError, match=r"needs latent.*returns only est"):
        Supervised(NeedsLatent(), [], RATE_HZ).loss(Wave(), make_batch())


def test_a_model_of_another_rate_is_refused():
    model = Scale()
    model.sample_rate = 48000
    with pytest.raises(ConfigError, match=r"48000 Hz.*16000 Hz"):
        Supervised(sdr_loss(), [], RATE_HZ).evaluate(model, make_batch())


def test_wrong_names_are_refused_when_the_task_is_built():
    with pytest.raises(ConfigError, match="erle"):
        Supervised(sdr_loss(), ["erl"], RATE_HZ)


def test_recordings_without_target_give_rows_with_a_loss_of_zero():
    batch = make_batch()
    batch = replace(batch, has_near=torch.zeros(3, dtype=torch.bool), near=torch.zeros_like(batch.near))
    rows = Supervised(sdr_loss(), ["si_sdr", "near_gain"], RATE_HZ).evaluate(Scale(), batch)
    assert [r["loss"] for r in rows] == [0.0, 0.0, 0.0]
    assert [r["si_sdr"] for r in rows] == [None, None, None]
    assert rows[2]["near_gain"] == pytest.approx(-6.02, abs=0.05)
