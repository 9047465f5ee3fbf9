"""python -m echofree.evaluate: a trained model's scores per scenario, beside the microphone, a linear filter, and any
other program or folder of outputs.

Writes scores.csv (a row per clip and system), scores.json (the summary, with everything that must be equal for two
evaluations to be comparable) and listen/ (the worst clips, to be heard), and prints the summary as a table. How much
echo is gone never stands without what happened to the talker.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, DataError, EchoFreeError
from echofree.verb import Key, Words, composed, ending, help_asked, parse, show_help, warn

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
    "align": Key("output", "output: its delay is taken out before it is compared with the target | none"),
    "aecmos_cut": Key("whole", "the part of a stretch that AECMOS hears, at most 20 s: whole | challenge"),
    "save_audio": Key("false", "write every system's output as wav into the output folder"),
    "listen": Key("6", "clips kept for listening, the worst first; the report plays them; null: none"),
    "out": Key("auto", "where scores.csv and scores.json go; auto: evaluate/ in the run directory"),
    "device": Key("cpu", "cpu | cuda"),
    "progress": Key("auto", "auto | on | off"),
}
GROUPS = ("data", "model", "system")
NOTES = (
    "Without checkpoint, model=linear scores the linear filter alone and system=mic the unprocessed microphone.",
    "data=... takes the options and keys of train; left out, it is the data that the run was trained on.",
    "",
    "Other systems, as many as you like, with or without a checkpoint:",
    "  system.command='prog {mic} {far} {out}'      any program, started for each clip with the paths of wav files",
    "  system.command='prog {list}'                 started once; a line 'mic far out' (tabs) for each clip",
    "  system.folder=/path/to/outputs               sound files named as the recordings are",
    "  system.NAME.command=... system.NAME.folder=...   the same with a name of their own",
    'Quote what the shell would take apart: system.command="prog {mic} {far} {out}".',
)
PACKAGES = {"pesq": "pesq", "stoi": "pystoi", "estoi": "pystoi", "aecmos_echo": "speechmos", "aecmos_deg": "speechmos"}
BASELINES = ("mic", "linear", "target")
GUARDS = ("near_gain", "speech_survival", "delay_ms", "talk_level")  # come along with any score of the echo
PAIRS = (("aecmos_echo", "aecmos_deg"), ("aecmos_deg", "aecmos_echo"))
KINDS = ("command", "folder")


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("evaluate", KEYS, NOTES)
        return 0
    return ending(lambda: run(parse(words, KEYS, GROUPS)), "interrupted, nothing was written")


def run(words: Words) -> None:
    """Everything in order: the systems, the data, the metrics, the scores, the files, the table."""
    import torch

    from echofree.listen import write_listening
    from echofree.process import num_threads
    from echofree.progress import Progress
    from echofree.score import score, summarise
    from echofree.scorefile import write_scores
    from echofree.scoretable import table, tell

    rivals = take_rivals(words)
    names = metric_names(words.names("metrics"))
    limit, save_audio, listen = words.number("limit"), words.switch("save_audio"), words.number("listen")
    if words["align"] not in ("output", "none"):
        raise ConfigError(f"align={words['align']}: give output or none")
    model_name, model, config = load(words, bool(rivals))
    rate_hz = int(config["data"]["sample_rate"]) if model is None else int(model.sample_rate)
    source, dataset = load_data(words, config, rate_hz)
    out = output_folder(words, config)
    metrics = build_metrics(names, rate_hz, words["aecmos_cut"], words["align"] == "output")
    models = build_models(model_name, model, words.names("baselines"), rate_hz, words["device"])
    total = len(dataset) if limit is None else min(limit, len(dataset))
    torch.set_num_threads(num_threads(1, 1))  # the filter's steps are small: a thread that waits for a core costs most
    with tempfile.TemporaryDirectory(prefix="echofree-evaluate-") as scratch:
        systems = callables(models, words["device"])
        systems |= build_rivals(rivals, systems, dataset, total, Path(scratch))
        main_name = list(systems)[-1] if model is None else model_name
        with Progress(total, "evaluate, clips", words["progress"]) as bar:
            writer = AudioWriter(out / "audio", rate_hz) if save_audio else None
            rows = score(systems, dataset, metrics, limit, "target" in words.names("baselines"), bar.update, writer)
        if listen is not None:
            write_listening(out, rows, systems, dataset, main_name, listen)
    summary = summarise(rows, names)
    add_speed(summary, models, dataset, words["device"])
    what = {name: name for name in models} | {name: f"{kind}: {value}" for name, (kind, value) in rivals.items()}
    about = protocol_of(words, what, config, source, rows, metrics, rate_hz, hasattr(dataset, "stretch"))
    write_scores(out, rows, summary, about, names)
    print(table(summary, names))
    tell(rows, summary, out, run_or(out))
    for name in [main_name, *rivals]:
        own = [row for row in rows if row["system"] == name]
        if own and all(row["problems"] for row in own):
            raise EchoFreeError(f"no output of {name} could be scored; the reasons are in {out / 'scores.csv'}")


def protocol_of(
    words: Words,
    systems: Mapping[str, str],
    config: Mapping[str, Any],
    source: Any,
    rows: Sequence[Row],
    metrics: Sequence[Any],
    rate_hz: int,
    parts: bool,
) -> dict[str, Any]:
    """What is stored with the scores."""
    from echofree.scorefile import protocol

    asked: dict[str, Any] = {key: words[key] for key in ("split", "aecmos_cut", "align")}
    asked |= {"checkpoint": words.given("checkpoint"), "systems": systems}
    return protocol(asked, config["data"], source, rows, metrics, rate_hz, parts)


def metric_names(asked: Sequence[str]) -> list[str]:
    """The metrics to score; for `auto` all, less those whose package is missing, which is said."""
    from echofree.metric import CORE, EXTRA
    from echofree.standing import ECHO

    if list(asked) != ["auto"]:
        guards = GUARDS if any(name in ECHO for name in asked) else ()
        added = [name for name in guards if name not in asked]
        added += [b for a, b in PAIRS if a in asked and b not in asked]
        if added:
            print(f"scored too, since echo says nothing without speech: {', '.join(added)}", file=sys.stderr)
        return [*asked, *added]
    missing = [name for name in EXTRA if importlib.util.find_spec(PACKAGES[name]) is None]
    if importlib.util.find_spec("onnxruntime") is None:
        missing += [name for name in EXTRA if name.startswith("aecmos") and name not in missing]
    if missing:
        print(f"not scored: {', '.join(missing)}. Type: pip install 'echofree[metrics]'", file=sys.stderr)
    return [*CORE, *(name for name in EXTRA if name not in missing and name != "estoi")]


def take_rivals(words: Words) -> dict[str, tuple[str, str]]:
    """Takes the words system.command=..., system.folder=..., system.NAME.command=... out of `words.passed`.

    Returns:
        {name: (command or folder, what was given)}; without a NAME it is that of the program or the folder.
    """
    from echofree.foreign import parse as check_command
    from echofree.foreign import program_name

    own = [word for word in words.passed if word.startswith("system.")]
    words.passed = [word for word in words.passed if word not in own]
    rivals: dict[str, tuple[str, str]] = {}
    for word in own:
        key, _, value = word.partition("=")
        parts = key.split(".")
        if len(parts) not in (2, 3) or parts[-1] not in KINDS or not value:
            raise ConfigError(
                f"{word}: give system.command='prog {{mic}} {{far}} {{out}}', system.folder=DIR, or either with a name "
                "(system.NAME.command=...)"
            )
        if parts[-1] == "command":
            check_command(value)
        own_name = program_name(value) if parts[-1] == "command" else Path(value).name
        name = parts[1] if len(parts) == 3 else own_name
        if name in rivals or name in BASELINES:
            name = f"{parts[-1]} {name}"
        if name in rivals:
            raise ConfigError(f"{word}: there is a system {name!r} already. Name it: system.NAME.{parts[-1]}=...")
        rivals[name] = (parts[-1], value)
    return rivals


def load(words: Words, rivals: bool = False) -> tuple[str, Any, Mapping[str, Any]]:
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
    if not model_words and words.given("system") is None and not rivals:
        raise ConfigError(
            "nothing to score: give checkpoint=<run dir>, or model=linear, or system=mic, or another program: "
            "system.command='prog {mic} {far} {out}'"
        )
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
    if root := config["data"].get("root"):
        kind += f"-{Path(str(root)).name}"
    checkpoint = words.given("checkpoint")
    if words["out"] != "auto":
        out = Path(words["out"])
    elif checkpoint is not None:
        from echofree.checkpoint import find, run_of
        from echofree.shipped import place

        out = place(run_of(find(checkpoint))) / "evaluate" / f"{kind}-{words['split']}"
    else:
        out = Path(str(config["output_root"])) / "evaluate" / f"{kind}-{words['split']}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: can't be made ({error.strerror}). Give another folder with out=") from error
    return out


def run_or(out: Path) -> Path:
    """The run directory when `out` lies in one's evaluate/, else `out`."""
    above = (folder.parent for folder in out.parents if folder.name == "evaluate")
    return next((folder for folder in above if is_run(folder)), out)


def is_run(folder: Path) -> bool:
    from echofree.rundir import RUN

    return (folder / RUN).is_file()


def build_metrics(names: Sequence[str], rate_hz: int, aecmos_cut: str, align: bool = True) -> list[ClipMetric]:
    from echofree.metric import default_metrics

    return default_metrics(names, rate_hz, aecmos_cut, align)


def build_models(name: str, model: Any, baselines: Sequence[str], rate_hz: int, device: str) -> dict[str, Any]:
    """The columns of this process: baselines first, the model last; None stands for the microphone as it is."""
    import torch

    from echofree.model.linear import Linear

    wrong = [b for b in baselines if b not in BASELINES]
    if wrong:
        raise ConfigError(
            f"baselines={','.join(baselines)}: {', '.join(wrong)} doesn't exist. There are: {', '.join(BASELINES)}"
        )
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device={device}: give cpu" + (" or cuda" if torch.cuda.is_available() else ""))
    models: dict[str, Any] = {}
    if "mic" in baselines or model is None:
        models["mic"] = None
    if "linear" in baselines and name != "linear":
        models["linear"] = Linear(sample_rate=rate_hz).eval()
    if model is not None:
        models[name] = model
    return models


def callables(models: Mapping[str, Any], device: str) -> dict[str, System]:
    """What `score` calls. The linear filter stays on the CPU: its many small FFTs are no faster elsewhere."""

    def called(name: str, model: Any) -> System:
        if model is None:
            return lambda mic, far: mic
        if name == "linear":
            return lambda mic, far: model(mic, far)
        placed = model.to(device)
        return lambda mic, far: placed(mic.to(device), far.to(device))

    return {name: called(name, model) for name, model in models.items()}


def build_rivals(
    rivals: Mapping[str, tuple[str, str]], systems: Mapping[str, System], dataset: Dataset, count: int, scratch: Path
) -> dict[str, System]:
    """Programs and folders; each program's files go into a folder of their own below `scratch`."""
    from echofree.foreign import Outputs, Program

    found: dict[str, System] = {}
    for number, (name, (kind, value)) in enumerate(rivals.items()):
        if name in systems:
            raise ConfigError(f"system {name!r} has the name of the model. Give it another: system.NAME.{kind}=...")
        if kind == "command":
            found[name] = Program(value, dataset, count, scratch / str(number))
        else:
            found[name] = Outputs(Path(value).expanduser(), dataset, count)
    return found


def add_speed(summary: dict[str, Any], models: Mapping[str, Any], dataset: Dataset, device: str) -> None:
    """Latency and real-time factor as a stream, for the systems of this process; another program's latency is its
    `delay_ms`."""
    from echofree.speed import stream_speed

    for about in summary.values():
        about.update(latency_ms=None, rtf_stream=None)
    try:
        clip = dataset.item(0, 0)
    except Exception as error:  # a broken first recording is a row of the table, not the end of it
        warn(f"speed as a stream wasn't measured: {error}")
        return
    for name, found in stream_speed(models if device == "cpu" else {}, clip.mic, clip.far).items():
        if name in summary:
            summary[name].update(found)


class AudioWriter:
    """Writes every estimate as a wav file: folder/system/clip.wav."""

    def __init__(self, folder: Path, rate_hz: int):
        self.folder, self.rate_hz = folder, rate_hz

    def __call__(self, system: str, clip: Clip, est: np.ndarray) -> None:
        from echofree.audio import write
        from echofree.foreign import file_name

        path = self.folder / system / f"{file_name(clip.name)}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, est, self.rate_hz, "FLOAT")


if __name__ == "__main__":
    sys.exit(main())
