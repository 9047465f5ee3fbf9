"""The server: Flower's rounds, begun where the last start left off. Imports Flower: see `flower.load`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.server import Server
from flwr.server.history import History

from echofree.config.schema import FederatedRole
from echofree.errors import ConfigError, EchoFreeError, ExitCode, Preempted, UserError
from echofree.federate import certificate, exchange
from echofree.federate.book import Book
from echofree.federate.clients import Simulated
from echofree.federate.roster import Roster
from echofree.federate.strategy import Averaging, Told
from echofree.federate.worker import Pool, Worker
from echofree.process import num_cores
from echofree.stop import FILE, StopFlag

log = logging.getLogger("echofree")

CLIENTS_DIR = "clients"


class Rounds(Server):  # type: ignore[misc,unused-ignore]
    """Flower's server with a book: it begins after the last saved round and can be asked to stop between two.

    Args:
        central: scores weights on the server's own clips.
    """

    def __init__(
        self,
        roster: Roster,
        strategy: Averaging,
        book: Book,
        stop: StopFlag,
        central: Callable[[Any], dict[str, float]],
    ):
        super().__init__(client_manager=roster, strategy=strategy)
        self.averaging, self.book, self.stop, self.central = strategy, book, stop, central
        self.stopped = False
        self.set_max_workers(strategy.settings.num_clients)  # asked all at once; a simulation's pool has its own limit

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[Any, float]:
        """Rounds up to `num_rounds`, those before included. -> (Flower's history, s)"""
        began = time.perf_counter()
        self.parameters = self._get_initial_parameters(server_round=0, timeout=timeout)
        if self.book.done == 0:
            self.averaging.told = Told()
            self.evaluate_round(0, timeout)
            self.book.before(self.averaging.told, self.central(self.parameters.tensors))
        for number in range(self.book.done + 1, num_rounds + 1):
            if self.stop.wanted(self.book.position.step):
                self.stopped = True
                break
            made = self.fit_round(number, timeout)
            if made is not None and made[0] is not None:
                self.parameters = made[0]
            self.evaluate_round(number, timeout)
            scores = self.central(self.parameters.tensors)
            self.book.close(number, self.parameters.tensors, self.averaging.told, scores)
        return History(), time.perf_counter() - began


def run(config: Any, run_dir: Path) -> int:
    """The server's whole life in a prepared run directory. -> the exit code"""
    from echofree.dist.cause import tell
    from echofree.dist.world import World
    from echofree.log import Position, RankLog
    from echofree.rundir import RunDir

    directory, world, position = RunDir(run_dir, is_first=True), World(), Position()
    rank_log = RankLog(run_dir / "logs" / "rank0.log", position, console=True, level=config.logger.level)
    try:
        directory.lock()
    except UserError as error:
        log.error("%s", error)
        rank_log.close()
        return int(error.exit_code)
    stop = StopFlag(None, run_dir / FILE)
    stop.install()
    try:
        return _run(config, directory, world, position, stop)
    except BaseException as error:
        if type(error) is EchoFreeError:  # raised on purpose: it says all there is to say
            log.error("%s", error)
            directory.note_failure(0, str(error), shown=True)
            directory.note(status="failed", end=time.time(), error=directory.first_failure())
            return int(error.exit_code)
        return tell(error, directory, world, rank_log)
    finally:
        stop.restore()
        directory.unlock()
        rank_log.close()


def _run(config: Any, directory: Any, world: Any, position: Any, stop: StopFlag) -> int:
    from echofree.dist.watchdog import Pulse
    from echofree.parts import build
    from echofree.saver import Saver

    parts = build(config)
    plan = exchange.plan(parts.model, config.federated.keep_local)
    if config.federated.noise > 0 and plan.statistics:
        raise ConfigError(
            "federated.noise can't hide running statistics: keep them. Type: federated.keep_local=[batchnorm]"
        )
    saver = Saver(directory.checkpoints, str(directory.facts["id"]), config.checkpoint, world, Pulse(), stop)
    book = Book(config, directory, saver, plan, parts.model.state_dict(), position)
    fingerprint = parts.source.fingerprint()
    book.go_on(fingerprint)
    directory.note(
        status="running", start=time.time(), end=None, error=None, data_fingerprint=fingerprint, pid=os.getpid(),
        world={"size": 1, "hosts": world.hosts, "backend": "none", "source": "alone", "device": "cpu",
               "threads": 1}, **({"parent": parts.parent} if parts.parent else {}),
    )  # fmt: skip
    pool = Pool(_workers(config, directory.folder))
    try:
        rounds = _rounds(config, book, pool, stop, parts)
        simulated = config.federated.role is FederatedRole.simulation
        (_simulate if simulated else _listen)(config, rounds, pool)
    except Preempted:
        rounds.stopped = True
    finally:
        pool.end()
    for line in book.summary():
        log.info("%s", line)
    if rounds.stopped:
        book.end("preempted")
        stop.obeyed()
        log.info("preempted after round %d: %s. resume=auto goes on", book.done, stop.reason)
        return int(ExitCode.PREEMPTED)
    _finish(config, book, parts, directory, world)
    return int(ExitCode.DONE)


def _rounds(config: Any, book: Book, pool: Pool, stop: StopFlag, parts: Any) -> Rounds:
    settings = config.federated
    roster = Roster(
        settings.num_clients, settings.min_clients, settings.wait_s, settings.fraction, settings.noise > 0, config.seed,
        stop,
    )  # fmt: skip
    valid = parts.source.split("valid")
    scored = valid is not None and len(valid) > 0

    def central(tensors: Any) -> dict[str, float]:
        if not scored:
            return {}
        scores: Mapping[str, float] = pool.ask({"what": "central", "tensors": list(tensors)})["scores"]
        return dict(scores)

    return Rounds(roster, Averaging(settings, book.plan, book.weights, roster, book.run_id), book, stop, central)


def _workers(config: Any, run_dir: Path) -> list[Worker]:
    """As many as there are cores, or clients; a server with clients elsewhere needs one for its own scores."""
    settings = config.federated
    simulated = settings.role is FederatedRole.simulation
    count = min(settings.num_clients, settings.processes or num_cores()) if simulated else 1
    threads = config.dist.threads or 1  # the same sums whatever the number of processes
    folder = run_dir / CLIENTS_DIR
    return [Worker(run_dir, folder, run_dir, number, threads) for number in range(count)]


def _simulate(config: Any, rounds: Rounds, pool: Pool) -> None:
    about = pool.ask({"what": "about"})
    names = [about_name(name) for name in _names(pool)]
    _say(config, rounds.book, f"{len(names)} clients in {len(pool.workers)} processes: {about['unevenness']}")
    for number, name in enumerate(names):
        log.info("client %d: %s, %d clips to train on", number, name, about["clips"][number])
        rounds.client_manager().register(Simulated(number, name, pool))
    rounds.fit(config.federated.rounds, config.federated.timeout_s)


def _names(pool: Pool) -> list[str]:
    return list(pool.ask({"what": "hello"})["names"])


def about_name(name: str) -> str:
    """A client's label, short enough for a line."""
    return name if len(name) <= 40 else f"{name[:37]}..."


def _listen(config: Any, rounds: Rounds, pool: Pool) -> None:
    """Flower's own transport: gRPC with one stream for each client."""
    from flwr.server.superlink.fleet.grpc_bidi.grpc_server import start_grpc_server

    settings = config.federated
    names = (certificate.CA, certificate.CERTIFICATE, certificate.KEY)
    pems = None if settings.insecure else certificate.read(settings.certificates, names)
    try:
        grpc = start_grpc_server(rounds.client_manager(), settings.address, certificates=pems)
    except RuntimeError as error:
        raise UserError(f"federated.address={settings.address}: can't listen there ({error})") from error
    how = "without TLS" if pems is None else "over TLS"
    _say(config, rounds.book, f"listening on {settings.address} {how} for {settings.num_clients} clients")
    try:
        rounds.fit(settings.rounds, settings.timeout_s)
        if not rounds.stopped:
            rounds.disconnect_all_clients(timeout=10.0)  # told that it is over; else they come back
    finally:
        grpc.stop(grace=1).wait()


def _say(config: Any, book: Book, text: str) -> None:
    settings = config.federated
    log.info(
        "federated: %d rounds of %d steps, %s, %d tensors of %.2f MB travel each way, %d stay with the client",
        settings.rounds, settings.local_steps, settings.strategy.value, len(book.plan.shared),
        sum(map(len, book.weights)) / 1e6, len(book.plan.local),
    )  # fmt: skip
    log.info("%s", text)


def _finish(config: Any, book: Book, parts: Any, directory: Any, world: Any) -> None:
    """The same end as a training's: test clips, exports, a page."""
    from echofree.final import final_scores, write_page

    book.end("done")
    parts.model.load_state_dict(book.state())
    if config.train.final_test:
        final_scores(config, parts.model, parts.source, directory, world, "cpu")
    if config.export.targets:
        from echofree.export.after import export_best

        directory.note(status="failed")  # unless every artifact agrees with its model
        export_best(config.export, directory, world, lambda: None)
    book.end("done")
    log.info("done: %d rounds. Run directory: %s", book.done, os.path.relpath(directory.folder))
    write_page(directory)
