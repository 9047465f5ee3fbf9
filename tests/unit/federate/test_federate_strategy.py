"""What the server makes of updates, against float64 numpy; which it leaves out; whom it asks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echofree.config.schema import BadUpdate, FederatedConfig, FederatedStrategy, FederatedWeights
from echofree.errors import ConfigError, EchoFreeError
from echofree.federate import exchange, flower

pytest.importorskip("flwr", reason="needs echofree[federated]", exc_type=ImportError)
flower.load()

from flwr.common import Code, FitRes, Parameters, Status, parameters_to_ndarrays  # noqa: E402

from echofree.federate.roster import ClientTrouble, Roster, Watched, Who  # noqa: E402
from echofree.federate.strategy import Averaging, Told  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)


class Peer:
    """A client that only has a number."""

    def __init__(self, number: int):
        self.who = Who(number, "")


def setting(**keys: Any) -> FederatedConfig:
    return FederatedConfig(**{"num_clients": 5, "min_clients": 1, **keys})


def strategy(settings: FederatedConfig, keep_local: tuple[str, ...] = ()) -> tuple[Averaging, list[np.ndarray]]:
    torch.manual_seed(3)
    model = Net()
    plan = exchange.plan(model, keep_local)
    first = exchange.pack(model.state_dict(), plan.shared)
    found = Averaging(settings, plan, first, Roster(5, 1, 1.0, settings.fraction, False, 0))
    found.old, found.told = [exchange.from_bytes(data) for data in first], Told()
    return found, found.old


def answer(number: int, arrays: list[np.ndarray], seconds: float, loss: float = 1.0) -> tuple[Any, FitRes]:
    tensors = [exchange.to_bytes(array) for array in arrays]
    facts = {"loss": loss, "lr": 0.1, "skipped": 0, "train_s": 0.0}
    result = FitRes(Status(Code.OK, ""), Parameters(tensors, "numpy.ndarray"), round(1000 * seconds), facts)
    return Peer(number), result


def moved(rng: np.random.Generator, old: list[np.ndarray], scale: float = 0.1) -> list[np.ndarray]:
    return [(a + scale * rng.standard_normal(a.shape)).astype(np.float32) for a in old]


def test_the_average_is_weighted_by_seconds_whatever_the_order(rng: np.random.Generator) -> None:
    found, old = strategy(setting())
    arrays, seconds = [moved(rng, old) for _ in range(4)], rng.uniform(0.5, 60.0, 4)
    results = [answer(k, arrays[k], seconds[k]) for k in range(4)]
    mean, _ = found.aggregate_fit(1, results, [])
    whole = [round(1000 * s) for s in seconds]
    for i, got in enumerate(parameters_to_ndarrays(mean)):
        wanted = sum(w * arrays[k][i].astype(np.float64) for k, w in enumerate(whole)) / sum(whole)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    found.told = Told()
    again, _ = found.aggregate_fit(1, [results[k] for k in (2, 0, 3, 1)], [])
    assert again.tensors == mean.tensors
    equal, old = strategy(setting(weights=FederatedWeights.equal))
    mean, _ = equal.aggregate_fit(1, results, [])
    wanted = np.mean([a[0].astype(np.float64) for a in arrays], 0)
    np.testing.assert_allclose(parameters_to_ndarrays(mean)[0], wanted, rtol=1e-5, atol=1e-6)


def spoilt(kind: str, arrays: list[np.ndarray], old: list[np.ndarray]) -> list[np.ndarray]:
    if kind == "not finite":
        arrays[1].flat[0] = np.inf
    elif kind == "shape":
        arrays.pop()
    elif kind == "type":
        arrays[0] = arrays[0].astype(np.float64)
    elif kind == "poisoned":
        return [b + 100 * (a - b) for a, b in zip(arrays, old, strict=True)]
    elif kind == "statistics":
        arrays[-1] = arrays[-1] + np.float32(1000)
    return arrays


@pytest.mark.parametrize("kind", ["not finite", "shape", "type", "poisoned", "statistics"])
def test_what_can_not_be_averaged_is_named_and_left_out(rng: np.random.Generator, kind: str) -> None:
    found, old = strategy(setting())
    good = [answer(k, moved(rng, old), 1.0) for k in (0, 1, 3)]
    bad = answer(2, spoilt(kind, moved(rng, old), old), 1.0)
    mean, _ = found.aggregate_fit(1, [bad, *good], [])
    (named,) = found.told.bad
    assert (named.who.number, named.kind) == (2, {"type": "shape", "statistics": "poisoned"}.get(kind, kind))
    found.told = Told()
    alone, _ = found.aggregate_fit(1, good, [])
    assert alone.tensors == mean.tensors
    stopping, _ = strategy(setting(on_bad_update=BadUpdate.stop))
    with pytest.raises(EchoFreeError, match="client 2"):
        stopping.aggregate_fit(1, [bad, *good], [])


def test_late_and_failed_clients_have_their_number_and_too_few_change_nothing(rng: np.random.Generator) -> None:
    found, old = strategy(setting(min_clients=2))
    failed = (Peer(4), FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no disk"), Parameters([], ""), 0, {}))
    late = ClientTrouble(Who(1, "kitchen"), "late", "no answer within 5 s")
    mean, _ = found.aggregate_fit(1, [answer(0, moved(rng, old), 1.0)], [failed, late])
    assert mean is None
    assert [str(bad) for bad in found.told.bad] == [
        "client 1 (kitchen): late: no answer within 5 s", "client 4: failed: no disk"
    ]  # fmt: skip
    assert found.told.void == "1 good updates, federated.min_clients=2"


def test_long_updates_are_clipped_and_noise_has_its_size(rng: np.random.Generator) -> None:
    limit = 0.5
    found, old = strategy(setting(clip_norm=limit, max_norm_ratio=None), ("batchnorm",))
    arrays = [moved(rng, old, 1.0), moved(rng, old, 0.001)]
    mean, _ = found.aggregate_fit(1, [answer(k, arrays[k], 1.0) for k in range(2)], [])
    changes = [[a.astype(np.float64) - b for a, b in zip(arrays[k], old, strict=True)] for k in range(2)]
    length = math.sqrt(sum(float((c**2).sum()) for c in changes[0]))
    assert found.told.clipped == 1
    for i, got in enumerate(parameters_to_ndarrays(mean)):
        np.testing.assert_allclose(got, old[i] + (changes[0][i] * limit / length + changes[1][i]) / 2, atol=1e-6)
    keys = {"clip_norm": limit, "max_norm_ratio": None, "noise": 3.0, "weights": FederatedWeights.equal}
    drawn = []
    for seed in range(300):
        noisy, _ = strategy(setting(noise_seed=seed, **keys), ("batchnorm",))
        out, _ = noisy.aggregate_fit(1, [answer(0, old, 1.0)], [])
        drawn.append(np.concatenate([(a - b).ravel() for a, b in zip(parameters_to_ndarrays(out), old, strict=True)]))
    # the sum of the updates has noise of 3 times 0.5, and five clients are expected
    assert np.std(drawn) == pytest.approx(3.0 * limit / 5, rel=0.06)
    assert abs(np.mean(drawn)) < 0.02


class Answering(Watched):
    """A connected client of this number."""

    def __init__(self, cid: str, number: int):
        super().__init__(type("End", (), {"cid": cid})())
        self.who = Who(number, "")


def test_a_round_asks_a_drawn_share_the_same_for_one_seed() -> None:
    def asked(seed: int, independent: bool = False) -> list[list[int]]:
        roster = Roster(8, 1, 1.0, 0.5, independent, seed)
        for number in (5, 2, 7, 0, 1, 3, 6, 4):
            roster.register(Answering(f"c{number}", number))
        rounds = []
        for roster.round in range(1, 9):
            rounds.append([client.who.number for client in roster.sample(4)])
        roster.round = None
        assert [client.who.number for client in roster.sample(1)] == list(range(8))
        return rounds

    first = asked(1)
    assert first == asked(1) != asked(2)
    assert all(len(numbers) == 4 and numbers == sorted(numbers) for numbers in first)
    assert len({len(numbers) for numbers in asked(1, independent=True)}) > 1


def test_what_travels_is_what_is_trained_and_does_not_stay() -> None:
    model = Net()
    assert exchange.plan(model, []).shared == [
        "wide.weight", "wide.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"
    ]  # fmt: skip
    kept = exchange.plan(model, ["batchnorm"])
    assert kept.shared == ["wide.weight", "wide.bias"]
    assert "norm.num_batches_tracked" in kept.local
    model.wide.requires_grad_(False)
    adapters = exchange.plan(model, [])
    assert adapters.shared == ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    with torch.no_grad():
        model.wide.weight += 1
    assert exchange.plan(model, []).mark != adapters.mark, "another frozen base is another model"
    model.norm.requires_grad_(False)
    model.wide.requires_grad_(True)
    assert exchange.plan(model, []).shared == ["wide.weight", "wide.bias"], "held statistics don't move"
    with pytest.raises(ConfigError, match="nothing to share"):
        exchange.plan(model, ["wide.*"])
    with pytest.raises(ConfigError, match="fits no weight"):
        exchange.plan(model, ["wild.*"])


def test_fedprox_tells_the_clients_its_pull() -> None:
    found, _ = strategy(setting(strategy=FederatedStrategy.fedprox, proximal_mu=0.25))
    found.roster.register(Answering("a", 0))
    found.roster.expected = 1
    ((client, ins),) = found.configure_fit(1, found.initialize_parameters(found.roster), found.roster)
    assert (client.who.number, ins.config["proximal_mu"], ins.config["round"]) == (0, 0.25, 1)
    plain, _ = strategy(setting(proximal_mu=0.25))
    assert plain.proximal_mu == 0.0
