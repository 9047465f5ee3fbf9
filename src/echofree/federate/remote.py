"""A client process: it comes to the server over Flower's transport, and again when the server is gone. Imports Flower:
see `flower.load`."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import Any

import grpc
from flwr.client import start_client

from echofree.errors import EchoFreeError, ExitCode
from echofree.federate import certificate
from echofree.federate.clients import Remote
from echofree.federate.worker import Pool, Worker

log = logging.getLogger("echofree")

PAUSE_S = (0.5, 10.0)  # between two tries: the first, and no longer than


def run(config: Any) -> int:
    """A client from its first connection until the server says that it is over. -> the exit code

    Raises:
        EchoFreeError: no server for longer than federated.wait_s.
    """
    from echofree.config import frozen
    from echofree.process import num_threads

    settings = config.federated
    roots = None if settings.insecure else certificate.read(settings.certificates, (certificate.CA,))[0]
    home = Path(config.output_root) / config.name / f"client-{settings.client:03d}"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.yaml").write_text(frozen.dump(config), encoding="utf-8")
    say(f"client {settings.client}: looking at its data, files in {home}")
    threads = config.dist.threads or num_threads(1, config.data.num_workers)
    pool = Pool([Worker(home, home / "clients", None, 0, threads)])
    try:
        names = pool.ask({"what": "hello"})["names"]
        name = names[settings.client] if settings.client < len(names) else socket.gethostname()
        client = Remote(settings.client, name, pool)
        _stay(client, settings, roots)
    finally:
        pool.end()
    say(f"client {settings.client}: the server is done")
    return int(ExitCode.DONE)


def _stay(client: Remote, settings: Any, roots: bytes | None) -> None:
    """Serves one connection after another until the server ends the last one itself."""
    pause_s, alone_since = PAUSE_S[0], time.monotonic()
    while True:
        began = time.monotonic()
        try:
            start_client(
                server_address=settings.address, client=client, root_certificates=roots, insecure=settings.insecure
            )
            return
        except grpc.RpcError as error:
            now = time.monotonic()
            if now - began > 2 * PAUSE_S[1]:  # it was there for a while
                alone_since, pause_s = now, PAUSE_S[0]
            why = error.details() if isinstance(error, grpc.Call) else str(error)
        if time.monotonic() - alone_since > settings.wait_s:
            raise EchoFreeError(
                f"no server at {settings.address} for {settings.wait_s:g} s (federated.wait_s): {why}. Start it, or "
                "type its federated.address"
            )
        say(f"client {client.number}: no server ({why}); again in {pause_s:.1f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S[1])


def say(text: str) -> None:
    print(text, flush=True)
