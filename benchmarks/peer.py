"""Other cancellers as a program for `python -m echofree.evaluate`: SpeexDSP and WebRTC's AEC3.

    python -m echofree.evaluate data=folder data.root=DIR system.speex.command='python benchmarks/peer.py speex {list}'

speex: libspeexdsp (Debian: apt-get install libspeexdsp1), frames of 256, a tail of 400 ms; speex_res: the same with its
suppressor of residual echo and noise. webrtc: AEC3 with its high-pass, as the package livekit carries it (30 MB); a
third word names a folder that was made with

    pip install --no-deps --target FOLDER livekit protobuf aiofiles

All take 16 kHz. A line "mic far out" (tab separated) per clip in; a line of JSON with the processor time of each out.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import soundfile

RATE_HZ = 16000
SPEEX_FRAME, SPEEX_TAIL = 256, 6400
SET_SAMPLING_RATE = SET_ECHO_STATE = 24  # of the echo canceller and of the preprocessor; from the library's headers


def framed(wave: np.ndarray, size: int) -> np.ndarray:
    """int16 [T] -> [frames, size], filled up with zeros."""
    return np.pad(wave, (0, -len(wave) % size)).reshape(-1, size)


def speex(mic: np.ndarray, far: np.ndarray, residual: bool = False) -> np.ndarray:
    """int16 [T], [T] -> [T]."""
    name = ctypes.util.find_library("speexdsp")
    if name is None:
        raise ImportError("libspeexdsp isn't installed: apt-get install libspeexdsp1")
    library, samples = ctypes.CDLL(name), ctypes.POINTER(ctypes.c_int16)
    library.speex_echo_state_init.restype = library.speex_preprocess_state_init.restype = ctypes.c_void_p
    library.speex_echo_cancellation.argtypes = [ctypes.c_void_p, samples, samples, samples]
    library.speex_preprocess_run.argtypes = [ctypes.c_void_p, samples]
    for function in (library.speex_echo_ctl, library.speex_preprocess_ctl):
        function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    state = ctypes.c_void_p(library.speex_echo_state_init(SPEEX_FRAME, SPEEX_TAIL))
    library.speex_echo_ctl(state, SET_SAMPLING_RATE, ctypes.byref(ctypes.c_int(RATE_HZ)))
    after = ctypes.c_void_p(library.speex_preprocess_state_init(SPEEX_FRAME, RATE_HZ)) if residual else None
    if after:
        library.speex_preprocess_ctl(after, SET_ECHO_STATE, state)
    blocks = [framed(wave, SPEEX_FRAME) for wave in (mic, far)]
    out = np.zeros_like(blocks[0])
    for heard, played, left in zip(*blocks, out):
        library.speex_echo_cancellation(state, *(x.ctypes.data_as(samples) for x in (heard, played, left)))
        if after:
            library.speex_preprocess_run(after, left.ctypes.data_as(samples))
    return out.reshape(-1)[: len(mic)]


def webrtc(mic: np.ndarray, far: np.ndarray) -> np.ndarray:
    """int16 [T], [T] -> [T]."""
    from livekit.rtc import AudioFrame, AudioProcessingModule

    size = RATE_HZ // 100  # it takes 10 ms at a time
    module = AudioProcessingModule(echo_cancellation=True, high_pass_filter=True)
    parts = []
    for heard, played in zip(framed(mic, size), framed(far, size)):
        module.process_reverse_stream(AudioFrame(bytearray(played.tobytes()), RATE_HZ, 1, size))
        module.set_stream_delay_ms(0)
        frame = AudioFrame(bytearray(heard.tobytes()), RATE_HZ, 1, size)
        module.process_stream(frame)
        parts.append(np.frombuffer(bytes(frame.data), np.int16))
    return np.concatenate(parts)[: len(mic)]


PEERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "speex": speex,
    "speex_res": lambda mic, far: speex(mic, far, residual=True),
    "webrtc": webrtc,
}


def main() -> int:
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in PEERS:
        print(f"give one of {', '.join(PEERS)}, a list of files, and perhaps a folder of packages", file=sys.stderr)
        return 2
    sys.path += sys.argv[3:]  # behind ours, so that numpy stays the one that is there
    try:
        PEERS[sys.argv[1]](np.zeros(RATE_HZ, np.int16), np.zeros(RATE_HZ, np.int16))  # what it loads isn't its speed
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    with open(sys.argv[2], encoding="utf-8") as lines:
        for line in lines:
            *given, out = line.rstrip("\n").split("\t")
            (mic, rate), (far, _) = (soundfile.read(path, dtype="int16") for path in given)
            if rate != RATE_HZ:
                print(f"{given[0]} has {rate} Hz, {sys.argv[1]} is set up for {RATE_HZ}", file=sys.stderr)
                return 2
            begin = time.process_time()
            est = PEERS[sys.argv[1]](mic, far)
            print(json.dumps({"out": out, "cpu_s": time.process_time() - begin}), flush=True)
            soundfile.write(out, est, rate, "PCM_16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
