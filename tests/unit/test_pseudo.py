"""Targets out of unlabelled recordings: what is kept, what is left out and why, and that a training takes them."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))
import pseudo

sys.path.pop()
RATE = 16000
BOUNDS = pseudo.Bounds(piece_s=2.0, min_echo=4.0, min_other=3.5, max_change=1.5, min_agreement=5.0)


def waves(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Three pieces of 2 s: a talker alone at first, then with an echo; an echo and a talker; a talker alone."""
    near, far = 0.1 * rng.standard_normal((2, 6 * RATE))
    far[:RATE], far[4 * RATE :] = 0, 0
    echo = 0.5 * np.concatenate([np.zeros(100), far[:-100]])
    found = {"mic": near + echo, "far": far, "teacher": near + 0.01 * echo, "student": near + 0.1 * echo}
    return {name: wave.astype(np.float32) for name, wave in found.items()}


def judged(found: dict[str, np.ndarray], scores: tuple[float, float] | None = (4.5, 4.0)) -> list[str]:
    return [piece.why for piece in pseudo.pieces(found, RATE, BOUNDS, lambda view: scores)]


def test_what_can_be_trusted_is_kept(rng: np.random.Generator) -> None:
    found = waves(rng)
    kept = pseudo.pieces(found, RATE, BOUNDS, lambda view: (4.5, 4.0))
    assert [piece.why for piece in kept] == ["", "", "nothing plays"]
    assert [(piece.start, piece.stop) for piece in kept] == [(0, 2 * RATE), (2 * RATE, 4 * RATE), (4 * RATE, 6 * RATE)]
    assert abs(kept[0].figures["level_change"]) < 0.01  # a lone talker for a second: the output is the microphone
    assert kept[1].figures["level_change"] is None
    assert kept[1].figures["agreement"] == pytest.approx(10 * np.log10(1 / (0.09 * 0.5) ** 2), abs=0.5)


def test_each_reason(rng: np.random.Generator) -> None:
    found = waves(rng)
    assert judged(found, (3.9, 4.0))[0] == "echo below 4"
    assert judged(found, (4.5, 3.4))[0] == "other below 3.5"
    assert judged(found, None)[0] == "echo below 4"  # not a number
    quiet = found | {name: found[name] * np.float32(0.7) for name in ("teacher", "student")}
    assert judged(quiet)[:2] == ["a lone talker's level changes by more than 1.5 dB", ""]
    other = found | {"student": rng.standard_normal(6 * RATE).astype(np.float32)}
    assert judged(other)[:2] == ["agreement below 5"] * 2
    broken = found | {"teacher": np.full(6 * RATE, np.nan, np.float32)}
    assert all(judged(broken)[:2])


def test_a_short_rest_is_left_out(rng: np.random.Generator) -> None:
    found = {name: wave[: round(4.9 * RATE)] for name, wave in waves(rng).items()}
    assert len(judged(found)) == 2


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Two scenes of which only microphone and far end are told."""
    from echofree.config.build import build_data
    from echofree.config.compose import compose
    from echofree.config.frozen import freeze

    words = ["data=synthetic", "data.num_train=2", "data.segment_s=8", "seed=1"]
    dataset = build_data(freeze(compose(words).config)).split("train")
    folder = tmp_path / "recordings"
    folder.mkdir()
    for index in range(2):
        clip = dataset.item(index, 0)
        for name in ("mic", "far"):
            sf.write(folder / f"{index}_{name}.wav", getattr(clip, name), RATE, subtype="FLOAT")
    return folder


def test_a_folder_to_train_on(recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("speechmos", reason="needs echofree[metrics]")
    from echofree.config.build import build_data
    from echofree.config.compose import compose
    from echofree.config.frozen import freeze

    out = tmp_path / "pseudo"
    words = ["teacher=tiny", "student=tiny", f"data.root={recordings}", f"out={out}", "piece_s=4"]
    loose = ["min_echo=0", "min_other=0", "max_change=100"]
    assert pseudo.main([*words, *loose]) == 0
    assert "train on it: python -m echofree.train data=folder" in capsys.readouterr().out
    rows = list(csv.DictReader((out / "pseudo.csv").read_text().splitlines()))
    kept = [row for row in rows if not row["left_out"]]
    assert len(rows) == 4
    assert len(kept) >= 2
    for row in kept:
        near, mic = (sf.read(out / f"{row['piece']}_{name}.flac")[0] for name in ("near", "mic"))
        assert len(near) == len(mic) == 4 * RATE
        assert 0 < np.square(near).mean() < np.square(mic).mean()
    given = ["data=folder", f"data.root={out}", "data.valid_fraction=0", "data.test_fraction=0"]
    dataset = build_data(freeze(compose(given).config)).split("train")
    assert len(dataset) == len(kept)
    assert dataset.item(0, 0).near is not None
    assert pseudo.main([*words, *loose]) == 2  # never into a folder that holds something
    assert f"out={out} is there already" in capsys.readouterr().err
    words[3] = f"out={tmp_path / 'none'}"
    assert pseudo.main([*words, "min_echo=5.1"]) == 1
    assert "nothing was kept" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_of_the_recipe(recordings: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """As experiments/README.md has them, with less data."""
    pytest.importorskip("speechmos", reason="needs echofree[metrics]")
    words = ["teacher=tiny", "student=tiny", f"data.root={recordings}", f"out={tmp_path / 'pseudo'}", "piece_s=4"]
    assert pseudo.main([*words, "min_echo=0", "min_other=0", "max_change=100"]) == 0
    train = ["data=folder", "data.root=pseudo", "init_from=tiny", "data.replay.share=0.5"]
    short = ["debug=quick", "train.batch_size=2", "data.valid_fraction=0", "data.test_fraction=0"]
    cli("train", *train, *short, "train.final_test=false", cwd=tmp_path).check()
    (run,) = (tmp_path / "outputs/debug").glob("*/run.json")
    assert json.loads(run.read_text())["status"] == "done"
