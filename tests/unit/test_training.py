"""Pieces of a run that need no run."""

from __future__ import annotations

import pytest
import torch

from echofree.config.schema import FrontEndPlace
from echofree.model.bark import BarkNet
from echofree.model.linear import Linear
from echofree.training import early_part


@pytest.mark.parametrize(
    ("where", "device", "ahead"),
    [("auto", "cpu", True), ("auto", "cuda", False), ("workers", "cuda", True), ("device", "cpu", False)],
)
def test_who_runs_the_front_end(where: str, device: str, ahead: bool) -> None:
    found = early_part(FrontEndPlace(where), BarkNet(hidden_size=8), torch.device(device))
    assert (found is not None) == ahead


def test_a_model_without_such_a_part_is_left_alone() -> None:
    assert early_part(FrontEndPlace.workers, Linear(), torch.device("cpu")) is None
