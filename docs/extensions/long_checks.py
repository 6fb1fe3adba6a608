"""What the long tests of reliability found, read from docs/results/reliability when the site is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.records import RESULTS, read_record
from bench.table_cells import cell, markdown
from figures import look_up
from record_tables import command

#: What the page says of a record: the place of each figure in it, and the words for the figure.
FIGURES = {
    "bad_calls": {
        "calls": "wrong calls",
        "processes_dead": "calls that crashed the process",
        "failed": "calls with a wrong error, or with changed operands",
    },
    "fuzz": {
        "cases": "calls",
        "by_part/nonsense/right": "random arguments: right results",
        "by_part/nonsense/refused": "random arguments: errors",
        "by_part/nonsense/returned": "random arguments: not compared (operands NaN, infinite or too large)",
        "by_part/bounds/right": "with bounds checking: right results",
        "by_part/bounds/refused": "with bounds checking: errors",
        "by_part/bounds/returned": "with bounds checking: not compared",
        "by_part/options/right": "valid combinations of options: right results",
        "failures": "failures",
    },
    "determinism": {
        "runs": "processes compared",
        "threads_of_numba_and_of_others": "threads of numba and of BLAS in each process",
        "pieces": "results compared: attention with each option, layers, products and sums",
        "steps": "training steps",
        "different": "results that differ",
    },
    "fuzz_gpu": {
        "cases": "calls",
        "outcomes/right": "right results",
        "right_by/extreme/True": "of these with extreme scores",
        "outcomes/refused": "refused calls",
        "failures": "failures",
        "kinds": "combinations drawn",
    },
    "barriers": {
        "statements": "statements removed, one at a time",
        "caught_by_a_test": "removals that a test catches",
        "orders_of_threads": "orders of the threads tried for each",
    },
    "ci": {"minutes": "minutes", "all_passed": "all parts passed"},
}
#: The columns of the rows of a record that the page shows, and the words for them.
COLUMNS = {
    "leaks": {
        "what": "steps of", "steps": "steps", "written_growth_percent": "growth, %",
        "written_mb": "memory at the end, MB",
    },
    "barriers": {"not_caught": "not caught", "statement": "statement"},
    "ci": {"part": "part", "ended": "result", "seconds": "seconds"},
}  # fmt: skip
#: The rows of the record of ``leaks``.
WORDS = {
    "training": "training",
    "lengths": "training with new sequence lengths",
    "writing": "text generation token by token",
    "models": "creating and deleting models",
    "attention": "attention with changing options",
    "refused": "calls that raise errors",
}


def file_of(name: str, folder: Path | None = None) -> Path:
    """Return where the record of a script lies."""
    return (folder or RESULTS / "reliability") / f"{name}.json"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else cell(value)


def _tables(name: str, record: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of a record."""
    if named := FIGURES.get(name, {}):
        lines = [[words, _shown(look_up(record, place))] for place, words in named.items()]
        yield markdown(["figure", "value"], lines)
    if columns := COLUMNS.get(name, {}):
        lines = [
            [WORDS.get(row[key], _shown(row[key])) for key in columns] for row in record["rows"]
        ]
        yield markdown([*columns.values()], lines)


def as_markdown(name: str, folder: Path | None = None) -> str:
    """Return the figures of the last run as Markdown.

    Args:
        name: Of the record.
        folder: Of the records; docs/results/reliability when None.

    Raises:
        ValueError: If the file is no record.
    """
    record = read_record(file_of(name, folder))
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    last = (
        f"Last run: {record['date']}, {record['device']}, {record['cores']} cores, "
        f"`{command(record, name)}` ([record](/results/reliability/{name}.json); {versions})."
    )
    return "\n\n".join([last, *_tables(name, record)])
