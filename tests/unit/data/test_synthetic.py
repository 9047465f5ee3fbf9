from __future__ import annotations

import hashlib
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from echofree.contracts import Clip, Dataset
from echofree.data.loader import eval_batches, eval_loader
from echofree.data.synthetic import Scenes, Synthetic
from echofree.errors import ConfigError, DataError

RATE = 16000
CONF = Path(__file__).resolve().parents[3] / "conf" / "data" / "synthetic.yaml"
SHORT: dict[str, Any] = {"segment_s": 1.0, "test_segment_s": 1.5, "num_rooms": 8}
SHORT |= {"num_train": 40, "num_valid": 6, "num_test": 6}


def split(name: str = "train", **more: Any) -> Scenes:
    found = Synthetic(**(SHORT | more)).split(name)
    assert found is not None
    return found


def digest(clip: Clip) -> str:
    waves = (clip.mic, clip.far, clip.near, clip.echo, clip.noise)
    text = b"".join(w.tobytes() for w in waves if w is not None)
    return hashlib.sha256(text + repr((clip.scenario, clip.delay_samples, clip.name, clip.seed)).encode()).hexdigest()


def _in_child(keys: list[tuple[int, int]]) -> list[str]:
    data = split()
    return [digest(data.item(i, e)) for i, e in keys]


def test_an_item_depends_on_seed_epoch_and_index_alone(rng: np.random.Generator) -> None:
    keys = [(i, e) for e in (0, 3) for i in range(8)]
    here = split()
    expected = {key: digest(here.item(*key)) for key in keys}
    mixed = [keys[k] for k in rng.permutation(len(keys))]
    with get_context("fork").Pool(2) as pool:
        for part, result in zip((mixed[::2], mixed[1::2]), pool.map(_in_child, [mixed[::2], mixed[1::2]])):
            assert result == [expected[key] for key in part]


def test_workers_do_not_matter() -> None:
    data = split("valid")
    batches = eval_batches(len(data), 2, 0, 1)
    alone, shared = (
        list(eval_loader(data, batches, num_workers=n, prefetch_factor=2, pin_memory=False)) for n in (0, 2)
    )
    assert len(alone) == 3
    for first, second in zip(alone, shared):
        assert first.name == second.name
        assert first.mic.equal(second.mic)
        assert first.far.equal(second.far)
        assert first.near.equal(second.near)


def test_seeds_epochs_indices_and_splits_all_differ() -> None:
    clips = [split(seed=s).item(i, e) for s in (0, 1) for e in (0, 1) for i in (0, 1, 2)]
    clips += [split(name).item(0, 0) for name in ("valid", "test")]
    assert len({c.seed for c in clips}) == len(clips)
    assert len({c.mic.tobytes() for c in clips}) == len(clips)


def test_first_random_gains_repeat_never() -> None:
    data = split()
    gains = [data.recipe(i, e).mic_peak_db for e in range(3) for i in range(40)]
    assert len(set(gains)) == len(gains)


def test_validation_and_test_are_the_same_in_every_epoch() -> None:
    for name in ("valid", "test"):
        data = split(name)
        assert digest(data.item(2, 0)) == digest(data.item(2, 5))
        assert "epoch" not in data.item(2, 5).name
    assert split().item(2, 5).name == "train/epoch 5/clip 2"


def test_lengths_and_counts_are_as_asked() -> None:
    for name, count, seconds in (("train", 40, 1.0), ("valid", 6, 1.0), ("test", 6, 1.5)):
        data = split(name)
        assert isinstance(data, Dataset)
        assert len(data) == count
        assert len(data.item(count - 1, 0).mic) == round(seconds * RATE)
        with pytest.raises(IndexError):
            data.item(count, 0)
    assert Synthetic(**(SHORT | {"num_valid": 0})).split("valid") is None


def test_splits_share_no_speech_file_and_no_room() -> None:
    pools = [split(name).maker.sources for name in ("train", "valid", "test")]
    rooms = [set(p.rooms.rooms) for p in pools]
    files = [{f for t in p.speech.talkers for f in t.paths} for p in pools]
    for sets in (rooms, files):
        assert sum(map(len, sets)) == len(set.union(*sets))


@pytest.mark.parametrize("rate", [8000, 48000])
def test_other_rates(rate: int) -> None:
    clip = split(sample_rate=rate).item(0, 0)
    assert len(clip.mic) == rate
    assert np.isfinite(clip.mic).all()


def test_conf_builds_the_defaults() -> None:
    keys = yaml.safe_load(CONF.read_text())
    for key in ("_target_", "num_workers", "prefetch_factor", "partition", "sampling", "replay"):  # read elsewhere
        assert key in keys
        del keys[key]
    keys["seed"] = 0
    written, default = Synthetic(**keys), Synthetic()
    assert written.fingerprint() == default.fingerprint()
    assert set(keys) == set(Synthetic.__init__.__annotations__) - {"return"}


def test_fingerprint_follows_settings_and_files(write: Callable[..., Path], tmp_path: Path) -> None:
    for k in range(6):
        write(f"speech/s{k}-0.wav", np.random.default_rng(k).standard_normal(4000) * 0.1)
    root = str(tmp_path / "speech")
    prints = [
        Synthetic(**SHORT).fingerprint(),
        Synthetic(**(SHORT | {"seed": 1})).fingerprint(),
        Synthetic(**(SHORT | {"scene": {"ser_db": [0, 1]}})).fingerprint(),
        Synthetic(**(SHORT | {"speech_root": root})).fingerprint(),
    ]
    write("speech/s6-0.wav", np.ones(4000) * 0.1)
    prints.append(Synthetic(**(SHORT | {"speech_root": root})).fingerprint())
    assert len(set(prints)) == 5
    assert Synthetic(**SHORT).fingerprint() == prints[0]


def test_survey_tells_what_there_is() -> None:
    rows = dict(Synthetic(**SHORT).survey())
    assert rows["train scenes"] == "40 x 1 s = 0.01 h"
    assert "double_talk 55 %" in rows["scenarios"]
    assert "train 8 files of 4 speakers" in rows["speech"]
    assert rows["noise"] == rows["rir"] == "built in"


def test_own_folders_are_used(write: Callable[..., Path], tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for k in range(6):
        write(f"speech/s{k}-0.flac", 0.1 * noise.standard_normal(3 * 8000), 8000)
        write(f"noise/n{k}.wav", 0.1 * np.sin(2 * np.pi * 3000 / RATE * np.arange(RATE)))
        response = np.zeros(400)
        response[100] = 1.0  # nothing but a travel time
        write(f"rir/room/r{k}.wav", response)
    roots = {f"{kind}_root": str(tmp_path / kind) for kind in ("speech", "noise", "rir")}
    scene = {
        "scenario_probability": [0, 0, 1, 0],
        "noise_probability": 1,
        "snr_db": [0, 0],
        "speech_varied_probability": 0,
    }
    data = split(**roots, scene=scene, noise_file_probability=1.0, rir_file_probability=1.0)
    clip = data.item(0, 0)
    assert clip.noise is not None
    spectrum = np.abs(np.fft.rfft(clip.noise)) ** 2
    assert spectrum[2990:3011].sum() / spectrum.sum() > 0.95
    room = data.maker.sources.rooms.draw(np.random.default_rng(0))
    assert np.count_nonzero(room.echo) == 1
    assert room.direct == 8
    assert all("speech" in str(p) for t in data.maker.sources.speech.talkers for p in t.paths)


def test_survey_names_what_is_left_out(write: Callable[..., Path], tmp_path: Path) -> None:
    for k in range(30):
        write(f"speech/s{k}-0.wav", 0.1 * np.random.default_rng(k).standard_normal(8000))
    for k in range(12):
        (tmp_path / f"speech/s{k}-0.wav").write_text("hello")
    source = Synthetic(**(SHORT | {"speech_root": str(tmp_path / "speech"), "num_valid": 0, "num_test": 0}))
    rows = [value for what, value in source.survey() if what == "left out"]
    pool = source._find("train").speech
    assert len(pool.left_out) >= 10
    assert len(rows) == min(len(pool.left_out), 10) + (len(pool.left_out) > 10)
    assert all("can't be read as audio" in row for row in rows[:10])


def test_missing_folders_name_the_key(tmp_path: Path) -> None:
    for key in ("speech_root", "noise_root", "rir_root"):
        with pytest.raises(DataError, match=f"data.{key}="):
            split(**{key: str(tmp_path / "nowhere")})


def test_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Synthetic(seed=-1, num_train=-2, segment_s=0.0, sample_rate=16, noise_file_probability=2.0)
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError, match="Did you mean ser_db"):
        Synthetic(scene={"ser_bd": [0, 1]})
