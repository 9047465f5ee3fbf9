"""The privacy budget against published values, and against what must hold whatever the values."""

from __future__ import annotations

import math

import pytest

from echofree.federate.privacy import epsilon, rdp

ORDERS = (*range(2, 65), 128, 256, 512)


def classic(sampling: float, noise: float, rounds: int, delta: float) -> float:
    """The looser conversion of Mironov 2017, with which the table below was made."""
    return min(rounds * rdp(sampling, noise, a) - math.log(delta) / (a - 1) for a in ORDERS)


# sampling, noise, rounds -> epsilon at delta 1e-5 by the library dp-accounting 0.6.0 (RdpAccountant, Poisson sampling),
# which knows orders between whole numbers as well and so is up to 1 % lower
REFERENCE = [
    (256 / 60000, 1.3, 3515, 0.95443), (256 / 60000, 1.1, 14062, 2.59656), (256 / 60000, 0.7, 10546, 6.31946),
    (1.0, 5.0, 10, 2.81365), (0.25, 2.0, 30, 3.78246),
]  # fmt: skip


@pytest.mark.parametrize(("sampling", "noise", "rounds", "expected"), REFERENCE)
def test_another_accountant_agrees(sampling: float, noise: float, rounds: int, expected: float) -> None:
    found = epsilon(sampling, noise, rounds, 1e-5)
    assert expected * (1 - 1e-4) <= found <= 1.01 * expected


# TensorFlow Privacy's tutorial on MNIST (60000 images, batches of 256, delta 1e-5): noise, epochs -> epsilon
@pytest.mark.parametrize(("noise", "epochs", "published"), [(1.3, 15, 1.18), (1.1, 60, 3.01), (0.7, 45, 7.10)])
def test_published_budgets(noise: float, epochs: int, published: float) -> None:
    assert classic(256 / 60000, noise, epochs * 60000 // 256, 1e-5) == pytest.approx(published, rel=0.015)


def test_everybody_asked_is_the_gaussian_mechanism() -> None:
    assert rdp(1.0, 2.0, 8) == pytest.approx(8 / (2 * 2.0**2), rel=1e-12)
    assert rdp(1 - 1e-12, 2.0, 8) == pytest.approx(rdp(1.0, 2.0, 8), rel=1e-6)


def test_one_order_by_hand() -> None:
    q, noise = 0.25, 1.5  # order 2: log((1-q)^2 + 2 q (1-q) + q^2 exp(1 / noise^2))
    by_hand = math.log((1 - q) ** 2 + 2 * q * (1 - q) + q**2 * math.exp(1 / noise**2))
    assert rdp(q, noise, 2) == pytest.approx(by_hand, rel=1e-12)


def test_more_rounds_cost_more_and_more_noise_costs_less() -> None:
    assert epsilon(0.1, 1.0, 0, 1e-5) == 0.0
    assert epsilon(0.1, 0.0, 1, 1e-5) == math.inf
    spent = [epsilon(0.1, 1.0, n, 1e-5) for n in (1, 10, 100)]
    assert spent == sorted(spent)
    assert epsilon(0.1, 2.0, 100, 1e-5) < spent[-1] < epsilon(0.5, 1.0, 100, 1e-5)
