"""How several machines find each other without a scheduler: the identical command on each, no node rank to mistype.

`dist.rendezvous=HOST:PORT` names a machine that takes part. Whoever can listen there opens the meeting (a TCPStore in
its launcher); the others knock until it answers, are compared with it key by key, and get their number, the run
directory and the job's id from it. Before any rank starts, every machine has tried to reach every other one at the
address that gloo will use. torch's launcher then runs with that number and the same store.

torch's own c10d rendezvous was left aside: it takes any machine that knows the run id, whatever its config; publishes
the host's name, which often leads to 127.0.1.1; and its agents poll the store once a second, so that a cut link ends
them with a traceback before the watchdog can say what happened.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from echofree.dist import network
from echofree.dist.endpoint import (
    LinkCut,
    Node,
    Place,
    interface_words,
    is_free,
    is_loopback,
    parse_endpoint,
    plain,
    unreachable,
    why_not,
    within,
)
from echofree.errors import ConfigError, EchoFreeError

log = logging.getLogger("echofree")

POLL_S = 0.1
BEAT_S = 1.0  # a machine that waits says so that often
SILENT_S = 6.0  # one that hasn't said so for longer has given up
CONNECT_S = 2.0  # for one attempt to connect
PATIENCE_S = 10.0  # for one answer of the store: the link may be cut
CONCLUDE_S = 40.0  # for the host to see its own ranks end
TELL_AFTER_S = 5.0  # of waiting in silence
MAX_DIFFERENT = 6  # keys that are named when two machines' commands differ
OWN_KEYS = ("dist.interface", "dist.num_procs")  # which may differ between machines


class Meeting:
    """This machine's part in it, from the first knock to the last word. Close it at the end.

    Args:
        rendezvous: HOST:PORT.
        num_nodes: machines in all.
        num_procs: ranks that this machine will start.
        interface: `dist.interface`, or None: the one that leads to the others.
        limit_s: `dist.start_timeout_s`, for all of it up to the start of the ranks.
        config: flat, for the comparison.

    Raises:
        ConfigError: a name that leads nowhere, an interface that isn't there, a command that differs.
        EchoFreeError: nobody came, or nobody answered, in time.
    """

    def __init__(
        self,
        rendezvous: str,
        num_nodes: int,
        num_procs: int,
        interface: str | None,
        limit_s: float,
        config: Mapping[str, Any],
    ):
        self.rendezvous, self.num_nodes, self.num_procs = rendezvous, num_nodes, num_procs
        self.limit_s, self.end = limit_s, time.monotonic() + limit_s
        self.config = {key: plain(value) for key, value in config.items() if key not in OWN_KEYS}
        self.host, self.port = parse_endpoint(rendezvous)
        self.me, self.nodes, self.number = socket.gethostname(), list[Node](), 0
        self.job_id = ""
        self._ears: socket.socket | None = None
        self._check_interface(interface)
        self.interface = interface
        self.addresses = self._resolve()
        self.is_host, self._own_address = False, ""
        self._store: Any = None
        self._open()

    # --- finding each other

    def _check_interface(self, asked: str | None) -> None:
        found = network.interfaces()
        if asked is not None and (wrong := network.wrong_names(asked, found)):
            raise ConfigError(
                f"dist.interface={asked}: {self.me} has no interface {wrong[0]!r}. It has {network.described(found)}. "
                f"Type: {interface_words(found)}"
            )

    def _resolve(self) -> list[str]:
        try:
            return network.addresses_of(self.host)
        except OSError as error:
            raise ConfigError(
                f"dist.rendezvous={self.rendezvous}: the name {self.host!r} leads to no address on {self.me} "
                f"({error.strerror}). Type the address of an interface of one of the machines instead, on all of them; "
                f"{self.me} has {network.described(network.interfaces())}"
            ) from error

    def _open(self) -> None:
        store = self._serve() if any(network.is_mine(a) for a in self.addresses) and is_free(self.port) else None
        self.is_host = store is not None
        self._store = PrefixStore("echofree/meeting", store if store is not None else self._knock())

    def _serve(self) -> Any:
        """Holds the meeting; None when another launcher of this machine was quicker."""
        limit = timedelta(seconds=self.limit_s)
        self._own_address = self.addresses[0]
        try:
            return TCPStore(
                self.host, self.port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=limit
            )
        except RuntimeError as error:  # torch's DistNetworkError
            log.debug("%s: %s", self.rendezvous, error)
            return None

    def _knock(self) -> Any:
        """Tries until somebody answers at the meeting point."""
        told, began, why = False, time.monotonic(), ""
        while time.monotonic() < self.end:
            for address in self.addresses:
                try:
                    with socket.create_connection((address, self.port), timeout=CONNECT_S) as line:
                        self._own_address = str(line.getsockname()[0])
                    return within(3 * CONNECT_S, self._client)  # a stranger who never speaks would keep it for ever
                except OSError as error:
                    why = why_not(error, address)
                except LinkCut:
                    why = f"something answers at port {self.port}, but it isn't a run of EchoFree: take another port"
            if not told and time.monotonic() - began > TELL_AFTER_S:
                told = True
                self._say(f"waiting for the meeting point {self.rendezvous}, up to {self.limit_s:g} s: {why}")
            time.sleep(5 * POLL_S)
        raise EchoFreeError(
            f"{self.me} could not reach the meeting point dist.rendezvous={self.rendezvous} within "
            f"dist.start_timeout_s={self.limit_s:g} s: {why}. HOST must be an address of one of the machines that run "
            f"this command, which the others can reach, and the command must run there, too. {self.me} has "
            f"{network.described(network.interfaces())}"
        )

    def _client(self) -> Any:
        limit = timedelta(seconds=self.limit_s)
        return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # --- agreeing

    def gather(self) -> None:
        """The host: returns when all machines are there. The others: when they have knocked."""
        if self.is_host:
            self._put("host", {"host": self.me, "pid": os.getpid(), "config": self.config, "nodes": self.num_nodes})
            self._wait_for_all()
        else:
            self._compare(self._wait_for("host"))
            self._key = f"{self._store.add('knocks', 1)}"
            self._listen(self._own_address)
            self._put(f"knock/{self._key}", asdict(self._self(0)))

    @property
    def size(self) -> int:
        """Ranks of all machines, once they are there."""
        return sum(node.num_procs for node in self.nodes)

    def _wait_for_all(self) -> None:
        beats: dict[str, tuple[Any, float]] = {}
        began, told = time.monotonic(), False
        while True:
            keys = [str(number) for number in range(1, self._store.add("knocks", 0) + 1)]
            for key in keys:
                beat = self._get(f"beat/{key}")
                if beat is not None and beats.get(key, (None, 0.0))[0] != beat:
                    beats[key] = (beat, time.monotonic())
            there = [key for key in keys if time.monotonic() - beats.get(key, (None, -1e9))[1] < SILENT_S]
            if len(there) >= self.num_nodes - 1:
                break
            if time.monotonic() > self.end:
                raise EchoFreeError(self._nobody(there))
            if not told and time.monotonic() - began > TELL_AFTER_S:
                told = True
                self._say(f"waiting at {self.rendezvous} for {self.num_nodes - 1 - len(there)} more machine(s)")
            time.sleep(POLL_S)
        there = there[: self.num_nodes - 1]
        others = [Node(**{**self._get(f"knock/{key}"), "number": i + 1}) for i, key in enumerate(there)]
        self._own_address = network.way_to(others[0].address) or self._own_address
        self._listen(self._own_address)
        self.nodes = [self._self(0), *others]
        self._keys = there

    def _nobody(self, there: Sequence[str]) -> str:
        came = [str(Node(**self._get(f"knock/{key}"))) for key in there]
        refused = [self._get(f"refused/{n}") for n in range(1, self._store.add("refusals", 0) + 1)]
        text = (
            f"{self.me} has waited dist.start_timeout_s={self.limit_s:g} s at {self.rendezvous} for "
            f"dist.num_nodes={self.num_nodes} machines; with it there were {len(came) + 1}"
            f"{f' (also {chr(44).join(came)})' if came else ''}. Start the same command on the others, within that time"
        )
        if all(is_loopback(address) for address in self.addresses):
            text += (
                f". {self.host!r} leads to {self.addresses[0]} here, where other machines reach only themselves: type "
                "an address of an interface instead"
            )
        if refused:
            text += ". Turned away: " + "; ".join(str(entry) for entry in refused)
        return f"{text}. {self.me} has {network.described(network.interfaces())}"

    def _compare(self, theirs: Mapping[str, Any]) -> None:
        """Raises ConfigError: the meeting is that of another job."""
        different = [
            f"{key} is {self.config.get(key, 'absent')} here and {theirs['config'].get(key, 'absent')} there"
            for key in sorted({*self.config, *theirs["config"]})
            if self.config.get(key) != theirs["config"].get(key)
        ]
        if different:
            more = len(different) - MAX_DIFFERENT
            listed = "; ".join(different[:MAX_DIFFERENT]) + (f"; and {more} more" if more > 0 else "")
            self._refuse(f"{self.me}, whose command differs: {listed}")
            raise ConfigError(
                f"the command on {self.me} isn't that of {theirs['host']}, which holds the meeting at "
                f"{self.rendezvous}: {listed}. Type the same command on every machine (another job may have taken the "
                "port: then give this one another)"
            )

    def _refuse(self, text: str) -> None:
        self._put(f"refused/{self._store.add('refusals', 1)}", text)

    def publish(self, **facts: Any) -> None:
        """The host: tells the machines their numbers, and what they have to know."""
        self.job_id = secrets.token_hex(16)
        roster = [asdict(node) for node in self.nodes]
        self._put("roster", {"keys": self._keys, "nodes": roster, "job_id": self.job_id, "facts": facts})

    def call_off(self, why: str) -> None:
        """The host: nothing will start."""
        self._put("roster", {"why": why})

    def told(self) -> dict[str, Any]:
        """The others: what the host has published.

        Raises:
            ConfigError: it has called the job off, or has its machines without this one.
        """
        roster = self._wait_for("roster")
        if "why" in roster:
            raise ConfigError(f"called off by the machine that holds {self.rendezvous}: {roster['why']}")
        if self._key not in roster["keys"]:
            raise ConfigError(
                f"the job at {self.rendezvous} has its dist.num_nodes={self.num_nodes} machines without {self.me}. Is "
                "the command still running from an earlier start?"
            )
        self.nodes = [Node(**node) for node in roster["nodes"]]
        self.number = 1 + roster["keys"].index(self._key)
        self.job_id = roster["job_id"]
        facts: dict[str, Any] = roster["facts"]
        return facts

    def agree(self, problem: str = "") -> None:
        """Every machine tries to reach every other one; returns on all when nothing speaks against the start.

        Args:
            problem: why this machine can't take part.

        Raises:
            ConfigError: some machine can't; the same text on all.
        """
        problem = problem or unreachable([n for n in self.nodes if n.number != self.number], self.me, 2 * CONNECT_S)
        self._put(f"ready/{self.number}", {"problem": problem})
        if self.is_host:
            found = [self._wait_for(f"ready/{node.number}")["problem"] for node in self.nodes]
            self._put("go", {"problem": "\n".join(dict.fromkeys(text for text in found if text))})
            for node in self.nodes[1:]:
                self._wait_for(f"gone/{node.number}")  # the store has to stay until they know
        told = self._wait_for("go")
        self._put(f"gone/{self.number}", {})
        if self._ears is not None:
            self._ears.close()
            self._ears = None
        if told["problem"]:
            raise ConfigError(told["problem"])

    # --- reaching each other

    def _self(self, number: int) -> Node:
        found = network.interfaces()
        if self.interface is None:
            asked = os.environ.get("GLOO_SOCKET_IFNAME") or None
            here = next((i for i in found if i.name == asked), None) or network.holding(self._own_address, found)
        else:
            here = next(i for i in found if i.name == self.interface)
        chosen = self.interface is not None or "GLOO_SOCKET_IFNAME" in os.environ
        address = here.addresses[0] if here is not None and here.addresses and chosen else self._own_address
        assert self._ears is not None
        port = int(self._ears.getsockname()[1])
        return Node(number, self.me, os.getpid(), self.num_procs, address, here.name if here else "", port)

    def _listen(self, address: str) -> None:
        self._ears = socket.create_server(("", 0), backlog=64)

    def place(self, attempt: int) -> Place:
        """This machine's part of the launch."""
        me = self.nodes[self.number]
        return Place(
            self.number, self.num_nodes, self.host, self.port, f"{self.job_id}-{attempt}", attempt, me.interface
        )

    # --- the end

    def conclude(self, attempt: int, **word: Any) -> None:
        """The host: what this attempt has come to; returns when the others know, or don't answer."""
        self._put(f"end/{attempt}", word)
        end = time.monotonic() + PATIENCE_S / 2
        keys = [f"read/{attempt}/{node.number}" for node in self.nodes[1:]]
        while time.monotonic() < end and not self._store.check(keys):
            time.sleep(POLL_S)

    def concluded(self, attempt: int) -> dict[str, Any] | None:
        """The others: what the host says this attempt has come to; None when it doesn't answer."""
        end = time.monotonic() + CONCLUDE_S
        try:
            while (word := within(PATIENCE_S, lambda: self._get(f"end/{attempt}"))) is None:
                if time.monotonic() > end:
                    return None
                time.sleep(POLL_S)
            within(PATIENCE_S, lambda: self._put(f"read/{attempt}/{self.number}", {}))
        except LinkCut as error:
            log.debug("%s: %s", self.rendezvous, error)
            return None
        found: dict[str, Any] = word
        return found

    def report(self, attempt: int, ended: Mapping[str, Any]) -> None:
        """How the ranks of this machine ended, for the host."""
        try:
            within(PATIENCE_S, lambda: self._put(f"ended/{attempt}/{self.number}", dict(ended)))
        except LinkCut as error:
            log.debug("%s: %s", self.rendezvous, error)

    def reports(self, attempt: int, limit_s: float) -> list[dict[str, Any]]:
        """The host: how the ranks of each machine ended, of those that say so in time; in the machines' order."""
        end = time.monotonic() + limit_s
        keys = [f"ended/{attempt}/{node.number}" for node in self.nodes]
        while time.monotonic() < end and not self._store.check(keys):
            time.sleep(POLL_S)
        return [found for key in keys if (found := self._get(key)) is not None]

    def close(self) -> None:
        if self._ears is not None:
            self._ears.close()
        self._store = None  # the last owner frees the port

    # --- words

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _wait_for(self, key: str) -> Any:
        """The value of `key`; while it isn't there, this machine says that it still waits."""
        beat = 0.0
        while True:
            try:
                if (value := within(PATIENCE_S, lambda: self._get(key))) is not None:
                    return value
                if not self.is_host and time.monotonic() - beat > BEAT_S and hasattr(self, "_key"):
                    beat = time.monotonic()
                    within(PATIENCE_S, lambda: self._put(f"beat/{self._key}", time.time()))
            except LinkCut as error:
                raise EchoFreeError(
                    f"the machine at the meeting point {self.rendezvous} has left before the ranks started: what does "
                    f"it say? ({error})"
                ) from error
            if time.monotonic() > self.end:
                raise EchoFreeError(
                    f"{self.me} has waited dist.start_timeout_s={self.limit_s:g} s at the meeting point "
                    f"{self.rendezvous} for the other machines: fewer than dist.num_nodes={self.num_nodes} came, or "
                    "one of them was too slow. What do they say?"
                )
            time.sleep(POLL_S)
