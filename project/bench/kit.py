"""What most measurements need, in one place."""

from bench.harness import Case, Figure, Measurement, Run
from bench.measuring import Unavailable, ratio, ready, spread
from bench.plots import Panel, curves
from bench.records import ROOT, Record
from bench.table_cells import cell, columns, markdown, timed_cell, workload_text

__all__ = [
    "ROOT", "Case", "Figure", "Measurement", "Panel", "Record", "Run", "Unavailable", "cell", "columns",
    "curves", "markdown", "ratio", "ready", "spread", "timed_cell", "workload_text",
]  # fmt: skip
