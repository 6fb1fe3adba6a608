"""Records of experiments as they lie in files: which folder is whose, and whether a file is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench import measuring

Record = dict[str, Any]
#: What every record tells of its making.
ORIGIN = {
    "device": str,
    "date": str,
    "command": str,
    "cores": int,
    "threads": int,
    "versions": dict,
}
#: What the code of an experiment raises when rows are not its own.
FOREIGN = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)


class BadRecordError(ValueError):
    """A file is not what the experiment wrote; the text is one line and names the file."""


def bad_record(path: Path, name: str, why: str) -> BadRecordError:
    """Return the error of a file.

    Args:
        path: Of the file.
        name: Of the experiment that its own name says.
        why: What is wrong with it.
    """
    line = " ".join(why.split())
    return BadRecordError(
        f"{path} is no record of the experiment {name}; make it with "
        f"python project/experiments/{name}.py --json, or take it away ({line})"
    )


def read_record(path: Path, name: str) -> Record:
    """Return the record of an experiment.

    Raises:
        BadRecordError: If the file is none; of its rows it is only known that they are rows.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad_record(path, name, f"{type(error).__name__}: {error}") from None
    if not isinstance(record, dict) or record.get("experiment") != name:
        found = record.get("experiment") if isinstance(record, dict) else type(record).__name__
        raise bad_record(path, name, f"its experiment is {found!r}")
    for key, kind in ORIGIN.items():
        if not isinstance(record.get(key), kind):
            raise bad_record(path, name, f"{key} is {record.get(key)!r}, expected {kind.__name__}")
    rows = record.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise bad_record(path, name, "it has no list of rows")
    return record


def folder_of(device: str, results: Path) -> str:
    """Return the folder of this machine's results.

    The number of cores names the folder of a processor.  Where that one holds the results of another
    processor with as many, which are not to be mixed with these nor replaced by them, the model's name is
    added.

    Args:
        device: "cpu" or "cuda".
        results: Where the folders are.
    """
    folder, name = measuring.slug_of(device), measuring.name_of(device)
    if device != "cpu" or all(
        _device_in(path) in (name, None) for path in (results / folder).glob("*.json")
    ):
        return folder
    return f"{folder}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def _device_in(path: Path) -> str | None:
    """Return the device that a file names, None where it is no record of anything."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("device") if isinstance(record, dict) else None
