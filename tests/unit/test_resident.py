"""Memory as the system counts it: hand-made sizes."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys

import numpy as np
import pytest

from echofree import resident

PROBE = "from echofree import resident; print(resident.peak_mb(), resident.now_mb())"


def test_peak_stays_and_now_goes_back():
    before = resident.now_mb()
    held = mmap.mmap(-1, 64 * 2**20)  # straight from the system: an allocator may have as much left over
    for _ in range(64):  # in pieces: what an allocator keeps of them doesn't count
        held.write(bytes([1]) * 2**20)
    gc.collect()
    assert resident.now_mb() - before == pytest.approx(64, abs=4)
    held.close()
    assert resident.now_mb() - before == pytest.approx(0, abs=4)
    assert resident.peak_mb() >= before + 62


def test_peak_of_a_child_is_its_own():
    """getrusage's would be at least this process's, whose pages the child shares until it executes."""
    held = np.ones(200 * 2**20, np.uint8)
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    peak, now = map(float, done.stdout.split())
    assert now - 1 <= peak < 100 < held.nbytes / 2**20
