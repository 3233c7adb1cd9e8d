"""A headless Chromium for tests of pages.

The browser is the one that `make dev` installs, or else the machine's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.scenarios import ROOT

_INSTALLED = (ROOT / ".venv" / "chromium", Path(sys.prefix) / "chromium")
_OWN = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARTEFACTS = ROOT / "artefacts"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser, or skip the test if there is none."""
    folder = next((each for each in _INSTALLED if (each / "chromium").exists()), None)
    own = next((found for name in _OWN if (found := shutil.which(name))), None)
    program = str(folder / "chromium") if folder else own
    if program is None:
        pytest.skip(
            "no Chromium: scripts/install_browser.py says why it could not be installed"
        )
    libraries = (
        {"LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_PATH": str(folder)}
        if folder
        else {}
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox"],
            env={**os.environ, **libraries},
        )
        yield browser
        browser.close()
