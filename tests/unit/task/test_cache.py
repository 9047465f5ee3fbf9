"""The cache of a teacher's outputs: what it gives back, what it refuses, and that it stays within its limit."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from echofree.errors import ConfigError
from echofree.task.cache import SUFFIX, Cache, decode, encode, key_of


def heard(rng: np.random.Generator, samples: int = 200) -> dict[str, np.ndarray]:
    return {
        "est": rng.standard_normal(samples).astype(np.float32),
        "latent": rng.standard_normal((3, 4)).astype(np.float32),
    }


def same(a: dict[str, np.ndarray] | None, b: dict[str, np.ndarray]) -> bool:
    return a is not None and list(a) == list(b) and all(np.array_equal(a[k], b[k]) for k in b)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob(f"*{SUFFIX}"))


def test_gives_back_the_same_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    cache, value = Cache(tmp_path, 1.0, "abc"), heard(rng)
    assert cache.get("00ff") is None
    assert cache.put("00ff", value)
    assert same(cache.get("00ff"), value)
    assert same(Cache(tmp_path, 1.0, "abc").get("00ff"), value)  # another process
    assert Cache(tmp_path, 1.0, "another teacher").get("00ff") is None
    assert (cache.hits, cache.misses) == (1, 1)


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-1], lambda b: b[:-9] + b"\x01" + b[-8:], lambda b: b"", lambda b: b[:9]]
)
def test_a_damaged_file_is_asked_again(
    spoil: object, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    cache, value = Cache(tmp_path, 1.0, "abc"), heard(rng)
    cache.put("00ff", value)
    path = cache.path("00ff")
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert cache.get("00ff") is None
    assert cache.put("00ff", value)
    assert same(cache.get("00ff"), value)


def test_a_flipped_bit_anywhere_in_the_values_is_seen(rng: np.random.Generator) -> None:
    body = bytearray(encode(heard(rng)))
    assert decode(bytes(body)) is not None
    body[int(rng.integers(len(body) - 800, len(body)))] ^= 1 << int(rng.integers(8))
    assert decode(bytes(body)) is None


def test_the_limit_holds(tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    one = len(encode(heard(rng)))
    cache = Cache(tmp_path, 3.5 * one / 1e6, "abc")
    with caplog.at_level(logging.WARNING):
        kept = [cache.put(f"{i:04x}", heard(rng)) for i in range(6)]
    assert kept == [True, True, True, False, False, False]
    assert size_of(tmp_path) == 3 * one
    assert sum("takes no more" in r.message for r in caplog.records) == 1
    cache.path("0001").unlink()  # by hand: a process that looks anew sees the room
    assert Cache(tmp_path, 3.5 * one / 1e6, "abc").put("0009", heard(rng))


def _fill(folder: str, limit_mb: float, seed: int) -> None:
    rng = np.random.default_rng(0)  # the same values everywhere: ranks agree about a clip
    values = {f"{i:04x}": heard(rng) for i in range(40)}
    order = np.random.default_rng(seed).permutation(list(values))
    cache = Cache(Path(folder), limit_mb, "abc")
    for key in order:
        if cache.get(str(key)) is None:
            cache.put(str(key), values[str(key)])


def test_many_processes_share_it(tmp_path: Path) -> None:
    one = len(encode(heard(np.random.default_rng(0))))
    limit_mb = 30.5 * one / 1e6
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fill, args=(str(tmp_path), limit_mb, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert size_of(tmp_path) <= limit_mb * 1e6
    files = list(tmp_path.rglob(f"*{SUFFIX}"))
    assert len(files) == 30
    assert all(decode(path.read_bytes()) is not None for path in files)
    assert list(tmp_path.rglob("*.part")) == []


def test_a_folder_that_cant_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"task\.cache_dir"):
        Cache(tmp_path / "file", 1.0, "abc")


def test_a_key_is_about_the_samples(rng: np.random.Generator) -> None:
    mic, far = rng.standard_normal((2, 50)).astype(np.float32)
    key = key_of(mic, far, 16000, False)
    assert key_of(mic.copy(), far.copy(), 16000, False) == key
    other = mic.copy()
    other[-1] += np.float32(1e-6)
    for changed in (key_of(other, far, 16000, False), key_of(far, mic, 16000, False), key_of(mic, far, 8000, False)):
        assert changed != key
    assert key_of(mic, far, 16000, True) != key
