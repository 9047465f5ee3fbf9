"""The commands of the site's pages as a reader types them, page after page in an empty folder, with less data.

A plain training that only changes keys is left to tests/unit/test_site.py, which composes it; everything else runs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/tools"))
from page import Page, commands, filled, pages, words_of, write_files  # noqa: E402

SHORT = ["train.epochs=1", "train.final_test=false", "train.device=cpu", "data.num_workers=0", "data.segment_s=1.0"]
SHORT += ["dist.threads=1"]  # two threads wait for each other where a core is busy with something else
SCENES = ["data.num_train=8", "data.num_valid=2", "data.num_test=2", "data.test_segment_s=1.0", "data.num_rooms=8"]
WORTH = ("dist=", "resume=", "data=", "model=mine", "loss=", "experiment=", "-m", "debug=nonfinite", "data.speech_root")
WORTH += ("train.precision=bf16", "train.batch_size=auto")
CLIENTS = ["federated.rounds=2", "federated.local_steps=1", "data.num_train=24"]
ONCE = ("parity", "profile", "doctor")  # leave nothing behind that a later line of the page needs
PAGES = [page for page in pages() if any(commands(page))]
FIRST = {line: page.name for page in reversed(PAGES) for _, line in commands(page)}  # the first page that has a line
RATE_HZ = 16000
Cli = Callable[..., Any]


def short(words: list[str]) -> list[str]:
    """What makes a training small, without the keys that the page sets."""
    more = [*SHORT, *([] if any(word.startswith("data=") for word in words) else SCENES)]
    if not any(word.startswith(("train.batch_size=", "train.global_batch_size=")) for word in words):
        more.append("train.batch_size=2")
    if "debug=quick" in words:
        more.append("train.max_steps=2")
    given = {word.partition("=")[0].lstrip("+") for word in words}
    return [word for word in more if word.partition("=")[0] not in given]


def newest(folder: Path, name: str, cli: Cli) -> Path:
    """The reader's last run of that name; made when a page takes for granted that there is one."""
    runs = sorted((folder / "outputs").glob(f"{name}/*"), key=lambda run: run.name)  # its date and time
    if not runs:
        cli("train", f"name={name.replace('*', 'tiny')}", *short([]), cwd=folder, timeout=280).check()
        runs = sorted((folder / "outputs").glob(f"{name}/*"))
    return runs[-1].relative_to(folder)


def sounds(folder: Path, rng: np.random.Generator) -> None:
    """mic.wav and far.wav, a folder of recordings, a folder of speech."""
    for name in ("mic.wav", "far.wav"):
        soundfile.write(folder / name, 0.1 * rng.standard_normal(RATE_HZ), RATE_HZ)
    (folder / "recordings").mkdir(exist_ok=True)
    for number in range(12):
        far, near = 0.1 * rng.standard_normal((2, 2 * RATE_HZ)) * (np.arange(2 * RATE_HZ) % 8000 < 5000)
        for what, wave in (("ref", far), ("near", near), ("mic", near + 0.3 * np.roll(far, 400))):
            soundfile.write(folder / "recordings" / f"take{number:02d}_{what}.wav", wave, RATE_HZ)
    (folder / "speech").mkdir()
    for path in (ROOT / "src/echofree/data/embedded").glob("*.flac"):
        (folder / "speech" / path.name).symlink_to(path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page(page: Page, cli: Cli, tmp_path: Path, rng: np.random.Generator) -> None:
    if page.name == "federated.md" and importlib.util.find_spec("flwr") is None:
        pytest.skip("needs echofree[federated]")
    write_files(page, tmp_path)
    sounds(tmp_path, rng)
    (tmp_path / "recordings/cases.csv").unlink(missing_ok=True)  # it names files that only its reader has
    for block, line in commands(page):
        if block.mark.startswith("not run"):
            continue
        run = None
        named = re.search(r"outputs/([\w-]+)/DATE_TIME", line)
        if named or "echofree.runs" in line:
            run = newest(tmp_path, named[1] if named else "*", cli)
        verb, words = words_of(line)
        if verb == "train" and block.exit_code == "0" and "--cfg" not in words and "--help" not in words:
            if words != ["debug=quick"] and not any(word.startswith(WORTH) for word in words):
                continue
            if not any(word.startswith("resume=outputs") for word in words):
                line = " ".join([line, *short(words)])
        if verb == "federate" and "resume=auto" not in words:  # which takes what was typed before
            more = [*CLIENTS, *short(words)]
            given = {word.partition("=")[0] for word in words}
            seen = {word.partition("=")[0]: word for word in reversed(more)}  # the first one wins
            line = " ".join([line, *(word for key, word in seen.items() if key not in given)])
        if verb in ONCE and FIRST[line] != page.name:
            continue
        if verb == "evaluate":
            line += " limit=2 metrics=si_sdr"
        code, text = typed(filled(line, tmp_path, run), tmp_path)
        assert block.exit_code in (str(code), "any"), f"{line}: exit code {code}\n{text[-6000:]}"


def typed(line: str, folder: Path) -> tuple[int, str]:
    """A line through the shell, as a person has it; -> (exit code, both streams)."""
    line = re.sub(r"\bpython\b", shlex.quote(sys.executable), line)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=400)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -signal.SIGKILL, f"{line} didn't end in time\n{process.communicate()[0]}"
