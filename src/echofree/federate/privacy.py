"""What noise on the sum of clipped updates promises: differential privacy of a client, by Renyi divergence.

Mironov, Talwar, Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian Mechanism" (arXiv 1908.10530), whole
orders (section 3.3): a round that takes each client with probability q and adds noise of `noise` times the longest
update costs, at order a,

    log( sum_k C(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 noise^2)) ) / (a - 1)

and rounds add up. From there to (epsilon, delta) by Canonne, Kamath, Steinke 2020 (arXiv 2004.00010, proposition 12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ORDERS = (*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512, 1024)


def rdp(sampling: float, noise: float, order: int) -> float:
    """Renyi divergence of order `order` that one round costs.

    Args:
        sampling: probability of a client to take part, 0 to 1.
        noise: standard deviation over the longest update, above 0.
        order: a whole number from 2.
    """
    if sampling == 0:
        return 0.0
    if sampling == 1:
        return order / (2 * noise**2)
    terms = [
        math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        + (order - k) * math.log1p(-sampling) + k * math.log(sampling) + k * (k - 1) / (2 * noise**2)
        for k in range(order + 1)
    ]  # fmt: skip
    top = max(terms)
    return (top + math.log(math.fsum(math.exp(t - top) for t in terms))) / (order - 1)


def epsilon(sampling: float, noise: float, rounds: int, delta: float, orders: Sequence[int] = ORDERS) -> float:
    """The budget spent after `rounds` rounds; infinite without noise, 0 before the first."""
    if rounds == 0:
        return 0.0
    if noise == 0:
        return math.inf
    best = math.inf
    for order in orders:
        cost = rounds * rdp(sampling, noise, order)
        found = cost + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, found)
    return max(0.0, best)
