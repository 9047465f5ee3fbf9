"""python -m echofree.evaluate: a trained model's scores per scenario, beside the microphone and a linear filter.

Writes scores.csv (a row per clip and system) and scores.json (the summary, with everything that must be equal for two
evaluations to be comparable), and prints the summary as a table.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, DataError, EchoFreeError, ExitCode, UserError
from echofree.verb import Key, Words, composed, help_asked, parse, report, show_help, warn

if TYPE_CHECKING:
    import numpy as np

    from echofree.contracts import Clip, Dataset
    from echofree.metric import ClipMetric
    from echofree.score import Row, System

KEYS = {
    "checkpoint": Key("none", "a run directory (its best weights) or one of its checkpoints"),
    "system": Key("none", "without checkpoint or model: mic scores the microphone as it is"),
    "split": Key("test", "train | valid | test"),
    "metrics": Key("auto", "names a,b,c; auto: all that are installed"),
    "baselines": Key(
        "mic,linear", "columns beside the model: mic | linear | target (what a perfect output would score)"
    ),
    "limit": Key("null", "score the first clips only"),
    "aecmos_cut": Key("whole", "the part of a stretch that AECMOS hears, at most 20 s: whole | challenge"),
    "save_audio": Key("false", "write every system's output as wav into the output folder"),
    "out": Key("auto", "where scores.csv and scores.json go; auto: evaluate/ in the run directory"),
    "device": Key("cpu", "cpu | cuda"),
    "progress": Key("auto", "auto | on | off"),
}
GROUPS = ("data", "model")
NOTES = (
    "Without checkpoint, model=linear scores the linear filter alone and system=mic the unprocessed microphone.",
    "data=... takes the options and keys of train; left out, it is the data that the run was trained on.",
)
PACKAGES = {"pesq": "pesq", "stoi": "pystoi", "estoi": "pystoi", "aecmos_echo": "speechmos", "aecmos_deg": "speechmos"}
BASELINES = ("mic", "linear", "target")


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("evaluate", KEYS, NOTES)
        return 0
    try:
        run(parse(words, KEYS, GROUPS))
    except UserError as error:
        return report(error)
    except EchoFreeError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    return 0


def run(words: Words) -> None:
    """Everything in order: the systems, the data, the metrics, the scores, the files, the table."""
    names = metric_names(words.names("metrics"))
    limit, save_audio = words.number("limit"), words.switch("save_audio")
    model_name, model, config = load(words)
    rate_hz = int(config["data"]["sample_rate"]) if model is None else int(model.sample_rate)
    source, dataset = load_data(words, config, rate_hz)
    out = output_folder(words, config)
    metrics = build_metrics(names, rate_hz, words["aecmos_cut"])
    systems = build_systems(model_name, model, words.names("baselines"), rate_hz, words["device"])

    from echofree.progress import Progress
    from echofree.score import score, summarise

    folder = out / "audio" if save_audio else None
    total = len(dataset) if limit is None else min(limit, len(dataset))
    with Progress(total, "evaluate, clips", words["progress"]) as bar:
        writer = None if folder is None else AudioWriter(folder, rate_hz)
        rows = score(systems, dataset, metrics, limit, "target" in words.names("baselines"), bar.update, writer)
    summary = summarise(rows, names)
    about = protocol(words, config, source, metrics, rate_hz, total, hasattr(dataset, "stretch"))
    write_scores(out, rows, summary, about, names)
    print(table(summary, names))
    tell(rows, summary, out)
    own = [row for row in rows if row["system"] == model_name]
    if own and all(row["problems"] for row in own):
        raise EchoFreeError(f"no output of {model_name} could be scored; the reasons are in {out / 'scores.csv'}")


def metric_names(asked: Sequence[str]) -> list[str]:
    """The metrics to score; for `auto` all, less those whose package is missing, which is said."""
    from echofree.metric import CORE, EXTRA

    if list(asked) != ["auto"]:
        return list(asked)
    missing = [name for name in EXTRA if importlib.util.find_spec(PACKAGES[name]) is None]
    if importlib.util.find_spec("onnxruntime") is None:
        missing += [name for name in EXTRA if name.startswith("aecmos") and name not in missing]
    if missing:
        print(f"not scored: {', '.join(missing)}. Type: pip install 'echofree[metrics]'", file=sys.stderr)
    return [*CORE, *(name for name in EXTRA if name not in missing and name != "estoi")]


def load(words: Words) -> tuple[str, Any, Mapping[str, Any]]:
    """-> (the column's name, the model or None for the bare microphone, the plain run config it comes with)."""
    from echofree.config.frozen import freeze

    checkpoint, model_words = (
        words.given("checkpoint"),
        [w for w in words.passed if not w.lstrip("+~").startswith("data")],
    )
    data_words = [w for w in words.passed if w not in model_words]
    if checkpoint is not None:
        if model_words or words.given("system"):
            raise ConfigError(
                f"checkpoint={checkpoint} brings its model: leave out {' '.join(model_words) or 'system'}"
            )
        from echofree.checkpoint import load_model

        model, frozen = load_model(checkpoint)
        config = dict(freeze(frozen))
        if data_words:
            config["data"] = data_config(data_words, frozen)
        name = str(config["name"])
        return f"model {name}" if name in BASELINES else name, model, config
    if words.given("system") not in (None, "mic"):
        raise ConfigError(f"system={words['system']}: give mic, or checkpoint=<run dir>, or model=linear")
    if not model_words and words.given("system") is None:
        raise ConfigError("nothing to score: give checkpoint=<run dir>, or model=linear, or system=mic")
    config = dict(freeze(composed([*words.passed, *everything(data_words)])))
    if not model_words:
        return "mic", None, config
    from echofree.config.build import build_model

    model = build_model(config)
    if any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"{' '.join(model_words)} has to be trained first; then give checkpoint=<run dir>")
    return "linear", model.eval(), config


def data_config(data_words: Sequence[str], frozen: Any) -> Any:
    """The data node: another source when `data=` names one, else the run's own with these keys changed."""
    from echofree.config.frozen import freeze

    if any(word.startswith("data=") for word in data_words):
        return freeze(composed([*data_words, *everything(data_words)]))["data"]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(frozen, OmegaConf.from_dotlist(list(data_words)))
        return freeze({str(key): value for key, value in merged.items()})["data"]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(data_words)}: {str(error).splitlines()[0]}") from error


def everything(data_words: Sequence[str]) -> list[str]:
    """A folder named for an evaluation is scored whole, unless the words say how to share it out."""
    if "data=folder" not in data_words or any("_fraction=" in word for word in data_words):
        return []
    print("data=folder: all of its recordings are scored (data.test_fraction=1)", file=sys.stderr)
    return ["data.test_fraction=1", "data.valid_fraction=0"]


def load_data(words: Words, config: Mapping[str, Any], rate_hz: int) -> tuple[Any, Dataset]:
    """The source and its split, at the model's rate."""
    from echofree.config.build import build_data

    if words["split"] not in ("train", "valid", "test"):
        raise ConfigError(f"split={words['split']}: give train, valid or test")
    source = build_data({**config, "data": {**config["data"], "sample_rate": rate_hz}})
    dataset: Dataset | None = source.split(words["split"])
    if dataset is None or len(dataset) == 0:
        raise DataError(f"split={words['split']}: this data has no such clips. Give another split, or another data=")
    for what, value in source.survey():
        print(f"{what}: {value}", file=sys.stderr)
    return source, dataset


def output_folder(words: Words, config: Mapping[str, Any]) -> Path:
    """Where the files go; made when missing."""
    kind = str(config["data"].get("_target_", "data")).rpartition(".")[2].lower()
    checkpoint = words.given("checkpoint")
    if words["out"] != "auto":
        out = Path(words["out"])
    elif checkpoint is not None:
        from echofree.checkpoint import find, run_of

        out = run_of(find(checkpoint)) / "evaluate" / f"{kind}-{words['split']}"
    else:
        out = Path(str(config["output_root"])) / "evaluate" / f"{kind}-{words['split']}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: can't be made ({error.strerror}). Give another folder with out=") from error
    return out


def build_metrics(names: Sequence[str], rate_hz: int, aecmos_cut: str) -> list[ClipMetric]:
    from echofree.metric import default_metrics

    return default_metrics(names, rate_hz, aecmos_cut)


def build_systems(name: str, model: Any, baselines: Sequence[str], rate_hz: int, device: str) -> dict[str, System]:
    """The columns: baselines first, the model last."""
    import torch

    from echofree.model.linear import Linear

    wrong = [b for b in baselines if b not in BASELINES]
    if wrong:
        raise ConfigError(
            f"baselines={','.join(baselines)}: {', '.join(wrong)} doesn't exist. There are: {', '.join(BASELINES)}"
        )
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device={device}: give cpu" + (" or cuda" if torch.cuda.is_available() else ""))
    systems: dict[str, System] = {}
    if "mic" in baselines or model is None:
        systems["mic"] = lambda mic, far: mic
    if "linear" in baselines and name != "linear":
        linear = Linear(sample_rate=rate_hz).eval()
        systems["linear"] = lambda mic, far: linear(mic, far)
    if model is not None:
        placed = model.to(device)
        systems[name] = lambda mic, far: placed(mic.to(device), far.to(device))
    return systems


class AudioWriter:
    """Writes every estimate as a wav file: folder/system/clip.wav."""

    def __init__(self, folder: Path, rate_hz: int):
        self.folder, self.rate_hz = folder, rate_hz

    def __call__(self, system: str, clip: Clip, est: np.ndarray) -> None:
        from echofree.audio import write

        path = self.folder / system / (clip.name.replace("/", "_").replace(" ", "_") + ".wav")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, est, self.rate_hz, "FLOAT")


def protocol(
    words: Words, config: Mapping[str, Any], source: Any, metrics: Sequence[Any], rate_hz: int, clips: int, parts: bool
) -> dict[str, Any]:
    """What must be equal for two score files to be comparable."""
    from importlib.metadata import PackageNotFoundError, version

    from echofree import score
    from echofree.metric.aecmos import AecmosModel

    versions: dict[str, str | None] = {}
    for package in ("echofree", "torch", "numpy", "scipy", "pesq", "pystoi", "speechmos", "onnxruntime"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    aecmos = AecmosModel(rate_hz, words["aecmos_cut"]).protocol if any("aecmos" in m.name for m in metrics) else None
    return {
        "checkpoint": words.given("checkpoint"),
        "data": dict(config["data"]),
        "data_fingerprint": source.fingerprint(),
        "split": words["split"],
        "clips": clips,
        "rate_hz": rate_hz,
        "scored": "labelled stretches, processed from the start of the recording" if parts else "whole clips",
        "alignment": "none: output and target are compared as they are; the far end is as captured",
        "erle": "10 ms frames, far end active in the last 0.3 s, above 100 Hz, at most 60 dB; erle_late: from 3 s on",
        "aecmos": aecmos,
        "confidence": {
            "method": "percentile bootstrap of the mean over clips",
            "level": score.CONFIDENCE,
            "draws": score.BOOTSTRAP_DRAWS,
            "seed": 0,
        },
        "versions": versions,
    }


def write_scores(
    out: Path, rows: Sequence[Row], summary: Mapping[str, Any], about: Mapping[str, Any], names: Sequence[str]
) -> None:
    """scores.csv and scores.json, each whole or not at all."""
    from echofree.durable import write_text

    columns = ["system", "name", "scenario", "seconds", "rtf", *names, "problems"]
    lines = [",".join(columns)]

    class Lines:
        def write(self, text: str) -> int:
            lines.append(text.rstrip("\r\n"))
            return len(text)

    writer = csv.writer(Lines())
    for row in rows:
        cells = [row.get(c) for c in columns[:-1]]
        writer.writerow([*("" if cell is None else cell for cell in cells), "; ".join(row["problems"])])
    write_text(out / "scores.csv", "\n".join(lines) + "\n")
    write_text(out / "scores.json", json.dumps({"protocol": about, "systems": summary}, indent=1) + "\n")


def table(summary: Mapping[str, Any], names: Sequence[str]) -> str:
    """The summary as text: a block per scenario, a line per metric, a column per system, mean [low, high]."""
    systems = list(summary)
    lines = []
    for scenario in dict.fromkeys(s for system in summary.values() for s in system["scenarios"]):
        parts = {s: summary[s]["scenarios"].get(scenario, {"clips": 0, "metrics": {}}) for s in systems}
        count = max(part["clips"] for part in parts.values())
        head = f"{scenario.replace('_', ' ')} ({count} clip{'' if count == 1 else 's'})"
        block = []
        for name in names:
            cells = [_cell(parts[s]["metrics"].get(name)) for s in systems]
            if any(cell != "-" for cell in cells):
                block.append(f"  {name:26}" + "".join(f"{cell:>26}" for cell in cells))
        if block:
            lines += [f"{head:28}" + "".join(f"{system:>26}" for system in systems), *block, ""]
    rtf = [f"{value:.3f}" if (value := summary[s]["rtf"]) is not None else "-" for s in systems]
    lines.append(f"{'real-time factor':28}" + "".join(f"{cell:>26}" for cell in rtf))
    return "\n".join(lines)


def _cell(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return "-"
    if numbers["mean"] is None:
        return f"invalid x{numbers['invalid']}"
    digits = 1 if abs(numbers["mean"]) >= 10 else 2
    text = f"{round(numbers['mean'], digits) + 0.0:.{digits}f}"  # + 0.0: no minus in front of zero
    if numbers["low"] is not None:
        text += f" [{numbers['low']:.{digits}f}, {numbers['high']:.{digits}f}]"
    if numbers["invalid"]:
        text += f" {numbers['invalid']}!"
    return text if numbers["valid"] else f"({text})"


def tell(rows: Sequence[Row], summary: Mapping[str, Any], out: Path) -> None:
    """What the table needs to be read right, and where the files are."""
    for system, about in summary.items():
        for flag in about["flags"] if system != "mic" else ():
            warn(f"{system}: {flag}")
    failed = [row for row in rows if row["problems"]]
    for row in failed[:5]:
        warn(f"{row['system']}, {row['name']}: {row['problems'][0]}")
    if len(failed) > 5:
        warn(f"and {len(failed) - 5} more, see {out / 'scores.csv'}")
    if any(row["problems"] for row in rows):
        print("n! = n clips whose output is invalid and not in the mean; (x) = doesn't count, the near end is muted")
    print(f"wrote {out / 'scores.csv'} and {out / 'scores.json'}")


if __name__ == "__main__":
    sys.exit(main())
