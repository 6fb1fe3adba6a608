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

import numpy as np
from bench.contestants import DIRECTIONS, case_call, errors, place_on, reference
from bench.harness import Case as Row
from bench.harness import Measurement, Run, why_failed
from bench.measuring import Unavailable, load_torch, prepare, ratio, spread
from bench.peer_cases import HELD_OUT, Case, cases, user_cases
from bench.plots import Result, headline, legend, panels
from bench.processes import in_processes
from bench.records import Record
from bench.table_cells import colour_of, markdown, timed_cell
from bench.torch_attention import FLEX, PEERS, TorchCall

from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, rounded
from kernels.traffic.formulas import attention_backward_flops, attention_flops

DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
OURS = "kernels"
#: Of bars, by dtype.
HATCHES = ("", "//", "..")


class Rivals:
    """The operands of one dtype for both sides."""

    def __init__(self, run: Any, name: str, torch: Any):
        self.device, self.torch, self.name, self.dtype = run.device, torch, name, DTYPES[name]
        rng, shape = np.random.default_rng(0), (1, run.heads, run.length, run.head_dim)
        arrays = [
            rounded(rng.standard_normal(shape, dtype=np.float32), self.dtype) for _ in range(4)
        ]
        self.first = [x[0, :1].astype(np.float64) for x in arrays]
        self.tensors: list[Any] | None = None
        if torch is not None:  # whose memory our kernels read, too
            wide = [torch.from_numpy(x.astype(np.float32)) for x in arrays]
            self.tensors = [x.to(run.device, getattr(torch, name)) for x in wide]
            self.arrays = self.tensors
            self.packed = [x[0].permute(1, 0, 2) for x in self.tensors]
        else:
            place = place_on(run.device)
            self.arrays = [place(x) for x in arrays]
            self.packed = [place(x[0].transpose(1, 0, 2)) for x in arrays]

    def call(self, peer: str, case: Case) -> Any:
        """Return a case by the kernels or by a peer, which has run once."""
        if peer == OURS:
            arrays = self.arrays if case.sums is None else self.packed
            call: Any = case_call(case, arrays, self.dtype, self.device)
        elif self.tensors is None:
            raise Unavailable("PyTorch is not installed")
        else:
            call = TorchCall(self.torch, peer, case, self.tensors)
        call.forward()
        call.backward()
        return call


def known_cases(run: Any) -> dict[str, Case]:
    """Return the cases to choose from, by name."""
    return (user_cases if run.functions else cases)(run.heads, run.length)


def run_once(settings: Record, dtype: str, name: str, peer: str) -> None:
    """Run one contestant of one case in this process; its kernels are then on the disk."""
    run, torch = SimpleNamespace(**settings), load_torch()
    if torch is not None:
        prepare(torch, run.device)
    with suppress(Exception):  # whether it can is found out again when it is timed
        Rivals(run, dtype, torch).call(peer, known_cases(run)[name])


def all_rows(run: Run) -> Iterator[Row]:
    start, known = time.perf_counter(), known_cases(run)
    sizes = {name: getattr(run, name) for name in ("heads", "length", "head_dim")}
    missing = "" if run.torch else "PyTorch is not installed, so that its lines are empty; "
    run.note(workload={"batch": 1, **sizes}, note=f"{missing}in float32 no peer uses TF32")
    chosen = [known[name] for name in run.cases or known]
    if run.jobs > 1:
        settings = {**sizes, "functions": run.functions, "device": run.device}
        compiled = [OURS, *(peer for peer in run.peers if peer == FLEX)]
        todo = [(settings, d, c.name, p) for p in compiled for d in run.dtypes for c in chosen]
        in_processes(run_once, todo, run.jobs)
    # FlexAttention compiles for each case, which takes longest: it comes last.
    early = [OURS, *(peer for peer in run.peers if peer != FLEX)]
    late = [peer for peer in run.peers if peer == FLEX]
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
        kept["wanted"] = None if case.dropout_p else reference(case, rivals.first, rivals.dtype)
        kept["ours"] = None
        try:
            kept["ours"] = rivals.call(OURS, case)
        except Exception:
            if peer == OURS:  # this dtype, this option, or not enough memory: the row says which
                raise
    ours: Any = kept["ours"]
    try:
        theirs: Any = ours if peer == OURS else rivals.call(peer, case)
    except Exception as error:  # a peer may raise anything
        raise Unavailable(why_failed(error)) from error
    size = case.heads, case.length, case.length, run.head_dim
    flops = (case.part * count(*size) for count in (attention_flops, attention_backward_flops))
    sides = {"theirs": theirs} | ({OURS: ours} if ours not in (None, theirs) else {})
    row: Record = {}
    for way, count in zip(DIRECTIONS, flops, strict=True):
        times = run.timed({name: getattr(side, way) for name, side in sides.items()})
        ms, against = spread(times["theirs"], 1e3), times.get(OURS)
        if theirs is ours:
            against = times["theirs"]
        row[way] = {
            "ms": ms, "tflops": 1e-9 * count / ms["median"],
            "ratio": against and ratio(times["theirs"], against)["median"],
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


def draw(figure: Any, results: list[Result]) -> None:
    all_peers = list(dict.fromkeys(row["peer"] for result in results for row in result.rows))
    drawn: list[Any] = []
    for axes, result in panels(figure, results, rows=len(DIRECTIONS)):
        rows, workload = result.rows, result.record["workload"]
        names = list(dict.fromkeys(row["case"] for row in rows))
        dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
        bars: dict[tuple[str, str], list[Record]] = {}
        for row in rows:
            if "forward" in row:
                bars.setdefault((row["peer"], row["dtype"]), []).append(row)
        order = list(dict.fromkeys((row["peer"], row["dtype"]) for row in rows))
        width, keys = 0.8 / max(len(bars), 1), [key for key in order if key in bars]
        size = f"{workload['heads']} heads, {workload['length']:,} keys, head_dim {workload['head_dim']}"
        titles = (f"{size}, {' and '.join(dtypes)}\nforward, TFLOP/s", "backward, TFLOP/s")
        for panel, way, title in zip(axes, DIRECTIONS, titles, strict=True):
            for i, (peer, dtype) in enumerate(keys):
                found = {row["case"]: row[way]["tflops"] for row in bars[peer, dtype]}
                places = [names.index(name) + i * width for name in found]
                panel.barh(
                    places, list(found.values()), width, label=peer, color=colour_of(peer, all_peers),
                    hatch=HATCHES[dtypes.index(dtype)],
                )  # fmt: skip
            ticks = [y + width * (len(keys) - 1) / 2 for y in range(len(names))]
            panel.set_yticks(ticks, names)
            panel.invert_yaxis()
            panel.set_xlabel("TFLOP/s")
            headline(panel, title)
            drawn.append(panel)
    legend(figure, drawn, columns=6)


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
                        "deadline": 130.0, "jobs": 1, **COMMON},
             "full": {"heads": 8, "length": 2048, "deadline": 600.0}},
     "cuda": {"quick": {"heads": 32, "length": 2048, "cases": ("dense", "causal"), "jobs": 1},
              "normal": {"heads": 64, "length": 4096, "dtypes": ("float16",), "seconds": 0.1,
                         "deadline": 215.0, "jobs": 5, **COMMON},
              "full": {"length": 8192, "deadline": 600.0}}},
    table=table, draw=draw, height=4.6, minutes={"cpu": 2, "cuda": 5}, paths=("kernels",),
    choices={"dtypes": tuple(DTYPES), "peers": PEERS},
    records={f"functions_{d}": {**FUNCTIONS, "head_dim": d} for d in (64, 128)},
    caption="Speed of this library's kernels and of PyTorch's backends in each case, in TFLOP/s, which "
    "count only unmasked scores. A backend without a bar does not support the case.",
)  # fmt: skip
