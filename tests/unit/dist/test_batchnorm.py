"""What can be said about synchronised batch norm without a second rank; tests/ranks/test_ddp.py has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echofree.dist.batchnorm import SyncBatchNorm, has_batchnorm, synchronise
from echofree.errors import ConfigError


def test_names_values_and_evaluation_stay() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    x = torch.randn(4, 2, 10)
    net(x)  # running statistics of some value
    names, expected = list(net.state_dict()), net.eval()(x)
    assert has_batchnorm(net)
    assert synchronise(net) == 2
    assert has_batchnorm(net)
    assert list(net.state_dict()) == names
    assert torch.equal(net.eval()(x), expected)
    assert isinstance(net[1], SyncBatchNorm)


def test_without_running_statistics_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dist\.sync_batchnorm=off"):
        synchronise(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)))


def test_a_model_without_batch_norm() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.LayerNorm(3))
    assert not has_batchnorm(net)
    assert synchronise(net) == 0
