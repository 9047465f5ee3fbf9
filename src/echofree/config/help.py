"""Help texts. They come from the schema's comments and from the folders of options, without Hydra and without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from echofree.config import search


@dataclass(frozen=True)
class Verb:
    """A line of `echofree --help`, and what its own help says."""

    line: str
    usage: str
    keys: tuple[tuple[str, str], ...] = ()
    examples: tuple[tuple[str, str], ...] = ()
    group: str = ""  # of the schema, all of whose keys its help shows


VERBS: dict[str, Verb] = {
    "train": Verb(
        "train a canceller: compose, check, run, score",
        "[group=option ...] [key=value ...] [-m]",
        examples=(
            ("", "no arguments: tiny model, embedded speech, this machine, minutes"),
            ("model=base dist=ddp", "a bigger model on all GPUs of this machine"),
            ("data=folder data.root=/path/to/recordings", "your own mic/far(/near) files"),
            ("-m optim.lr=1e-3,3e-4 seed=0,1", "a sweep of four runs, one after another"),
            ("-m optim.lr=1e-3,3e-4 seed=0,1 hydra/launcher=local", "the same, beside each other on this machine"),
            ("resume=auto", "go on with the newest run"),
        ),
    ),
    "evaluate": Verb(
        "score a trained model, other programs and folders of outputs per scenario",
        "checkpoint=<run dir|checkpoint> [data=... data.root=...] [system.command='prog {mic} {far} {out}']",
        keys=(
            ("checkpoint", "a run directory (its best weights) or one of its checkpoints"),
            ("data", "the group of train, with its keys; left out: the data of the run"),
            ("system.command", "any other program, beside the model or alone; {mic} {far} {out} become wav files"),
            ("system.folder", "sound files that some system made, named as the recordings are"),
        ),
        examples=(
            ("checkpoint=outputs/tiny/2026-01-31_12-00-00", "on the test split that the run was trained beside"),
            (
                "checkpoint=outputs/tiny/2026-01-31_12-00-00 data=folder data.root=/path/to/recordings",
                "on your own files",
            ),
            (
                "data=folder data.root=/path/to/recordings system.command='prog {mic} {far} {out}'",
                "another canceller on the same",
            ),
        ),
    ),
    "export": Verb(
        "make a checkpoint into files for devices, and compare each with the model before it may ship",
        "checkpoint=<run dir|checkpoint> [export=onnx|[onnx,onnx_int8]|...]",
        keys=(
            ("checkpoint", "a run directory (its best weights) or one of its checkpoints"),
            ("export", "one target or several; left out: onnx"),
            ("out", "where the folders go; left out: export/ of the run directory"),
        ),
        examples=(
            ("checkpoint=outputs/run/2026-01-31_12-00-00", "an ONNX file, its contract and golden vectors"),
            ("checkpoint=outputs/run/2026-01-31_12-00-00 export=[onnx,onnx_int8] export.minutes=2", "two at once"),
        ),
    ),
    "adapt": Verb(
        "fit a trained canceller to one device, from recordings that nobody labelled; refuses to make it worse",
        "checkpoint=<run dir|checkpoint> data.root=<recordings of the device>",
        keys=(
            ("checkpoint", "a run directory (its best weights) or one of its checkpoints"),
            ("data.root", "a folder of recordings of one device: microphone and far end"),
            ("methods", "bn,affine: the ways that are tried; the best one that makes nothing worse is kept"),
        ),
        examples=(
            ("checkpoint=outputs/tiny/2026-01-31_12-00-00 data.root=/path/to/recordings", "an adapted run directory"),
            (
                "checkpoint=outputs/tiny/2026-01-31_12-00-00 data.root=/path/to/recordings steps=200 min_gain=2",
                "longer, and asking for more",
            ),
        ),
    ),
    "federate": Verb(
        "fine-tune on clients that keep their audio: a simulation here, or a server and clients over TLS",
        "[group=option ...] [key=value ...] federated.num_clients=N federated.rounds=R",
        keys=(
            ("federated", "the group of this verb: rounds, clients, policies, privacy"),
            ("data.partition", "how a simulation shares the data out: by room, device, speaker, dirichlet ..."),
            ("init_from", "the run directory or checkpoint whose weights it begins with"),
        ),
        examples=(
            (
                "init_from=outputs/tiny/2026-01-31_12-00-00 data.partition.by=room federated.num_clients=8",
                "eight clients in different rooms, three rounds",
            ),
            ("federated.strategy=fedprox federated.keep_local=[batchnorm]", "a pull to the mean; own batch norms"),
            ("federated.role=certificates federated.certificates=certificates", "certificates to try TLS with"),
            ("federated.role=server federated.certificates=certificates", "a server, and then on each device:"),
            ("federated.role=client federated.client=0 federated.certificates=certificates", "client 0"),
            ("resume=auto", "go on after the last finished round"),
        ),
        group="federated",
    ),
    "chain": Verb(
        "a recipe of several verbs, such as cloud_to_edge: teacher, student, export, devices, export; and one table",
        "<recipe> [size=test|laptop|cluster] [out=DIR] [stage.key=value ...]",
        keys=(
            ("recipe", "a file of experiments/, such as cloud_to_edge; also typed without recipe="),
            ("size", "one of the recipe's sizes; left out: test, minutes on two cores"),
            ("out", "where all of it goes; left out: outputs/<recipe>-<size>"),
        ),
        examples=(
            ("cloud_to_edge", "at test size; the same command again goes on where it was stopped"),
            ("cloud_to_edge size=cluster all.data=folder all.data.root=/path/to/recordings", "with data of your own"),
        ),
    ),
    "cancel": Verb(
        "remove the echo from a recording",
        "model=<run dir|checkpoint> mic=<file> far=<file> out=<file>",
        keys=(
            ("model", "a run directory or one of its checkpoints"),
            ("mic", "the microphone's file: wav or flac, any rate and length"),
            ("far", "the far end's file, as sent to the loudspeaker"),
            ("out", "where the cleaned file goes"),
        ),
        examples=(("model=outputs/tiny/2026-01-31_12-00-00 mic=mic.wav far=far.wav out=clean.wav", "one file"),),
    ),
    "demo": Verb(
        "a canceller as a web page of static files: two recordings or the microphone, live, in the browser",
        "checkpoint=<run dir|checkpoint> | artifact=<exported folder> [out=DIR]",
        keys=(
            ("checkpoint", "a run directory (its best weights) or one of its checkpoints; exported first"),
            ("artifact", "or a folder that export has written"),
            ("out", "the folder to make; left out: demo"),
        ),
        examples=(
            ("checkpoint=outputs/tiny/2026-01-31_12-00-00", "then: python -m http.server --directory demo 8000"),
            ("artifact=outputs/tiny/2026-01-31_12-00-00/export/onnx out=site/demo", "of what was exported already"),
        ),
    ),
    "report": Verb(
        "one page for a run, a comparison of runs, or a sweep, that opens without a network",
        "DIR [DIR ...] [out=FILE.html]",
        keys=(
            ("runs", "run directories, or a folder of runs such as a sweep's; also typed without runs="),
            ("out", "the file; left out: report.html in the run or sweep directory, for several here"),
        ),
        examples=(
            ("outputs/tiny/2026-01-31_12-00-00", "a run's page, which train has written already"),
            ("outputs/tiny/2026-01-31_12-00-00 outputs/small/2026-01-31_14-00-00", "two runs beside each other"),
            ("multirun/tiny/2026-01-31_12-00-00", "a sweep: which setting matters"),
        ),
    ),
    "reproduce": Verb(
        "run a run again and compare: exit code 0 only if every record and weight is equal",
        "run=<run dir> [reproduce.code=recorded] [reproduce.steps=N]",
        keys=(
            ("run", "the run directory"),
            ("reproduce.code", "current, or recorded: the run's own commit and patch in a checkout"),
            ("reproduce.steps", "the first steps only"),
        ),
        examples=(
            ("run=outputs/tiny/2026-01-31_12-00-00", "all of it"),
            ("run=outputs/tiny/2026-01-31_12-00-00 reproduce.code=recorded reproduce.steps=50", "a quick check"),
        ),
    ),
    "runs": Verb(
        "a table of runs: status, step, best score, changed settings; or how two differ",
        "[dir] [filter=...] [sort=...] [diff=[a,b]] [format=table|csv|json]",
        keys=(
            ("dir", "the folder to look in: outputs, or a sweep's"),
            ("filter", "conditions that all hold: status=done,optim.lr=0.001"),
            ("diff", "[a,b]: the settings in which two runs differ"),
        ),
        examples=(
            ("outputs filter=status=failed", "those that failed, or died without a word"),
            ("multirun sort=-best format=csv", "a sweep, the best last or first"),
        ),
    ),
    "sweep": Verb(
        "a sweep under way or at its end: show, wait, cancel, start again what didn't get done",
        "<dir> [show|wait|cancel|retry] [jobs=[0,3]] [format=table|csv|json]",
        keys=(
            ("dir", "the sweep's folder, as its launcher (hydra/launcher=local or slurm) has told it"),
            ("do", "show, wait, cancel or retry; the word alone is enough"),
            ("jobs", "[0,3]: these jobs only"),
        ),
        examples=(
            ("multirun/tiny/2026-01-31_12-00-00", "how each job stands"),
            ("multirun/tiny/2026-01-31_12-00-00 retry", "failed and cancelled jobs go on in their directories"),
        ),
    ),
    "doctor": Verb(
        "what is wrong with this machine, before it costs a night",
        "[format=table|json] [data=... data.root=...] [dist=...] [output_root=...]",
        keys=(
            ("format", "table, or json for scripts"),
            ("data, dist, train, output_root", "the words of a training, whose needs are compared with what is here"),
        ),
        examples=(
            ("", "drivers, GPUs, network, memory, limits, disk, extras, and a trial of two ranks"),
            ("dist=ddp dist.num_procs=4 data.root=/path/to/recordings data.num_workers=8", "for that training"),
        ),
    ),
    "parity": Verb(
        "compare one process with N, step by step, under every strategy",
        "[words of train ...] [parity.worlds=[1,2]] [parity.strategies=[ddp,fsdp]]",
        keys=(
            ("parity.worlds", "numbers of ranks"),
            ("parity.strategies", "left out: those that the model allows"),
        ),
        examples=(
            ("train.batch_size=4 data.segment_s=1.0", "tiny under ddp and fsdp on two ranks"),
            ("model=base model.hidden_size=96 model.num_layers=2 train.batch_size=4", "a small base under everything"),
        ),
    ),
    "profile": Verb(
        "tell where the time of a training step goes, or what memory it will take",
        "[words of train ...] [profile.steps=10] [estimate=true]",
        keys=(
            ("profile.steps", "steps that are measured"),
            ("estimate", "true: what a rank will hold in memory, told without running"),
        ),
        examples=(
            ("model=base dist=ddp dist.num_procs=2", "table, verdict, profile.json, a trace for ui.perfetto.dev"),
            ("model=base dist=fsdp dist.num_procs=8 train.batch_size=32 estimate=true", "memory of one rank"),
        ),
    ),
}

EXIT_CODES = (
    ("0", "done"),
    ("1", "failed"),
    ("2", "the input was wrong (config, paths, missing extra), said before anything started"),
    ("75", "preempted or out of time, state saved: start again with resume=auto"),
    ("130", "interrupted"),
)

# What people change most; their lines come from the schema. Keys of open groups bring their own.
MOST_USED = (
    "train.batch_size",
    "train.gradient_accumulation_steps",
    "train.epochs",
    "train.max_steps",
    "train.max_time",
    "train.save_interval",
    "train.eval_interval",
    "train.log_every",
    "train.precision",
    "train.clip_norm",
    "train.device",
    "optim.lr",
    "optim.schedule",
    "optim.warmup_steps",
    "dist.num_procs",
    "dist.backend",
    "checkpoint.metric",
    "checkpoint.keep_last",
    "name",
    "seed",
    "resume",
    "output_root",
)
OPEN_KEYS = (
    ("model.hidden_size", "base", "width of the model, where its class takes it"),
    ("model.num_layers", "base", "depth of the model, where its class takes it"),
    ("data.root", "folder", "folder of recordings"),
    ("data.num_workers", "all", "processes of each rank that make or read clips; 0: in the training process"),
)

GROUP_LINES = {
    "model": "the canceller",
    "data": "where clips come from",
    "loss": "what is minimised",
    "task": "what a batch means",
    "train": "how long, how much at once, how often to look and to save",
    "optim": "optimizer, learning rate, schedule",
    "dist": "where the work runs",
    "checkpoint": "what is kept",
    "logger": "where metrics go beside metrics.jsonl",
    "export": "what the best checkpoint becomes for a device",
    "federated": "rounds, clients, policies: read by python -m echofree.federate alone",
    "experiment": "one small file of differences: experiments/experiment/NAME.yaml",
    "debug": "remedies: shorter, stricter, louder",
}


@cache
def schema_docs() -> dict[str, tuple[str, str, str]]:
    """Dotted key -> (type, default, line), read off the text of schema.py, where each key has a comment behind it."""
    text = (Path(__file__).with_name("schema.py")).read_text(encoding="utf-8")
    classes: dict[str, dict[str, tuple[str, str, str]]] = {}
    sections: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        head = re.match(r"class (\w+)", line)
        item = re.match(r"    (\w+): ([^=#]+?)(?: = (.*?))?(?:  # (.*))?$", line)
        if head:
            current = head.group(1)
        elif item and current.endswith("Config"):
            name, kind, default, comment = item.groups()
            classes.setdefault(current, {})[name] = (kind, _default(default or ""), comment or "")
            if current == "RunConfig" and kind.endswith("Config"):
                sections[name] = kind
    table = {f"{group}.{key}": row for group, kind in sections.items() for key, row in classes[kind].items()}
    table.update({key: row for key, row in classes["RunConfig"].items() if key not in sections})
    return table


def _default(text: str) -> str:
    enum = re.fullmatch(r"[A-Z]\w+\.(\w+)", text)
    plain = {"None": "null", "True": "true", "False": "false", "field(default_factory=list)": "[]"}
    return enum.group(1) if enum else plain.get(text, text.strip('"'))


def _enum_options(kind: str) -> str:
    """`fp32 | bf16 | fp16` for an enum of the schema, else nothing."""
    text = (Path(__file__).with_name("schema.py")).read_text(encoding="utf-8")
    body = re.search(rf"class {re.escape(kind)}\(Enum\):\n((?:    .*\n|\n(?=    ))+)", text)
    return " | ".join(re.findall(r"^    (\w+) = ", body.group(1), flags=re.M)) if body else ""


def overview() -> str:
    """What `echofree --help` prints."""
    width = max(map(len, VERBS))
    return "\n".join(
        [
            "EchoFree trains acoustic echo cancellers.",
            "",
            "Usage: echofree <verb> [key=value ...]        (the same as python -m echofree.<verb> ...)",
            "",
            "Verbs:",
            *(f"  {name:{width}}  {verb.line}" for name, verb in VERBS.items()),
            "",
            "  echofree <verb> --help    what the verb takes",
            "  echofree --version        the version",
            "",
            *_exit_codes(),
        ]
    )


def verb_help(verb: str) -> str:
    """What `python -m echofree.<verb> --help` prints."""
    about = VERBS[verb]
    command = f"python -m echofree.{verb}"
    lines = [f"{command}: {about.line}", "", f"Usage: {command} {about.usage}", ""]
    lines += [*_train_body(), ""] if verb == "train" else [*_table("Keys", about.keys), ""]
    if about.group:
        own = [(key, *told) for key, told in schema_docs().items() if key.startswith(f"{about.group}.")]
        rows = tuple((f"{key}={default}", _with_options(kind, what)) for key, kind, default, what in own)
        lines += [*_table("All keys of its group, with their defaults", rows), ""]
    width = max(len(words) for words, _ in about.examples)
    lines += ["Examples:", *(f"  {command} {words:{width}}  # {what}".rstrip() for words, what in about.examples), ""]
    return "\n".join([*lines, *_exit_codes()])


def _with_options(kind: str, what: str) -> str:
    return "; ".join(part for part in (_enum_options(kind), what) if part)


def _train_body() -> list[str]:
    options, docs = search.groups(), schema_docs()
    lines = ["Groups (group=option; the first in brackets is the default):"]
    defaults = _default_options()
    for group, what in GROUP_LINES.items():
        names = [f"[{name}]" if name == defaults.get(group) else name for name in options.get(group, [])]
        names.sort(key=lambda name: not name.startswith("["))
        lines.append(f"  {group:11} {what}: {' '.join(names)}")
    rows = []
    for key in MOST_USED:
        kind, default, line = docs[key]
        rows.append((f"{key}={default}", _with_options(kind, line)))
    rows += [(key, f"{line} (data={option})" if option == "folder" else line) for key, option, line in OPEN_KEYS]
    lines += ["", *_table("Keys used most, with their defaults", tuple(rows))]
    lines += [
        "",
        "A model's preset (conf/model_preset) sets train and optim values that suit it; what you type wins.",
        "",
        "Flags:",
        "  -m, --multirun        several values per key (a,b,c) make a sweep",
        "  --cfg job             show the composed config, run nothing; -p GROUP: one part; --resolve: fill in ${...}",
        "  --config-dir DIR      another folder of groups; experiments/ beside the command is always found",
        "  --info, --hydra-help  what Hydra says about itself",
    ]
    return lines


def _default_options() -> dict[str, str]:
    text = (search.conf_dir() / "train.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^  - (\w+): (\w+)", text, flags=re.M))


def _table(title: str, rows: tuple[tuple[str, str], ...]) -> list[str]:
    width = max((len(key) for key, _ in rows), default=0)
    return [f"{title}:", *(f"  {key:{width}}  {what}".rstrip() for key, what in rows)]


def _exit_codes() -> list[str]:
    return ["Exit codes:", *(f"  {code:>3}  {what}" for code, what in EXIT_CODES)]
