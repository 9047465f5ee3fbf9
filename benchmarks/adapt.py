"""What `python -m echofree.adapt` brings on one device, and what it costs elsewhere.

    python benchmarks/adapt.py [--checkpoint tiny] [--recordings 24] [--seconds 15] [key=value ...]

The device is computed: one room, one loudspeaker that distorts and sounds through its case, and a gain control in the
microphone that can't be turned off, which takes most cancellers 10 dB. Nobody labels its recordings; in half of them
only the far end talks, in the others somebody answers. Words behind the options go to `adapt`. Target: at least 2 dB
more echo gone on stretches that were not trained on, at most 0.2 dB SI-SDR lost elsewhere. A refusal is told, with the
scores of all that was tried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import soundfile as sf

from echofree.contracts import Scenario
from echofree.data.synthetic import Synthetic

# One device: what varies from scene to scene elsewhere stands still.
DEVICE: dict[str, Any] = {
    "far_probability": [1.0, 0.0, 0.0],
    "playback_agc_probability": 0.0,
    "loudspeaker_eq_probability": 0.0,
    "loudspeaker_high_pass_hz": [380, 380],
    "loudspeaker_low_pass_hz": [5500, 5500],
    "distortion_probability": 1.0,
    "distortion_share": {"memory": 0.5, "volterra": 0.5},
    "structure_probability": 1.0,
    "structure_db": [-12, -12],
    "delay_ms": [60, 60],
    "no_delay_probability": 0.0,
    "long_delay_probability": 0.0,
    "delay_jump_probability": 0.0,
    "drift_probability": 0.0,
    "path_change_probability": 0.0,
    "noise_probability": 0.3,
    "mic_clip_probability": 0.0,
    "dc_probability": 0.0,
    "transmit_agc_probability": 1.0,
}


def record(folder: Path, count: int, seconds: float, seed: int) -> None:
    """Microphone and far end of `count` calls, half of them with a talker, as files."""
    for scenario, share in ((Scenario.FAR_END, [0.0, 1.0, 0.0, 0.0]), (Scenario.DOUBLE_TALK, [1.0, 0.0, 0.0, 0.0])):
        source = Synthetic(
            seed=seed, segment_s=seconds, num_train=count // 2, num_rooms=1,
            scene={**DEVICE, "scenario_probability": share},
        )  # fmt: skip
        scenes = source.split("train")
        assert scenes is not None
        for number in range(count // 2):
            clip = scenes.item(number, 0)
            name = f"call{number:02d}{scenario.name.lower()}"
            for part, wave in (("mic", clip.mic), ("ref", clip.far)):
                sf.write(str(folder / f"{name}_{part}.wav"), wave, source.sample_rate, subtype="FLOAT")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--recordings", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adapt-") as name:
        folder, out = Path(name) / "device", Path(name) / "out"
        folder.mkdir()
        record(folder, args.recordings, args.seconds, args.seed)
        began = time.perf_counter()
        command = [
            sys.executable, "-m", "echofree.adapt", f"checkpoint={args.checkpoint}", f"data.root={folder}",
            f"out={out}", *args.words,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        took = time.perf_counter() - began
        about = json.loads((out / "adapt.json").read_text())
    before, tried = about["before"], about["tried"]
    chosen = about["chosen"] or max(tried, key=lambda way: tried[way]["scores"]["device_erle"])
    after = tried[chosen]["scores"]
    print(
        json.dumps(
            {
                "exit_code": done.returncode,
                "way": chosen,
                "refused": tried[chosen]["problems"],
                "echo_s": about["seconds"],
                "took_s": took,
                "before": before,
                "after": after,
                "gain_db": after["device_erle"] - before["device_erle"],
                "lost_elsewhere_db": before["elsewhere_si_sdr"] - after["elsewhere_si_sdr"],
            }
        )
    )


if __name__ == "__main__":
    main()
