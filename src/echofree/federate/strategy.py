"""What the server makes of a round's updates: Flower's FedProx (FedAvg where mu is 0) behind a judgement of each.

An update that is late, missing, not finite, of another shape or far too large is named and left out, or ends the run
(`federated.on_bad_update`). Then updates are clipped, averaged by Flower, and noise is added. Imports Flower: see
`flower.load`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.strategy import FedProx

from echofree.config.schema import BadUpdate, FederatedStrategy, FederatedWeights
from echofree.errors import EchoFreeError
from echofree.federate import exchange
from echofree.federate.roster import ClientTrouble, Roster, Who

log = logging.getLogger("echofree")

NOISE = 0x901
OK = Status(code=Code.OK, message="")


@dataclass
class Update:
    """What one client sent.

    Attributes:
        who: the client.
        arrays: the shared tensors after its training.
        seconds: of audio that it trains on.
        facts: loss, lr, skipped, train_s.
        length, statistics: Euclidean length of the change of the weights, and of the running statistics.
        num_bytes: as they came.
    """

    who: Who
    arrays: list[np.ndarray]
    seconds: float
    facts: dict[str, float]
    num_bytes: int
    length: float = 0.0
    statistics: float = 0.0


@dataclass
class Bad:
    """Why a client's update isn't in the average."""

    who: Who
    kind: str  # late, gone, failed, shape, not finite, poisoned
    text: str

    def __str__(self) -> str:
        return f"{self.who}: {self.kind}: {self.text}"


@dataclass
class Told:
    """Of one round: who gave what, how many bytes went each way, what the clients scored."""

    asked: list[Who] = field(default_factory=list)
    good: list[Update] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    clipped: int = 0
    void: str = ""  # why the weights stayed as they were
    train_s: float = 0.0
    scores: dict[int, dict[str, float]] = field(default_factory=dict)  # client -> what it scored
    names: dict[int, str] = field(default_factory=dict)
    unscored: list[str] = field(default_factory=list)


class Averaging(FedProx):  # type: ignore[misc,unused-ignore]
    """Flower's average behind the policies of the `federated` group.

    Args:
        settings: that group.
        plan: what travels.
        first: the weights that the training begins, or goes on, with.
        roster: the clients.
        run: the training's id, by which clients know whether what they kept is of it.
    """

    def __init__(self, settings: Any, plan: exchange.Plan, first: Sequence[bytes], roster: Roster, run: str = ""):
        self.settings, self.plan, self.roster = settings, plan, roster
        self.told = Told()
        self.old: list[np.ndarray] = []
        self._began = 0.0
        mu = settings.proximal_mu if settings.strategy is FederatedStrategy.fedprox else 0.0
        super().__init__(
            fraction_fit=settings.fraction, min_fit_clients=1, min_evaluate_clients=1, min_available_clients=1,
            initial_parameters=Parameters(list(first), "numpy.ndarray"), proximal_mu=float(mu),
            on_fit_config_fn=lambda number: {"round": number, "mark": plan.mark, "run": run},
            on_evaluate_config_fn=lambda number: {"round": number, "run": run},
            fit_metrics_aggregation_fn=lambda metrics: {}, evaluate_metrics_aggregation_fn=lambda metrics: {},
        )  # fmt: skip

    # --- a round's training -----------------------------------------------------------------------------------------

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        self.told, self.roster.round = Told(), server_round
        self.old = parameters_to_ndarrays(parameters)
        asked = super().configure_fit(server_round, parameters, client_manager)
        self.told.asked = [client.who for client, _ in asked]
        self.told.bytes_down = len(asked) * sum(map(len, parameters.tensors))
        self._began = time.perf_counter()
        if not asked:
            self.told.void = "the draw has asked no client"
        return asked

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """-> (the new weights or None when the old ones stay, {})

        Raises:
            EchoFreeError: a bad update and federated.on_bad_update=stop.
        """
        told = self.told
        told.train_s = time.perf_counter() - self._began
        for failure in failures:
            told.bad.append(self._trouble(failure))
        for client, result in sorted(results, key=lambda pair: pair[0].who.number):
            told.bytes_up += sum(map(len, result.parameters.tensors))
            found = self._read(client.who, result)
            (told.bad if isinstance(found, Bad) else told.good).append(found)  # type: ignore[arg-type]
        self._leave_poison()
        told.bad.sort(key=lambda bad: bad.who.number)
        if told.bad and self.settings.on_bad_update is BadUpdate.stop:
            raise EchoFreeError(
                f"round {server_round}: {'; '.join(map(str, told.bad))} (federated.on_bad_update=stop). The rounds "
                "before are saved: the same command with resume=auto goes on"
            )
        if len(told.good) < self.settings.min_clients:
            told.void = f"{len(told.good)} good updates, federated.min_clients={self.settings.min_clients}"
            return None, {}
        return self._average(server_round), {}

    def _average(self, server_round: int) -> Parameters:
        settings, told = self.settings, self.told
        ready = []
        for update in told.good:
            arrays = self._clipped(update)
            weight = update.seconds if settings.weights is FederatedWeights.seconds else 1.0
            examples = max(1, round(1000 * weight))  # Flower counts in whole numbers: milliseconds
            ready.append((None, FitRes(OK, ndarrays_to_parameters(arrays), examples, {})))
        mean, _ = super().aggregate_fit(server_round, ready, [])
        if settings.noise > 0:
            return ndarrays_to_parameters(self._noisy(parameters_to_ndarrays(mean), server_round))
        assert isinstance(mean, Parameters)
        return mean

    def _clipped(self, update: Update) -> list[np.ndarray]:
        limit = self.settings.clip_norm
        if limit is None or update.length <= limit:
            return update.arrays
        self.told.clipped += 1
        factor = limit / update.length
        return [
            new if name in self.plan.statistics else (old + factor * (new - old)).astype(new.dtype)
            for name, new, old in zip(self.plan.shared, update.arrays, self.old, strict=True)
        ]

    def _noisy(self, mean: Sequence[np.ndarray], server_round: int) -> list[np.ndarray]:
        """The sum of the updates and noise of `noise` times `clip_norm`, over the clients that a round is expected to
        ask: a denominator that no client's presence changes."""
        settings = self.settings
        expected = settings.fraction * settings.num_clients
        seed = settings.noise_seed
        rng = np.random.default_rng(None if seed is None else [seed, NOISE, server_round])
        scale, count = settings.noise * settings.clip_norm, len(self.told.good)
        return [
            (old + ((new.astype(np.float64) - old) * count + rng.normal(0.0, scale, old.shape)) / expected).astype(
                old.dtype
            )
            for new, old in zip(mean, self.old, strict=True)
        ]

    # --- what an update is worth ------------------------------------------------------------------------------------

    def _trouble(self, failure: Any) -> Bad:
        if isinstance(failure, ClientTrouble):
            return Bad(failure.who, failure.kind, failure.text)
        if isinstance(failure, tuple):
            return Bad(failure[0].who, "failed", failure[1].status.message)
        raise failure

    def _read(self, who: Who, result: FitRes) -> Update | Bad:
        tensors = result.parameters.tensors
        try:
            arrays = [exchange.from_bytes(data) for data in tensors]
        except ValueError as error:
            return Bad(who, "shape", f"a tensor can't be read: {error}")
        if len(arrays) != len(self.old):
            return Bad(who, "shape", f"{len(arrays)} tensors, the model has {len(self.old)}")
        for name, new, old in zip(self.plan.shared, arrays, self.old, strict=True):
            if new.shape != old.shape or new.dtype != old.dtype:
                return Bad(who, "shape", f"{name} is {new.dtype} {list(new.shape)}, not {old.dtype} {list(old.shape)}")
            if not np.isfinite(new).all():
                return Bad(who, "not finite", f"{name} has NaN or infinite values")
        told = {key: float(value) for key, value in result.metrics.items() if isinstance(value, int | float)}
        facts = {"loss": math.nan, "lr": math.nan, "skipped": 0.0, "train_s": math.nan, **told}
        update = Update(who, arrays, result.num_examples / 1000, facts, sum(map(len, tensors)))
        if update.seconds <= 0:
            return Bad(who, "failed", "it says that it has no audio")
        change = [(name, new - old) for name, new, old in zip(self.plan.shared, arrays, self.old, strict=True)]
        update.length = exchange.norm([c for name, c in change if name not in self.plan.statistics])
        update.statistics = exchange.norm([c for name, c in change if name in self.plan.statistics])
        return update

    def _leave_poison(self) -> None:
        """Updates far longer than the median of their round, in weights or in running statistics."""
        ratio, told = self.settings.max_norm_ratio, self.told
        if ratio is None or not told.good:
            return
        for what in ("length", "statistics"):
            middle = float(np.median([getattr(update, what) for update in told.good]))
            for update in list(told.good):
                value = getattr(update, what)
                if middle > 0 and value > ratio * middle:
                    told.good.remove(update)
                    thing = "its weights" if what == "length" else "its running statistics"
                    text = f"{thing} moved by {value:.3g}, {value / middle:.0f} times the median of the round"
                    told.bad.append(Bad(update.who, "poisoned", text))

    # --- a round's scores -------------------------------------------------------------------------------------------

    def configure_evaluate(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        self.roster.round = None
        asked = super().configure_evaluate(server_round, parameters, client_manager)
        self.told.bytes_down += len(asked) * sum(map(len, parameters.tensors))
        return asked

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        told = self.told
        for client, result in sorted(results, key=lambda pair: pair[0].who.number):
            self._score(client.who, result)
        told.unscored = sorted(str(self._trouble(failure)) for failure in failures)
        return None, {}

    def _score(self, who: Who, result: EvaluateRes) -> None:
        self.told.names[who.number] = who.name
        if result.num_examples > 0:
            scores: Mapping[str, Any] = result.metrics
            self.told.scores[who.number] = {k: float(v) for k, v in scores.items() if isinstance(v, int | float)}
