"""A run directory that can't be written any more: gone, read-only or full; what to say when nothing can be noted."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
PROBE_BYTES = 65536  # a file system that is full still has room for a few bytes here and there


def trouble(folder: Path) -> str:
    """Why nothing can be written into `folder`, and what to do; "" when it can."""
    if not folder.is_dir():
        return (
            f"the run directory {folder} is gone: removed, renamed, or on a disk that isn't there any more. Nothing of "
            "it was made anew. Put it back and start again with resume=<it>, or start a run of its own"
        )
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return f"the run directory {folder} {_what(error)}"
    return ""


def is_full(error: OSError) -> bool:
    return error.errno in FULL


def _what(error: OSError) -> str:
    then = "Earlier checkpoints are untouched; start again with resume=<this directory>"
    if is_full(error):
        return f"is on a full disk ({os.strerror(error.errno or 0)}). Free some space. {then}"
    if error.errno in CLOSED:
        return f"can't be written any more ({error.strerror}). Make it writable (mount, chmod). {then}"
    return f"can't be written any more: {error}. {then}"
