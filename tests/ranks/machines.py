"""Two or more "machines" on this one: network namespaces with an address and a host name of their own, joined by a
bridge. Needs root and iproute2. Everything is gone when the `with` block ends."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path
from types import TracebackType


def why_not() -> str:
    """Why this machine can't have namespaces; "" when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no {tool} here (iproute2, util-linux)"
    name = f"try{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Machines:
    """`count` machines a, b, ... with the addresses 10.x.y.11, .12, ... at eth0; each also has an eth1 that leads
    nowhere (192.168.z.1)."""

    def __init__(self, count: int = 2):
        self.tag = secrets.token_hex(3)
        number = secrets.randbelow(200) + 20
        self.net = f"10.{number}.{secrets.randbelow(250) + 1}"
        self.names = [f"{letter}{self.tag}" for letter in "abcdef"[:count]]
        self.bridge = f"br{self.tag}"

    def address(self, index: int) -> str:
        return f"{self.net}.{11 + index}"

    def __enter__(self) -> Machines:
        try:
            ip("link", "add", self.bridge, "type", "bridge")
            ip("link", "set", self.bridge, "up")
            for index, name in enumerate(self.names):
                self._add(index, name)
        except BaseException:
            self._remove()
            raise
        return self

    def _add(self, index: int, name: str) -> None:
        ip("netns", "add", name)
        ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"v{name}", "master", self.bridge, "up")
        ip("-n", name, "link", "add", "eth1", "type", "veth", "peer", "name", "far1")
        ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        ip("-n", name, "addr", "add", f"192.168.{100 + index}.1/24", "dev", "eth1")
        for device in ("lo", "eth0", "eth1", "far1"):
            ip("-n", name, "link", "set", device, "up")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "link", "del", f"v{name}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def link(self, index: int, state: str) -> None:
        """Cuts a machine off ("down") or joins it again ("up")."""
        ip("link", "set", f"v{self.names[index]}", state)

    def head(self, index: int, hidden: Path | None = None) -> list[str]:
        """Words in front of a command that runs on that machine, under its host name (which doesn't resolve).

        Args:
            hidden: a folder that is empty for this machine: its disk isn't shared.
        """
        name = self.names[index]
        hide = f"mount -t tmpfs none {hidden} && " if hidden is not None else ""
        return [
            "nsenter", f"--net={Path('/run/netns') / name}", "unshare", "--uts", "--mount", "sh", "-c",
            f'{hide}hostname {name} && exec "$@"', "sh",
        ]  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
