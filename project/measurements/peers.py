"""The kernels beside PyTorch's named backends and compiled FlexAttention, dense and with each option.

TFLOP/s count the scores that the option leaves.  A ratio is the peer's time over ours within a round:
above 1 the kernels are faster.  The error is the largest one of out, and of the gradients relative to
their largest element, of the first head, against the textbook formula in float64.  Dropout has none:
each draws other bits.  ``--functions`` compares mask and score functions of users instead of options.
Where PyTorch is not installed its lines are empty.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from bench.contestants import DIRECTIONS, errors, reference
from bench.harness import Case as Row
from bench.kit import Measurement, Panel, Record, Run, markdown, timed_cell
from bench.measuring import Unavailable, load_torch, prepare, ratio, spread, why_failed
from bench.peer_cases import HELD_OUT, Case, cases, user_cases
from bench.processes import in_processes
from bench.torch_attention import DTYPES, FLEX, PEERS, Rivals

from kernels.traffic.formulas import attention_backward_flops, attention_flops

OURS = "kernels"


def known_cases(run: Any) -> dict[str, Case]:
    """Return the cases to choose from, by name."""
    return (user_cases if run.functions else cases)(run.heads, run.length)


def run_once(settings: Record, dtype: str, name: str, peer: str | None) -> None:
    """Run one contestant of one case in this process; its kernels are then on the disk."""
    run, torch = SimpleNamespace(**settings), load_torch()
    if torch is not None:
        prepare(torch, run.device)
    with suppress(Exception):  # whether it can is found out again when it is timed
        Rivals(run, dtype, torch).call(peer, known_cases(run)[name])


def all_rows(run: Run) -> Iterator[Row]:
    start, known, sizes = (
        time.perf_counter(),
        known_cases(run),
        run.chosen("heads", "length", "head_dim"),
    )
    missing = "" if run.torch else "PyTorch is not installed, so that its lines are empty; "
    run.note(workload={"batch": 1, **sizes}, note=f"{missing}in float32 no peer uses TF32")
    chosen = [known[name] for name in run.cases or known]
    # FlexAttention compiles for each case, which takes longest: it comes last.
    early = [OURS, *(peer for peer in run.peers if peer != FLEX)]
    late = [peer for peer in run.peers if peer == FLEX]
    settings = {**sizes, "functions": run.functions, "device": run.device}
    todo = [(settings, d, c.name, p) for p in (None, *late) for d in run.dtypes for c in chosen]
    in_processes(run_once, todo, run.jobs)
    for dtype in run.dtypes:
        rivals = Rivals(run, dtype, run.torch)
        for case, peers in [(c, early) for c in chosen] + [(c, late) for c in chosen if late]:
            kept: Record = {}  # ours and the textbook's result, which all peers are compared with
            for peer in peers:
                key = {"case": case.name, "peer": peer, "dtype": dtype}
                if run.functions:
                    key["held_out"] = case.name in HELD_OUT
                yield key, partial(compare, run, rivals, case, peer, kept, start)


def compare(run: Run, rivals: Rivals, case: Case, peer: str, kept: Record, start: float) -> Record:
    """Return times and TFLOP/s of a contestant, ratios to ours, and errors."""
    if time.perf_counter() - start > run.deadline:
        raise Unavailable("no time left")
    if "ours" not in kept:
        kept["wanted"] = None if case.dropout_p else reference(case, rivals.first(), rivals.dtype)
        kept["ours"] = None
        try:
            kept["ours"] = rivals.call(None, case)
        except Exception:
            if peer == OURS:  # this dtype, this option, or not enough memory: the row says which
                raise
    ours: Any = kept["ours"]
    try:
        theirs: Any = ours if peer == OURS else rivals.call(peer, case)
    except Exception as error:  # a peer may raise anything
        raise Unavailable(why_failed(error)) from error
    size, row = (case.heads, case.length, case.length, run.head_dim), Record()
    for way, count in zip(DIRECTIONS, (attention_flops, attention_backward_flops), strict=True):
        sides = {"theirs": theirs} | ({OURS: ours} if ours not in (None, theirs) else {})
        times = run.timed({name: getattr(side, way) for name, side in sides.items()})
        ms, against = spread(times["theirs"], 1e3), times.get(OURS, times["theirs"])
        row[way] = {
            "ms": ms, "tflops": 1e-9 * case.part * count(*size) / ms["median"],
            "ratio": ratio(times["theirs"], against)["median"] if ours else None,
        }  # fmt: skip
    wanted = kept["wanted"]
    return row if wanted is None else row | errors(theirs.first_heads(), wanted)


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
    "functions": True, "peers": (FLEX,), "dtypes": ("bfloat16",), "length": 8192, "heads": 16, "jobs": 6,
    "deadline": 600.0,
}  # fmt: skip
MEASUREMENT = Measurement(
    "peers", "Which option has which PyTorch backend, and how fast is it beside the kernels?", all_rows,
    {"cpu": {"quick": {"heads": 1, "length": 128, "head_dim": 8, "seconds": 0.01},
             "normal": {"heads": 4, "length": 1024, "dtypes": ("float32",), "seconds": 0.2,
                        "deadline": 130.0, "jobs": 1, **COMMON}},
     "cuda": {"quick": {"heads": 32, "length": 2048, "cases": ("dense", "causal"), "jobs": 1},
              "normal": {"heads": 64, "length": 4096, "dtypes": ("float16",), "seconds": 0.1,
                         "deadline": 215.0, "jobs": 5, **COMMON}}},
    table=table, draw=draw, height=5.0, minutes={"cpu": 2, "cuda": 5}, paths=("kernels",),
    choices={"dtypes": tuple(DTYPES), "peers": PEERS},
    records={f"functions_{d}": {**FUNCTIONS, "head_dim": d} for d in (64, 128)},
    caption="Speed of this library's kernels and of PyTorch's backends in each case, in TFLOP/s, which "
    "count only unmasked scores. A backend without a bar does not support the case.",
)  # fmt: skip
