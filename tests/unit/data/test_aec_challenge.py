from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echofree.contracts import Scenario
from echofree.data.aec_challenge import AecChallenge
from echofree.data.recording import Recordings
from echofree.errors import ConfigError, DataError

RATE = 16000
Write = Callable[..., Path]


def make_synthetic(write: Write, ids: list[int], rng: np.random.Generator, base: str = "datasets/synthetic") -> None:
    rows = []
    for number in ids:
        echo, near, noise = rng.standard_normal((3, RATE)) * 0.05
        scale = float(rng.uniform(0.2, 2.0))
        write(f"{base}/nearend_mic_signal/nearend_mic_fileid_{number}.wav", echo + scale * near + 0.1 * noise)
        write(f"{base}/farend_speech/farend_speech_fileid_{number}.wav", np.roll(echo, -50))
        write(f"{base}/nearend_speech/nearend_speech_fileid_{number}.wav", near)
        write(f"{base}/echo_signal/echo_fileid_{number}.wav", echo)
        rows.append(f"3,1,{number},{scale}\n")
    path = write(f"{base}/x.wav", np.ones(1))
    path.unlink()
    (path.parent / "meta.csv").write_text("ser,is_farend_noisy,fileid,nearend_scale\n" + "".join(rows))


def make_real(write: Write, rng: np.random.Generator) -> None:
    for name in ("Aa_farend_singletalk", "Aa_doubletalk_with_movement", "Bb_farend_singletalk_with_movement"):
        write(f"datasets/real/{name}_mic.wav", rng.standard_normal(RATE) * 0.1)
        write(f"datasets/real/{name}_lpb.wav", rng.standard_normal(RATE) * 0.1)
    write("datasets/real/Aa_nearend_singletalk_mic.wav", rng.standard_normal(RATE) * 0.1)
    for name in ("Aa_sweep_mic", "Aa_sweep_lpb", "Cc_doubletalk_enrl"):
        write(f"datasets/real/{name}.wav", rng.standard_normal(RATE) * 0.1)


def split(root: Path, name: str, **more: Any) -> Recordings:
    found = AecChallenge(str(root), **more).split(name)
    assert found is not None
    return found


def test_real_recordings(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    make_real(write, rng)
    data = split(tmp_path, "test")
    clips = {c.name.split("/")[-1]: c for c in (data.item(i, 0) for i in range(len(data)))}
    assert {name: c.scenario for name, c in clips.items()} == {
        "Aa_farend_singletalk": Scenario.FAR_END,
        "Aa_doubletalk_with_movement": Scenario.DOUBLE_TALK,
        "Bb_farend_singletalk_with_movement": Scenario.FAR_END,
        "Aa_nearend_singletalk": Scenario.NEAR_END,
    }
    assert not clips["Aa_nearend_singletalk"].far.any()
    assert all(c.near is None for c in clips.values())
    survey = AecChallenge(str(tmp_path)).survey()
    assert any(value.startswith("3 x a sweep or an enrolment clip") for _, value in survey)


def test_synthetic_targets_are_scaled_and_parts_add_up(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    make_synthetic(write, [3, 4], rng)
    data = split(tmp_path, "test")
    for i in range(2):
        clip = data.item(i, 0)
        assert clip.near is not None
        assert clip.noise is not None
        assert clip.mic == pytest.approx(clip.near + clip.echo + clip.noise, abs=1e-6)
        assert np.std(clip.noise) == pytest.approx(0.005, rel=0.1)  # the scale was applied: only the noise is left


def test_first_500_are_test_and_training_gets_all_scenarios(
    write: Write, tmp_path: Path, rng: np.random.Generator
) -> None:
    make_synthetic(write, [0, 499, *range(500, 560)], rng)
    test = split(tmp_path, "test", test_fraction=0.0)
    assert {r.name for r in test.recordings} == {f"datasets/synthetic/fileid_{i}" for i in (0, 499)}
    assert {test.item(i, 0).scenario for i in range(2)} == {Scenario.DOUBLE_TALK}
    train = split(tmp_path, "train", test_fraction=0.0, far_end_fraction=0.3, near_end_fraction=0.3)
    kinds = Counter(train.item(i, 0).scenario for i in range(len(train)))
    assert set(kinds) == {Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END}
    assert len(split(tmp_path, "valid", test_fraction=0.0)) == 3
    for i in range(len(train)):
        clip = train.item(i, 0)
        assert clip.near is not None
        assert bool(clip.near.any()) == (clip.scenario != Scenario.FAR_END)
        assert bool(clip.far.any()) == (clip.scenario != Scenario.NEAR_END)


def test_ids_that_one_side_lacks_are_reported(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    base = tmp_path / "datasets/synthetic"
    make_synthetic(write, [1, 2, 3, 4], rng)
    (base / "farend_speech/farend_speech_fileid_2.wav").unlink()
    lines = (base / "meta.csv").read_text().splitlines()
    (base / "meta.csv").write_text("\n".join([*lines[:3], lines[4], "1,1,99,0.5"]) + "\n")
    source = AecChallenge(str(tmp_path))
    reasons = [value for what, value in source.survey() if what == "left out"]
    assert sorted(reasons) == [
        "1 x synthetic: no far file (datasets/synthetic/fileid_2)",
        "1 x synthetic: no mic, far, near, echo file (datasets/synthetic/fileid_99)",
        "1 x synthetic: not in meta.csv (datasets/synthetic/fileid_3)",
    ]


def test_missing_table_or_column_is_told(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    make_synthetic(write, [1], rng)
    table = tmp_path / "datasets/synthetic/meta.csv"
    table.write_text("fileid,ser\n1,2\n")
    with pytest.raises(DataError, match="no column nearend_scale"):
        AecChallenge(str(tmp_path))
    table.write_text("fileid,nearend_scale\nx,2\n")
    with pytest.raises(DataError, match="line 2"):
        AecChallenge(str(tmp_path))
    table.unlink()
    with pytest.raises(DataError, match=r"meta\.csv: no such file"):
        AecChallenge(str(tmp_path))


def test_pointers_of_a_clone_without_lfs_are_told(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    make_real(write, rng)
    for path in (tmp_path / "datasets/real").glob("*.wav"):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 320044\n")
    with pytest.raises(DataError, match="git lfs pull"):
        AecChallenge(str(tmp_path))


def test_a_folder_of_something_else_is_refused(write: Write, tmp_path: Path) -> None:
    write("song.wav", np.ones(RATE))
    with pytest.raises(DataError, match="no recordings of the AEC challenge"):
        AecChallenge(str(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.kinds"):
        AecChallenge(str(tmp_path), kinds=["fullband"])
    with pytest.raises(ConfigError, match="far_end_fraction"):
        AecChallenge(str(tmp_path), far_end_fraction=0.8, near_end_fraction=0.5)
