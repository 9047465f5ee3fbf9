"""Files that are there whole or not at all, also after a kill or a power cut. Without torch: what only reads run
directories starts at once."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces `path` as a whole or not at all."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        sync_text(temporary, text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def append(path: Path, text: str) -> None:
    """Adds `text` to the end of `path` as a whole or not at all."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before, data = os.fstat(fd).st_size, text.encode()
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            os.ftruncate(fd, before)
            raise
    finally:
        os.close(fd)


def sync_text(path: Path, text: str) -> None:
    """Writes `path`; on return it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """On return the content of a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    """The checksum of a file's content, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
