"""The words and small tools of a meeting of several machines: who they are, where they meet, why one isn't reached."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echofree.dist import network
from echofree.errors import ConfigError


class LinkCut(Exception):
    """The meeting point doesn't answer any more."""


@dataclass(frozen=True)
class Node:
    """A machine at the meeting.

    Attributes:
        number: its place; 0 holds the meeting point and rank 0.
        host, pid: name and launcher.
        num_procs: ranks that it starts.
        address: where its ranks can be reached.
        interface: that has this address; "" when none is known to.
        port: where it listens while the others try to reach it.
    """

    number: int
    host: str
    pid: int
    num_procs: int
    address: str
    interface: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} ({self.address}{f' at {self.interface}' if self.interface else ''})"


@dataclass(frozen=True)
class Place:
    """What the local launcher needs to start this machine's share of the ranks."""

    number: int
    num_nodes: int
    host: str
    port: int
    job_id: str
    attempt: int
    interface: str


def within(limit_s: float, ask: Callable[[], Any]) -> Any:
    """The answer of `ask`, which may never come: a store behind a cut link doesn't.

    Raises:
        LinkCut: no answer, or a broken connection.
    """
    box: list[Any] = []

    def work() -> None:
        try:
            box.append((ask(), None))
        except Exception as error:  # torch has several for a store that is gone
            box.append((None, error))

    thread = threading.Thread(target=work, name="meeting", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not box:
        raise LinkCut(f"no answer for {limit_s:g} s")
    answer, error = box[0]
    if error is not None:
        raise LinkCut(str(error).splitlines()[0]) from error
    return answer


def parse_endpoint(text: str) -> tuple[str, int]:
    """ "HOST:PORT" or "[IPV6]:PORT" -> (host, port).

    Raises:
        ConfigError: another form.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or ("://" in text) or (":" in bare and bare == host) or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"dist.rendezvous={text}: must be HOST:PORT. Type: dist.rendezvous=10.0.0.5:29400")
    return bare, int(port)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def is_free(port: int) -> bool:
    with socket.socket() as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"port {port} can't be opened here: {error.strerror}. Take one above 1024") from error
    return True


def why_not(error: OSError, address: str) -> str:
    if error.errno == errno.ECONNREFUSED:
        return f"{address} answers, but nobody listens at the port there (not started yet, or ended again?)"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no way leads to {address} from here ({error.strerror}): another network?"
    return f"{address} doesn't answer ({error.strerror or 'no reply'}): machine off, link cut, or a firewall?"


def interface_words(found: Sequence[network.Interface]) -> str:
    best = network.recommended(found)
    return f"dist.interface={best.name}" if best is not None else "dist.interface=null"


def unreachable(nodes: Sequence[Node], me: str, limit_s: float) -> str:
    """Which of the other machines doesn't answer at the address that gloo will use there; "" when all do."""
    for node in nodes:
        try:
            socket.create_connection((node.address, node.port), timeout=limit_s).close()
        except OSError as error:
            return (
                f"{me} can't reach {node.host} at {node.address}, the address of its interface "
                f"{node.interface or '?'} ({error.strerror or 'no answer'}): other interfaces lead there, or a "
                f"firewall keeps ports closed. Name the one that does on {node.host}: dist.interface=NAME (the key may "
                f"differ between machines). {me} has {network.described(network.interfaces())}"
            )
    return ""
