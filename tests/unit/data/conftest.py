"""Banks of rooms go to a temporary cache, and recordings are written where a test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOFREE_CACHE", str(cache))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write("a/x_mic.wav", wave, rate) below the test's folder."""

    def put(name: str, wave: np.ndarray, rate: int = 16000, subtype: str | None = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        sf.write(path, wave, rate, subtype=subtype)
        return path

    return put
