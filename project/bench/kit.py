"""What most measurements need, in one place."""

from bench.harness import Case, Figure, Measurement, Run
from bench.measuring import Unavailable, ratio, ready, spread
from bench.plots import Panel
from bench.records import ROOT, Record
from bench.table_cells import cell, markdown, timed_cell

__all__ = [
    "ROOT", "Case", "Figure", "Measurement", "Panel", "Record", "Run", "Unavailable", "cell", "markdown",
    "ratio", "ready", "spread", "timed_cell",
]  # fmt: skip
