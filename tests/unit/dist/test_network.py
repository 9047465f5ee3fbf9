"""Interfaces, names and ways, as far as any machine has them."""

from __future__ import annotations

import socket

import pytest

from echofree.dist import network
from echofree.dist.endpoint import LinkCut, parse_endpoint, within
from echofree.dist.network import Interface
from echofree.errors import ConfigError


def test_the_loopback_interface_is_everywhere() -> None:
    found = network.interfaces()
    (lo,) = [i for i in found if i.name == "lo"]
    assert "127.0.0.1" in lo.addresses
    assert lo.is_loopback
    assert not lo.leads_out
    assert network.holding("127.0.0.1", found) == network.holding("127.0.1.1", found) == lo
    assert network.holding("203.0.113.77", found) is None
    assert "lo 127.0.0.1" in network.described(found)


def test_whose_address_it_is() -> None:
    assert network.is_mine("127.0.0.1")
    assert not network.is_mine("203.0.113.77")  # kept for documentation, nobody's
    assert network.way_to("127.0.0.1") == "127.0.0.1"


def test_names_lead_to_addresses_or_nowhere() -> None:
    assert network.addresses_of("10.1.2.3") == ["10.1.2.3"]
    with pytest.raises(socket.gaierror):
        network.addresses_of("nowhere.invalid")


def test_which_interface_is_recommended() -> None:
    lo, docker = Interface("lo", ("127.0.0.1",)), Interface("docker0", ("172.17.0.1",), speed_mbps=10_000)
    slow, fast = Interface("eth0", ("10.0.0.5",), speed_mbps=1000), Interface("ib0", ("10.1.0.5",), speed_mbps=200_000)
    assert network.recommended([lo, docker]) is None
    assert network.recommended([lo, docker, slow, fast]) == fast
    default = Interface("eth1", ("192.0.2.1",), is_default=True)
    assert network.recommended([lo, slow, fast, default]) == default
    assert network.recommended([lo, Interface("eth9", ("10.9.0.1",), up=False)]) is None


def test_names_that_are_not_there() -> None:
    have = [Interface("lo", ("127.0.0.1",))]
    assert network.wrong_names("^lo", have) == ["^lo"]
    assert network.wrong_names("lo,eth7", have) == ["eth7"]
    assert network.wrong_names(None, have) == network.wrong_names("lo", have) == []


def test_end_points() -> None:
    assert parse_endpoint("node1:29400") == ("node1", 29400)
    assert parse_endpoint("[fd00::2]:1") == ("fd00::2", 1)
    for wrong in ("node1", ":29400", "node1:0", "node1:70000", "tcp://node1:29400", "fd00::2:29400", "node1:x"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            parse_endpoint(wrong)


def test_an_answer_that_never_comes() -> None:
    def broken() -> None:
        raise RuntimeError("Connection reset by peer\nmore")

    assert within(5.0, lambda: 3) == 3
    with pytest.raises(LinkCut, match=r"no answer for 0\.1 s"):
        within(0.1, lambda: __import__("time").sleep(3))
    with pytest.raises(LinkCut, match=r"^Connection reset by peer$"):
        within(5.0, broken)
