"""Clips of a device's own echoes: the sum is right, the far end stays with its echo, nothing but the seed decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

from echofree.contracts import Scenario
from echofree.data.level import active_mask, frame_energy
from echofree.data.remix import LEAD_S, Remix, Stretch, read_stretches, write_stretches
from echofree.errors import ConfigError, DataError

RATE = 16000
DELAY_S = 0.06


@pytest.fixture
def recordings(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Two recordings of 4 s, the echo half the far end, 60 ms later."""
    rows = []
    for number in range(2):
        far = (rng.standard_normal(4 * RATE) * 0.1).astype(np.float32)
        late = round(DELAY_S * RATE)
        mic = np.float32(0.5) * np.concatenate([np.zeros(late, np.float32), far[:-late]])
        names = [str(tmp_path / f"{number}-{kind}.wav") for kind in ("mic", "far")]
        for name, wave in zip(names, (mic, far), strict=True):
            sf.write(name, wave, RATE, subtype="FLOAT")
        rows.append(Stretch(names[0], names[1], 1.0, 3.5, DELAY_S, "train"))
        rows.append(Stretch(names[0], names[1], 3.5, 4.0, DELAY_S, "valid"))
    path = tmp_path / "stretches.json"
    write_stretches(path, rows)
    assert read_stretches(str(path)) == rows
    return path


def source(path: Path, **more: Any) -> Remix:
    return Remix(str(path), RATE, **{"segment_s": 1.5, "num_train": 12, "num_valid": 3, "num_rooms": 8, **more})


def test_microphone_is_near_plus_the_devices_echo(recordings: Path) -> None:
    clips, seen = source(recordings, share=[0.4, 0.3, 0.3]).split("train"), set()
    assert clips is not None
    for index in range(12):
        clip = clips.item(index, 0)
        seen.add(clip.scenario)
        assert clip.near is not None
        assert clip.echo is not None
        assert len(clip.mic) == round(1.5 * RATE)
        assert clip.mic == pytest.approx(clip.near + clip.echo, abs=1e-6)
        assert np.abs(clip.mic).max() <= 1.0
        talks, echoes = clip.scenario != Scenario.FAR_END, clip.scenario != Scenario.NEAR_END
        assert (clip.near.any(), clip.echo.any(), clip.far.any()) == (talks, echoes, echoes)
    assert len(seen) == 3


def test_far_end_is_a_little_before_its_echo(recordings: Path) -> None:
    clips = source(recordings, share=[0.0, 1.0, 0.0], segment_s=1.0).split("train")
    assert clips is not None
    lead = round(LEAD_S * RATE)
    for index in range(6):
        clip = clips.item(index, 0)
        assert clip.echo is not None
        fits = np.abs(clip.echo[lead:] - 0.5 * clip.far[:-lead]) < 1e-6
        assert fits.mean() > 0.98  # at a seam the first 10 ms belong to the stretch before


def test_ratio_of_near_to_echo_is_the_one_drawn(recordings: Path) -> None:
    clips = source(recordings, share=[1.0, 0.0, 0.0], ser_db=[-7.0, -7.0]).split("train")
    assert clips is not None
    for index in range(4):
        clip = clips.item(index, 1)
        assert clip.near is not None
        assert clip.echo is not None
        near, echo = frame_energy(clip.near, RATE), frame_energy(clip.echo, RATE)
        both = active_mask(near) & active_mask(echo)
        assert 10 * np.log10(near[both].sum() / echo[both].sum()) == pytest.approx(-7.0, abs=0.2)


def test_items_depend_on_seed_epoch_and_index(recordings: Path) -> None:
    first, second, valid = (source(recordings).split(name) for name in ("train", "train", "valid"))
    assert first is not None
    assert second is not None
    assert valid is not None
    second.item(7, 2)
    assert np.array_equal(first.item(5, 2).mic, second.item(5, 2).mic)
    assert not np.array_equal(first.item(5, 2).mic, first.item(5, 3).mic)
    assert np.array_equal(valid.item(1, 0).mic, valid.item(1, 9).mic)
    assert source(recordings).fingerprint() == source(recordings).fingerprint()
    assert source(recordings, seed=1).fingerprint() != source(recordings).fingerprint()


def test_what_cant_be(tmp_path: Path, recordings: Path) -> None:
    with pytest.raises(DataError, match=r"data\.stretches isn't given"):
        Remix(None)
    with pytest.raises(DataError, match="can't be read"):
        Remix(str(tmp_path / "nothing.json"))
    with pytest.raises(ConfigError, match=r"data\.share"):
        source(recordings, share=[1.0])
    write_stretches(tmp_path / "empty.json", [])
    with pytest.raises(DataError, match="holds no stretch"):
        Remix(str(tmp_path / "empty.json"))
