"""What Flower's round costs beside the same local steps run bare, and with --quality what federation brings.

    python benchmarks/federated.py [--clients 4] [--steps 10] [--rounds 5] [key=value ...]
    python benchmarks/federated.py --quality RUN_DIR [--clients 8] [--steps 20] [--rounds 6] [key=value ...]

The cost: `tiny` on synthetic clips. Bare, the loop takes each client's steps in a process that has everything built.
In a round, Flower asks clients in a worker process: weights are packed, sent, set, the loop built, its steps taken, the
weights sent back, judged and averaged. Both take turns, round by round; medians of processor time (all processes of a
side together, so that a busy machine doesn't blur it) and of wall time. The target is at most 10 % more.

--quality: clients in different rooms fine-tune the model of a run. Beside the federated mean stand each client alone
with as many steps, and one training on all clips together with the steps of all clients. Scored on each client's held
out clips; the targets: the mean within 0.3 dB SI-SDR of the pooled training, the worst client better than alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from echofree.config import frozen
from echofree.config.compose import compose
from echofree.federate import exchange, flower, rules
from echofree.federate.site import Site
from echofree.federate.worker import Pool, Worker

WORDS = ("train.device=cpu", "data.num_workers=0", "data.num_valid=0", "data.num_test=0", "data.partition.by=room")
TICKS = 100  # of /proc, in a second


def config_of(clients: int, steps: int, rounds: int, words: list[str]) -> Any:
    own = [f"federated.num_clients={clients}", f"federated.local_steps={steps}", f"federated.rounds={rounds}"]
    config = compose([*WORDS, *own, *words]).config
    rules.settle(config)
    return config


def averaging(config: Any, site: Site, pool: Pool | None) -> Any:
    """Flower's server and strategy, its clients in `pool`."""
    flower.load()
    from flwr.server import Server

    from echofree.federate.clients import Simulated
    from echofree.federate.roster import Roster
    from echofree.federate.strategy import Averaging

    settings = config.federated
    roster = Roster(settings.num_clients, 1, 10.0, 1.0, False, config.seed)
    first = exchange.pack(site.base, site.plan.shared)
    strategy = Averaging(settings, site.plan, first, roster)
    server = Server(client_manager=roster, strategy=strategy)
    server.set_max_workers(1)
    server.parameters = strategy.initialize_parameters(roster)
    if pool is not None:
        for number, name in enumerate(site.names):
            roster.register(Simulated(number, name, pool))
    return server


def spent_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def cost(clients: int, steps: int, rounds: int, words: list[str]) -> None:
    config = config_of(clients, steps, rounds + 1, words)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.yaml").write_text(frozen.dump(config), encoding="utf-8")
        site = Site(config, place / "bare", None, 1)
        worker = Worker(place, place / "clients", None, 0, 1)
        pool = Pool([worker])
        try:
            server = averaging(config, site, pool)
            loops = [site.loop(k, 1, site.parts.task, site.data(k)[0])[0] for k in range(clients)]
            rows = []
            for number in range(1, rounds + 2):
                began, cpu = time.perf_counter(), time.process_time()
                for loop in loops:
                    loop.take(steps)
                bare = time.process_time() - cpu, time.perf_counter() - began
                pool.ask({"what": "hello"})
                assert worker._process is not None
                pid = worker._process.pid
                began, cpu, theirs = time.perf_counter(), time.process_time(), spent_s(pid)
                made = server.fit_round(number, 600.0)
                assert made is not None
                server.parameters = made[0]
                whole = time.process_time() - cpu + spent_s(pid) - theirs, time.perf_counter() - began
                if number > 1:  # the first warms both up
                    rows.append((*bare, *whole))
        finally:
            pool.end()
    bare_cpu, bare_wall, cpu, wall = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{clients} clients x {steps} steps, batches of {config.train.batch_size}, {rounds} rounds, medians")
    print(f"{'':16}{'bare':>10}{'round':>10}{'overhead':>10}")
    print(f"{'processor, s':16}{bare_cpu:10.2f}{cpu:10.2f}{100 * (cpu / bare_cpu - 1):9.1f}%")
    print(f"{'wall, s':16}{bare_wall:10.2f}{wall:10.2f}{100 * (wall / bare_wall - 1):9.1f}%")
    facts = {"bare_cpu_s": bare_cpu, "cpu_s": cpu, "bare_wall_s": bare_wall, "wall_s": wall}
    print(json.dumps({"clients": clients, "steps": steps, **facts, "overhead": cpu / bare_cpu - 1}))


def quality(run: str, clients: int, steps: int, rounds: int, words: list[str]) -> None:
    config = config_of(clients, steps, rounds, [f"init_from={run}", *words])
    with TemporaryDirectory() as folder:
        site = Site(config, Path(folder), None, 1)
        first = exchange.pack(site.base, site.plan.shared)

        def scores(tensors: list[bytes], only: int | None = None) -> list[float]:
            which = range(clients) if only is None else [only]
            return [site.evaluate(k, 0, tensors)["scores"].get("si_sdr", np.nan) for k in which]

        columns = {"before": scores(first)}
        alone = []
        for k in range(clients):
            tensors = first
            for number in range(1, rounds + 1):
                tensors = site.fit(k, number, tensors, 0.0, site.plan.mark)["tensors"]
            alone += scores(tensors, k)
        columns["alone"] = alone
        columns["federated"] = scores(federated(config, site, first, clients, rounds))
        columns["pooled"] = scores(pooled(site, first, clients * steps * rounds))
    print(f"SI-SDR of held-out clips, dB; {clients} clients, {rounds} rounds of {steps} steps")
    print("client  " + "".join(f"{name:>11}" for name in columns))
    for k in range(clients):
        print(f"{k:6}  " + "".join(f"{column[k]:11.2f}" for column in columns.values()))
    for what, of in (("mean", np.nanmean), ("worst", np.nanmin)):
        print(f"{what:6}  " + "".join(f"{of(column):11.2f}" for column in columns.values()))
    gap = float(np.nanmean(columns["federated"]) - np.nanmean(columns["pooled"]))
    gain = float(np.nanmin(columns["federated"]) - np.nanmin(columns["alone"]))
    print(json.dumps({"mean_minus_pooled_db": gap, "worst_minus_alone_db": gain}))


def federated(config: Any, site: Site, first: list[bytes], clients: int, rounds: int) -> list[bytes]:
    """The rounds in this process, averaged by Flower's strategy."""
    server = averaging(config, site, None)
    from flwr.common import Code, FitRes, Parameters, Status

    from echofree.federate.roster import Who
    from echofree.federate.strategy import Told

    class Peer:
        def __init__(self, number: int):
            self.who = Who(number, "")

    tensors = first
    for number in range(1, rounds + 1):
        server.strategy.told = Told()
        server.strategy.old = [exchange.from_bytes(data) for data in tensors]
        results = []
        for k in range(clients):
            made = site.fit(k, number, tensors, 0.0, site.plan.mark)
            parameters = Parameters(made["tensors"], "numpy.ndarray")
            result = FitRes(Status(Code.OK, ""), parameters, round(1000 * made["seconds"]), made["facts"])
            results.append((Peer(k), result))
        tensors = list(server.strategy.aggregate_fit(number, results, [])[0].tensors)
    return tensors


def pooled(site: Site, first: list[bytes], steps: int) -> list[bytes]:
    """One training on the training clips of all clients."""
    from echofree.data.partition import Part

    everything = np.sort(np.concatenate([site.indices(k)[0] for k in range(len(site.names))]))
    site.begin(0, 0, first)
    site.round_config.train.max_steps = steps
    site.round_config.train.log_every = steps
    loop, _ = site.loop(0, 1, site.parts.task, Part(site._whole, everything))
    loop.take(steps)
    return exchange.pack(site.model.state_dict(), site.plan.shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quality", metavar="RUN_DIR")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    size = (asked.clients, asked.steps, asked.rounds, asked.words)
    if asked.quality:
        quality(asked.quality, *size)
    else:
        cost(*size)


if __name__ == "__main__":
    main()
