"""python -m echofree.reproduce: a run again from its own directory, compared record by record and bit by bit.

The frozen config is run in a new directory by the same ranks started here; with reproduce.code=recorded by the same
source, rebuilt from the commit and code.patch in a checkout of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree import rundir
from echofree.errors import ConfigError, DataError, ExitCode
from echofree.verb import REQUIRED, Key, Words, ending, help_asked, parse, show_help, warn

if TYPE_CHECKING:
    from echofree.dist.local import Ended

KEYS = {
    "run": Key(REQUIRED, "the run directory to reproduce"),
    "reproduce.code": Key("current", "current | recorded: rebuild the run's commit and code.patch in a new checkout"),
    "reproduce.steps": Key("null", "this many optimizer steps only, with the schedule of the whole run"),
    "reproduce.tolerance": Key("auto", "auto: 0 (bit for bit) on the same versions, processor and device, else 0.02"),
    "reproduce.out": Key("auto", "the new run directory; auto: <output_root>/reproduce/<date_time>"),
}
NOTES = (
    "Everything in metrics.jsonl but timing is compared, then weights and moments of every common checkpoint.",
    "Exit code 0 only if all of it is equal; 1 with the first difference (step, key, both values).",
)
LOOSE = 0.02  # for another machine, library or kind of device: rounding grows with every step
# What may change in a resume without changing a number.
QUIET = ("logger.", "train.max_time", "checkpoint.", "resume", "output_root", "name")


@dataclass
class Plan:
    """What will be run and how it is compared.

    Attributes:
        config: the frozen config as plain containers, ready to be written.
        stop_at: the step to stop after, or None for the whole run.
        last: the last step that can be compared.
        size: ranks.
        differs: what isn't as it was; not empty: compared with tolerances.
    """

    config: dict[str, Any]
    stop_at: int | None
    last: int
    size: int
    differs: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("reproduce", KEYS, NOTES)
        return 0
    return ending(lambda: run(parse(words, KEYS)))


def run(words: Words) -> int:
    """Everything in order: what the run was, what is different here, the new run, the comparison."""
    old = Path(words["run"]).resolve()
    if words["reproduce.code"] not in ("current", "recorded"):
        raise ConfigError(f"reproduce.code={words['reproduce.code']}: give current or recorded")
    if not (old / rundir.RUN).is_file():
        raise ConfigError(f"run={words['run']}: no run directory (no {rundir.RUN}). python -m echofree.runs lists them")
    facts = rundir.RunDir(old, is_first=False).facts
    out = None if words["reproduce.out"] == "auto" else Path(words["reproduce.out"]).resolve()
    plan = make_plan(old, facts, words.number("reproduce.steps"))
    rtol = tolerance(words["reproduce.tolerance"], plan)
    for text in plan.differs:
        print(f"not as it was: {text}")
    print(f"compared {'bit for bit' if rtol == 0 else f'with a tolerance of {rtol:g}'}, up to step {plan.last}")
    root = Path(str(plan.config.get("output_root", "outputs"))).resolve()
    recorded = words["reproduce.code"] == "recorded"
    with checkout(old, facts) if recorded else nullcontext(), place(facts):
        if not recorded:
            check_code(facts)
            check_data(plan.config, facts)
        new, ended = again(plan, out, root, str(facts["id"]))
    code = int(ended.code)
    said = rundir.RunDir(new, is_first=False).facts
    if code not in (ExitCode.DONE, ExitCode.PREEMPTED) or said["status"] not in ("done", "stopped", "preempted"):
        failure = rundir.RunDir(new, is_first=False).first_failure() or {}
        why = failure.get("traceback", ended.text or said["status"])
        print(f"the run could not be run again: {why}", file=sys.stderr)
        return int(ExitCode.FAILED)
    if said["data_fingerprint"] != facts["data_fingerprint"]:
        print(f"other data: fingerprint {facts['data_fingerprint']} then, {said['data_fingerprint']} now")
        return int(ExitCode.FAILED)
    return verdict(old, new, plan, rtol)


# --- what the run was -----------------------------------------------------------------------------------------------


def make_plan(old: Path, facts: Mapping[str, Any], steps: int | None) -> Plan:
    """Reads the run's directory.

    Raises:
        ConfigError: it has no record to compare with, or changed its course in a resume before that.
    """
    from omegaconf import OmegaConf

    from echofree import compare

    reached = max((int(r["step"]) for r in compare.records(old, 2**62)), default=0)
    if reached == 0 or not facts.get("world"):
        raise ConfigError(f"{old} has no records to compare with: it ended before its first logged step")
    turned, file = turn(old, facts)
    last = min(reached, steps or reached)
    if turned is not None and last > turned:
        remedy = f"Type reproduce.steps={turned} for the part before" if turned else "Reproduce a run without a turn"
        raise ConfigError(
            f"the run changed its course when it was resumed at step {turned} (run.json, resumes), which can't be run "
            f"again in one go. {remedy}"
        )
    config: Any = OmegaConf.to_container(OmegaConf.load(file))
    world = facts["world"]
    wanted: dict[str, dict[str, Any]] = {
        "logger": {"name": "console"}, "dist": {"num_procs": str(world["size"])},
        "train": {"final_test": False, "max_time": None}, "checkpoint": {"archive_dir": None},
    }  # fmt: skip
    if world.get("threads"):
        wanted["dist"]["threads"] = world["threads"]
    if world["size"] == 1:
        del wanted["dist"]["num_procs"]
    for group, values in wanted.items():  # an older version may not know every key
        config[group].update({key: value for key, value in values.items() if key in config[group]})
    config["resume"], config["resume_allow"] = None, []
    whole = last == reached and facts["status"] in ("done", "stopped")
    return Plan(config, None if whole else last, last, int(world["size"]), differences(facts, config))


def turn(old: Path, facts: Mapping[str, Any]) -> tuple[int | None, Path]:
    """-> (the step at which a resume changed what is computed, or None; the config that held until then)"""
    for number, entry in enumerate(facts.get("resumes", [])):
        changed = [key for key in entry["changed"] if not key.startswith(QUIET)]
        other_code = entry["code_digest"] != facts.get("code_digest")
        begun = int(str(entry["from"]).removeprefix("step-").partition(".")[0]) if entry["from"] else 0
        if changed or other_code or "world_size" in entry["allow"]:
            kept = old / f"config-{number}.yaml"
            return begun, kept if kept.is_file() else old / rundir.CONFIG
    return None, old / rundir.CONFIG


def differences(facts: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What can change roundings and isn't as it was."""
    import torch

    here = {**rundir.packages(), "python": sys.version.split()[0]}
    then = {**facts["packages"], "python": facts["python"]}
    names = ("torch", "numpy", "scipy", "soundfile", "soxr", "python")
    found = [f"{n} {then.get(n)} then, {here.get(n)} now" for n in names if then.get(n) != here.get(n)]
    machine, now = facts.get("machine", {}), rundir.machine()
    found += [f"{n}: {machine.get(n)} then, {now[n]} now" for n in ("cpu", "cpu_features") if machine.get(n) != now[n]]
    device = str(facts["world"]["device"]).partition(":")[0]
    available = "cuda" if torch.cuda.is_available() and config["train"].get("device") != "cpu" else "cpu"
    if device != available:
        found.append(f"device {device} then, {available} now")
    elif device == "cuda" and machine.get("driver") != now["driver"]:
        found.append(f"driver {machine.get('driver')} then, {now['driver']} now")
    return found


def tolerance(asked: str, plan: Plan) -> float:
    """`reproduce.tolerance` as a number."""
    if asked == "auto":
        return LOOSE if plan.differs else 0.0
    try:
        value = float(asked)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"reproduce.tolerance={asked}: give auto, or a number from 0 up to 1")
    return value


def check_code(facts: Mapping[str, Any]) -> None:
    """Says when the source in use isn't the run's."""
    digest = rundir.code_digest()
    if facts.get("code_digest") not in (None, digest):
        warn(
            f"the run was made by code {facts['code_digest']} (commit {facts.get('git_commit')}), this is {digest}. "
            "reproduce.code=recorded rebuilds it"
        )


def check_data(config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Before anything runs.

    Raises:
        DataError: the data isn't what the run saw.
    """
    from echofree.config.build import build_data
    from echofree.config.frozen import thaw

    now = build_data(thaw(config), training=True).fingerprint()
    if now != facts["data_fingerprint"]:
        raise DataError(
            f"the data isn't what the run saw: fingerprint {facts['data_fingerprint']} then, {now} now. Files came, "
            "went or changed (or their loader: reproduce.code=recorded)"
        )


# --- running it again -----------------------------------------------------------------------------------------------


@contextmanager
def place(facts: Mapping[str, Any]) -> Iterator[None]:
    """The run's own working directory, which relative paths of data mean, and its folder of experiments."""
    before, name = Path.cwd(), "ECHOFREE_EXPERIMENTS"
    had = os.environ.get(name)
    there = facts.get("cwd")
    if there and Path(there).is_dir():
        os.chdir(there)
    elif there:
        warn(f"{there}, where the run was started, isn't there: relative paths are looked for in {before}")
    if had is None and name in facts.get("environment", {}):
        os.environ[name] = facts["environment"][name]
    try:
        yield
    finally:
        os.chdir(before)
        _set(name, had)


@contextmanager
def checkout(old: Path, facts: Mapping[str, Any]) -> Iterator[None]:
    """The run's own source, rebuilt in a temporary folder and found before any other by the ranks.

    Raises:
        UserError: the run recorded no commit, its patch is incomplete, or git can't rebuild it.
    """
    commit = facts.get("git_commit")
    if commit is None:
        raise ConfigError("reproduce.code=recorded: the run recorded no commit (installed from a wheel?). Leave it out")
    left = facts.get("patch_left_out", [])
    if left:
        warn(f"not in code.patch, so not rebuilt: {', '.join(left)}")
    source = Path(rundir.__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="echofree-code-") as folder:
        tree = Path(folder) / "code"
        top = _git("-C", str(source), "rev-parse", "--show-toplevel").strip()
        _git("clone", "--quiet", "--shared", "--no-checkout", top, str(tree))
        _git("-C", str(tree), "checkout", "--quiet", "--detach", commit)
        if facts.get("patch"):
            _git("-C", str(tree), "apply", "--whitespace=nowarn", str(old / facts["patch"]))
        inside = tree / source.parent.relative_to(top)
        had = {name: os.environ.get(name) for name in ("PYTHONPATH", "ECHOFREE_EXPERIMENTS")}
        os.environ["PYTHONPATH"] = os.pathsep.join([str(inside), *filter(None, [had["PYTHONPATH"]])])
        if (tree / "experiments").is_dir() and had["ECHOFREE_EXPERIMENTS"] is None:
            os.environ["ECHOFREE_EXPERIMENTS"] = str(tree / "experiments")
        print(f"code: commit {commit[:12]}{' and code.patch' if facts.get('patch') else ''}, rebuilt")
        try:
            yield
        finally:
            for name, value in had.items():
                _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise ConfigError(f"reproduce.code=recorded: git {' '.join(words[:4])} failed: {str(why).strip()}") from error


def again(plan: Plan, out: Path | None, root: Path, run_id: str) -> tuple[Path, Ended]:
    """Runs the plan. -> (the new run directory, how its ranks ended)"""
    from echofree.config import frozen
    from echofree.dist.local import launch
    from echofree.durable import write_text
    from echofree.stop import FILE

    text, seed = frozen.dump(plan.config), int(plan.config["seed"])
    command = rundir.command_line()
    if out is None:
        folder = rundir.create(root / "reproduce", text, command, seed, run_id)
    else:
        folder = rundir.create_at(out, text, command, seed, run_id)
    if plan.stop_at is not None:
        write_text(folder / FILE, f"{plan.stop_at}\n")
    print(f"running {plan.last} steps on {plan.size} rank(s) in {os.path.relpath(folder)}", flush=True)
    return folder, launch(plan.size, folder, float(plan.config["dist"].get("start_timeout_s", 600.0)))


# --- the comparison -------------------------------------------------------------------------------------------------


def verdict(old: Path, new: Path, plan: Plan, rtol: float) -> int:
    """Prints what was found. -> the exit code"""
    from echofree import compare

    theirs, mine = compare.records(old, plan.last), compare.records(new, plan.last)
    where = compare.in_records(theirs, mine, rtol)
    pairs = compare.common_checkpoints(old, new, plan.last)
    count = 0
    if where is None:
        for a, b in pairs:
            where, number = compare.in_weights(a, b, rtol)
            count += number
            if where is not None:
                break
    took = f"{datetime.now():%H:%M:%S}"
    if where is not None:
        print(f"{took} NOT equal, first at {where}\n  {old}\n  {new}")
        return int(ExitCode.FAILED)
    how = "equal bit for bit" if rtol == 0 else f"equal within {rtol:g}"
    if pairs:
        names = ", ".join(a.name for a, _ in pairs)
        print(f"{took} {how}: {len(theirs)} records up to step {plan.last}, {count} tensors of {names}")
    else:
        print(f"{took} {how}: {len(theirs)} records up to step {plan.last}; no checkpoint of the same step to compare")
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
