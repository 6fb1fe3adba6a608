"""Run scripts one after the other, each in a process of its own, and tell what became of each."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping

from tqdm import tqdm


def run_one_by_one(commands: Mapping[str, list[str] | str]) -> tuple[list[list[str]], int]:
    """Run commands; one that fails does not keep the others from running, a Ctrl-C does.

    Args:
        commands: By name: what to run, or why there is nothing to run.

    Returns:
        A line for each one that had its turn, (name, what became of it, seconds), and the exit code: that
        of the first that failed, 130 after a Ctrl-C, else 0.
    """
    lines, code = [], 0
    for name, command in tqdm(commands.items(), desc="all", unit="script", disable=None):
        if isinstance(command, str):
            lines.append([name, command, "–"])
            continue
        print(f"\n## {name}\n", flush=True)
        start = time.perf_counter()
        process = subprocess.Popen(command)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # it was interrupted, too, and writes what it has
            status = 130
        how = {0: "done", 130: "interrupted"}.get(status, f"failed with exit code {status}")
        lines.append([name, how, f"{time.perf_counter() - start:.0f}"])
        code = code or status
        if status == 130:
            break
    return lines, code
