"""A folder for gradings that is removed when the grader ends, even if it is killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Waits until the grader closes the pipe, or ends, and removes the folder. A child may still write to it.
CLEANER = """import os, shutil, sys, time
sys.stdin.read()
for _ in range(50):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that a process of its own removes at the end of the context or of this process."""
    folder = Path(tempfile.mkdtemp(prefix="course-")).resolve()
    command = [sys.executable, "-I", "-S", "-c", CLEANER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield folder
