"""Headless Chromium for tests of what a user sees.

Without a browser such a test is skipped, with a warning; with MINITORCH_BROWSER=1, as CI should have it, it
fails.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start headless Chromium; without one skip the test and say so in the warnings, or fail."""
    reason = None
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        reason = 'playwright is not installed: pip install -e ".[app,test]"'
    else:
        with sync_playwright() as playwright:
            try:
                chromium = playwright.chromium.launch(
                    executable_path=found, args=["--no-sandbox", "--force-color-profile=srgb"]
                )
            except Error as error:
                first = str(error).splitlines()[0]
                reason = (
                    "no browser: apt-get install chromium, or python -m playwright install "
                    f"--with-deps chromium ({first})"
                )
            else:
                yield chromium
                chromium.close()
    if reason and os.environ.get("MINITORCH_BROWSER") == "1":
        pytest.fail(f"MINITORCH_BROWSER=1 asks for the test in a browser: {reason}", pytrace=False)
    if reason:
        warnings.warn(f"NOT TESTED IN A BROWSER: {reason}", stacklevel=1)
        pytest.skip(reason)
