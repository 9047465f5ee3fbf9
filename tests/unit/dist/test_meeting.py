"""Machines that meet: here threads of one process, each with a meeting of its own, over the loopback interface."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from echofree.dist.meeting import Meeting
from echofree.errors import ConfigError, EchoFreeError

CONFIG = {"optim.lr": 0.001, "dist.num_procs": "2", "dist.interface": None}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def machine(port: int, num_procs: int = 2, limit_s: float = 20.0, nodes: int = 2, **config: Any) -> dict[str, Any]:
    """One machine's way through the meeting; -> what it knows at the end."""
    meeting = Meeting(f"localhost:{port}", nodes, num_procs, None, limit_s, {**CONFIG, **config})
    try:
        meeting.gather()
        if meeting.is_host:
            meeting.publish(folder="outputs/run/1")
            facts = {"folder": "outputs/run/1"}
        else:
            facts = meeting.told()
        meeting.agree()
        place = meeting.place(0)
        if meeting.is_host:
            meeting.conclude(0, again=False, code=1)
            word = {"again": False, "code": 1}
        else:
            word = meeting.concluded(0) or {}
        return {"place": place, "facts": facts, "size": meeting.size, "word": word, "hosts": len(meeting.nodes)}
    finally:
        meeting.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results, or the errors, of calls at the same time."""
    results: list[Any] = [None] * len(calls)

    def work(index: int) -> None:
        try:
            results[index] = calls[index]()
        except EchoFreeError as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=[index]) for index in range(len(calls))]
    for thread in threads:
        thread.start()
        threading.Event().wait(0.5)  # torch shares one port among the stores of a process: the first has to be there
    for thread in threads:
        thread.join(60)
    return results


def test_three_machines_get_numbers_one_job_and_one_end() -> None:
    port = free_port()
    found = together(*(lambda n=n: machine(port, n, nodes=3, **{"dist.num_procs": str(n)}) for n in (1, 2, 3)))
    assert all(isinstance(f, dict) for f in found), found
    places = [f["place"] for f in found]
    assert sorted(place.number for place in places) == [0, 1, 2]
    assert len({place.job_id for place in places}) == 1
    assert {place.interface for place in places} == {"lo"}
    assert all((f["size"], f["hosts"], f["facts"]["folder"]) == (6, 3, "outputs/run/1") for f in found)
    assert all(f["word"] == {"again": False, "code": 1} for f in found)


def test_the_host_says_what_another_command_differs_in() -> None:
    port = free_port()
    found = together(lambda: machine(port, limit_s=4), lambda: machine(port, limit_s=4, **{"optim.lr": 0.1}))
    told = [f for f in found if isinstance(f, ConfigError)]
    waited = [f for f in found if isinstance(f, EchoFreeError) and not isinstance(f, ConfigError)]
    assert len(told) == len(waited) == 1, found
    assert "optim.lr is" in str(told[0])
    assert "Type the same command on every machine" in str(told[0])
    assert "with it there were 1" in str(waited[0])
    assert "Turned away: " in str(waited[0])
    assert "'localhost' leads to" in str(waited[0])  # where no other machine could have come


def test_a_port_where_something_else_listens() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EchoFreeError, match="something answers at port"):
            machine(port, limit_s=3)


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"dist\.interface=ib7: .* has no interface 'ib7'\. It has lo 127\.0\.0\.1"):
        Meeting(f"localhost:{free_port()}", 2, 1, "ib7", 5.0, CONFIG)


def test_a_host_that_calls_the_job_off() -> None:
    port = free_port()

    def host_or_guest() -> str:
        meeting = Meeting(f"localhost:{port}", 2, 1, None, 20.0, CONFIG)
        try:
            meeting.gather()
            if meeting.is_host:
                meeting.call_off("the disk is full")
                threading.Event().wait(1.0)
                return "host"
            meeting.told()
        finally:
            meeting.close()
        return "told"

    found = together(host_or_guest, host_or_guest)
    assert "host" in found
    (error,) = [f for f in found if isinstance(f, ConfigError)]
    assert "called off by the machine that holds" in str(error)
    assert "the disk is full" in str(error)
