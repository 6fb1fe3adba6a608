"""The kernels against PyTorch's named backends and compiled FlexAttention, dense and with each option.

    python project/experiments/peers.py                                       the CPU
    python project/experiments/peers.py --device cuda --deadline 140          one GPU
    python project/experiments/peers.py --device cuda --dtypes float16 --cases dense causal
    python project/experiments/peers.py --device cuda --dtypes float16 --jobs 12   compiled side by side
    python project/experiments/peers.py --device cuda --dtypes bfloat16 --functions --peers FlexAttention

TFLOP/s count the scores that the option leaves.  A ratio is the peer's time over ours within a round:
above 1 the kernels are faster.  The error is the largest one of out, and of the gradients relative to their
largest element, of the first head, against the textbook formula in float64.  Dropout has none: each draws
other bits.  Where PyTorch is not installed its lines are empty.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any

import harness
import numpy as np
from bench.measuring import interleaved, ratio, spread, timing_note
from bench.our_attention import OurCall, errors, reference, why_failed
from bench.peer_cases import Case, cases
from bench.torch_attention import FLEX, PEERS, TorchCall, Unavailable, load_torch, prepare
from bench.user_functions import HELD_OUT, user_cases
from common.command_line import COUNT
from harness import Experiment, Record, Report, Result, markdown, timed_cell

from kernels.cuda.runtime.arrays import to_device
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32, rounded
from kernels.traffic.formulas import attention_backward_flops, attention_flops

#: Heads and length by device and size.
WORKLOADS = {
    "cpu": {"quick": (2, 256), "normal": (4, 1024), "full": (8, 2048)},
    "cuda": {"quick": (32, 2048), "normal": (64, 4096), "full": (64, 8192)},
}
DTYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
DIRECTIONS = ("forward", "backward")
OURS = "kernels"
#: Of bars, by dtype.
HATCHES = ("", "//", "..")


def options(parser: Any) -> None:
    parser.add_argument("--heads", type=COUNT, help="of q, k and v")
    parser.add_argument("--length", type=COUNT, help="of queries and keys")
    parser.option("--head-dim", int, 64, "of q, k and v")
    add = parser.add_argument
    add("--dtypes", nargs="+", choices=list(DTYPES), default=["float32"], help="(default: float32)")
    names = [*cases(1, 64), *user_cases(1, 64)]
    add("--cases", nargs="+", choices=names, help="(default: all options, or all functions)")
    add("--functions", action="store_true", help="compare functions of users instead of options")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="(default: all)")
    parser.option("--seconds", float, 0.4, "to spend on timing each pair and direction")
    parser.option("--deadline", float, 600.0, "seconds after which no other pair begins")
    parser.option("--jobs", int, 1, "processes that compile kernels before anything is timed")


class Rivals:
    """What one dtype needs: operands for both sides.

    Args:
        args: Of the command line.
        name: Of the dtype.
        torch: The module, or None.
    """

    def __init__(self, args: argparse.Namespace, name: str, torch: Any):
        self.device, self.torch, self.name, self.dtype = args.device, torch, name, DTYPES[name]
        rng = np.random.default_rng(0)
        shape = 1, args.heads, args.length, args.head_dim
        arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
        arrays = [rounded(x, self.dtype) for x in arrays]
        self.first = [x[0, :1].astype(np.float64) for x in arrays]
        self.tensors: list[Any] | None = None
        if torch is not None:  # whose memory our kernels read, too
            kind = getattr(torch, name)
            wide = [torch.from_numpy(x.astype(np.float32)) for x in arrays]
            self.tensors = [x.to(args.device, kind) for x in wide]
            self.arrays = self.tensors
            self.packed = [x[0].permute(1, 0, 2) for x in self.tensors]
        else:
            place = to_device if args.device == "cuda" else np.asarray
            self.arrays = [place(x) for x in arrays]
            self.packed = [place(x[0].transpose(1, 0, 2)) for x in arrays]

    def ours_of(self, case: Case) -> OurCall:
        """Return a case by the kernels."""
        arrays = self.arrays if case.sums is None else self.packed
        return OurCall(case, arrays, self.dtype, self.device == "cuda")

    def peer_of(self, peer: str, case: Case) -> TorchCall:
        """Return a case by a peer.

        Raises:
            Unavailable: If it cannot do it.
        """
        if self.tensors is None:
            raise Unavailable("PyTorch is not installed")
        return TorchCall(self.torch, peer, case, self.tensors)


def compare(
    ours: OurCall | None,
    theirs: Any,
    args: argparse.Namespace,
    case: Case,
    wanted: list[Any] | None,
) -> Record:
    """Return the entries of a row: times and TFLOP/s of ``theirs``, ratios to ``ours``, errors.

    Args:
        ours: Which has run before; None where the kernels cannot do the case.
        theirs: A peer, or ``ours`` itself.
        args: Of the command line.
        case: That both compute.
        wanted: By the textbook, or None where there is nothing to compare.
    """
    theirs.forward()
    theirs.backward()
    size = case.heads, case.length, case.length, args.head_dim
    flops = (case.part * count(*size) for count in (attention_flops, attention_backward_flops))
    rivals = {"theirs": theirs} | ({OURS: ours} if ours not in (None, theirs) else {})
    entry: Record = {}
    for direction, count in zip(DIRECTIONS, flops, strict=True):
        steps = {name: getattr(rival, direction) for name, rival in rivals.items()}
        times = interleaved(steps, args.device, args.seconds)
        timing = spread(times["theirs"], 1e3)
        against = times["theirs"] if theirs is ours else times.get(OURS)
        entry[direction] = {
            "ms": timing,
            "tflops": 1e-9 * count / timing["median"],
            "ratio": against and ratio(times["theirs"], against)["median"],
        }
    return entry | (errors(theirs.first_heads(), wanted) if wanted is not None else {})


def measure(args: argparse.Namespace, report: Report) -> None:
    heads, length = WORKLOADS[args.device][args.size]
    args.heads, args.length = args.heads or heads, args.length or length
    torch, start = load_torch(), time.perf_counter()
    if torch is not None:
        prepare(torch, args.device)
    workload = {name: getattr(args, name) for name in ("heads", "length", "head_dim")}
    installed = (
        "" if torch is not None else "PyTorch is not installed, so that its lines are empty; "
    )
    report.note(
        workload={"batch": 1, **workload},
        timing=timing_note(args.device),
        note=f"{installed}in float32 no peer uses TF32",
    )
    known = _known(args)
    chosen = [known[name] for name in args.cases or known]
    # FlexAttention compiles for each case, which takes longest: it comes last.
    late = [peer for peer in args.peers if peer == FLEX]
    early = [OURS, *(peer for peer in args.peers if peer != FLEX)]
    if args.jobs > 1:
        _compile(args, report, chosen)
    for dtype in args.dtypes:
        rivals = Rivals(args, dtype, torch)
        plan = [(case, early) for case in chosen] + [(case, late) for case in chosen if late]
        for case, peers in report.progress(plan, f"case of {dtype}"):
            _measure_case(args, report, rivals, case, peers, start)


def _known(args: argparse.Namespace) -> dict[str, Case]:
    """Return the cases to choose from, by name."""
    return (user_cases if args.functions else cases)(args.heads, args.length)


def _compile(args: argparse.Namespace, report: Report, chosen: list[Case]) -> None:
    """Run in several processes all that compiles: our kernels' machine code and PyTorch's stay on disk."""
    compiled = [OURS, *(peer for peer in args.peers if peer == FLEX)]
    todo = [
        (args, dtype, case.name, peer)
        for peer in compiled for dtype in args.dtypes for case in chosen
    ]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, context) as pool:
        steps = [pool.submit(_run_once, *one) for one in todo]
        for step in report.progress(steps, "kernels compiled"):
            step.result()


def _run_once(args: argparse.Namespace, dtype: str, name: str, peer: str) -> None:
    """Run one contestant of one case; whether it can is found out again when it is timed."""
    torch = load_torch()
    if torch is not None:
        prepare(torch, args.device)
    rivals, case = Rivals(args, dtype, torch), _known(args)[name]
    with suppress(Exception):
        call: Any = rivals.ours_of(case) if peer == OURS else rivals.peer_of(peer, case)
        call.forward()
        call.backward()


def _measure_case(
    args: argparse.Namespace,
    report: Report,
    rivals: Rivals,
    case: Case,
    peers: list[str],
    start: float,
) -> None:
    """Add a row for each contestant of one case."""
    if time.perf_counter() - start > args.deadline:
        for peer in peers:
            report.add(case=case.name, peer=peer, dtype=rivals.name, why_not="no time left")
        return
    ours, why_not = None, None
    try:
        ours = rivals.ours_of(case)
        ours.forward()
        ours.backward()
    except Exception as error:  # this dtype, this option, or not enough memory: the row says which
        ours, why_not = None, why_failed(error)
    wanted = None if case.dropout_p else reference(case, rivals.first, rivals.dtype)
    for peer in peers:
        row: Record = {"case": case.name, "peer": peer, "dtype": rivals.name}
        if args.functions:
            row["held_out"] = case.name in HELD_OUT
        try:
            if peer == OURS and why_not is not None:
                raise Unavailable(why_not)
            theirs = ours if peer == OURS else rivals.peer_of(peer, case)
            row |= compare(ours, theirs, args, case, wanted)
        except Exception as error:  # a peer may raise anything
            row["why_not"] = why_failed(error)
        report.add(**row)


def table(record: Record) -> str:
    workload = record["workload"]
    size = ", ".join(f"{name} {value}" for name, value in workload.items())
    head = ["case, peer, dtype"]
    for direction in DIRECTIONS:
        head += [f"{direction} ms", "TFLOP/s", f"× of {OURS}"]
    lines = []
    for row in record["rows"]:
        name = f"{row['case']}, {row['peer']}, {row['dtype']}"
        if "why_not" in row:
            lines.append([name, row["why_not"], *["–"] * 7])
            continue
        cells: list[Any] = [name]
        for direction in DIRECTIONS:
            entry = row[direction]
            cells += [timed_cell(entry["ms"]), entry["tflops"], entry["ratio"]]
        cells += [f"{row[key]:.1e}" if key in row else "–" for key in ("error", "gradient_error")]
        lines.append(cells)
    return f"{size}\n\n{markdown([*head, 'error', 'of gradients'], lines)}"


def draw(figure: Any, results: list[Result]) -> None:
    all_peers = list(dict.fromkeys(row["peer"] for result in results for row in result.rows))
    drawn: list[Any] = []
    for axes, result in harness.panels(figure, results, rows=len(DIRECTIONS)):
        names = list(dict.fromkeys(row["case"] for row in result.rows))
        dtypes = list(dict.fromkeys(row["dtype"] for row in result.rows))
        peers = list(dict.fromkeys((row["peer"], row["dtype"]) for row in result.rows))
        measured = [key for key in peers if any(_is(row, key) for row in result.rows)]
        width = 0.8 / max(len(measured), 1)
        workload = result.record["workload"]
        size = f"{workload['heads']} heads, {workload['length']:,} keys, head_dim {workload['head_dim']}"
        titles = (f"{size}, {' and '.join(dtypes)}\nforward, TFLOP/s", "backward, TFLOP/s")
        for panel, direction, title in zip(axes, DIRECTIONS, titles, strict=True):
            for i, key in enumerate(measured):
                rows = {
                    row["case"]: row[direction]["tflops"] for row in result.rows if _is(row, key)
                }
                places = [names.index(name) + i * width for name in rows]
                panel.barh(
                    places, list(rows.values()), width, label=key[0],
                    color=harness.colour_of(key[0], all_peers), hatch=HATCHES[dtypes.index(key[1])],
                )  # fmt: skip
            panel.set_yticks(
                [y + width * (len(measured) - 1) / 2 for y in range(len(names))], names
            )
            panel.invert_yaxis()
            panel.set_xlabel("TFLOP/s")
            harness.headline(panel, title)
            drawn.append(panel)
    harness.legend(figure, drawn, columns=6)


def _is(row: Record, key: tuple[str, str]) -> bool:
    """Tell whether a row holds measurements of a peer in a dtype."""
    return (row["peer"], row["dtype"]) == key and "forward" in row


CAPTION = (
    "Speed of this library's kernels and of PyTorch's backends in each case, in TFLOP/s, which "
    "count only unmasked scores. A backend without a bar does not support the case."
)
EXPERIMENT = Experiment(
    "peers", __doc__, measure, table, draw, options=options, height=4.6, caption=CAPTION
)

if __name__ == "__main__":
    raise SystemExit(harness.run(EXPERIMENT))
