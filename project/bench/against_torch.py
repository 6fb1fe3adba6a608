"""The rungs of a GPU beside PyTorch's named backends, measured in one run: the figures they are held to.

    python project/bench_attention.py --device cuda --against torch
    python project/bench_attention.py --device cuda --against torch --groups options --jobs 8

Every call has 16,384 tokens in its batch and 2,048 columns over its heads.  What is compared takes turns in
each round; a ratio is PyTorch's time over ours within a round, and a figure is the geometric mean of the
medians of its calls.  Times are the device's own: it is kept busy while Python launches, whose share is a
figure of its own.  Work counts the scores that the option leaves: 4 N^2 d a head forward, 2.5 times that
backward.  Gradients of q are added up by atomics, as PyTorch's are, where nothing else is said.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from common.command_line import COUNT
from tqdm import tqdm

import minitorch
from bench.measuring import (
    command_line,
    interleaved,
    name_of,
    ratio,
    rows_of,
    timing_note,
    write_record,
)
from bench.our_attention import OurCall, errors, reference, why_failed
from bench.peer_cases import Case, cases
from bench.peer_figures import DIRECTIONS, GROUPS, OPTIONS, SDPA, Row, details, table
from bench.torch_attention import FLEX, TorchCall, load_torch, prepare
from kernels.runtime.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kernels.traffic.formulas import attention_backward_flops, attention_flops

TOKENS, HIDDEN = 16384, 2048
#: Batch and heads go by tokens and columns; lengths.
DEFAULTS = (None, None, [512, 1024, 2048, 4096, 8192, 16384])
#: Of the calls with options: their length, window and sizes are those of the published comparison.
LENGTH, WINDOW, BLOCK, DOCUMENT = 8192, 1024, 128, 1000
#: Of the calls whose results are compared with the textbook's, and how many of their heads.
ACCURACY_LENGTH, ACCURACY_HEADS = 1024, 8
#: Rows, columns and depth of the matrix product.
PRODUCT = 8192
#: Seconds of a reading at least; seconds that Python takes for one call at most; cycles a second.
READING, LAUNCHING, CLOCK = 0.004, 5e-4, 1.8e9
DTYPES = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}


class Ours(NamedTuple):
    """One of our contestants.

    Attributes:
        name: In the tables.
        options: Of the public call, beside those of the case.
    """

    name: str
    options: dict[str, Any]


class Peers(NamedTuple):
    """Calls that are timed in turn.

    Attributes:
        group: Of the figures.
        case: Name of the option.
        dtype: Of the tensors.
        head_dim: Columns of a head.
        length: Of queries and keys.
        ours: Our contestants.
        theirs: Of PyTorch's.
    """

    group: str
    case: str
    dtype: str
    head_dim: int
    length: int
    ours: tuple[Ours, ...]
    theirs: tuple[str, ...]

    @property
    def heads(self) -> int:
        """Batch times heads."""
        return max(TOKENS // self.length, 1) * (HIDDEN // self.head_dim)


def of_rung(rung: str) -> tuple[Ours, ...]:
    """Return a rung with gradients of q in any order, and in a given one."""
    return (
        Ours(rung, {"rung": rung, "deterministic": False}),
        Ours(f"{rung}, deterministic", {"rung": rung, "deterministic": True}),
    )


AUTO = (Ours("auto", {"deterministic": False}),)
RUNGS = (*of_rung("flash2_mma"), *of_rung("flash3_wgmma"))
PRECISIONS = tuple(
    Ours(name, {"precision": name, "deterministic": False}) for name in ("float32", "tf32")
)


def plan(args: argparse.Namespace) -> Iterator[Peers]:
    """Yield all that there is to be timed."""
    masks = "dense", "causal"
    for dim, length, case in itertools.product(args.dims, args.lengths, masks):
        for dtype in args.dtypes:
            yield Peers("dense", case, dtype, dim, length, RUNGS, ("FLASH", "CUDNN"))
        peers = ("EFFICIENT", "MATH") if length < LENGTH else ("EFFICIENT",)
        yield Peers("float32", case, "float32", dim, length, PRECISIONS, peers)
    for dtype in (*args.dtypes, "float32"):
        ours, peer = (PRECISIONS[:1], "EFFICIENT") if dtype == "float32" else (RUNGS, "MATH")
        for dim, case in itertools.product(args.dims, masks):
            yield Peers("accuracy", case, dtype, dim, ACCURACY_LENGTH, ours, (peer,))
    narrow = [dim for dim in args.dims if dim <= 128]
    for dim, case in itertools.product(narrow, ("boolean mask", "dropout")):
        yield Peers("masks", case, "bfloat16", dim, LENGTH, AUTO, SDPA)
    for dim, case in itertools.product(narrow, OPTIONS):
        yield Peers("options", case, "bfloat16", dim, LENGTH, AUTO, (FLEX,))


class Operands:
    """q, k, v and dout of PyTorch's on the device; our kernels read the same memory."""

    def __init__(self, torch: Any, one: Peers):
        torch.manual_seed(0)
        shape = 1, one.heads, one.length, one.head_dim
        self.dtype, kind = DTYPES[one.dtype], getattr(torch, one.dtype)
        self.tensors = [torch.randn(shape, device="cuda").to(kind) for _ in range(4)]

    def first_heads(self, count: int) -> list[Any]:
        """Return q, k, v and dout of so many heads in float64, (heads, length, head_dim)."""
        return [x[0, :count].double().cpu().numpy() for x in self.tensors]

    def ours(self, ours: Ours, case: Case) -> OurCall:
        """Return a contestant."""
        tensors = self.tensors
        if case.sums is not None:
            tensors = [x[0].permute(1, 0, 2) for x in tensors]
        return OurCall(case, tensors, self.dtype, True, ours.options)


def case_of(one: Peers) -> Case:
    """Return the option of some calls."""
    return cases(one.heads, one.length, WINDOW, BLOCK, DOCUMENT)[one.case]


def compiled_first(todo: list[Peers]) -> list[Peers]:
    """Return calls of one contestant each, those first that share no kernel with an earlier one.

    Of PyTorch's only FlexAttention compiles, once for each case; what it compiles stays on disk, too.
    """
    flex = [one._replace(ours=(), theirs=(FLEX,)) for one in todo if FLEX in one.theirs]
    alone = [one._replace(ours=(ours,), theirs=()) for one in todo for ours in one.ours]
    known: set[tuple[Any, ...]] = set()
    first, later = [], []
    for one in alone:
        kernel = one.dtype, one.head_dim, one.case, one.ours[0].name
        (later if kernel in known else first).append(one)
        known.add(kernel)
    return flex + sorted(first, key=lambda one: one.case in ("dense", "causal")) + later


def compile_for(one: Peers) -> None:
    """Run contestants once in this process: their kernels are then on the disk."""
    torch = load_torch()
    prepare(torch, "cuda")
    operands, case = Operands(torch, one), case_of(one)
    for name in (*one.ours, *one.theirs):
        contestant(torch, name, operands, case)


def contestant(torch: Any, name: Ours | str, operands: Operands, case: Case) -> Any:
    """Return a contestant that has run once, or the text that says why it cannot."""
    try:
        if isinstance(name, str):
            call: Any = TorchCall(torch, name, case, operands.tensors)
        else:
            call = operands.ours(name, case)
        call.forward()
        call.backward()
        torch.cuda.synchronize()
    except Exception as error:  # a peer may raise anything
        return why_failed(error)
    return call


def _hold(torch: Any, repeats: int) -> None:
    """Let the device wait, in cycles of its clock, while so many calls are launched."""
    torch.cuda._sleep(int(repeats * LAUNCHING * CLOCK))


def measure(torch: Any, one: Peers, budget: float) -> Row:
    """Return the row of some calls: of each contestant times, rates and errors, or why it has none."""
    operands, case = Operands(torch, one), case_of(one)
    found = {
        name if isinstance(name, str) else name.name: contestant(torch, name, operands, case)
        for name in (*one.ours, *one.theirs)
    }
    row: Row = {
        "group": one.group, "case": one.case, "dtype": one.dtype, "head_dim": one.head_dim,
        "length": one.length, "heads": one.heads, "part": case.part,
    }  # fmt: skip
    calls = {name: call for name, call in found.items() if not isinstance(call, str)}
    row["why_not"] = {name: text for name, text in found.items() if name not in calls}
    if one.group == "accuracy":
        wanted = reference(case, operands.first_heads(ACCURACY_HEADS), operands.dtype)
        row["errors"] = {
            name: errors(call.first_heads(ACCURACY_HEADS), wanted)
            for name, call in calls.items()
        }  # fmt: skip
        return row
    steps = {
        (name, direction): getattr(call, direction)
        for direction in DIRECTIONS
        for name, call in calls.items()
    }
    times = interleaved(
        steps, "cuda", budget, least=5, shortest=READING, hold=partial(_hold, torch)
    )
    shape = one.heads, one.length, one.length, one.head_dim
    counts = (attention_flops(*shape), attention_backward_flops(*shape))
    for direction, count in zip(DIRECTIONS, counts, strict=True):
        row[direction] = {
            name: {
                "ms": 1e3 * median(times[name, direction]),
                "tflops": case.part * count / median(times[name, direction]) / 1e12,
                "times_of": {
                    other: ratio(times[other, direction], times[name, direction])["median"]
                    for other in calls
                    if other != name
                },
            }
            for name in calls
        }
    return row


def product(torch: Any, budget: float) -> Row:
    """Return the rates of a matrix product in bfloat16, ours and cuBLAS's of the same operands."""
    theirs = [torch.randn((PRODUCT, PRODUCT), device="cuda").bfloat16() for _ in range(2)]
    ours = [
        minitorch.tensor(x.float().cpu().numpy(), dtype=BFLOAT16, backend=minitorch.CudaBackend)
        for x in theirs
    ]
    steps = {"ours": lambda: ours[0] @ ours[1], "cuBLAS": lambda: theirs[0] @ theirs[1]}
    with minitorch.no_grad():
        for step in steps.values():
            step()
        times = interleaved(
            steps, "cuda", budget, least=5, shortest=READING, hold=partial(_hold, torch)
        )
    return {
        "group": "product",
        "case": f"matrix product, {PRODUCT}^3",
        "dtype": "bfloat16",
        "tflops": {name: 2e-12 * PRODUCT**3 / median(times[name]) for name in steps},
        "ratio": ratio(times["cuBLAS"], times["ours"])["median"],
    }


def options(group: Any) -> None:
    """Add the options of the command line to a group of a parser."""
    add = group.add_argument
    add(
        "--against",
        choices=["torch"],
        help="the figures that tensor cores are held to, and no table of lengths",
    )
    add(
        "--dims",
        type=COUNT,
        nargs="+",
        default=[64, 128, 256],
        help="head dims (default: 64 128 256)",
    )
    add("--dtypes", nargs="+", choices=["float16", "bfloat16"], default=["float16", "bfloat16"],
        help="of dense calls (default: both)")  # fmt: skip
    add(
        "--groups",
        nargs="+",
        choices=GROUPS,
        default=list(GROUPS),
        help="of figures (default: all)",
    )
    add("--jobs", type=COUNT, default=1, help="processes that compile kernels first (default: 1)")
    add(
        "--go-on", action="store_true", help="keep the rows that --json has, and measure the others"
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, print, and write the record as rows come; return 0 if every figure is reached.

    Args:
        args: Of ``bench_attention``.
        argv: Its command line.
    """
    torch = load_torch()
    if torch is None:
        sys.exit("--against torch needs PyTorch: pip install torch")
    prepare(torch, "cuda")
    rows = rows_of(args.json) if args.go_on and args.json else []
    todo = [one for one in plan(args) if one.group in args.groups and not is_there(one, rows)]
    if args.jobs > 1 and todo:
        context, first = multiprocessing.get_context("spawn"), compiled_first(todo)
        with ProcessPoolExecutor(args.jobs, context) as pool:
            steps = pool.map(compile_for, first)
            for _ in tqdm(steps, total=len(first), unit="call", desc="compile"):
                pass
    try:
        if "product" in args.groups and all(row["group"] != "product" for row in rows):
            rows.append(product(torch, args.seconds))
        for one in tqdm(todo, unit="call", desc="time"):
            rows.append(measure(torch, one, args.seconds))
            write(args, argv, rows)
            torch.cuda.empty_cache()
    except KeyboardInterrupt:
        print("interrupted: these calls are done", file=sys.stderr)
    write(args, argv, rows)
    print(f"{name_of('cuda')}; {TOKENS} tokens, {HIDDEN} columns; TFLOP/s\n\n{details(rows)}\n")
    found = table(rows)
    print(found)
    return int("| NO |" in found)


def is_there(one: Peers, rows: list[Row]) -> bool:
    """Tell whether calls are among rows that have been measured."""
    names = "group", "case", "dtype", "head_dim", "length"
    return any(all(row.get(name) == getattr(one, name) for name in names) for row in rows)


def write(args: argparse.Namespace, argv: list[str], rows: list[Row]) -> None:
    """Write the rows that are done."""
    if args.json:
        command = command_line("project/bench_attention.py", argv)
        write_record(
            args.json, command, name_of("cuda"), timing=timing_note("cuda"), tokens=TOKENS,
            hidden=HIDDEN, rows=rows,
        )  # fmt: skip
