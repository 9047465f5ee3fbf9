"""Interfaces, names, ports, and a trial of the back end."""

from __future__ import annotations

import ipaddress

from echofree.dist import network
from echofree.doctor.check import Check, fail, passed, warn
from echofree.doctor.facts import Facts

SLOW_MB_S = 50.0  # of an all-reduce between two processes of one machine


def interfaces(facts: Facts) -> Check:
    """Which interface gloo and NCCL will use, and which they should for several machines."""
    name, asked = "interfaces", facts.environment.get("GLOO_SOCKET_IFNAME")
    have, several = network.described(facts.interfaces), facts.plan.num_nodes > 1
    best = network.recommended(facts.interfaces)
    advice = f"dist.interface={best.name}" if best is not None else "dist.interface=lo"
    for key, value in (("GLOO_SOCKET_IFNAME", asked), ("dist.interface", facts.plan.interface)):
        wrong = network.wrong_names(value, facts.interfaces)
        if wrong:
            syntax = " (^ and = are NCCL's syntax, gloo doesn't know it)" if wrong[0][:1] in ("^", "=") else ""
            remedy = f"unset {key}, or type {advice}" if key.isupper() else f"type {advice}"
            return fail(name, f"{key}={value} names {wrong[0]!r}, which isn't there{syntax}. There are {have}", remedy)
    chosen = next((i for i in facts.interfaces if i.name == (facts.plan.interface or asked)), None)
    if several and chosen is not None and chosen.is_loopback:
        return fail(name, f"{chosen.name} reaches this machine only, and dist.num_nodes={facts.plan.num_nodes}", advice)
    if several and best is None:
        return fail(name, f"no interface leads to other machines: {have}", "connect this machine, or dist.num_nodes=1")
    if best is None:
        return passed(name, f"{have}: enough for one machine; several machines need another")
    for_several = f"for several machines the one that leads to the others is found; by hand: {advice}"
    return passed(name, f"{have}. One machine uses {facts.plan.interface or asked or 'lo'}; {for_several}")


def host_name(facts: Facts) -> Check:
    name = "host name"
    if not facts.host_addresses:
        return warn(
            name, f"{facts.host!r} leads to no address. EchoFree doesn't need it; torchrun and libraries may",
            f"a line in /etc/hosts: 127.0.1.1 {facts.host} (several machines: its address)",
        )  # fmt: skip
    found = f"{facts.host!r} is {', '.join(facts.host_addresses)}"
    if all(ipaddress.ip_address(a).is_loopback for a in facts.host_addresses):
        if (
            facts.plan.rendezvous
            and facts.plan.rendezvous.rpartition(":")[0] == facts.host
            and facts.plan.num_nodes > 1
        ):
            return fail(
                name, f"{found}: dist.rendezvous={facts.plan.rendezvous} means another machine on each machine",
                f"dist.rendezvous=<an address: {network.described(facts.interfaces)}>:PORT",
            )  # fmt: skip
        return passed(name, f"{found}: fine for one machine; as dist.rendezvous take an address instead")
    return passed(name, found)


def ports(facts: Facts) -> Check:
    name = "ports"
    if not facts.can_listen:
        return fail(
            name, "this user can't listen at a port of the loopback interface", "is lo up? Is a sandbox in use?"
        )
    wanted = int(facts.plan.rendezvous.rpartition(":")[2]) if facts.plan.rendezvous else None
    if wanted is not None and wanted in facts.ports_taken:
        return fail(
            name, f"port {wanted} of dist.rendezvous is taken here", "take another port, or end what listens: ss -ltnp"
        )
    taken = [str(p) for p in facts.ports_taken]
    busy = f"; {' and '.join(taken)} taken, which harms only who asks for them" if taken else ""
    return passed(name, f"free ones can be opened{busy}")


def all_reduce(facts: Facts, mb_per_s: float, small_ms: float, backend: str, error: str) -> Check:
    """Two ranks of this machine sum a tensor."""
    name = f"all-reduce ({backend})"
    if error:
        return fail(
            name, error, "run again with TORCH_CPP_LOG_LEVEL=INFO; are ports of the loopback interface blocked?"
        )
    found = f"2 ranks of this machine: {mb_per_s:.0f} MB/s, {small_ms:.2f} ms for a small one"
    if mb_per_s < SLOW_MB_S:
        return warn(name, f"{found}, which is slow", "is the machine busy? Fewer ranks, or larger batches")
    return passed(name, found)


CHECKS = (interfaces, host_name, ports)
