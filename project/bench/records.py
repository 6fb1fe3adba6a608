"""Records of measurements: their origin, their files, and whether the code has changed since."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba

from kernels.runtime.targets import device_name
from minitorch.training.model_files import write_file

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
#: What every record says of its making.
ORIGIN = {
    "device": str, "date": str, "command": str, "cores": int, "threads": int, "versions": dict,
}  # fmt: skip


def processor() -> str:
    """Return the name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def name_of(device: str) -> str:
    """Return the name of a device, "cpu" or "cuda": of the processor or of the GPU."""
    return device_name() if device == "cuda" else processor()


def folder_of(device: str, results: Path | None = None) -> str:
    """Return the folder of this machine's records: "cpu-2-cores", "nvidia-h100".

    Where the folder of a CPU has records of another processor with as many cores, the name of this one
    is added.
    """
    if device != "cpu":
        # Without the size of its memory.
        return re.sub(r"[^a-z0-9]+", "-", re.sub(r" \d+gb.*", "", name_of(device).lower()))
    folder, name = f"cpu-{os.cpu_count()}-cores", processor()
    for path in ((results or RESULTS) / folder).glob("*.json"):
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("device", name)
        except (OSError, ValueError, AttributeError):  # not a record of anything
            continue
        if found != name:
            return f"{folder}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
    return folder


def _git(*words: str) -> str:
    """Return what git prints, or an empty text where it fails."""
    try:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commits_since(record: Record, paths: tuple[str, ...]) -> int | None:
    """Return the number of commits that changed some paths after a record; None where git does not know.

    A record that names no commit, or one that is not in this history, is dated by its day.
    """
    commit = str(record.get("versions", {}).get("commit", ""))
    found = commit and _git("rev-list", "--count", f"{commit}..HEAD", "--", *paths)
    since = f"--since={record.get('date', '')}T23:59:59"
    found = found or _git("rev-list", "--count", since, "HEAD", "--", *paths)
    return int(found) if found else None


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, with the last commit that changed the library.

    The variable ``MINITORCH_COMMIT`` names it for a copy without a ``.git`` folder.
    """
    loaded = ("numpy", "numba", "numba_cuda", "torch", "transformers")
    found = {name: sys.modules[name].__version__ for name in loaded if sys.modules.get(name)}
    last = _git("log", "-1", "--format=%h", "--", "kernels", "minitorch")
    commit = os.environ.get("MINITORCH_COMMIT") or last
    return {"python": platform.python_version(), **found, **({"commit": commit} if commit else {})}


def command_line(script: str, argv: list[str], leave_out: tuple[str, ...] = ("--json",)) -> str:
    """Return the command that makes a record again on any machine."""
    kept: list[str] = []
    words = iter(word for word in argv if word not in ("--publish", "--resume"))
    for word in words:
        option, equals, value = word.partition("=")
        if word in leave_out:
            next(words, None)
        elif option not in leave_out:
            place = Path(value if equals else word)
            kept.append(f"{option}=" * bool(equals) + place.name if place.is_absolute() else word)
    return " ".join(["python", script, *(f'"{word}"' if " " in word else word for word in kept)])


def write_record(path: str | Path, command: str, device: str, **figures: Any) -> None:
    """Write what has been measured so far, with its origin; the file is replaced as a whole."""
    record = {
        "command": command, "date": datetime.date.today().isoformat(), "device": device,
        "cores": os.cpu_count(), "threads": numba.get_num_threads(), "versions": versions(), **figures,
    }  # fmt: skip
    write_file(Path(path), (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def read_record(path: Path) -> Record:
    """Return a record; exit with one line if a file is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        for key, kind in ORIGIN.items():
            if not isinstance(record[key], kind):
                raise TypeError(f"{key} is {record[key]!r}, expected {kind.__name__}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a record ({error!r}); delete it, or measure again"
        ) from None
    return record
