"""Systems that aren't of this process: any program that reads and writes sound files, and folders of its outputs.

Both are asked clip by clip (`score.Foreign`). What they hear is what a model hears: the recording from its start to the
end of the stretch that is scored, at the rate of the evaluation, one channel, 16 bits.

Legend: T samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from echofree import audio
from echofree.errors import ConfigError

if TYPE_CHECKING:
    from echofree.contracts import Clip, Dataset

PLACES = ("mic", "far", "out", "list")
ALSO = {"ref": "far", "lpb": "far"}
MAX_MISSING_S = 0.25  # programs that work in blocks drop the last one, late ones the end
ENDINGS = ("", "_mic", "_out", "_enh", "_clean", "_est")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
TRIAL_S = 1.0


class Program:
    """`prog {mic} {far} {out}`, started for each clip; or `prog {list}`, started once with a text file that has a line
    "mic far out" (tab separated) for each clip.

    The real-time factor is processor time over the length of the clip, start-up (measured on a second of silence) taken
    off; a program with {list} may print a line {"out": ..., "cpu_s": ...} for each file instead.

    Args:
        command: with the places in braces; {ref} and {lpb} are {far} by other names.
        dataset, count: its first `count` items are what will be asked for.
        folder: where the files go.
        timeout_s: for each clip.

    Raises:
        ConfigError: no such program, a place is missing, or it fails on a second of silence.
    """

    def __init__(self, command: str, dataset: Dataset, count: int, folder: Path, timeout_s: float = 600.0):
        self.words, self.rate_hz = parse(command), dataset.sample_rate
        self.folder, self.timeout_s = folder, timeout_s
        self.dataset, self.count = dataset, count
        self.is_list = any("{list}" in word for word in self.words)
        self._took: dict[str, float] = {}  # processor seconds by output
        folder.mkdir(parents=True, exist_ok=True)
        self.startup_s = self._trial()

    def est(self, index: int, clip: Clip) -> tuple[np.ndarray, float | None]:
        """-> (estimate [T], real-time factor).

        Raises:
            RuntimeError: it fails or writes nothing; with the end of what it said.
        """
        out, length_s = self.folder / f"{index:05d}_out.wav", len(clip.mic) / self.rate_hz
        if self.is_list and not self._took:
            self._all()
        elif not out.is_file():
            files = self._write(f"{index:05d}", clip.mic, clip.far)
            took, _ = self._start(files, self.timeout_s)
            self._took[str(out)] = max(0.0, took - self.startup_s)
            for place in ("mic", "far"):  # what comes out stays: it is asked for again to be heard
                Path(files[place]).unlink()
        if not out.is_file():
            raise RuntimeError(f"the program wrote no {out.name}")
        return read(out, self.rate_hz, len(clip.mic)), self._took[str(out)] / length_s

    def _write(self, stem: str, mic: np.ndarray, far: np.ndarray) -> dict[str, str]:
        import soundfile

        files = {place: str(self.folder / f"{stem}_{place}.wav") for place in ("mic", "far", "out")}
        for place, wave in (("mic", mic), ("far", far)):
            # rounded here: libsndfile multiplies floats by 32767, and what was read as 16 bits should be so again
            bits = np.clip(np.rint(wave * 32768.0), -32768, 32767).astype(np.int16)
            soundfile.write(files[place], bits, self.rate_hz, subtype="PCM_16")
        return files

    def _start(self, files: dict[str, str], timeout_s: float) -> tuple[float, str]:
        """-> (processor seconds of the program and its children, what it printed)."""
        argv = [re.sub(r"\{(\w+)\}", lambda m: files[ALSO.get(m[1], m[1])], word) for word in self.words]
        env = {**os.environ, **dict.fromkeys(THREADS, "1")}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the program didn't end within {timeout_s:g} s") from None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise RuntimeError(f"the program ended with exit code {done.returncode}: {said[-300:]}")
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout

    def _listed(self, jobs: Sequence[dict[str, str]]) -> dict[str, str]:
        path = self.folder / "list.txt"
        path.write_text("".join(f"{j['mic']}\t{j['far']}\t{j['out']}\n" for j in jobs), encoding="utf-8")
        return {"list": str(path)}

    def _trial(self) -> float:
        """One second of faint noise. -> processor seconds, which are start-up but for little"""
        rng = np.random.default_rng(0)
        mic, far = (1e-3 * rng.standard_normal((2, round(TRIAL_S * self.rate_hz)))).astype(np.float32)
        files = self._write("trial", mic, far)
        try:
            took, _ = self._start(self._listed([files]) if self.is_list else files, self.timeout_s)
        except RuntimeError as error:
            raise ConfigError(
                f"system.command: a trial with a second of faint noise failed: {error}. Tried: {shlex.join(self.words)}"
            ) from error
        if not Path(files["out"]).is_file():
            raise ConfigError(f"system.command: the program ended well but wrote no {{out}}: {shlex.join(self.words)}")
        for path in self.folder.glob("trial_*.wav"):
            path.unlink()
        return took

    def _all(self) -> None:
        """The whole list, once."""
        jobs, lengths_s = [], {}
        for index in range(self.count):
            try:
                clip = self.dataset.item(index, 0)
            except Exception:  # nobody asks for it: `score` has made a row of it
                continue
            jobs.append(self._write(f"{index:05d}", clip.mic, clip.far))
            lengths_s[jobs[-1]["out"]] = len(clip.mic) / self.rate_hz
        took, said = self._start(self._listed(jobs), self.timeout_s * self.count)
        told = dict(_told(said))
        share = max(0.0, took - self.startup_s) / sum(lengths_s.values())
        self._took = {out: told.get(out, share * length_s) for out, length_s in lengths_s.items()}
        for job in jobs:
            for place in ("mic", "far"):
                Path(job[place]).unlink()


def _told(said: str) -> Iterator[tuple[str, float]]:
    """What a program with {list} says of its own processor time."""
    for line in said.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(line)
            yield str(found["out"]), float(found["cpu_s"])


class Outputs:
    """A folder of sound files that some system made earlier: for each clip the file that carries the clip's name or
    that of its microphone file (with or without _mic, _out, _enh, _clean, _est), wav or flac, at any depth.

    Args:
        folder: it.
        dataset: where the clips come from; says the microphone files when it has `mic_path(index)`.

    Raises:
        ConfigError: no such folder, or none of the first clips has a file in it.
    """

    def __init__(self, folder: Path, dataset: Dataset, count: int):
        if not folder.is_dir():
            raise ConfigError(f"system.folder={folder}: there is no such folder")
        self.dataset, self.rate_hz, self.folder = dataset, dataset.sample_rate, folder
        self.files = {p.stem: p for p in sorted(folder.rglob("*")) if p.suffix.lower() in (".wav", ".flac")}
        mic_path = getattr(dataset, "mic_path", None)
        if mic_path is not None and not any(self._file([mic_path(i).stem]) for i in range(count)):
            wanted = mic_path(0).stem
            near = ", ".join(list(self.files)[:3]) or "no sound files at all"
            raise ConfigError(
                f"system.folder={folder}: none of its files is named as a recording is; it has {near}. The output for "
                f"{wanted} would be {wanted}.wav or {wanted.removesuffix('_mic')}.wav"
            )

    def est(self, index: int, clip: Clip) -> tuple[np.ndarray, float | None]:
        """-> (estimate [T], None).

        Raises:
            RuntimeError: there is none for this clip.
        """
        mic_path = getattr(self.dataset, "mic_path", None)
        names = [clip.name, file_name(clip.name)] + ([] if mic_path is None else [mic_path(index).stem])
        path = self._file(names)
        if path is None:
            raise RuntimeError(f"{self.folder} has no file named {names[-1]}.wav")
        return read(path, self.rate_hz, len(clip.mic)), None

    def _file(self, names: Sequence[str]) -> Path | None:
        stems = [stem + end for name in names for stem in (name, name.removesuffix("_mic")) for end in ENDINGS]
        return next((self.files[stem] for stem in stems if stem in self.files), None)


def parse(command: str) -> list[str]:
    """The words of a command, its places checked.

    Raises:
        ConfigError: quotes that don't close, unknown or missing places, a program that isn't there.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"system.command={command}: {error}") from error
    found = {ALSO.get(name, name) for word in words for name in re.findall(r"\{(\w+)\}", word)}
    if unknown := found - set(PLACES):
        raise ConfigError(
            f"system.command: {{{min(unknown)}}} is no place. There are: {{mic}} {{far}} {{out}} {{list}}"
        )
    if "list" not in found and not {"mic", "out"} <= found:
        raise ConfigError(
            "system.command: say where the files go, such as system.command='prog {mic} {far} {out}'; or "
            "'prog {list}' for a program that takes a text file with a line \"mic far out\" for each clip"
        )
    if shutil.which(words[0]) is None:
        raise ConfigError(f"system.command: there is no program {words[0]!r}")
    return words


def program_name(command: str) -> str:
    """What a column is called: the program, or the script or module that an interpreter runs."""
    words = [word for word in shlex.split(command) if not word.startswith(("-", "{")) and "=" not in word]
    first = next((word for word in words if not re.match(r"(python|env$|bash$|sh$|node$)", Path(word).name)), words[0])
    return Path(first).stem if "/" in first or first.endswith((".py", ".sh")) else first


def read(path: Path, rate_hz: int, num_samples: int) -> np.ndarray:
    """An output at `rate_hz`, as long as the microphone: cut, or filled up when little is missing.

    Raises:
        RuntimeError: more than `MAX_MISSING_S` is missing.
        DataError: it can't be read.
    """
    wave, _ = audio.read(path, rate_hz)
    if num_samples - len(wave) > MAX_MISSING_S * rate_hz:
        raise RuntimeError(f"{path.name} has {len(wave) / rate_hz:.2f} s, the microphone {num_samples / rate_hz:.2f} s")
    return audio.fit(wave, num_samples)


def file_name(clip_name: str) -> str:
    """A clip's name as the name of a file."""
    return re.sub(r"[/\s]", "_", clip_name)
