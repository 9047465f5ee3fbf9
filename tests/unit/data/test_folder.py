from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import yaml

from echofree.contracts import Clip, Scenario
from echofree.data.folder import Folder
from echofree.data.recording import Reading, Recording, Recordings, segment_starts
from echofree.data.scan import label_offset
from echofree.errors import ConfigError, DataError

RATE = 16000
CONF = Path(__file__).resolve().parents[3] / "conf" / "data"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 9\n"
Write = Callable[..., Path]


@pytest.fixture
def triple(write: Write, rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """triple("a", seconds=2) writes a_mic, a_ref and a_near; -> [3, T], multiples of 1/32768."""

    def put(name: str, seconds: float = 2.0, rate: int = RATE, near_shift: int = 0, near: bool = True) -> np.ndarray:
        count = round(seconds * rate)
        far, talk = np.round(rng.standard_normal((2, count)) * 2000) / 32768
        mic = np.round((talk + 0.5 * np.roll(far, 100)) * 32768) / 32768
        write(f"{name}_mic.wav", mic, rate)
        write(f"{name}_ref.wav", far, rate)
        if near:
            write(f"{name}_near.wav", np.roll(talk, near_shift), rate)
        return np.stack([mic, far, talk]).astype(np.float32)

    return put


def everything(root: Path, **more: Any) -> Recordings:
    found = Folder(str(root), **more).split("all")
    assert found is not None
    return found


def left_out(source: Folder) -> str:
    return "\n".join(value for what, value in source.survey() if what == "left out")


def test_samples_come_through_unchanged_at_the_native_rate(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    mic, far, near = triple("a")
    clip = everything(tmp_path).item(0, 0)
    assert np.array_equal(clip.mic, mic)
    assert np.array_equal(clip.far, far)
    assert clip.near is not None
    assert np.array_equal(clip.near, near)
    assert clip.mic.dtype == np.float32
    assert clip.name == "a"
    assert clip.echo is None
    assert clip.scenario == Scenario.DOUBLE_TALK  # told from what is active


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_other_rates_keep_pitch_level_and_length(rate: int, write: Write, tmp_path: Path) -> None:
    time = np.arange(rate) / rate
    for role in ("mic", "ref"):
        write(f"a_dt_{role}.wav", 0.25 * np.sin(2 * np.pi * 1000 * time), rate)
    source = Folder(str(tmp_path))
    assert dict(source.survey())["rates"] == f"{rate} Hz: 1; read at 16000 Hz"
    data = source.split("test")
    assert data is not None
    clip = data.item(0, 0)
    assert len(clip.mic) == RATE
    slow = 0.25 * np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE)
    assert np.abs(clip.mic - slow)[200:-200].max() < 2e-3
    assert np.array_equal(clip.mic, clip.far)


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_every_encoding_means_the_same_samples(
    subtype: str, write: Write, tmp_path: Path, rng: np.random.Generator
) -> None:
    wave = np.round(rng.standard_normal(RATE) * 3000) / 32768
    write("a_fe_mic.wav", wave, RATE, subtype)
    write("a_fe_ref.wav", wave, RATE, subtype)
    assert np.array_equal(everything(tmp_path).item(0, 0).mic, wave.astype(np.float32))


def test_flac_and_wav_mix(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    wave = np.round(rng.standard_normal(RATE) * 3000) / 32768
    write("a_fe_mic.flac", wave)
    write("a_fe_lpb.wav", wave)
    clip = everything(tmp_path).item(0, 0)
    assert np.array_equal(clip.mic, clip.far)


def test_stereo_is_refused_until_a_policy_is_given(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    wave = np.round(rng.standard_normal((RATE, 2)) * 3000) / 32768
    write("a_fe_mic.wav", wave)
    write("a_fe_ref.wav", wave[:, 0])
    with pytest.raises(DataError, match=r"2 channels; say data\.channel=mean"):
        Folder(str(tmp_path))
    for channel, expected in (("mean", wave.mean(axis=1)), ("first", wave[:, 0]), (1, wave[:, 1])):
        clip = everything(tmp_path, channel=channel).item(0, 0) if channel != 1 else None
        if channel == 1:  # the mono far end has channel 0 only: it is taken as it is
            clip = everything(tmp_path, channel=1).item(0, 0)
        assert clip is not None
        assert clip.mic == pytest.approx(expected, abs=1e-6)
        assert np.array_equal(clip.far, wave[:, 0].astype(np.float32))
    with pytest.raises(DataError, match="2 channel"):
        Folder(str(tmp_path), channel=2)


@pytest.mark.parametrize("length", [4801, 16001, 16255, 16257])
def test_odd_lengths_keep_every_sample(length: int, write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    wave = np.round(rng.standard_normal(length) * 3000) / 32768
    write("a_fe_mic.wav", wave)
    write("a_fe_ref.wav", wave)
    assert np.array_equal(everything(tmp_path).item(0, 0).mic, wave.astype(np.float32))


@pytest.mark.parametrize(("length", "reason"), [(0, "holds no samples"), (1, "shorter than"), (255, "shorter than")])
def test_nothing_and_next_to_nothing_is_left_out(
    length: int, reason: str, write: Write, tmp_path: Path, triple: Callable[..., np.ndarray]
) -> None:
    triple("good")
    write("a_fe_mic.wav", np.ones(length) * 0.1)
    write("a_fe_ref.wav", np.ones(RATE) * 0.1)
    source = Folder(str(tmp_path))
    assert reason in left_out(source)
    assert "(a_fe)" in left_out(source)
    assert len(everything(tmp_path)) == 1


@pytest.mark.parametrize("extra", [-RATE, -1, 1, RATE])
def test_far_end_is_fitted_to_the_microphone_and_that_is_said(
    extra: int, write: Write, tmp_path: Path, rng: np.random.Generator
) -> None:
    mic = np.round(rng.standard_normal(2 * RATE) * 3000) / 32768
    far = np.round(rng.standard_normal(2 * RATE + extra) * 3000) / 32768
    write("a_fe_mic.wav", mic)
    write("a_fe_ref.wav", far)
    clip = everything(tmp_path).item(0, 0)
    assert len(clip.far) == len(clip.mic) == 2 * RATE
    both = min(len(far), len(mic))
    assert np.array_equal(clip.far[:both], far[:both].astype(np.float32))
    assert not clip.far[both:].any()
    if abs(extra) > 1:
        notes = [value for what, value in Folder(str(tmp_path)).survey() if what == "note"]
        assert notes == [
            "1 x far end shorter than the microphone: padded with zeros"
            if extra < 0
            else "1 x far end longer than the microphone: cut"
        ]


def test_everything_broken_is_left_out_counted_and_named(
    triple: Callable[..., np.ndarray], write: Write, tmp_path: Path, rng: np.random.Generator
) -> None:
    wave = rng.standard_normal(2 * RATE) * 0.1
    for name in ("good1", "good2", "alone", "lfs", "cut", "cutflac", "text", "mute", "shift"):
        triple(name, near_shift=-320 if name == "shift" else 0)
    (tmp_path / "alone_ref.wav").unlink()
    (tmp_path / "lfs_ref.wav").write_text(LFS)
    damaged = (tmp_path / "cut_mic.wav").read_bytes()
    (tmp_path / "cut_mic.wav").write_bytes(damaged[: len(damaged) // 2])
    (tmp_path / "cutflac_mic.wav").unlink()
    damaged = write("cutflac_mic.flac", wave).read_bytes()
    (tmp_path / "cutflac_mic.flac").write_bytes(damaged[: len(damaged) // 2])
    (tmp_path / "text_mic.wav").write_text("hello")
    write("mute_mic.wav", np.zeros(2 * RATE))
    write("quiet_fe_mic.wav", wave)
    write("quiet_fe_ref.wav", np.zeros(2 * RATE))
    source = Folder(str(tmp_path))
    text = left_out(source)
    for reason in (
        "no far-end file (alone)",
        "far: is a git-LFS pointer, not audio. Type: git lfs pull (lfs)",
        "mic: truncated",
        "(cut)",
        "(cutflac)",
        "mic: can't be read as audio",
        "mic: silent (mute)",
        "far: silent in a far_end recording (quiet_fe)",
        "near: 20 ms behind the microphone (shift)",
    ):
        # np.roll by -320 makes the near file early: the microphone lags it.
        reason = reason.replace("behind", "ahead of")
        assert reason in text, reason
    data = source.split("all")
    assert data is not None
    assert [data.item(i, 0).name for i in range(len(data))] == ["good1", "good2"]


def test_equal_reasons_are_counted_together(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    triple("good")
    for k in range(5):
        triple(f"x{k}")
        (tmp_path / f"x{k}_ref.wav").write_text(LFS)
    assert "5 x far: is a git-LFS pointer" in left_out(Folder(str(tmp_path)))
    assert "(x0, x1, x2 and 2 more)" in left_out(Folder(str(tmp_path)))


def test_a_set_of_shifted_targets_is_refused(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    for k in range(4):
        triple(f"x{k}", near_shift=320)
    with pytest.raises(DataError, match=r"in 4 of 4 recordings.*20 ms behind.*max_label_offset_ms"):
        Folder(str(tmp_path))
    assert len(everything(tmp_path, max_label_offset_ms=25.0)) == 4


def test_label_offset_has_its_sign(rng: np.random.Generator) -> None:
    near = rng.standard_normal(RATE).astype(np.float32)
    mic = np.concatenate([np.zeros(77, np.float32), near])[:RATE]
    offset, clarity = label_offset(near, mic, RATE)
    assert offset == 77
    assert clarity > 0.9
    assert label_offset(mic, near, RATE)[0] == -77
    assert label_offset(near, rng.standard_normal(RATE).astype(np.float32), RATE)[1] < 0.1


def test_near_end_without_loopback_gets_a_silent_far_end(write: Write, tmp_path: Path) -> None:
    write("a_nearend_singletalk_mic.wav", np.ones(RATE) * 0.1)
    clip = everything(tmp_path).item(0, 0)
    assert clip.scenario == Scenario.NEAR_END
    assert not clip.far.any()
    assert clip.near is None


def test_far_end_recordings_can_be_trained_on_when_said(write: Write, tmp_path: Path) -> None:
    for k in range(4):
        write(f"a{k}_fe_mic.wav", np.ones(RATE) * 0.1)
        write(f"a{k}_fe_ref.wav", np.ones(RATE) * 0.1)
    assert Folder(str(tmp_path)).split("train") is None
    train = Folder(str(tmp_path), silent_near=True).split("train")
    assert train is not None
    clip = train.item(0, 0)
    assert clip.near is not None
    assert not clip.near.any()


def test_missing_or_empty_root_names_key_and_path(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DataError, match=rf"data\.root={tmp_path}/no: no such folder"):
        Folder(str(tmp_path / "no"))
    with pytest.raises(DataError, match=r"data\.root=.*no audio files"):
        Folder(str(tmp_path))
    with pytest.raises(DataError, match=r"data\.root isn't given"):
        Folder(None)
    write("a_mic.wav", np.ones(RATE) * 0.1)
    with pytest.raises(DataError, match=r"(?s)data\.root=.*nothing in it can be used.*1 x no far-end file \(a\)"):
        Folder(str(tmp_path))


def test_splits_are_disjoint_repeatable_and_cover(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    for k in range(20):
        triple(f"r{k:02d}", seconds=0.5)
    source = Folder(str(tmp_path))
    names = {}
    for name in ("train", "valid", "test"):
        data = source.split(name)
        assert data is not None
        names[name] = {r.name for r in data.recordings}
    assert [len(n) for n in names.values()] == [16, 2, 2]
    assert len(set.union(*names.values())) == 20
    again = Folder(str(tmp_path)).split("test")
    assert again is not None
    assert {r.name for r in again.recordings} == names["test"]
    only_test = Folder(str(tmp_path), test_fraction=1.0)
    assert only_test.split("train") is None
    assert len(only_test.split("test") or []) == 20


def test_sub_folders_decide_the_split(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/c", "test/d"):
        triple(name, seconds=0.5)
    source = Folder(str(tmp_path))
    found = {
        name: [r.name for r in (source.split(name) or everything(tmp_path)).recordings] for name in ("valid", "test")
    }
    assert found == {"valid": ["val/c"], "test": ["test/d"]}
    assert len(source.split("train") or []) == 2


def test_segments_cover_a_long_file(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    mic, _, near = triple("train/a", seconds=5.0)
    train = Folder(str(tmp_path), segment_s=2.0).split("train")
    assert train is not None
    clips = [train.item(i, e) for e in (0, 1) for i in range(len(train))]
    assert [c.name for c in clips[:3]] == ["train/a at 0.00 s", "train/a at 2.00 s", "train/a at 3.00 s"]
    assert [c.index for c in clips[:3]] == [0, 1, 2]
    for clip, start in zip(clips, (0, 2, 3, 0, 2, 3)):
        part = slice(start * RATE, (start + 2) * RATE)
        assert np.array_equal(clip.mic, mic[part])
        assert clip.near is not None
        assert np.array_equal(clip.near, near[part])
    overlapping = Folder(str(tmp_path), segment_s=2.0, hop_s=0.5).split("train")
    assert len(overlapping or []) == 7


@pytest.mark.parametrize(
    ("span", "expected"),
    [((0, 1), [0]), ((0, 2), [0]), ((0, 4), [0, 2]), ((0, 4.5), [0, 2, 2.5]), ((1, 3.5), [1, 1.5])],
)
def test_segment_starts(span: tuple[float, float], expected: list[float]) -> None:
    assert segment_starts(*span, 2.0, 2.0) == pytest.approx(expected)


def test_cases_hear_the_recording_from_its_start(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    mic, far = (np.round(rng.standard_normal((2, 6 * RATE)) * 3000) / 32768).astype(np.float32)
    write("k_mic.wav", mic)
    write("k_ref.wav", far)
    rows = "k_fe,fe,k_mic.wav,k_ref.wav,,0,2\nk_ne,ne,k_mic.wav,k_ref.wav,,2,4\nk_dt,dt,k_mic.wav,k_ref.wav,,4.5,\n"
    (tmp_path / "cases.csv").write_text("id,scenario,mic,ref,near,start_s,end_s\n" + rows)
    data = Folder(str(tmp_path)).split("test")
    assert data is not None
    clips = [data.item(i, 0) for i in range(3)]
    assert [c.scenario for c in clips] == [Scenario.FAR_END, Scenario.NEAR_END, Scenario.DOUBLE_TALK]
    assert [len(c.mic) / RATE for c in clips] == [2, 4, 6]
    assert np.array_equal(clips[1].mic, mic[: 4 * RATE])
    assert [data.stretch(i) for i in range(3)] == [(0, 2 * RATE), (2 * RATE, 4 * RATE), (72000, 6 * RATE)]
    by_name = Folder(str(tmp_path), cases=None).split("all")
    assert by_name is not None
    assert [r.name for r in by_name.recordings] == ["k"]


def test_a_file_lost_after_the_scan_does_not_end_an_epoch(
    triple: Callable[..., np.ndarray], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    triple("a")
    data = everything(tmp_path)
    (tmp_path / "a_mic.wav").unlink()
    with caplog.at_level(logging.WARNING):
        clip = data.item(0, 0)
    assert "a: skipped" in caplog.text
    assert len(clip.mic) == 2 * RATE
    assert not clip.mic.any()
    assert clip.scenario == Scenario.SILENCE


def test_headers_alone_find_less_but_never_crash(
    triple: Callable[..., np.ndarray], write: Write, tmp_path: Path
) -> None:
    triple("a")
    write("a_mic.wav", np.zeros(2 * RATE))
    data = everything(tmp_path, decode=False)
    assert len(data) == 1
    assert data.item(0, 0).scenario == Scenario.UNKNOWN


def test_fingerprint_follows_files_and_settings(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    triple("a")
    first = Folder(str(tmp_path)).fingerprint()
    assert Folder(str(tmp_path)).fingerprint() == first
    assert Folder(str(tmp_path), segment_s=3.0).fingerprint() != first
    triple("b")
    assert Folder(str(tmp_path)).fingerprint() != first


def test_mistakes_are_told_together(triple: Callable[..., np.ndarray], tmp_path: Path) -> None:
    triple("a")
    with pytest.raises(ConfigError) as caught:
        Folder(str(tmp_path), sample_rate=1, channel="left", segment_s=0.1, hop_s=-1.0, valid_fraction=2.0)
    assert len(caught.value.problems) == 5


def test_parts_of_a_mixture_add_up(write: Write, tmp_path: Path, rng: np.random.Generator) -> None:
    near, echo, noise = rng.standard_normal((3, RATE)).astype(np.float32) * 0.05
    for name, wave in (("mic", 0.5 * near + echo + noise), ("far", echo), ("near", near), ("echo", echo)):
        write(f"{name}.wav", wave, RATE, "FLOAT")
    files = {name: tmp_path / f"{name}.wav" for name in ("mic", "far", "near", "echo")}
    base: dict[str, Any] = files | {"scenario": Scenario.DOUBLE_TALK, "near_scale": 0.5, "duration_s": 1.0}

    def item(**more: Any) -> Clip:
        return Recordings([Recording("a", **base, **more)], Reading(RATE)).item(0, 0)

    clip = item()
    assert clip.near == pytest.approx(0.5 * near, abs=1e-7)
    assert clip.noise == pytest.approx(noise, abs=1e-6)
    far_end = item(only=Scenario.FAR_END)
    assert far_end.scenario == Scenario.FAR_END
    assert far_end.mic == pytest.approx(echo + noise, abs=1e-6)
    assert not far_end.near.any()  # type: ignore[union-attr]
    near_end = item(only=Scenario.NEAR_END)
    assert near_end.mic == pytest.approx(0.5 * near + noise, abs=1e-6)
    assert not near_end.far.any()
    assert not near_end.echo.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["folder", "aec_challenge"])
def test_conf_states_every_key_with_its_default(name: str) -> None:
    import importlib
    import inspect

    keys = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    module, _, target = keys.pop("_target_").rpartition(".")
    signature = inspect.signature(getattr(importlib.import_module(module), target))
    for read_elsewhere in ("num_workers", "prefetch_factor", "partition", "sampling", "replay"):
        del keys[read_elsewhere]
    assert set(keys) == set(signature.parameters)
    for key, value in keys.items():
        default = signature.parameters[key].default
        expected = None if default is inspect.Parameter.empty else default
        assert (tuple(value) if isinstance(value, list) else value) == expected, key


def test_real_recordings_are_all_read(shared_audio: Path) -> None:
    source = Folder(str(shared_audio / "real"))
    data = source.split("test")
    assert data is not None
    assert len(data) == 21
    assert source.split("train") is None
    assert "9 double_talk, 7 far_end, 5 near_end" in dict(source.survey())["test"]
    for i in range(len(data)):
        clip, (first, stop) = data.item(i, 0), data.stretch(i)
        header = sf.info(str(data.recordings[i].mic))
        assert 0 <= first < stop <= len(clip.mic) <= header.frames
        assert clip.mic[first:stop].any()


def test_synthetic_mixtures_are_aligned(shared_audio: Path) -> None:
    source = Folder(str(shared_audio / "synthetic"), test_fraction=1.0)
    data = source.split("test")
    assert data is not None
    assert len(data) == 48
    assert not left_out(source)
