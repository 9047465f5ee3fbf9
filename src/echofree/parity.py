"""python -m echofree.parity: one process against N, step by step, under every strategy that the model allows.

Trains the same global batches in each world and compares loss, gradient norm and weights after every step. Says which
step and which tensor differ first and what mostly causes that; writes parity.json and parity.svg; exit code 1 on a
difference.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, EchoFreeError, ExitCode, UserError
from echofree.verb import Key, Words, ending, help_asked, parse, report, show_help

if TYPE_CHECKING:
    from echofree.config.compose import Composed

KEYS = {
    "parity.worlds": Key("[1,2]", "numbers of ranks; 1: one process with the batch accumulated in other parts"),
    "parity.strategies": Key("auto", "out of ddp,fsdp,tensor,pipeline; auto: those that the model allows"),
    "parity.steps": Key("8", "optimizer steps"),
    "parity.tolerance": Key("auto", "largest difference of a weight; auto: 1e-6, or 1e-4 with batch norms"),
    "parity.uneven": Key("auto", "clips of unequal lengths, epochs that end in a partial group: auto | true | false"),
    "parity.scale": Key("1e-3", "norm that gradients are clipped to, and optim.eps; null: the run's own"),
    "parity.bf16": Key("true", "train in bf16 as well and compare the loss"),
    "parity.bf16_gap": Key("0.05", "largest relative gap of its mean loss"),
    "parity.out": Key("auto", "where parity.json and parity.svg go; auto: <output_root>/parity/<date_time>"),
}
NOTES = (
    "Weights are compared absolutely, those of a tensor whose largest exceeds 1 relative to that.",
    "All other words are those of train; train.batch_size x train.gradient_accumulation_steps is the global batch.",
    "auto leaves unequal lengths and partial groups out for models with batch norms, which see padding and fillers;",
    "for them a batch accumulated in other parts is another training as well, and is left out with parity.uneven=auto.",
    "parity.scale: by itself Adam takes rounding for a gradient where there is none, and makes whole steps of it.",
)
STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline")
LOSS_RTOL, NORM_RTOL = 1e-5, 1e-3
FULL_GROUPS = 3  # of an epoch, before a partial one


@dataclass
class Case:
    """One training of the same global batches.

    Attributes:
        name: for people and folders.
        strategy, world: where it runs; `data_size` of the ranks read different clips.
        batch_size, accumulation: of one rank.
        precision: fp32 | bf16.
    """

    name: str
    strategy: str
    world: int
    data_size: int
    batch_size: int
    accumulation: int
    precision: str = "fp32"


@dataclass
class Verdict:
    """How a case compares with the reference.

    Attributes:
        loss, norm: largest relative differences; `weights`: largest absolute one.
        step: the first step with a difference beyond what is allowed, or None; `what` differs, in which `tensor`.
        cause: what that mostly is.
        rows: of the case, a row per step.
    """

    case: Case
    loss: float = 0.0
    norm: float = 0.0
    weights: float = 0.0
    step: int | None = None
    what: str = ""
    tensor: str = ""
    cause: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.step is None


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    from echofree.config.compose import main_config

    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("parity", KEYS, NOTES)
        return 0
    own = [word for word in words if word.partition("=")[0].startswith("parity.")]
    try:
        asked = parse(own, KEYS)
    except UserError as error:
        return report(error)
    composed = main_config([word for word in words if word not in own])
    return ending(lambda: run(asked, composed))


def run(asked: Words, composed: Composed) -> int:
    """Everything in order: the cases, the reference, the others, the comparison, the files."""
    from echofree.parts import build

    if composed.resumed:
        raise ConfigError("parity trains new runs. Leave resume= out")
    parts = build(composed.config)
    norms = _batch_norms(parts.model)
    uneven = asked.switch("parity.uneven") if asked["parity.uneven"] != "auto" else not norms
    found, left_out = cases(asked, composed.config, parts.model)
    gap = _float(asked, "parity.bf16_gap")
    # torch's own batch norm adds up in float32 on a CPU: the mean that one process takes can be 1e-4 off
    usual = 1e-4 if norms else 1e-6
    tolerance = usual if asked["parity.tolerance"] == "auto" else _float(asked, "parity.tolerance")
    scale = None if asked.given("parity.scale") is None else _float(asked, "parity.scale")
    steps = asked.number("parity.steps") or 1
    prepared = configure(composed.config, found[0], steps, uneven, scale)
    del parts
    out = Path(asked["parity.out"])
    if asked["parity.out"] == "auto":
        out = Path(composed.config.output_root) / "parity" / time.strftime("%Y-%m-%d_%H-%M-%S")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"parity.out={out} isn't empty. Name a new folder")
    facts = {"uneven": uneven, "batch_norm": norms[:1], "dropout": _dropout(composed.config), "steps": steps}
    print(f"the same {prepared['data']['num_clips']} clips in every world, {steps} steps; {_about(facts)}", flush=True)
    for text in left_out:
        print(f"left out: {text}", flush=True)
    verdicts: list[Verdict] = []
    reference = train_case(composed, found[0], prepared, out, None)
    expected = _rows(reference, found[0])
    for case in found[1:]:
        print(f"  {case.name} ...", flush=True)
        config = adjust(prepared, case)
        folder = train_case(composed, case, config, out, reference / "weights")
        verdicts.append(compare(case, _rows(folder, case), expected, tolerance, gap, facts))
    write(out, found[0], expected, verdicts, tolerance, facts)
    shutil.rmtree(out / "cases")
    print(table(found[0], verdicts))
    print(f"wrote {out / 'parity.json'} and {out / 'parity.svg'}")
    return int(ExitCode.DONE if all(verdict.equal for verdict in verdicts) else ExitCode.FAILED)


# --- what is trained --------------------------------------------------------------------------------------------------


def cases(asked: Words, config: Any, model: Any) -> tuple[list[Case], list[str]]:
    """-> (the cases, the reference first; what was left out and why).

    Raises:
        ConfigError: a named strategy that can't work, or a global batch that can't be shared out.
    """
    from echofree.config.schema import StrategyKind
    from echofree.dist import fit

    batch, accumulation = config.train.batch_size, config.train.gradient_accumulation_steps
    if not isinstance(batch, int):
        raise ConfigError(f"train.batch_size={batch}: parity needs a number. Type: train.batch_size=4")
    total = batch * accumulation
    worlds = [_whole(word) for word in asked.names("parity.worlds")]
    named = asked.names("parity.strategies")
    unknown = [name for name in named if name not in (*STRATEGIES, "auto")]
    if unknown or not worlds:
        raise ConfigError(
            f"parity.strategies={asked['parity.strategies']} parity.worlds={asked['parity.worlds']}: give strategies "
            f"out of {', '.join(STRATEGIES)} and numbers of ranks. Type: parity.strategies=[ddp] parity.worlds=[1,2]"
        )
    found = [Case("one process", "single", 1, 1, batch, accumulation)]
    left_out: list[str] = []
    problems: list[str] = []
    for world in worlds:
        if world == 1 and asked["parity.uneven"] == "auto" and _batch_norms(model):
            left_out.append(f"another accumulation: {_batch_norms(model)[0]} (a batch norm) sees each part alone")
            continue
        if world == 1:
            other = (total, 1) if accumulation > 1 else (max(1, total // 2), 2)
            found.append(Case(f"one process, {other[0]} x {other[1]}", "single", 1, 1, *other))
            continue
        for name in STRATEGIES if named == ["auto"] else named:
            dist = dataclasses.replace(_typed(config.dist), name=StrategyKind[name])
            why = fit.problems(dist, model, world)
            data_size = world if name in ("ddp", "fsdp") else 1
            if total % data_size:
                why.append(f"{total} clips can't be dealt out to {data_size} ranks. Type train.batch_size={world}")
            if why:
                (left_out if named == ["auto"] else problems).extend(f"{name} on {world} ranks: {text}" for text in why)
                continue
            share = total // data_size
            own = accumulation if share % accumulation == 0 else 1
            found.append(Case(f"{name} on {world}", name, world, data_size, share // own, own))
    if problems:
        raise ConfigError(problems)
    if asked.switch("parity.bf16"):
        found.append(Case("one process, bf16", "single", 1, 1, batch, accumulation, "bf16"))
    return found, left_out


def configure(config: Any, case: Case, steps: int, uneven: bool, scale: float | None) -> dict[str, Any]:
    """The frozen config that all cases share: every step logged, nothing else than steps."""
    from echofree.config.build import AROUND_KEYS, LOADER_KEYS
    from echofree.config.frozen import freeze

    plain = freeze(config)
    total = case.batch_size * case.accumulation
    num_clips = total * FULL_GROUPS + (max(1, total // 2) if uneven else 0)
    loader = {key: plain["data"].pop(key) for key in (*LOADER_KEYS, *AROUND_KEYS) if key in plain["data"]}
    plain["data"] = {
        "_target_": "echofree.data.cut.Cut", "source": plain["data"], "num_clips": num_clips, "uneven": uneven, **loader
    }  # fmt: skip
    plain["train"].update(
        batch_size=case.batch_size, gradient_accumulation_steps=case.accumulation, global_batch_size=None, epochs=steps,
        max_steps=steps, max_time=None, log_every=1, save_interval=0, save_every_steps=0, eval_interval=0,
        eval_every_steps=0, early_stop_patience=0, final_test=False, dry_run="off", precision=case.precision,
    )  # fmt: skip
    plain["optim"].update(warmup_steps=0, schedule="constant")  # a warm-up would leave nothing to compare
    if scale is not None:
        # a bias before a batch norm has no gradient but rounding, about 1e-4 of the whole: it must not become a step
        plain["train"]["clip_norm"], plain["optim"]["eps"] = scale, scale
    plain["dist"].update(name="single", num_procs="1", num_nodes=1, rendezvous=None, max_restarts=0, mesh={}, threads=1)
    plain["logger"].update(name="console", progress="off", level="warning")
    plain["export"]["targets"] = {}
    return plain


def adjust(plain: dict[str, Any], case: Case) -> dict[str, Any]:
    """The shared config for one case."""
    result: dict[str, Any] = json.loads(json.dumps(plain))
    result["train"].update(
        batch_size=case.batch_size, gradient_accumulation_steps=case.accumulation, precision=case.precision
    )
    result["dist"].update(name=case.strategy, num_procs=str(case.world))
    if case.strategy == "pipeline":
        parts = max(result["dist"]["microbatches"], case.world)
        result["dist"]["microbatches"] = -(-parts // case.world) * case.world
    return result


def train_case(composed: Composed, case: Case, config: dict[str, Any], out: Path, reference: Path | None) -> Path:
    """Trains one case in ranks started here; -> its run directory.

    Raises:
        EchoFreeError: it failed; what it said stands above.
    """
    from echofree import rundir, train
    from echofree.config import frozen
    from echofree.dist.local import launch

    name = case.name.replace(" ", "-").replace(",", "")
    folder = out / "cases" / name
    one = dataclasses.replace(composed, config=frozen.thaw(config, "parity"), run_dir=folder)
    run_dir = train.prepare(one, case.world)
    rundir.RunDir(run_dir, is_first=True).note(
        parity={"reference": None if reference is None else str(reference.resolve())}
    )
    code = train._verdict(run_dir, launch(case.world, run_dir, one.config.dist.start_timeout_s))
    if code != ExitCode.DONE:
        raise EchoFreeError(f"{case.name} ended with exit code {code}: nothing to compare. Its logs: {run_dir}/logs")
    return run_dir


def _rows(folder: Path, case: Case) -> list[dict[str, Any]]:
    from echofree.follow import rows

    found = rows(folder)
    if not found:
        raise EchoFreeError(f"{case.name} wrote no steps: {folder}")
    return found


# --- how it compares --------------------------------------------------------------------------------------------------


def compare(
    case: Case, rows: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float, gap: float, facts: Any
) -> Verdict:
    """A case against the reference; bf16 by its mean loss alone."""
    verdict = Verdict(case, rows=rows)
    pairs = list(zip(rows, expected, strict=True))
    # a step of silence has a loss near zero: what matters is the size of the losses of this training
    scale = sum(abs(row["loss"] or 0.0) for row in expected) / len(expected)
    verdict.loss = max(_relative(a["loss"], b["loss"], scale) for a, b in pairs)
    verdict.norm = max(_relative(a["grad_norm"], b["grad_norm"]) for a, b in pairs)
    verdict.weights = max(row["worst"][0][1] for row in rows)
    if case.precision != "fp32":
        means = [sum(row["loss"] for row in side) / len(side) for side in (rows, expected)]
        verdict.loss = abs(means[0] - means[1]) / max(scale, 1e-12)
        if not verdict.loss <= gap:
            verdict.step, verdict.what, verdict.cause = (
                len(rows),
                "mean loss",
                "rounding of bf16 is more than noise here",
            )
        return verdict
    for mine, theirs in pairs:
        if mine["clips"] != theirs["clips"]:
            verdict.what = "clips"
        elif _relative(mine["loss"], theirs["loss"], scale) > LOSS_RTOL:
            verdict.what = "loss"
        elif _relative(mine["grad_norm"], theirs["grad_norm"]) > NORM_RTOL:
            verdict.what = "gradient norm"
        elif not mine["worst"][0][1] <= tolerance:
            verdict.what = "weights"
        else:
            continue
        verdict.step, verdict.tensor = mine["step"], mine["worst"][0][0]
        verdict.cause = likely_cause(verdict.what, mine, theirs, verdict.step == 1, facts)
        break
    return verdict


def likely_cause(what: str, mine: dict[str, Any], theirs: dict[str, Any], at_once: bool, facts: Any) -> str:
    """What a first difference of this kind mostly comes from."""
    if what == "clips":
        return "data order: the ranks together read other clips in this step than one process does"
    key = {"loss": "loss", "gradient norm": "grad_norm"}.get(what)
    ratio = mine[key] / theirs[key] if key and mine[key] and theirs[key] else 1.0
    factor = next((n for n in range(2, 65) if abs(ratio * n - 1) < 1e-3 or abs(ratio / n - 1) < 1e-3), None)
    if factor is not None:
        return f"weighting: the {what} is off by a factor of {factor}, as if ranks or micro-batches were averaged twice"
    if facts["batch_norm"]:
        seen = (
            "padding and fillers are part of its batch" if facts["uneven"] else "each rank or part sees its own batch"
        )
        return f"batch norm ({facts['batch_norm'][0]}): {seen}"
    if facts["dropout"]:
        return f"dropout ({facts['dropout']}): other activations are dropped. Type model.dropout=0.0"
    if what == "loss" and at_once:
        return "the forward pass: something in it depends on which clips share a batch, or is random"
    if what in ("loss", "gradient norm"):
        return (
            "weighting: unequal parts count as equal (a mean of means), or a gradient is exchanged twice or not at all"
        )
    return "rounding that the optimizer enlarges, or an update of this tensor that one rank doesn't share"


def _relative(a: float | None, b: float | None, scale: float = 0.0) -> float:
    """The difference by the larger of the two, or by `scale` where that is more."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(a), abs(b), scale, 1e-12)


# --- what is told -----------------------------------------------------------------------------------------------------


def table(reference: Case, verdicts: Sequence[Verdict]) -> str:
    """A row per case."""
    head = ("case", "clips x parts x ranks", "loss", "grad norm", "weights", "verdict")
    lines = [(reference.name, _split(reference), "", "", "", "the reference")]
    for v in verdicts:
        told = "equal" if v.equal else f"DIFFERS at step {v.step} in {v.what}"
        if v.case.precision != "fp32":
            lines.append((v.case.name, _split(v.case), f"{v.loss:.1e}", "", "", "near" if v.equal else told))
        else:
            lines.append(
                (v.case.name, _split(v.case), f"{v.loss:.1e}", f"{v.norm:.1e}", f"{v.weights:.1e}", told)
            )  # fmt: skip
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *lines)]
    for v in verdicts:
        if not v.equal:
            where = f", {v.tensor} most" if v.tensor else ""
            text.append(f"{v.case.name}: first differs at step {v.step} in {v.what}{where}. Likely: {v.cause}")
    return "\n".join(text)


def write(
    out: Path,
    reference: Case,
    expected: list[dict[str, Any]],
    verdicts: Sequence[Verdict],
    tolerance: float,
    facts: Any,
) -> None:
    """parity.json and parity.svg."""
    from echofree import curve

    content = {
        "tolerance": {"weights": tolerance, "loss_relative": LOSS_RTOL, "grad_norm_relative": NORM_RTOL},
        **facts,
        "reference": {"case": dataclasses.asdict(reference), "rows": expected},
        "cases": [{**dataclasses.asdict(v), "equal": v.equal} for v in verdicts],
    }
    text = json.dumps(content, indent=1).replace("Infinity", "null")
    (out / "parity.json").write_text(text + "\n", encoding="utf-8")
    losses = {reference.name: [(row["step"], row["loss"]) for row in expected]}
    losses |= {v.case.name: [(row["step"], row["loss"]) for row in v.rows] for v in verdicts}
    gaps = {v.case.name: [(row["step"], row["worst"][0][1]) for row in v.rows] for v in verdicts}
    panels = [("loss of each step", losses, False), ("largest difference of a weight", gaps, True)]
    (out / "parity.svg").write_text(curve.svg(panels, f"tolerance of a weight: {tolerance:g}"), encoding="utf-8")


def _split(case: Case) -> str:
    return f"{case.batch_size} x {case.accumulation} x {case.data_size}"


def _about(facts: dict[str, Any]) -> str:
    lengths = "unequal lengths, the last group of an epoch partial" if facts["uneven"] else "equal lengths, full groups"
    norm = f" (batch norm: {facts['batch_norm'][0]})" if facts["batch_norm"] else ""
    return f"{lengths}{norm}"


def _batch_norms(model: Any) -> list[str]:
    from torch.nn.modules.batchnorm import _BatchNorm

    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def _dropout(config: Any) -> float:
    value = config.model.get("dropout", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _typed(dist: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_object(dist)


def _whole(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"parity.worlds: {word!r} is no number of ranks. Type: parity.worlds=[1,2]")
    return int(word)


def _float(asked: Words, key: str) -> float:
    word = asked.given(key)
    try:
        value = float(word or "")
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{key}={asked[key]}: give a number such as 1e-6")
    return value


if __name__ == "__main__":
    sys.exit(main())
