"""A Chromium for the tests of pages, the installed one or ECHOFREE_CHROMIUM; needs the extra `browser` (playwright)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

PATH = os.environ.get("ECHOFREE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required"]


@pytest.fixture(scope="module")
def launch() -> Iterator[Any]:
    """launch("--more-flags") -> a browser; all of them close at the module's end."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright isn't installed: pip install 'echofree[browser]'"
    )
    if PATH is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set ECHOFREE_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        found: list[Any] = []

        def start(*flags: str) -> Any:
            found.append(playwright.chromium.launch(executable_path=PATH, args=[*ARGUMENTS, *flags]))
            return found[-1]

        yield start
        for browser in found:
            browser.close()


@pytest.fixture(scope="module")
def browser(launch: Any) -> Any:
    return launch()
