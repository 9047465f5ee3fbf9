"""Which clients are there, by number, and which of them a round asks. Imports Flower: see `flower.load`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from echofree.errors import EchoFreeError, Preempted
from echofree.federate.worker import WorkerGone, WorkerLate
from echofree.stop import StopFlag

log = logging.getLogger("echofree")

DRAW = 0x5A3
NAME_LENGTH = 60
ASK_S = 60.0  # for a client's number
LATE = 0.98  # of the time limit: a connection that ends so late was cut for being late


@dataclass(frozen=True)
class Who:
    """A client by its number and what a person calls it."""

    number: int
    name: str

    def __str__(self) -> str:
        return f"client {self.number}" + (f" ({self.name})" if self.name else "")


def printable(name: str) -> str:
    """What a client calls itself, fit for a line of a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:NAME_LENGTH]


class ClientTrouble(Exception):
    """Why a client has no update to give.

    Args:
        who: the client.
        kind: late, gone or failed.
        text: what it, or its connection, says.
    """

    def __init__(self, who: Who, kind: str, text: str):
        self.who, self.kind, self.text = who, kind, text
        super().__init__(f"{who}: {kind}: {text}")


class Watched(ClientProxy):  # type: ignore[misc,unused-ignore]
    """A client whose failures say whose they are.

    Args:
        inner: Flower's own end of the client's connection.
    """

    def __init__(self, inner: ClientProxy):
        super().__init__(inner.cid)
        self.inner = inner
        self.who: Who | None = None

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self.inner.get_properties(ins, timeout, group_id)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self.inner.get_parameters(ins, timeout, group_id)

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self.inner.reconnect(ins, timeout, group_id)

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._named(lambda: self.inner.fit(ins, timeout, group_id), timeout)

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._named(lambda: self.inner.evaluate(ins, timeout, group_id), timeout)

    def _named(self, action: Any, timeout: float | None) -> Any:
        assert self.who is not None
        began = time.monotonic()
        try:
            return action()
        except WorkerLate as error:
            raise ClientTrouble(self.who, "late", str(error)) from error
        except WorkerGone as error:
            raise ClientTrouble(self.who, "gone", str(error)) from error
        except EchoFreeError as error:
            raise ClientTrouble(self.who, "failed", str(error)) from error
        except Exception as error:  # Flower's connection: it knows only that it ended
            took = time.monotonic() - began
            late = timeout is not None and took >= LATE * timeout
            text = f"no answer within {timeout:g} s" if late else f"its connection ended after {took:.1f} s"
            raise ClientTrouble(self.who, "late" if late else "gone", text) from error


class Roster(SimpleClientManager):  # type: ignore[misc,unused-ignore]
    """Flower's list of connected clients, which knows their numbers and draws those of a round from a seed.

    Args:
        expected: clients in all.
        least: that must be there.
        wait_s: how long they may take to come.
        fraction: of them, asked in a round.
        independent: each by itself with that probability, as the privacy budget assumes; else always as many.
        seed: of the draw.
        stop: whether to give up waiting.
    """

    def __init__(
        self,
        expected: int,
        least: int,
        wait_s: float,
        fraction: float,
        independent: bool,
        seed: int,
        stop: StopFlag | None = None,
    ):
        super().__init__()
        self.stop = stop
        self.expected, self.least, self.wait_s = expected, least, wait_s
        self.fraction, self.independent, self.seed = fraction, independent, seed
        self.round: int | None = None  # of the draw; None: everybody is asked
        self._waited = False

    def register(self, client: ClientProxy) -> bool:
        return bool(super().register(client if isinstance(client, Watched) else Watched(client)))

    def sample(self, num_clients: int, min_num_clients: int | None = None, criterion: Any = None) -> list[Any]:
        """The clients of this round in the order of their numbers.

        Raises:
            EchoFreeError: too few have come.
            Preempted: asked to stop while they were waited for.
        """
        there = self._there()
        if self.round is None:
            return list(there.values())
        rng = np.random.default_rng([self.seed, DRAW, self.round])
        if self.independent:
            drawn = set(np.flatnonzero(rng.random(self.expected) < self.fraction).tolist())
        else:
            count = max(1, round(self.fraction * self.expected))
            drawn = set(rng.permutation(sorted(there))[:count].tolist())
        return [client for number, client in there.items() if number in drawn]

    def _there(self) -> dict[int, Watched]:
        """Number -> client, ascending, once enough of them have come."""
        end = time.monotonic() + self.wait_s
        wanted = self.least if self._waited else self.expected
        found = self._known()
        while len(found) < wanted and time.monotonic() < end:
            if self.stop is not None and self.stop.wanted():
                raise Preempted("asked to stop while it waited for clients")
            time.sleep(0.2)
            found = self._known()
        self._waited = True
        if len(found) < self.least:
            came = ", ".join(map(str, found)) or "none"
            raise EchoFreeError(
                f"{len(found)} clients are there ({came}), a round needs {self.least} (federated.min_clients); waited "
                f"{self.wait_s:g} s (federated.wait_s). What is done is saved: resume=auto goes on"
            )
        if away := [number for number in range(self.expected) if number not in found]:
            log.warning("not there: client %s", ", ".join(map(str, away)))
        return dict(sorted(found.items()))

    def _known(self) -> dict[int, Watched]:
        from flwr.common import GetPropertiesIns

        found: dict[int, Watched] = {}
        for client in list(self.all().values()):
            if client.who is None:
                try:
                    told = client.get_properties(GetPropertiesIns({}), ASK_S, 0).properties
                    client.who = Who(int(told["client"]), printable(str(told.get("name", ""))))
                except Exception as error:
                    log.warning("a client came and left, or doesn't say its number: %s", error or type(error).__name__)
                    self.unregister(client)
                    continue
            if client.who.number >= self.expected:
                log.warning("%s isn't one of %d and is left out (federated.num_clients)", client.who, self.expected)
                continue
            found[client.who.number] = client  # the one that came last, when one has come twice
        return found
