"""Picks from a list, epoch after epoch, so that each item comes equally often, and nobody has to remember anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def picks(num_items: int, per_epoch: int, epoch: int, key: Sequence[int]) -> np.ndarray:
    """[per_epoch] indices below `num_items`, a pure function of its arguments.

    Epochs are cut from one endless run through shuffled lists: after any number of epochs the counts of two items
    differ by at most one.

    Args:
        key: of the shuffles.
    """
    places = np.arange(epoch * per_epoch, (epoch + 1) * per_epoch)
    turns, at = np.divmod(places, num_items)
    found = np.empty(per_epoch, np.int64)
    for turn in np.unique(turns):
        order = np.random.default_rng([*key, int(turn)]).permutation(num_items)
        found[turns == turn] = order[at[turns == turn]]
    return found
