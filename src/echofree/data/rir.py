"""Room responses: a fast image-source method and a cached bank of rooms.

One room gives two echo paths (loudspeaker to microphone, moved a little between them) and two near-end paths
(talker to the same microphone). The direct path arrives at `round(distance / c * rate)`: no constant latency.
Images: Allen & Berkley, "Image method for efficiently simulating small-room acoustics", JASA 65 (1979), with the
order capped, image positions jittered against sweeping echoes, and an exponential noise tail beyond the cap.

Legend: R rooms, P paths of a room (0, 1 echo; 2, 3 near end), T samples, I images.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

SPEED_OF_SOUND = 343.0  # m/s
VERSION = 1  # of the bank; raise it when the responses change
NUM_ECHO, NUM_NEAR = 2, 2
# RT60 of 4,570 device recordings of the AEC challenge (share of rooms, seconds); the ends are ours.
RT60_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
RT60_S = (0.06, 0.08, 0.18, 0.28, 0.60, 1.34, 1.5)
SINC_HALF = 8  # taps on each side of a fractional arrival

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BankConfig:
    """What a bank holds.

    Attributes:
        num_rooms: rooms for training; validation and test get an eighth of that each (at least 4).
        sample_rate: Hz.
        length_s: seconds kept of each response.
        max_order: most reflections of an image.
        distance_m: loudspeaker to microphone, shortest and longest.
        near_distance_m: talker to microphone.
        seed: of the rooms; fixed, so that runs with different seeds share one bank.
    """

    num_rooms: int = 96
    sample_rate: int = 16000
    length_s: float = 0.6
    max_order: int = 10
    distance_m: tuple[float, float] = (0.03, 0.6)
    near_distance_m: tuple[float, float] = (0.3, 2.5)
    seed: int = 0

    @property
    def num_held_out(self) -> int:
        return max(4, self.num_rooms // 8)

    @property
    def total_rooms(self) -> int:
        return self.num_rooms + 2 * self.num_held_out

    def key(self) -> str:
        """Names the content: settings and version."""
        return hashlib.sha256(repr((VERSION, sorted(asdict(self).items()))).encode()).hexdigest()[:16]


@dataclass
class RoomBank:
    """Responses of many rooms.

    Attributes:
        taps: float16 [R, P, T], the direct path's tap is 1.
        direct: int32 [R, P], the index of the direct path in samples.
        rt60_s: float32 [R], the asked reverberation time.
        num_rooms, num_held_out: how the rooms are shared out: train, then valid, then test.
    """

    taps: np.ndarray
    direct: np.ndarray
    rt60_s: np.ndarray
    num_rooms: int
    num_held_out: int

    def rooms(self, split: str) -> range:
        """Room numbers of train, valid or test; no room is in two."""
        start = {"train": 0, "valid": self.num_rooms, "test": self.num_rooms + self.num_held_out}[split]
        return range(start, start + (self.num_rooms if split == "train" else self.num_held_out))


def load_bank(config: BankConfig, folder: Path | None = None) -> RoomBank:
    """The bank from the cache, or built and put there. Any number of processes may call this at once.

    The cache is `folder`, else $ECHOFREE_CACHE, else ~/.cache/echofree. A cache that can't be written is said in the
    log and costs only time; a damaged file is built anew.
    """
    path = (folder or cache_folder()) / f"rooms-{config.key()}.npz"
    if path.exists():
        try:
            return _read(path, config)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            log.warning("%s: damaged room bank (%s), building it again.", path, error)
    bank = build_bank(config)
    try:
        _write(path, bank)
    except OSError as error:
        log.warning("%s: the room bank can't be cached (%s), so every run builds it.", path, error)
    return bank


def cache_folder() -> Path:
    """Where banks are kept."""
    given = os.environ.get("ECHOFREE_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "echofree"


def build_bank(config: BankConfig) -> RoomBank:
    """Draws and computes all rooms: a pure function of the config."""
    num_taps = round(config.length_s * config.sample_rate)
    shape = (config.total_rooms, NUM_ECHO + NUM_NEAR)
    taps = np.zeros((*shape, num_taps), dtype=np.float16)
    direct = np.zeros(shape, dtype=np.int32)
    rt60_s = np.zeros(config.total_rooms, dtype=np.float32)
    lattice = _lattice(config.max_order)
    for room in range(config.total_rooms):
        rng = np.random.default_rng((config.seed, room))
        # Stratified: few rooms still follow the measured quantiles, in every split.
        share = ((room * 0.6180339887) % 1.0 + rng.uniform(-0.02, 0.02)) % 1.0
        rt60_s[room] = np.interp(share, RT60_SHARES, RT60_S)
        size_m = rng.uniform((2.6, 2.4, 2.2), (7.0, 5.5, 3.2))
        mic, sources = _geometry(rng, size_m, config)
        for path, source in enumerate(sources):
            response, at = shoebox(rng, size_m, source, mic, float(rt60_s[room]), config.sample_rate, num_taps, lattice)
            taps[room, path], direct[room, path] = response, at
    return RoomBank(taps, direct, rt60_s, config.num_rooms, config.num_held_out)


def shoebox(
    rng: np.random.Generator,
    size_m: np.ndarray,
    source: np.ndarray,
    mic: np.ndarray,
    rt60_s: float,
    rate_hz: int,
    num_taps: int,
    lattice: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, int]:
    """One response of a box-shaped room.

    Args:
        size_m, source, mic: [3] metres.
        rt60_s: reverberation time that the wall absorption (Eyring) and the tail follow.
        lattice: of `_lattice`, when many responses share it.

    Returns:
        (float32 [num_taps] scaled so that the direct path's tap is 1, index of the direct path).
    """
    parity, shift, order = _unpack(lattice or _lattice(10))
    images = (1 - 2 * parity) * source + 2 * shift * size_m  # [I, 3]
    images = images + np.where(order[:, None] > 0, rng.uniform(-0.02, 0.02, images.shape), 0.0)
    distance = np.linalg.norm(images - mic, axis=1)  # [I]
    surface = 2 * (size_m[0] * size_m[1] + size_m[0] * size_m[2] + size_m[1] * size_m[2])
    log_reflection = -0.5 * 0.161 * np.prod(size_m) / (surface * rt60_s)  # Eyring, per reflection
    first = float(np.linalg.norm(source - mic))
    # Walls absorb more than Eyring in very dry rooms, so no image may beat the direct path.
    amplitude = first / np.maximum(distance, first) * np.exp(order * log_reflection)
    direct = round(first / SPEED_OF_SOUND * rate_hz)
    arrival = direct + (distance - first) / SPEED_OF_SOUND * rate_hz  # the direct path falls on a sample
    response = _place(arrival, amplitude, num_taps)  # [T]
    # Beyond this time the capped order misses images.
    complete = int(order.max() * size_m.min() / SPEED_OF_SOUND * rate_hz)
    response = _add_tail(rng, response, direct, complete, rt60_s, rate_hz)
    return (response / response[direct]).astype(np.float32), direct


def _geometry(rng: np.random.Generator, size_m: np.ndarray, config: BankConfig) -> tuple[np.ndarray, list[np.ndarray]]:
    """-> (microphone [3], 2 loudspeaker and 2 talker positions). The second loudspeaker position is the first, moved
    by 1 to 10 cm: what a hand or a laptop's lid does."""
    low, high = np.full(3, 0.35), size_m - 0.35
    mic = rng.uniform(low, high)
    mic[2] = rng.uniform(0.6, min(1.4, high[2]))
    reach = np.exp(rng.uniform(*np.log(config.distance_m)))
    speaker = _near_point(rng, mic, reach, low / 2, size_m - 0.15)
    moved = speaker + _direction(rng) * min(rng.uniform(0.01, 0.1), 0.5 * reach)
    talkers = [
        _near_point(rng, mic, np.exp(rng.uniform(*np.log(config.near_distance_m))), low / 2, size_m - 0.15)
        for _ in range(NUM_NEAR)
    ]
    return mic, [speaker, np.clip(moved, 0.05, size_m - 0.05), *talkers]


def _near_point(
    rng: np.random.Generator, center: np.ndarray, distance: float, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """A point at `distance` from `center`, inside the box; the distance shrinks when the box leaves no room."""
    for attempt in range(40):
        point = center + _direction(rng) * distance * 0.95**attempt
        if np.all(point >= low) and np.all(point <= high):
            return point
    return np.clip(center + distance * 0.1, low, high)


def _direction(rng: np.random.Generator) -> np.ndarray:
    """A unit vector [3]."""
    vector = rng.standard_normal(3)
    return vector / np.linalg.norm(vector)


def _lattice(max_order: int) -> tuple[np.ndarray, np.ndarray]:
    """All images of at most `max_order` reflections: -> (parity [I, 3] of 0 and 1, shift [I, 3] whole rooms)."""
    axis = np.arange(-(max_order // 2) - 1, max_order // 2 + 2)
    grid = np.stack(np.meshgrid(axis, axis, axis, [0, 1], [0, 1], [0, 1], indexing="ij"), -1).reshape(-1, 6)
    shift, parity = grid[:, :3], grid[:, 3:]
    keep = np.abs(2 * shift - parity).sum(axis=1) <= max_order
    return parity[keep].astype(np.float64), shift[keep].astype(np.float64)


def _unpack(lattice: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parity, shift = lattice
    return parity, shift, np.abs(2 * shift - parity).sum(axis=1)


def _place(arrival: np.ndarray, amplitude: np.ndarray, num_taps: int) -> np.ndarray:
    """Impulses [I] at fractional samples, as windowed sincs -> [num_taps]. Taps before 0 are cut off, images 80 dB
    below the loudest left out."""
    inside = (arrival < num_taps - SINC_HALF - 1) & (amplitude > 1e-4 * amplitude.max())
    arrival, amplitude = arrival[inside], amplitude[inside]
    whole = np.round(arrival).astype(np.int64)
    fraction = arrival - whole  # [I]
    offset = np.arange(-SINC_HALF, SINC_HALF + 1)
    distance = offset[None, :] - fraction[:, None]  # [I, taps]
    # sin(pi (k - f)) = -(-1)^k sin(pi f): one sine per image instead of one per tap.
    sign = np.where(offset % 2 == 0, -1.0, 1.0)
    small = np.abs(distance) < 1e-9
    kernel = sign * np.sin(np.pi * fraction)[:, None] / (np.pi * np.where(small, 1.0, distance))
    kernel = np.where(small, 1.0, kernel) * (1.0 - np.square(distance / (SINC_HALF + 1))) ** 2
    index = whole[:, None] + offset[None, :] + SINC_HALF
    out = np.bincount(index.ravel(), (kernel * amplitude[:, None]).ravel(), num_taps + 2 * SINC_HALF + 1)
    return out[SINC_HALF : SINC_HALF + num_taps]


def _add_tail(
    rng: np.random.Generator, response: np.ndarray, direct: int, complete: int, rt60_s: float, rate_hz: int
) -> np.ndarray:
    """Fades from the images to decaying noise around the sample `complete`, without a step in level."""
    num_taps = len(response)
    time = np.arange(num_taps)
    decay = np.exp(-3.0 * np.log(10.0) * (time - direct) / (rt60_s * rate_hz))  # amplitude, -60 dB after rt60
    start, end = int(0.6 * complete), min(complete, num_taps)
    window = slice(max(direct + 1, start // 2), max(direct + 2, end))
    level = np.sqrt(np.mean((response[window] / decay[window]) ** 2))
    fade = np.clip((time - start) / max(end - start, 1), 0.0, 1.0)
    spectrum = np.fft.rfft(rng.standard_normal(num_taps))
    freq_hz = np.fft.rfftfreq(num_taps, 1.0 / rate_hz)
    corner_hz = rng.uniform(2000.0, 7000.0)  # air and walls take the highs first
    spectrum *= (freq_hz > 60.0) / np.sqrt(1.0 + (freq_hz / corner_hz) ** 2)
    noise = np.fft.irfft(spectrum, num_taps)
    noise *= level / max(np.std(noise), 1e-12)
    out = response * np.sqrt(1.0 - fade) + noise * decay * np.sqrt(fade)
    end_fade = min(num_taps, round(0.03 * rate_hz))
    out[num_taps - end_fade :] *= np.cos(np.linspace(0.0, np.pi / 2, end_fade)) ** 2
    return out


def _write(path: Path, bank: RoomBank) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, taps=bank.taps, direct=bank.direct, rt60_s=bank.rt60_s)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path, config: BankConfig) -> RoomBank:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
        bank = RoomBank(data["taps"], data["direct"], data["rt60_s"], config.num_rooms, config.num_held_out)
    shape = (config.total_rooms, NUM_ECHO + NUM_NEAR, round(config.length_s * config.sample_rate))
    if bank.taps.shape != shape or bank.taps.dtype != np.float16 or bank.direct.shape != shape[:2]:
        raise ValueError(f"holds {bank.taps.dtype} {bank.taps.shape}, expected float16 {shape}")
    return bank
