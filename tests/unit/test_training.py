"""Pieces of a run that need no run."""

from __future__ import annotations

import pytest
import torch

from echofree.config.schema import FrontEndPlace
from echofree.loss import SiSdr, Weighted
from echofree.model.bark import BarkNet
from echofree.model.linear import Linear
from echofree.parts import Parts
from echofree.task.supervised import Supervised
from echofree.training import early_part


def parts(model: torch.nn.Module) -> Parts:
    return Parts(None, model, Supervised(Weighted({"sdr": SiSdr()}, {"sdr": 1.0}), [], 16000))


@pytest.mark.parametrize(
    ("where", "device", "ahead"),
    [("auto", "cpu", True), ("auto", "cuda", False), ("workers", "cuda", True), ("device", "cpu", False)],
)
def test_who_runs_the_front_end(where: str, device: str, ahead: bool) -> None:
    found = early_part(FrontEndPlace(where), parts(BarkNet(hidden_size=8)), torch.device(device))
    assert (found is not None) == ahead


def test_a_model_without_such_a_part_is_left_alone() -> None:
    assert early_part(FrontEndPlace.workers, parts(Linear()), torch.device("cpu")) is None


def test_nothing_is_done_ahead_for_a_task_that_would_not_pass_it_on() -> None:
    chosen = parts(BarkNet(hidden_size=8))
    chosen.task = object()
    assert early_part(FrontEndPlace.workers, chosen, torch.device("cpu")) is None
