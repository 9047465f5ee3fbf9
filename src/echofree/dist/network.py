"""The network as this machine sees it: interfaces and their addresses, what a name leads to, which way a peer lies.

Nothing here needs torch or a network. Linux.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SIOCGIFADDR = 0x8915
# Names of interfaces that lead to containers or virtual machines of this machine, never to another one.
INSIDE = ("docker", "br-", "virbr", "cni", "flannel", "veth", "podman", "lxc", "kube", "tunl", "dummy")


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        addresses: IPv4 first, then IPv6 without link-local ones.
        up: whether it carries packets.
        speed_mbps: of the link, 0 when it doesn't say.
        is_default: whether packets for the rest of the world leave here.
    """

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    speed_mbps: int = 0
    is_default: bool = False

    @property
    def is_loopback(self) -> bool:
        return bool(self.addresses) and all(ipaddress.ip_address(a).is_loopback for a in self.addresses)

    @property
    def leads_out(self) -> bool:
        """Whether other machines may lie behind it."""
        return self.up and bool(self.addresses) and not self.is_loopback and not self.name.startswith(INSIDE)


def interfaces() -> list[Interface]:
    """All of this machine, in the kernel's order."""
    second, default = _ipv6(), _default_route()
    found = []
    for _, name in socket.if_nameindex():
        first = _ipv4(name)
        here = Path("/sys/class/net") / name
        state = _read(here / "operstate")
        speed = _read(here / "speed")
        found.append(
            Interface(
                name,
                (*([first] if first else []), *second.get(name, ())),
                up=state in ("up", "unknown", ""),
                speed_mbps=int(speed) if speed.isdigit() else 0,
                is_default=name == default,
            )
        )
    return found


def _ipv4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # it has none
    return socket.inet_ntoa(answer[20:24])


def _ipv6() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        digits, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:  # those need a scope, which no address list carries
            found[name] = (*found.get(name, ()), str(address))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # a kernel without it, or an interface that has no such number


def described(found: Sequence[Interface]) -> str:
    """ "lo 127.0.0.1, eth0 10.0.0.5 (down)": those that have an address."""
    return ", ".join(" ".join([i.name, *i.addresses, *([] if i.up else ["(down)"])]) for i in found if i.addresses)


def addresses_of(host: str) -> list[str]:
    """What a name leads to, IPv4 first; an address leads to itself.

    Raises:
        OSError: it leads nowhere.
    """
    found = {info[4][0]: info[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return sorted((str(a) for a in found), key=lambda a: ":" in a)


def is_mine(address: str) -> bool:
    """Whether `address` belongs to this machine: only then can one listen at it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        try:
            trying.bind((address, 0))
        except OSError:
            return False
    return True


def way_to(address: str) -> str | None:
    """This machine's own address on the way to `address`; None when no way leads there. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except OSError:
            return None
        return str(asking.getsockname()[0])


def holding(address: str | None, found: Sequence[Interface]) -> Interface | None:
    """The interface that has `address`. All of 127.0.0.0/8 is the loopback interface's."""
    for interface in found:
        if address in interface.addresses:
            return interface
    if address is not None and ipaddress.ip_address(address).is_loopback:
        return next((i for i in found if i.is_loopback), None)
    return None


def recommended(found: Sequence[Interface]) -> Interface | None:
    """The interface to give to `dist.interface` for several machines: the one of the default route, else the fastest
    that leads out; None: no other machine can be reached."""
    out = [i for i in found if i.leads_out]
    return max(out, key=lambda i: (i.is_default, i.speed_mbps), default=None)


def _default_route() -> str | None:
    for line in _read(Path("/proc/net/route")).splitlines()[1:]:
        words = line.split()
        if words[1] == "00000000":
            return words[0]
    return None


def wrong_names(asked: str | None, found: Sequence[Interface]) -> list[str]:
    """What a list as in GLOO_SOCKET_IFNAME names and this machine doesn't have."""
    have = {i.name for i in found}
    return [name for name in (asked or "").split(",") if name and name not in have]
