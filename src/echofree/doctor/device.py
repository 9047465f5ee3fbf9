"""GPUs, their driver, and what torch was built for."""

from __future__ import annotations

from echofree.doctor.check import Check, fail, passed, warn
from echofree.doctor.facts import Facts

# The oldest driver that runs a torch built with this major version of CUDA (NVIDIA's table of minor version
# compatibility).
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
LOW_FREE = 0.9  # of a GPU's memory: below that, somebody else uses it


def driver(facts: Facts) -> Check:
    name = "driver and torch"
    if facts.cuda_build is None:
        if facts.driver is None:
            return passed(name, f"torch {facts.torch} for CPUs; this machine has no NVIDIA driver")
        return warn(
            name, f"driver {facts.driver}, but torch {facts.torch} was built for CPUs: the GPUs stay idle",
            "install the CUDA build of the same torch version",
        )  # fmt: skip
    build = f"torch {facts.torch} for CUDA {facts.cuda_build}"
    if facts.driver is None:
        return warn(
            name, f"{build}; no NVIDIA driver: everything runs on the CPU", "install the driver, or ignore this"
        )
    oldest = OLDEST_DRIVER.get(int(facts.cuda_build.split(".")[0]))
    if oldest is not None and _numbers(facts.driver) < _numbers(oldest):
        fitting = [str(major) for major, least in OLDEST_DRIVER.items() if _numbers(facts.driver) >= _numbers(least)]
        other = f", or install a torch built for CUDA {fitting[-1]}" if fitting else ""
        return fail(
            name, f"driver {facts.driver} is too old for {build}", f"update the driver to {oldest} or later{other}"
        )
    if not facts.cuda_works:
        return fail(
            name, f"driver {facts.driver} and {build}, but no GPU works: {facts.cuda_error or 'no reason given'}",
            "is CUDA_VISIBLE_DEVICES empty? Does nvidia-smi list the GPUs? In a container: start it with its GPUs",
        )  # fmt: skip
    return passed(name, f"driver {facts.driver}, {build}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def kernels(facts: Facts) -> Check:
    """Compute capability against the kernels that torch brings. Compiled code (sm_) runs on later minor versions of the
    same major one; intermediate code (compute_) on all later ones, compiled when it is first used."""
    name = "compiled kernels"
    if not facts.gpus:
        return passed(name, "no GPU")
    compiled = [_capability(a) for a in facts.arch_list if a.startswith("sm_")]
    portable = [_capability(a) for a in facts.arch_list if a.startswith("compute_")]
    late = []
    for gpu in facts.gpus:
        if any(c[0] == gpu.capability[0] and c[1] <= gpu.capability[1] for c in compiled):
            continue
        if not any(c <= gpu.capability for c in portable):
            return fail(
                name, f"{gpu.name} has capability {gpu.capability[0]}.{gpu.capability[1]}, torch has kernels for "
                f"{' '.join(facts.arch_list)}",
                "install a torch version that was built for this GPU, or type train.device=cpu",
            )  # fmt: skip
        late.append(gpu.name)
    if late:
        return warn(name, f"{late[0]}: kernels are compiled at the first start, which takes minutes", "a newer torch")
    kinds = sorted({f"{g.capability[0]}.{g.capability[1]}" for g in facts.gpus})
    return passed(name, f"capability {', '.join(kinds)} is among {' '.join(facts.arch_list)}")


def _capability(arch: str) -> tuple[int, int]:
    digits = "".join(c for c in arch.partition("_")[2] if c.isdigit())
    return int(digits[:-1]), int(digits[-1])


def gpus(facts: Facts) -> Check:
    if not facts.gpus:
        return passed("GPUs", "none: training runs on the CPU")
    found = "; ".join(f"{i}: {g.name}, {g.free_mb} of {g.memory_mb} MB free" for i, g in enumerate(facts.gpus))
    if facts.plan.ranks > len(facts.gpus):
        return fail("GPUs", f"{found}; {facts.plan.ranks} ranks would start here", f"dist.num_procs={len(facts.gpus)}")
    used = [i for i, g in enumerate(facts.gpus) if g.free_mb < LOW_FREE * g.memory_mb]
    if used:
        return warn(
            "GPUs", f"{found}. Another process uses GPU {used[0]}", "nvidia-smi shows which; CUDA_VISIBLE_DEVICES"
        )
    return passed("GPUs", found)


def links(facts: Facts) -> Check:
    name = "GPU links"
    if len(facts.gpus) < 2:
        return passed(name, "fewer than two GPUs")
    apart = [f"{i}-{j}" for i, j, direct in facts.peers if not direct]
    kinds = ", ".join(facts.links) or "unknown"
    if apart:
        return warn(
            name, f"GPUs {', '.join(apart[:4])} don't reach each other's memory (links: {kinds}): gradients go by "
            "way of the host",
            "in a virtual machine or container, ask for the GPUs with their links; if NCCL hangs: NCCL_P2P_DISABLE=1",
        )  # fmt: skip
    return passed(name, f"all pairs reach each other's memory (links: {kinds})")


def back_ends(facts: Facts) -> Check:
    name = "back ends"
    if not facts.gloo:
        return fail(name, "this torch has no gloo, which carries the decisions of all ranks", "install the usual build")
    if facts.gpus and facts.nccl is None:
        return fail(name, "gloo, but no NCCL: gradients of GPUs would take the slow way", "install torch's CUDA build")
    return passed(name, "gloo" + (f", NCCL {facts.nccl}" if facts.nccl else "; no NCCL (needs GPUs)"))


CHECKS = (driver, kernels, gpus, links, back_ends)
