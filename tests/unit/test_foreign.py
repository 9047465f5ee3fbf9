"""Other programs and folders of outputs, asked clip by clip; what they do wrong is a clip's problem or a refusal."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from echofree import audio
from echofree.contracts import Clip, Scenario
from echofree.errors import ConfigError
from echofree.foreign import Outputs, Program, parse, program_name, read

RATE_HZ = 16000
HALVES = """
import json, sys
import numpy as np, soundfile as sf
jobs = [sys.argv[1:]] if len(sys.argv) > 2 else [line.rstrip("\\n").split("\\t") for line in open(sys.argv[1])]
for mic, far, out in jobs:
    x, rate = sf.read(mic)
    sf.write(out, 0.5 * x - sf.read(far)[0], rate, subtype="FLOAT")
    if len(sys.argv) == 2:
        print(json.dumps({"out": out, "cpu_s": 0.25}))
"""


class Clips:
    sample_rate = RATE_HZ

    def __init__(self, rng: np.random.Generator, count: int = 3):
        self.waves = (0.1 * rng.standard_normal((count, 2, 8000))).astype(np.float32)

    def __len__(self) -> int:
        return len(self.waves)

    def item(self, index: int, epoch: int) -> Clip:
        mic, far = self.waves[index]
        return Clip(mic, far, None, scenario=Scenario.DOUBLE_TALK, name=f"room a/clip {index}", index=index)


@pytest.fixture
def clips(rng):
    return Clips(rng)


@pytest.fixture
def halves(tmp_path) -> Path:
    path = tmp_path / "halves.py"
    path.write_text(HALVES)
    return path


@pytest.mark.parametrize("places", ["{mic} {far} {out}", "{mic} {ref} {out}", "{list}"])
def test_a_program_hears_what_a_model_hears(places, clips, halves, tmp_path):
    program = Program(f"{sys.executable} {halves} {places}", clips, len(clips), tmp_path / "files")
    for index in (2, 0, 2):
        clip = clips.item(index, 0)
        est, rtf = program.est(index, clip)
        np.testing.assert_allclose(est, 0.5 * clip.mic - clip.far, atol=3e-5)  # 16 bits in
        assert rtf == 0.5 if places == "{list}" else rtf >= 0


def test_what_a_program_does_wrong_is_said(clips, tmp_path):
    def made(text: str) -> Program:
        script = tmp_path / "wrong.py"
        script.write_text(text)
        return Program(f"{sys.executable} {script} {{mic}} {{out}}", clips, 1, tmp_path / "files", timeout_s=20)

    with pytest.raises(ConfigError, match=r"exit code 3: no licence"):
        made("import sys; print('no licence', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ConfigError, match="wrote no"):
        made("print('done')")
    late = made("import shutil, sys\nif 'trial' in sys.argv[1]: shutil.copy(*sys.argv[1:])\nelse: sys.exit(9)")
    with pytest.raises(RuntimeError, match="exit code 9"):
        late.est(0, clips.item(0, 0))


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("cat {mic}", "say where the files go"),
        ("cat {mic} {wav} {out}", "{wav} is no place"),
        ("no_such_program {mic} {far} {out}", "no program 'no_such_program'"),
        ("cat '{mic} {out}", "quotation"),
    ],
)
def test_commands_that_cant_be(command, text):
    with pytest.raises(ConfigError, match=text):
        parse(command)


def test_names_of_programs():
    assert program_name("/usr/bin/speexdsp {mic} {far} {out}") == "speexdsp"
    assert program_name("/a/b/python3 -u my/nlms.py --mu=1 {list}") == "nlms"
    assert program_name("env A=1 aec3 {mic} {far} {out}") == "aec3"


def test_a_folder_of_outputs(clips, tmp_path):
    folder = tmp_path / "outputs"
    (folder / "deep").mkdir(parents=True)
    audio.write(folder / "deep" / "room_a_clip_1.wav", clips.waves[1, 1], RATE_HZ, "FLOAT")
    outputs = Outputs(folder, clips, len(clips))
    np.testing.assert_array_equal(outputs.est(1, clips.item(1, 0))[0], clips.waves[1, 1])
    with pytest.raises(RuntimeError, match=r"room_a_clip_0\.wav"):
        outputs.est(0, clips.item(0, 0))
    with pytest.raises(ConfigError, match="no such folder"):
        Outputs(tmp_path / "gone", clips, 1)


def test_files_are_found_by_the_microphones_name(clips, tmp_path):
    class Named(Clips):
        def mic_path(self, index: int) -> Path:
            return Path(f"/data/case{index}_mic.flac")

    named = Named(np.random.default_rng(0))
    folder = tmp_path / "outputs"
    folder.mkdir()
    audio.write(folder / "other.wav", named.waves[0, 0], RATE_HZ, "FLOAT")
    with pytest.raises(ConfigError, match=r"case0_mic\.wav or case0\.wav"):
        Outputs(folder, named, 3)
    for index, name in enumerate(("case0_mic.flac", "case1.wav", "case2_enh.wav")):
        audio.write(folder / name, 0.1 * named.waves[index, 0], RATE_HZ, "PCM_16")
    outputs = Outputs(folder, named, 3)
    for index in range(3):
        np.testing.assert_allclose(outputs.est(index, named.item(index, 0))[0], 0.1 * named.waves[index, 0], atol=4e-5)


def test_lengths_and_rates(rng, tmp_path):
    wave = (0.1 * rng.standard_normal(16000)).astype(np.float32)
    audio.write(tmp_path / "a.wav", wave, RATE_HZ, "FLOAT")
    assert len(read(tmp_path / "a.wav", RATE_HZ, 15000)) == 15000
    padded = read(tmp_path / "a.wav", RATE_HZ, 18000)
    np.testing.assert_array_equal(padded[16000:], 0)
    with pytest.raises(RuntimeError, match=r"1\.00 s, the microphone 2\.00 s"):
        read(tmp_path / "a.wav", RATE_HZ, 32000)
    assert len(read(tmp_path / "a.wav", 8000, 8000)) == 8000
