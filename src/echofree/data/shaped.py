"""A source whose training clips are one client's share, or drawn otherwise: `data.partition` and `data.sampling`."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from echofree.contracts import Dataset, DataSource
from echofree.data import partition, sampling
from echofree.data.domain import labels, seconds
from echofree.errors import ConfigError, DataError


class Shaped:
    """
    Args:
        inner: the corpus; its validation and test clips stay as they are.
        parts: how it is shared out, or None.
        drawn: how clips are drawn, or None.

    Raises:
        ConfigError: a client that doesn't exist.
    """

    def __init__(self, inner: DataSource, parts: partition.Settings | None, drawn: sampling.Settings | None):
        self.inner, self.parts, self.drawn, self.sample_rate = inner, parts, drawn, inner.sample_rate
        client = None if parts is None else parts.client
        if client is not None and not 0 <= client < len(self.shared.clients):
            raise ConfigError(
                f"{partition.KEY}.client={client}: there are {len(self.shared.clients)} clients, from 0 on"
            )

    @cached_property
    def whole(self) -> Dataset:
        found = self.inner.split("train")
        if found is None or len(found) == 0:
            raise DataError(f"{partition.KEY}: the data has no clips to train on")
        return found

    @cached_property
    def shared(self) -> partition.Partition:
        """All clients."""
        assert self.parts is not None
        return partition.partition(self.whole, self.parts)

    def split(self, name: str) -> Dataset | None:
        """train: the client's clips (everybody's when none is named), drawn as asked; any other: as it is."""
        found = self.inner.split(name)
        if name != "train" or found is None:
            return found
        if self.parts is not None:
            client = self.parts.client
            mine = np.arange(len(self.whole)) if client is None else self.shared.clients[client]
            found = partition.Part(self.whole, mine)
        return found if self.drawn is None else sampling.Resampled(found, self.drawn)

    def fingerprint(self) -> str:
        return f"{self.inner.fingerprint()}/{self.parts}/{self.drawn}"

    def survey(self) -> list[tuple[str, str]]:
        """The corpus's rows, and how uneven the clients are."""
        rows = self.inner.survey()
        if self.parts is not None:
            kinds = [str(kind) for kind in labels(self.whole, "scenario", None, partition.KEY)]
            rows = [*rows, *partition.report(self.shared, seconds(self.whole), kinds)]
        if self.drawn is not None:
            rows = [*rows, ("sampling", f"{self.drawn.how}")]
        return rows
