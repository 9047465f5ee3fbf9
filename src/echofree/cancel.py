"""python -m echofree.cancel: a microphone file and a far-end file in, the cleaned file out.

The recording runs through the model as a stream, so what is written is what a device would play; only the model's
latency is taken out again, and sample n of the output belongs to sample n of the microphone.

Legend: T samples at the model's rate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from echofree import audio
from echofree.errors import CheckpointError, ConfigError, DataError
from echofree.live import FORMATS, Live, as_live, check_rate, is_artifact, pipe
from echofree.verb import REQUIRED, Key, Words, composed, ending, help_asked, parse, show_help, warn

if TYPE_CHECKING:
    import torch

KEYS = {
    "model": Key(
        REQUIRED,
        "tiny, tiny_20ms (come trained), linear (a Kalman filter), a run directory, a checkpoint, an exported folder",
    ),
    "mic": Key(REQUIRED, "the microphone's file"),
    "far": Key("none", "the far end's file, as sent to the loudspeaker; none: the microphone is passed through"),
    "out": Key(REQUIRED, "where the cleaned file goes; its ending chooses the format"),
    "channel": Key("mean", "what to do with several channels: mean | first | a number from 0"),
    "device": Key("cpu", "cpu | cuda"),
    "progress": Key("auto", "auto | on | off"),
}
STREAM_KEYS = {
    "model": KEYS["model"],
    "stream": Key("true", "raw sound from stdin to stdout, as it comes; also spelled --stream"),
    "format": Key("s16", "s16 | f32: samples in and out, little endian; in: two channels, mic and far"),
    "rate": Key("none", "Hz of the sound; it must be the model's and is only checked"),
    "device": KEYS["device"],
}
NOTES = (
    "The files may have any rate, length and format: they are resampled to the model's rate and back, the far end is",
    "cut or filled up with silence to the microphone's length, and the output has the microphone's rate, length and",
    "encoding, one channel. Without a far end, or with a silent one, there is nothing to cancel and the output equals",
    "the microphone.",
    "",
    "With stream=true raw sound goes from stdin to stdout: two channels (mic, far) in, one out, late by the model's",
    "latency. Keys then: model, format (s16 | f32), rate, device. For example:",
    "  sox -M mic.wav far.wav -t raw -e signed -b 16 -r 16000 - | python -m echofree.cancel model=export/onnx --stream",
)
CHUNK_S = 1.0  # of audio per progress step
SILENT_POWER = 1e-9  # mean square below which (-90 dBFS) a far end plays nothing
SHORT_S = 0.2  # a recording below which a canceller that starts anew has learnt nothing
SAME_DB = 30.0  # microphone and far end that differ by less are one recording


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("cancel", KEYS, NOTES)
        return 0
    words = ["stream=true" if word == "--stream" else word for word in words]
    if "stream=true" in words:
        return ending(lambda: run_stream(parse(words, STREAM_KEYS)))
    words = [word for word in words if word != "stream=false"]
    return ending(lambda: run(parse(words, KEYS)), "interrupted, nothing was written")


def run(words: Words) -> None:
    """Reads, cancels, writes, reports. Files and keys are judged before the model is loaded."""
    mic_path, out_path = Path(words["mic"]), Path(words["out"])
    far_path = None if words.given("far") is None else Path(words["far"])
    channel: str | int = int(words["channel"]) if words["channel"].isdigit() else words["channel"]
    check_paths(mic_path, far_path, out_path)
    subtype = choose_subtype(out_path, audio.info(mic_path).subtype)
    mic, rate_hz = read(mic_path, channel)
    far = None
    if far_path is None:
        warn("no far end was given (far=...), so there is nothing to cancel: the output equals the microphone")
    else:
        far = read_far(far_path, channel, rate_hz, len(mic))
    if far is not None and np.mean(far**2) < SILENT_POWER:
        warn(f"{far_path} is silent, so there is nothing to cancel: the output equals the microphone")
        far = None
    if far is None:
        est = mic
    else:
        if nearly_equal(mic, far):
            warn(
                f"{mic_path} and {far_path} hold nearly the same recording: whatever is in both will be removed. "
                "Give the microphone as mic= and what the loudspeaker was sent as far="
            )
        est = cancel(load_model(words["model"], words["device"]), mic, far, rate_hz, words["progress"])
    clipped = audio.write(out_path, est, rate_hz, subtype)
    if clipped:
        warn(f"{clipped} samples of {out_path} exceeded full scale and were clipped")
    print(f"wrote {out_path}: {len(est) / rate_hz:.2f} s, {rate_hz} Hz, {subtype}")


def run_stream(words: Words) -> int:
    """Cancels stdin until it ends. -> the exit code; 0 also when nobody reads on"""
    if words["format"] not in FORMATS:
        raise ConfigError(f"format={words['format']}: give {' or '.join(FORMATS)}")
    live = as_live(load_model(words["model"], words["device"]))
    check_rate(live, words.given("rate"))
    late_ms = 1000 * live.latency_samples / live.sample_rate
    print(
        f"{live.sample_rate} Hz, {words['format']}, (mic, far) in; the output is late by {live.latency_samples} "
        f"samples ({late_ms:.0f} ms)",
        file=sys.stderr,
        flush=True,
    )
    try:
        pipe(live, words["format"])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains while it leaves
        return 0
    except KeyboardInterrupt:
        return 130
    for text in findings(live.flags()):
        warn(text)
    return 0


def check_paths(mic: Path, far: Path | None, out: Path) -> None:
    """Raises one error that holds every problem with the three files."""
    problems = []
    for key, path in (("mic", mic), ("far", far)):
        if path is None:
            continue
        try:
            audio.info(path)
        except DataError as error:
            problems.append(f"{key}={path}: {str(error).removeprefix(f'{path}: ')}")
        if out.exists() and path.exists() and out.samefile(path):
            problems.append(f"out={out} is the same file as {key}: give another name, the input would be lost")
    try:
        if out.is_dir():
            problems.append(f"out={out} is a directory. Give a file name, such as out={out / 'clean.wav'}")
        else:
            audio.writable_subtype(out, "PCM_16")
        if not out.absolute().parent.is_dir():
            problems.append(f"out={out}: the directory {out.parent} doesn't exist. Type: mkdir -p {out.parent}")
    except DataError as error:
        problems.append(f"out={error}")
    if problems:
        raise ConfigError(problems)


def choose_subtype(out: Path, wanted: str) -> str:
    """The microphone's encoding, or the nearest that the output's format can hold."""
    subtype = audio.writable_subtype(out, wanted)
    if subtype != wanted:
        warn(f"{out.suffix} can't hold {wanted} like the microphone's file: {subtype} is written")
    return subtype


def read(path: Path, channel: str | int) -> tuple[np.ndarray, int]:
    channels = audio.info(path).channels
    if channels > 1:
        print(f"{path} has {channels} channels: channel={channel} is used", file=sys.stderr)
    return audio.read(path, channel=channel)


def read_far(path: Path, channel: str | int, rate_hz: int, num_samples: int) -> np.ndarray:
    """The far end at the microphone's rate and length."""
    far, far_rate_hz = read(path, channel)
    far = audio.resample(far, far_rate_hz, rate_hz)
    if far_rate_hz != rate_hz:
        print(f"{path} has {far_rate_hz} Hz, the microphone {rate_hz} Hz: resampled", file=sys.stderr)
    if abs(len(far) - num_samples) > rate_hz // 100:
        what = "longer" if len(far) > num_samples else "shorter"
        done = "what is too much is left out" if what == "longer" else "the rest counts as silence"
        gap_s = abs(len(far) - num_samples) / rate_hz
        print(f"{path} is {gap_s:.2f} s {what} than the microphone: {done}", file=sys.stderr)
    return audio.fit(far, num_samples)


def nearly_equal(mic: np.ndarray, far: np.ndarray) -> bool:
    """Whether mic is a scaled copy of far, but for what lies 30 dB below."""
    scale = float(mic @ far) / max(float(far @ far), 1e-20)
    energy = float(mic @ mic)
    return energy > 0 and float(np.sum((mic - scale * far) ** 2)) < energy * 10 ** (-SAME_DB / 10)


def load_model(name: str, device: str) -> torch.nn.Module | Live:
    """A trained model or an exported one from a path, or an untrained one that has nothing to train from its name in
    conf/model.

    Raises:
        ConfigError, CheckpointError: neither, or a model whose weights were never trained.
    """
    if is_artifact(name):
        from echofree.runtime import Canceller

        if device != "cpu":
            raise ConfigError(f"device={device} is read for checkpoints only: an exported model runs on its own engine")
        return Canceller.load(name)
    import torch

    from echofree.shipped import named, names

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device={device}: give cpu" + (" or cuda" if torch.cuda.is_available() else ""))
    if Path(name).exists() or named(name):
        from echofree.checkpoint import load_model as load

        return load(name)[0].eval().to(device)
    if "/" in name:
        raise CheckpointError(f"model={name}: there is no such directory. Type the path of a run directory, or linear")
    from echofree.config.build import build_model

    model: torch.nn.Module = build_model(composed([f"model={name}"]))
    if any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            f"model={name} has to be trained first: python -m echofree.train model={name}, then give its run directory "
            f"(model=outputs/...). Trained already: {', '.join([*names(), 'linear'])}"
        )
    return model.eval().to(device)


def cancel(model: Any, mic: np.ndarray, far: np.ndarray, rate_hz: int, progress: str = "off") -> np.ndarray:
    """Runs a recording through a model as a stream.

    Args:
        model: see `contracts.Model`, in evaluation mode; or a `Live`, fresh.
        mic, far: float32, of one length.
        rate_hz: of both; they are resampled to the model's rate and back.
        progress: auto | on | off.

    Returns:
        float32, as long as mic and aligned with it.
    """
    from echofree.progress import Progress

    if not len(mic):
        return mic
    if len(mic) < SHORT_S * rate_hz:
        warn(
            f"{1000 * len(mic) / rate_hz:.0f} ms are too short to learn an echo from, and every call starts anew. "
            "Pieces of a recording belong into one stream: --stream, or one echofree.model.streaming.Stream for all"
        )
    live = as_live(model)
    mic_m, far_m = (audio.resample(x, rate_hz, live.sample_rate) for x in (mic, far))  # [T]
    if rate_hz != live.sample_rate:
        print(f"{rate_hz} Hz is resampled to the model's {live.sample_rate} Hz and back", file=sys.stderr)
    chunk, parts = round(CHUNK_S * live.sample_rate), []
    start = time.perf_counter()
    with Progress(-(-len(mic_m) // chunk), "cancel, seconds", progress) as bar:
        for at in range(0, len(mic_m), chunk):
            parts.append(live.process(mic_m[at : at + chunk], far_m[at : at + chunk]))
            bar.update(1)
    parts.append(live.flush())
    late = live.latency_samples
    est = np.concatenate(parts)[late : late + len(mic_m)].astype(np.float32)  # [T]
    took_s, length_s = time.perf_counter() - start, len(mic_m) / live.sample_rate
    print(f"{length_s:.2f} s of audio in {took_s:.2f} s: real-time factor {took_s / length_s:.3f}", file=sys.stderr)
    for text in findings(live.flags()):
        warn(text)
    if not np.isfinite(est).all():
        raise CheckpointError("the model's output holds NaN or infinite samples: its weights are broken")
    return audio.fit(audio.resample(est, live.sample_rate, rate_hz), len(mic))


def findings(flags: Mapping[str, Any]) -> list[str]:
    """What the linear front end, if the model has one, found wrong with the pair of recordings."""
    if not flags:
        return []
    texts = []
    if flags["negative_delay"]:
        texts.append(
            "the microphone is ahead of the far end, which can't be cancelled: the far end was captured too late. "
            "Delay the microphone, or take the far end earlier on its way to the loudspeaker"
        )
    if flags["drift"]:
        texts.append(
            f"the two clocks differ by {flags['drift_ppm']:.0f} ppm. The far end is resampled to fit, from some "
            "seconds on; with one clock for both it would have been cancelled from the start"
        )
    if flags["unexplained"]:
        texts.append(
            "the far end explains nothing of the microphone, so little was cancelled: is it the right file, and is its "
            "echo in the microphone at all?"
        )
    if flags["saturated"]:
        texts.append("the microphone clips: its echo is not linear there. Record with less gain")
    return texts


if __name__ == "__main__":
    sys.exit(main())
