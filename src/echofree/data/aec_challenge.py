"""`data=aec_challenge`: the folders of the Microsoft AEC challenge (https://github.com/microsoft/AEC-Challenge).

Real recordings: GUID_{farend_singletalk,doubletalk,nearend_singletalk}[_with_movement]_{mic,lpb}.wav; near-end single
talk has no lpb (nothing is played). Synthetic: farend_speech/, echo_signal/, nearend_mic_signal/, nearend_speech/ with
..._fileid_N.wav, and meta.csv, whose nearend_scale brings the near end to its level at the microphone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echofree.contracts import Scenario
from echofree.data.folder import Corpus, check_root, split_by_folder
from echofree.data.match import LeftOut, pair
from echofree.data.recording import Reading, Recording, Recordings
from echofree.data.scan import ScanOptions
from echofree.data.speech import list_audio, stable_order
from echofree.errors import ConfigError, DataError

SYNTHETIC_FOLDERS = {
    "mic": "nearend_mic_signal",
    "far": "farend_speech",
    "near": "nearend_speech",
    "echo": "echo_signal",
}
REAL_PATTERNS = {"mic": "{id}_mic.*", "far": "{id}_lpb.*", "near": "", "echo": ""}
IGNORED = re.compile(r"_sweep(_|\.)|_enrl\.|_enrol", re.IGNORECASE)
NUM_TEST = 500  # the first synthetic files are the challenge's test set
FILE_ID = re.compile(r"fileid_(\d+)\.")


class AecChallenge:
    """The challenge's real and synthetic sets below one folder (a `DataSource`).

    Args:
        root: a clone of the challenge's repository or any folder inside it; both kinds are found by their names.
        sample_rate: Hz to read at.
        segment_s, hop_s: length and distance of training segments; hop_s None: equal to segment_s.
        kinds: real, synthetic, or both.
        far_end_fraction, near_end_fraction: share of the synthetic training recordings, which are all double talk,
            that is reduced to far-end single talk (microphone without near end) or near-end single talk (without echo).
        channel: see `Folder`.
        valid_fraction: of the synthetic recordings that aren't test; test_fraction: of real recordings with a target,
            of which there are none unless silent_near is set.
        silent_near: train on real far-end single talk with a silent target.
        decode, min_s, max_label_offset_ms: see `ScanOptions`.

    Raises:
        ConfigError, DataError: as `Folder`; also neither kind found, or a meta.csv without the columns needed.
    """

    def __init__(
        self,
        root: str | None,
        sample_rate: int = 16000,
        segment_s: float = 4.0,
        hop_s: float | None = None,
        kinds: Sequence[str] = ("real", "synthetic"),
        far_end_fraction: float = 0.2,
        near_end_fraction: float = 0.15,
        channel: str | int = "error",
        silent_near: bool = False,
        valid_fraction: float = 0.05,
        test_fraction: float = 0.1,
        decode: bool = True,
        min_s: float = 0.3,
        max_label_offset_ms: float = 8.0,
    ):
        _check(kinds, far_end_fraction, near_end_fraction)
        folder = check_root(root)
        candidates: list[Recording] = []
        left_out: list[LeftOut] = []
        paths = list_audio(folder, "data.root")
        made = [p for p in paths if p.parent.name in SYNTHETIC_FOLDERS.values()]
        if "synthetic" in kinds:
            for base in sorted({p.parent.parent for p in made}):
                found, refused = synthetic(base, folder)
                candidates += [_reduced(r, far_end_fraction, near_end_fraction) for r in found]
                left_out += refused
        if "real" in kinds:
            found, refused = real(folder, sorted(set(paths) - set(made)), silent_near)
            candidates += found
            left_out += refused
        if not candidates:
            raise DataError(
                f"data.root={root}: no recordings of the AEC challenge ({' or '.join(kinds)}) in it: neither *_mic.wav "
                "with *_lpb.wav nor the folders nearend_mic_signal, farend_speech, echo_signal, nearend_speech."
            )
        reading, options = Reading(sample_rate, channel), ScanOptions(decode, min_s, max_label_offset_ms)
        self.corpus = Corpus(
            folder, candidates, left_out, reading, options, segment_s, hop_s, valid_fraction, test_fraction
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


def real(root: Path, paths: Sequence[Path], silent_near: bool) -> tuple[list[Recording], list[LeftOut]]:
    """Real recordings; sweeps and enrolment clips are counted and left out. Without targets they can only be scored, so
    all go to test."""
    ignored = [p for p in paths if IGNORED.search(p.name)]
    left_out = [LeftOut(p.relative_to(root).as_posix(), "a sweep or an enrolment clip") for p in ignored]
    recordings, refused = pair(root, sorted(set(paths) - set(ignored)), REAL_PATTERNS)
    known = []
    for recording in recordings:
        trainable = silent_near and recording.scenario == Scenario.FAR_END
        split = split_by_folder(recording.mic.relative_to(root)) or ("" if trainable else "test")
        known.append(replace(recording, split=split, silent_near=trainable))
    return known, left_out + refused


def synthetic(base: Path, root: Path) -> tuple[list[Recording], list[LeftOut]]:
    """Synthetic recordings of one folder, joined with meta.csv by file id; ids that only one side has are left out.

    Raises:
        DataError: no meta.csv or not the columns fileid and nearend_scale.
    """
    files: dict[str, dict[int, Path]] = {
        role: {int(m[1]): p for p in sorted((base / name).iterdir()) if (m := FILE_ID.search(p.name))}
        if (base / name).is_dir()
        else {}
        for role, name in SYNTHETIC_FOLDERS.items()
    }
    scales = _scales(base / "meta.csv")
    name = (base.relative_to(root) / "fileid_").as_posix().removeprefix("./")
    recordings, left_out = [], []
    for number in sorted(set(scales) | {i for found in files.values() for i in found}):
        missing = [role for role, found in files.items() if number not in found]
        if number not in scales:
            left_out.append(LeftOut(f"{name}{number}", "synthetic: not in meta.csv"))
        elif missing:
            left_out.append(LeftOut(f"{name}{number}", f"synthetic: no {', '.join(missing)} file"))
        else:
            recordings.append(
                Recording(
                    f"{name}{number}",
                    mic=files["mic"][number],
                    far=files["far"][number],
                    near=files["near"][number],
                    echo=files["echo"][number],
                    scenario=Scenario.DOUBLE_TALK,
                    split="test" if number < NUM_TEST else "",
                    near_scale=scales[number],
                )
            )
    return recordings, left_out


def _scales(table: Path) -> dict[int, float]:
    if not table.is_file():
        raise DataError(f"{table}: no such file; the near end's level is in it (column nearend_scale).")
    with table.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = {"fileid", "nearend_scale"} - set(reader.fieldnames or ())
        if missing:
            raise DataError(f"{table}: no column {', '.join(sorted(missing))}.")
        try:
            return {int(row["fileid"]): float(row["nearend_scale"]) for row in reader}
        except (TypeError, ValueError) as error:
            raise DataError(f"{table}: line {reader.line_num}: {error}.") from error


def _reduced(recording: Recording, far_end_fraction: float, near_end_fraction: float) -> Recording:
    """Decides by the name whether a training recording loses one of its talkers."""
    if recording.split == "test":
        return recording
    share = int(stable_order(recording.name)[:8], 16) / 0xFFFFFFFF
    if share < far_end_fraction:
        return replace(recording, only=Scenario.FAR_END)
    if share < far_end_fraction + near_end_fraction:
        return replace(recording, only=Scenario.NEAR_END)
    return recording


def _check(kinds: Sequence[str], far_end_fraction: float, near_end_fraction: float) -> None:
    problems = []
    if not kinds or isinstance(kinds, str) or any(k not in ("real", "synthetic") for k in kinds):
        problems.append(f"data.kinds={kinds!r}: give a list of real, synthetic.")
    low, total = min(far_end_fraction, near_end_fraction), far_end_fraction + near_end_fraction
    if low < 0 or total > 1:
        problems.append(
            f"data.far_end_fraction={far_end_fraction}, data.near_end_fraction={near_end_fraction}: give shares of 0 "
            "to 1 that add up to at most 1."
        )
    if problems:
        raise ConfigError(problems)
