"""The kernels beside PyTorch's named backends and compiled FlexAttention, dense and with each option.

TFLOP/s count the scores that the option leaves.  A ratio is the peer's time over ours within a round:
above 1 the kernels are faster.  The error is the largest one of out, and of the gradients relative to
their largest element, of the first head, against the textbook formula in float64.  Dropout has none:
each draws other bits.  ``--functions`` compares mask and score functions of users instead of options.
Where PyTorch is not installed its lines are empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.contestants import DIRECTIONS, directions, errors, reference
from bench.harness import Case as Row
from bench.kit import Measurement, Panel, Record, Run, markdown, ratio, ready, spread, timed_cell
from bench.peer_cases import HELD_OUT, Case, cases, user_cases
from bench.torch_attention import DTYPES, FLEX, PEERS, Rivals

from kernels.traffic.formulas import attention_backward_flops, attention_flops

OURS = "kernels"


def all_rows(run: Run) -> Iterator[Row]:
    known = (user_cases if run.functions else cases)(run.heads, run.length)
    missing = "" if run.torch else "PyTorch is not installed, so that its lines are empty; "
    workload = {"batch": 1, **run.chosen("heads", "length", "head_dim")}
    run.note(workload=workload, note=f"{missing}in float32 no peer uses TF32")
    for dtype in run.dtypes:
        rivals = Rivals(run, dtype, run.torch)
        for name in run.cases or known:
            yield {"case": name, "dtype": dtype}, partial(compare, run, rivals, known[name])


def compare(run: Run, rivals: Rivals, case: Case) -> list[Record]:
    """Return times and TFLOP/s of each contestant, ratios to ours, and errors."""
    ours = rivals.call(None, case)
    # A peer may raise anything.
    peers, why_not = ready({n: partial(rivals.call, n, case) for n in run.peers}, Exception)
    calls = {OURS: ours, **peers}
    times, counts = run.timed(directions(calls)), (attention_flops, attention_backward_flops)
    wanted = None if case.dropout_p else reference(case, rivals.first(), rivals.dtype)
    size, rows = (case.heads, case.length, case.length, run.head_dim), list[Record]()
    for name in (OURS, *run.peers):
        row: Record = {"peer": name}
        row |= {"held_out": case.name in HELD_OUT} if run.functions else {}
        row |= {"why_not": why_not[name]} if name in why_not else {}
        for way, count in zip(DIRECTIONS, counts, strict=True) if name in calls else ():
            ms = spread(times[name, way], 1e3)
            row[way] = {
                "ms": ms, "tflops": 1e-9 * case.part * count(*size) / ms["median"],
                "ratio": ratio(times[name, way], times[OURS, way])["median"],
            }  # fmt: skip
        if name in calls and wanted is not None:
            row |= errors(calls[name].first_heads(), wanted)
        rows.append(row)
    return rows


def table(record: Record) -> str:
    size = ", ".join(f"{name} {value}" for name, value in record["workload"].items())
    head, lines = ["case, peer, dtype"], list[list[Any]]()
    for way in DIRECTIONS:
        head += [f"{way} ms", "TFLOP/s", f"× of {OURS}"]
    for row in record["rows"]:
        cells: list[Any] = [f"{row['case']}, {row['peer']}, {row['dtype']}"]
        if "why_not" in row:
            lines.append([*cells, row["why_not"], *["–"] * 7])
            continue
        for entry in (row[way] for way in DIRECTIONS):
            cells += [timed_cell(entry["ms"]), entry["tflops"], entry["ratio"]]
        cells += [f"{row[key]:.1e}" if key in row else "–" for key in ("error", "gradient_error")]
        lines.append(cells)
    return f"{size}\n\n{markdown([*head, 'error', 'of gradients'], lines)}"


def draw(record: Record) -> list[Panel]:
    workload, rows = record["workload"], [row for row in record["rows"] if "forward" in row]
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
    size = "{heads} heads, {length:,} keys, head_dim {head_dim}".format(**workload) + f", {dtypes}"
    found: dict[str, dict[str, Record]] = {way: {} for way in DIRECTIONS}
    for row in rows:
        for way, bars in found.items():
            bars.setdefault(row["peer"], {})[row["case"]] = row[way]["tflops"]
    return [Panel(f"{size}\n{way}, TFLOP/s", "TFLOP/s", bars=bars) for way, bars in found.items()]


COMMON = {"cases": (), "functions": False, "peers": PEERS, "head_dim": 64}
#: The records of functions of users.
FUNCTIONS = {
    "functions": True, "peers": (FLEX,), "dtypes": ("bfloat16",), "length": 8192, "heads": 16,
}  # fmt: skip
MEASUREMENT = Measurement(
    "peers", "Which option has which PyTorch backend, and how fast is it beside the kernels?", all_rows,
    {"cpu": {"quick": {"heads": 1, "length": 128, "head_dim": 8, "seconds": 0.01},
             "normal": {"heads": 4, "length": 1024, "dtypes": ("float32",), "seconds": 0.2,
                        **COMMON}},
     "cuda": {"quick": {"heads": 32, "length": 2048, "cases": ("dense", "causal")},
              "normal": {"heads": 64, "length": 4096, "dtypes": ("float16",), "seconds": 0.1,
                         **COMMON}}},
    table=table, draw=draw, height=5.0, minutes={"cpu": 2, "cuda": 5}, paths=("kernels",),
    choices={"dtypes": tuple(DTYPES), "peers": PEERS},
    records={f"functions_{d}": {**FUNCTIONS, "head_dim": d} for d in (64, 128)},
    caption="Speed of this library's kernels and of PyTorch's backends in each case, in TFLOP/s, which "
    "count only unmasked scores. A backend without a bar does not support the case.",
)  # fmt: skip
