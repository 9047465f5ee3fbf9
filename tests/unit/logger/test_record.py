"""Names and numbers of a record."""

from __future__ import annotations

from echofree.logger.record import scalars


def test_names_by_kind_and_split() -> None:
    assert scalars({"kind": "train", "step": 3, "epoch": 1, "loss": 2, "note": "x", "lr": None}) == {"train/loss": 2.0}
    assert scalars({"kind": "eval", "split": "valid", "step": 3, "si_sdr": 4.5}) == {"valid/si_sdr": 4.5}


def test_mappings_become_paths() -> None:
    record = {
        "kind": "eval",
        "split": "test",
        "step": 3,
        "scenario": {"far_end": {"erle": 20.0, "count": 7}},
        "ids": [1],
    }
    assert scalars(record) == {"test/scenario/far_end/erle": 20.0, "test/scenario/far_end/count": 7.0}
