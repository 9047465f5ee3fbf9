"""A run directory with everything in it, made in milliseconds."""

from __future__ import annotations

import pytest

from unit.report.fake import fake_run


@pytest.fixture
def run_dir(tmp_path):
    return fake_run(tmp_path / "tiny" / "2026-01-31_12-00-00")
