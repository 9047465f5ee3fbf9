"""Cores, memory, disks, limits, data, SLURM and extras."""

from __future__ import annotations

from echofree.doctor.check import Check, fail, passed, warn
from echofree.doctor.facts import Facts
from echofree.process import num_threads

# Estimates, rough on purpose: a process that has imported torch, and a loader worker forked from it.
RANK_MB, WORKER_MB = 500, 150
CLIP_FIELDS, FRONT_FIELDS = 5, 6  # float32 arrays of a clip: mic, far, near, echo, noise; and what a front end makes
SAMPLE_RATE_HZ = 16000
SMALL_SHM_MB = 64  # what a container gets when nobody asks for more
FEW_FILES = 1024
DISK_FAIL, DISK_WARN = 10**9, 20 * 10**9
SLOW_DECODE = 100.0  # seconds of audio per second
EXTRAS = {
    "metrics": "AECMOS, PESQ, STOI",
    "sim": "room simulation",
    "tensorboard": "logger=tensorboard",
    "sweep": "parallel and adaptive sweeps",
    "export": "ONNX export",
    "litert": "LiteRT export",
    "executorch": "ExecuTorch export",
    "federated": "fine-tuning on clients (Flower)",
    "browser": "tests of the report in a browser",
    "docs": "the documentation site",
    "dev": "tests and linters",
}


def shared_memory(facts: Facts) -> Check:
    """Loader workers hand batches over in /dev/shm."""
    name, plan = "/dev/shm", facts.plan
    ahead = plan.front_end == "workers" or (plan.front_end == "auto" and not facts.gpus)
    fields = CLIP_FIELDS + FRONT_FIELDS * ahead
    num_bytes = plan.batch_size * plan.clip_s * SAMPLE_RATE_HZ * fields * 4
    need_mb = int(plan.ranks * plan.workers * (plan.prefetch + 1) * num_bytes / 2**20)
    remedy = "in a container: --shm-size=8g (or --ipc=host); else data.num_workers=0, or a smaller data.prefetch_factor"
    if facts.shm_mb is None:
        return fail(name, "there is none: loader workers can't hand over batches", remedy)
    found = f"{facts.shm_mb} MB free; {plan.ranks} x {plan.workers} workers hold up to about {need_mb} MB"
    if plan.workers and facts.shm_mb < need_mb:
        return fail(name, found, remedy)
    if plan.workers and facts.shm_mb <= max(SMALL_SHM_MB, 2 * need_mb):
        return warn(name, found, remedy)
    return passed(name, found)


def open_files(facts: Facts) -> Check:
    name = "open files"
    found = f"{facts.files_soft} per process (up to {facts.files_hard})"
    if facts.files_soft < FEW_FILES:
        return fail(name, found, f"ulimit -n {min(facts.files_hard, 65536)}, in the shell or job script")
    if facts.files_soft < 4 * FEW_FILES and facts.plan.ranks > 8:
        return warn(name, f"{found}; {facts.plan.ranks} ranks need more", f"ulimit -n {min(facts.files_hard, 65536)}")
    return passed(name, found)


def disk(facts: Facts) -> Check:
    name, root = "disk", facts.plan.output_root
    if facts.disk_writable:
        return fail(name, f"output_root={root}: {facts.disk_writable}", "output_root=<a folder that you can write>")
    files = "any number of" if facts.disk_files >= 2**60 else f"{facts.disk_files}"
    found = f"output_root={root}: {facts.disk_bytes / 1e9:.1f} GB and {files} files free"
    if facts.disk_bytes < DISK_FAIL or facts.disk_files < 1000:
        return fail(name, found, "free some, or output_root=<a folder on a bigger disk>")
    if facts.disk_bytes < DISK_WARN or facts.disk_files < 20_000:
        return warn(name, found, "output_root=<a bigger disk>, or checkpoint.keep_last=1")
    return passed(name, found)


def data(facts: Facts) -> Check:
    name = "data"
    if facts.data_error:
        return fail(name, facts.data_error, "data.root=<a folder of audio files>")
    if facts.decode is None:
        return passed(name, "made while training; no files are read (name data.root=... to have them looked at)")
    tried, speed = facts.decode
    found = f"data.root={facts.plan.data_root}: {tried} files decoded, {speed:.0f} s of audio per second and core"
    if speed < SLOW_DECODE:
        return warn(name, f"{found}, which is slow", "copy the data to a local disk; more data.num_workers")
    return passed(name, found)


def workers(facts: Facts) -> Check:
    """All ranks of this machine together."""
    name, plan = "loader workers", facts.plan
    per_rank = max(0, facts.cores // max(1, plan.ranks) - 1)
    found = f"{plan.ranks} rank(s) x {plan.workers} workers on {facts.cores} cores"
    if plan.workers > 1 and plan.ranks * plan.workers > facts.cores:
        return warn(name, f"{found}: more processes than cores", f"data.num_workers={per_rank}")
    return passed(name, found)


def memory(facts: Facts) -> Check:
    name, plan = "memory", facts.plan
    need_mb = plan.ranks * (RANK_MB + plan.workers * WORKER_MB)
    found = f"{facts.memory_mb} MB available; {plan.ranks} rank(s) with workers start at about {need_mb} MB"
    if facts.memory_mb < need_mb:
        return fail(name, found, "data.num_workers=0, fewer ranks, or a larger memory limit of the container or job")
    if facts.memory_mb < 2 * need_mb:
        return warn(name, f"{found}, and the model comes on top", "a smaller data.num_workers")
    return passed(name, found)


def threads(facts: Facts) -> Check:
    name, plan = "threads", facts.plan
    each = plan.threads or num_threads(plan.ranks, plan.workers, facts.cores)
    found = f"{plan.ranks} rank(s) x {each} threads on {facts.cores} cores"
    if plan.ranks * each > facts.cores:
        remedy = "dist.threads=0" if plan.threads else f"dist.num_procs={facts.cores}"
        return warn(name, f"{found}: threads would wait for each other, which costs several times the step", remedy)
    return passed(name, found)


def slurm(facts: Facts) -> Check:
    name, env = "SLURM", facts.environment
    if "SLURM_JOB_ID" in env:
        tasks, nodes = env.get("SLURM_NTASKS", "1"), env.get("SLURM_JOB_NUM_NODES", "1")
        found = f"inside job {env['SLURM_JOB_ID']}: {nodes} node(s), {tasks} task(s)"
        given = env.get("SLURM_CPUS_PER_TASK")
        if given is not None and int(given) < 1 + facts.plan.workers:
            return warn(
                name, f"{found} of {given} core(s); a rank with its workers wants {1 + facts.plan.workers}",
                f"#SBATCH --cpus-per-task={1 + facts.plan.workers}",
            )  # fmt: skip
        return passed(name, found)
    if not facts.slurm_commands:
        return passed(name, "not here")
    found = f"commands: {', '.join(facts.slurm_commands)}"
    if not facts.slurm_answers:
        return warn(name, f"{found}, but the controller doesn't answer", "scontrol ping; is this a login node?")
    if "sacct" not in facts.slurm_commands:
        return warn(name, f"{found}; no sacct", "without accounting, a launcher doesn't notice jobs that were killed")
    return passed(name, f"{found}; the controller answers")


def extras(facts: Facts) -> Check:
    name = "extras"
    there = [extra for extra, missing in facts.extras.items() if not missing]
    away = [f"{extra} ({EXTRAS.get(extra, 'optional')})" for extra, missing in facts.extras.items() if missing]
    found = f"installed: {', '.join(there) or 'none'}"
    if away:
        found += f"; not installed: {', '.join(away)}. To add one: pip install 'echofree[NAME]'"
    return passed(name, found)


CHECKS = (memory, workers, threads, shared_memory, open_files, disk, data, slurm, extras)
