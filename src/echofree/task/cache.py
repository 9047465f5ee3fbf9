"""What a teacher said about a clip, on disk, so that it is asked once and not in every epoch and run.

A file's name is a hash over the clip's own samples, so that no other data, seed or augmentation can ever be given its
answer; the folder above is the teacher's fingerprint. Files appear whole or not at all and carry a checksum; any number
of ranks, runs and machines may share a folder. It never grows beyond its limit: what doesn't fit is computed each time.

Layout of a file: MAGIC, 4 bytes of header length, the header (JSON: checksum, names and shapes), float32 values.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from echofree.errors import ConfigError

log = logging.getLogger("echofree")

MAGIC = b"EFTC1\n"
SUFFIX = ".heard"
SIZE = "size"  # bytes of all files, written under a lock
Heard = dict[str, np.ndarray]  # float32 by name


class Cache:
    """The outputs of one teacher.

    Args:
        folder: shared by all teachers.
        limit_mb: of the folder.
        teacher: its fingerprint.

    Raises:
        ConfigError: the folder can't be made or written.
    """

    def __init__(self, folder: Path, limit_mb: float, teacher: str):
        self.root, self.limit, self.folder = folder, int(limit_mb * 1e6), folder / teacher
        self.hits = self.misses = 0
        self._told, self._counted = False, False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.root / SIZE).touch()
        except OSError as error:
            raise ConfigError(
                f"task.cache_dir={folder}: can't be written ({error.strerror}). Type another folder, or "
                "task.cache_dir=null to ask the teacher each time"
            ) from error

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"

    def get(self, key: str) -> Heard | None:
        """What is known under this key; None when nothing is, or when the file is damaged, which is told."""
        path = self.path(key)
        try:
            body = path.read_bytes()
        except OSError:
            body = b""
        found = decode(body) if body else None
        if body and found is None:
            log.warning("%s is damaged: the teacher is asked again", path)
        self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
        return found

    def put(self, key: str, heard: Mapping[str, np.ndarray]) -> bool:
        """Keeps it; -> whether it is there now. A full folder or disk is told once and ends nothing."""
        path, body = self.path(key), encode(heard)
        part = path.with_name(f".{uuid.uuid4().hex}.part")
        try:
            with self._total() as total:
                old = path.stat().st_size if path.exists() else 0
                if not self._fits(total, len(body) - old):
                    self._tell(f"it holds {self.limit / 1e6:g} MB (task.cache_mb)")
                    return False
                path.parent.mkdir(exist_ok=True)
                part.write_bytes(body)
                os.replace(part, path)
                total[0] += len(body) - old
        except OSError as error:
            self._tell(str(error))
            part.unlink(missing_ok=True)
            return False
        return True

    def _tell(self, why: str) -> None:
        if not self._told:
            log.warning("%s takes no more: %s; what isn't in it is computed each time", self.root, why)
        self._told = True

    def _fits(self, total: list[int], count: int) -> bool:
        if total[0] + count > self.limit and not self._counted:  # files may have been removed by hand
            total[0], self._counted = _bytes_in(self.root), True
        return total[0] + count <= self.limit

    @contextmanager
    def _total(self) -> Iterator[list[int]]:
        """The number of bytes in the folder. While it is held nobody else writes."""
        with open(self.root / SIZE, "a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read().strip()
            total = [int(text) if text.isdigit() else _bytes_in(self.root)]
            yield total
            file.seek(0)
            file.truncate()
            file.write(str(total[0]))


def key_of(mic: np.ndarray, far: np.ndarray, rate_hz: int, latent: bool) -> str:
    """32 hex digits over a clip's float32 samples, without padding, and over what is asked."""
    digest = hashlib.blake2b(f"{rate_hz} {latent} {len(mic)}".encode(), digest_size=16)
    for wave in (mic, far):
        digest.update(np.ascontiguousarray(wave, np.float32).data)
    return digest.hexdigest()


def encode(heard: Mapping[str, np.ndarray]) -> bytes:
    values = {name: np.ascontiguousarray(array, np.float32) for name, array in heard.items()}
    payload = b"".join(array.tobytes() for array in values.values())
    header = {"sum": _sum(payload), "arrays": [[name, list(array.shape)] for name, array in values.items()]}
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + payload


def decode(body: bytes) -> Heard | None:
    """None for anything but what `encode` wrote."""
    start = len(MAGIC) + 4
    if not body.startswith(MAGIC) or len(body) < start:
        return None
    end = start + int.from_bytes(body[start - 4 : start], "little")
    try:
        header = json.loads(body[start:end])
        shapes = {str(name): tuple(int(n) for n in shape) for name, shape in header["arrays"]}
    except (ValueError, KeyError, TypeError):
        return None
    payload = body[end:]
    if header.get("sum") != _sum(payload):
        return None
    values, found, at = np.frombuffer(payload, np.float32), {}, 0
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        found[name], at = values[at : at + count].reshape(shape), at + count
    return found


def _sum(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _bytes_in(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob(f"*{SUFFIX}"))
