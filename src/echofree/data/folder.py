"""`data=folder`: a user's own recordings, in any layout that a name pattern or a table can describe."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echofree.contracts import Scenario
from echofree.data.match import LeftOut, pair, read_cases
from echofree.data.recording import Reading, Recording, Recordings
from echofree.data.scan import MAX_EXAMPLES, Scan, ScanOptions, scan
from echofree.data.speech import list_audio, stable_order
from echofree.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")
SPLIT_FOLDERS = {"train": "train", "valid": "valid", "val": "valid", "dev": "valid", "test": "test", "eval": "test"}


class Corpus:
    """Scanned recordings, shared out over the splits (a `DataSource`).

    Args:
        root: what file names are relative to.
        candidates: recordings; those without a split get one here.
        left_out: what was left out before.
        reading: rate and channels.
        options: what is looked at.
        segment_s, hop_s: of training segments; validation and test take whole recordings.
        valid_fraction, test_fraction: of the recordings that have no split, by a hash of the microphone file's name;
            test is taken first.

    Raises:
        ConfigError: fractions or lengths that can't be.
        DataError: nothing usable, with the reasons.
    """

    def __init__(
        self,
        root: Path,
        candidates: Sequence[Recording],
        left_out: Sequence[LeftOut],
        reading: Reading,
        options: ScanOptions,
        segment_s: float,
        hop_s: float | None,
        valid_fraction: float,
        test_fraction: float,
    ):
        _check_numbers(reading, options, segment_s, hop_s, valid_fraction, test_fraction)
        self.root, self.reading, self.sample_rate = root, reading, reading.sample_rate
        self.segment_s, self.hop_s = segment_s, hop_s
        self._settings = repr((reading, options, segment_s, hop_s, valid_fraction, test_fraction))
        self.scan: Scan = scan(candidates, reading, options)
        self.scan.left_out[:0] = left_out
        _refuse_misaligned(root, self.scan)
        if not self.scan.recordings:
            reasons = "".join(f"\n  - {what}: {value}" for what, value in _reasons(self.scan.left_out))
            raise DataError(f"data.root={root}: nothing in it can be used.{reasons}")
        self.recordings = share_out(self.scan.recordings, valid_fraction, test_fraction)

    def split(self, name: str) -> Recordings | None:
        """train: segments of recordings that have a target; valid, test: whole recordings; all: every one, whole.
        None when there are none."""
        if name == "all":
            return Recordings(self.recordings, self.reading)
        chosen = [r for r in self.recordings if r.split == name]
        if name != "train":
            return Recordings(chosen, self.reading) if chosen else None
        chosen = [r for r in chosen if r.trainable]
        return Recordings(chosen, self.reading, self.segment_s, self.hop_s) if chosen else None

    def fingerprint(self) -> str:
        """A hash over the settings and the names, labels and sizes of all files in use."""
        rows = [
            (r.name, r.split, int(r.scenario), r.start_s, r.end_s, r.near_scale, r.only, r.silent_near)
            for r in self.recordings
        ]
        paths = sorted({p for r in self.recordings for p in r.paths})
        files = [(str(p.relative_to(self.root)), p.stat().st_size) for p in paths]
        return hashlib.sha256(repr((self._settings, rows, files)).encode()).hexdigest()[:16]

    def survey(self) -> list[tuple[str, str]]:
        """Rows of (what, value): clips, hours, rates, scenarios, notes, and everything left out with the reason."""
        rows = [("folder", str(self.root))]
        for name in SPLITS:
            chosen = [r for r in self.recordings if r.split == name]
            if chosen:
                hours = sum(r.stop_s - r.start_s for r in chosen) / 3600
                kinds = Counter(r.scenario if r.only is None else r.only for r in chosen)
                shares = ", ".join(f"{n} {k.name.lower()}" for k, n in sorted(kinds.items()))
                rows.append((name, f"{len(chosen)} recordings, {hours:.2f} h ({shares})"))
        untrained = sum(r.split == "train" and not r.trainable for r in self.recordings)
        if untrained:
            rows.append(("not trained on", f"{untrained} recordings without a near-end target"))
        rates = ", ".join(f"{hz} Hz: {n}" for hz, n in sorted(self.scan.rates.items()))
        rows.append(("rates", f"{rates}; read at {self.sample_rate} Hz"))
        rows += [("note", f"{n} x {text}") for text, n in sorted(self.scan.notes.items())]
        return rows + _reasons(self.scan.left_out)


class Folder:
    """Recordings below a folder (a `DataSource`).

    Args:
        root: the folder.
        sample_rate: Hz to read at.
        segment_s, hop_s: length and distance of training segments; hop_s None: equal to segment_s.
        mic_pattern, far_pattern, near_pattern, echo_pattern: names, see `match.compile_pattern`; near and echo are
            optional files.
        cases: a CSV of labelled stretches relative to root, see `match.read_cases`; auto: cases.csv if it is there;
            None: don't look.
        channel: for files with several channels: error (leave the recording out and say so), mean, first, or an index.
        silent_near: treat far-end single talk without a near file as having a silent near end, so that it can be
            trained on.
        valid_fraction, test_fraction: see `Corpus`; sub-folders named train, valid (val, dev), test (eval) come first.
            To score everything: test_fraction=1.
        decode: False looks at headers only, which is faster and finds less.
        min_s, max_label_offset_ms: see `ScanOptions`.

    Raises:
        ConfigError, DataError: see `Corpus`; a missing folder names data.root.
    """

    def __init__(
        self,
        root: str | None,
        sample_rate: int = 16000,
        segment_s: float = 4.0,
        hop_s: float | None = None,
        mic_pattern: str = "{id}_mic.*|mic/{id}.*",
        far_pattern: str = "{id}_ref.*|{id}_lpb.*|{id}_far.*|far/{id}.*|ref/{id}.*|lpb/{id}.*",
        near_pattern: str = "{id}_near.*|{id}_clean.*|near/{id}.*|clean/{id}.*",
        echo_pattern: str = "{id}_echo.*|echo/{id}.*",
        cases: str | None = "auto",
        channel: str | int = "error",
        silent_near: bool = False,
        valid_fraction: float = 0.1,
        test_fraction: float = 0.1,
        decode: bool = True,
        min_s: float = 0.3,
        max_label_offset_ms: float = 8.0,
    ):
        folder = check_root(root)
        table = folder / ("cases.csv" if cases == "auto" else cases) if cases else None
        if table is not None and (cases != "auto" or table.is_file()):
            candidates, left_out = read_cases(table)
        else:
            patterns = {"mic": mic_pattern, "far": far_pattern, "near": near_pattern, "echo": echo_pattern}
            candidates, left_out = pair(folder, list_audio(folder, "data.root"), patterns)
        candidates = [
            replace(r, split=split_by_folder(r.mic.relative_to(folder)), silent_near=silent_near and is_far_end(r))
            for r in candidates
        ]
        self.corpus = Corpus(
            folder,
            candidates,
            left_out,
            Reading(sample_rate, channel),
            ScanOptions(decode, min_s, max_label_offset_ms),
            segment_s,
            hop_s,
            valid_fraction,
            test_fraction,
        )
        self.sample_rate = sample_rate

    def split(self, name: str) -> Recordings | None:
        """See `Corpus.split`."""
        return self.corpus.split(name)

    def fingerprint(self) -> str:
        """See `Corpus.fingerprint`."""
        return self.corpus.fingerprint()

    def survey(self) -> list[tuple[str, str]]:
        """See `Corpus.survey`."""
        return self.corpus.survey()


def check_root(root: str | None) -> Path:
    """The folder that `data.root` names.

    Raises:
        DataError: not given, or not there.
    """
    if not root:
        raise DataError("data.root isn't given. Type: data.root=/path/to/recordings")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise DataError(f"data.root={root}: no such folder. Type: data.root=/path/to/recordings")
    return folder.resolve()


def is_far_end(recording: Recording) -> bool:
    return recording.scenario == Scenario.FAR_END and recording.near is None


def split_by_folder(relative: Path) -> str:
    """train, valid or test when a folder on the way has such a name, else ""."""
    return next((SPLIT_FOLDERS[p.lower()] for p in relative.parts[:-1] if p.lower() in SPLIT_FOLDERS), "")


def share_out(recordings: Sequence[Recording], valid_fraction: float, test_fraction: float) -> list[Recording]:
    """Gives a split to those that have none. Stretches of one microphone file stay together. Where nothing can be
    trained on, all go to test."""
    if not any(r.trainable for r in recordings):
        return [replace(r, split=r.split or "test") for r in recordings]
    files = sorted(
        {str(r.mic) for r in recordings if not r.split}, key=lambda f: stable_order("/".join(Path(f).parts[-2:]))
    )
    num_test = _share(len(files), test_fraction)
    num_valid = min(_share(len(files), valid_fraction), len(files) - num_test)
    chosen = {
        f: "test" if i < num_test else "valid" if i < num_test + num_valid else "train" for i, f in enumerate(files)
    }
    return [r if r.split else replace(r, split=chosen[str(r.mic)]) for r in recordings]


def _share(count: int, fraction: float) -> int:
    """At least one when there are enough to leave some for training."""
    return max(round(fraction * count), 1 if fraction > 0 and count >= 3 else 0)


def _reasons(left_out: Sequence[LeftOut]) -> list[tuple[str, str]]:
    """Rows, one a reason, the commonest first."""
    groups: dict[str, list[str]] = {}
    for item in left_out:
        groups.setdefault(item.reason, []).append(item.name)
    rows = []
    for reason, names in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0])):
        more = f" and {len(names) - MAX_EXAMPLES} more" if len(names) > MAX_EXAMPLES else ""
        rows.append(("left out", f"{len(names)} x {reason} ({', '.join(names[:MAX_EXAMPLES])}{more})"))
    return rows


def _refuse_misaligned(root: Path, result: Scan) -> None:
    """A shift that most targets share is a fault of the set, not of some files."""
    bad = [item for item in result.left_out if item.reason.startswith("near: ") and item.reason.endswith("microphone")]
    good = sum(r.near is not None for r in result.recordings)
    if bad and len(bad) > good:
        raise DataError(
            f"data.root={root}: in {len(bad)} of {len(bad) + good} recordings the near-end target isn't aligned with "
            f"the microphone; {bad[0].name}: {bad[0].reason}. A model trained on them learns silence. Shift the near "
            "files, or, if the offset is meant, raise data.max_label_offset_ms."
        )


def _check_numbers(
    reading: Reading,
    options: ScanOptions,
    segment_s: float,
    hop_s: float | None,
    valid_fraction: float,
    test_fraction: float,
) -> None:
    problems = []
    if not 8000 <= reading.sample_rate <= 48000:
        problems.append(f"data.sample_rate={reading.sample_rate}: give 8000 to 48000 Hz.")
    index = isinstance(reading.channel, int) and not isinstance(reading.channel, bool) and reading.channel >= 0
    if reading.channel not in ("error", "mean", "first") and not index:
        problems.append(f"data.channel={reading.channel!r}: give error, mean, first, or a number from 0.")
    if segment_s < options.min_s or options.min_s <= 0:
        problems.append(f"data.segment_s={segment_s}, data.min_s={options.min_s}: give 0 < min_s <= segment_s.")
    if hop_s is not None and hop_s <= 0:
        problems.append(f"data.hop_s={hop_s}: give seconds above 0.")
    for key, value in (("valid_fraction", valid_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value <= 1:
            problems.append(f"data.{key}={value}: give a share from 0 to 1 (test is taken first).")
    if problems:
        raise ConfigError(problems)
