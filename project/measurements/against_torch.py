"""The tensor-core rungs beside PyTorch's named backends: the figures that they are held to.

Every call has 16,384 tokens in its batch and 2,048 columns over its heads.  Contestants take turns in each
round; a ratio is PyTorch's time over ours within a round, and a figure is the geometric mean of the medians
of its calls.  Times are the device's own: it is kept busy while Python launches, which ``calls`` measures.
Work counts the scores that the option leaves: 4 N^2 d a head forward, 2.5 times that backward.  Gradients
of q are added up by atomics, as PyTorch's are, where nothing else is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from statistics import geometric_mean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench.contestants import DIRECTIONS, directions, errors, reference
from bench.kit import Case, Figure, Measurement, Record, Run, ratio, ready
from bench.measuring import load_torch, prepare
from bench.peer_cases import cases
from bench.processes import in_processes
from bench.torch_attention import FLEX, Rivals

import minitorch
from kernels.runtime.dtypes import BFLOAT16
from kernels.traffic.formulas import attention_backward_flops, attention_flops

TOKENS, HIDDEN = 16384, 2048
#: Of the calls with options: their length, window and sizes are those of the published comparison.
LENGTH, WINDOW, BLOCK, DOCUMENT = 8192, 1024, 128, 1000
#: Of the calls that are compared with the textbook, and how many of their heads.
ACCURACY_LENGTH, ACCURACY_HEADS = 1024, 8
#: Rows, columns and depth of the matrix product.
PRODUCT = 8192
#: Seconds of a reading at least; seconds that Python takes for one call at most; cycles a second.
READING, LAUNCHING, CLOCK = 0.004, 5e-4, 1.8e9
#: Of the calls that FlexAttention computes, too.
OPTIONS = (
    "dense", "causal", "window", "documents", "butterfly", "ALiBi", "ALiBi as score_mod", "softcap",
    "boolean mask",
)  # fmt: skip
GROUPS = ("product", "dense", "masks", "options", "float32", "accuracy")
SDPA = ("FLASH", "CUDNN", "EFFICIENT")
#: Our contestants: name → options of the public call, beside those of the case.
OURS: dict[str, Record] = {
    "auto": {"deterministic": False},
    **{name: {"precision": name, "deterministic": False} for name in ("float32", "tf32")},
    **{
        rung + suffix: {"rung": rung, "deterministic": bool(suffix)}
        for rung in ("flash2_mma", "flash3_wgmma")
        for suffix in ("", ", deterministic")
    },
}
RUNGS = tuple(OURS)[3:]


class Bound(NamedTuple):
    """A figure of the table: the geometric mean of PyTorch's time over ours."""

    name: str  # in the table
    group: str  # whose rows it is made of
    ours: str  # name of our contestant, or of the case where that is "auto"
    theirs: tuple[str, ...]  # names of PyTorch's; the fastest one counts
    directions: tuple[str, ...]  # which
    must: float  # ratio that has to be reached
    aim: float  # ratio beyond
    lengths: tuple[int, int] = (0, 1 << 30)  # the least and the greatest


LONG, SHORT = (2048, 1 << 30), (512, 1024)
FORWARD, BACKWARD = DIRECTIONS[:1], DIRECTIONS[1:]
_MMA, _WGMMA = "flash2_mma", "flash3_wgmma"
FIGURES = (
    Bound(f"{_MMA} forward / PyTorch flash", "dense", _MMA, ("FLASH",), FORWARD, 1.0, 1.15),
    Bound(f"{_MMA} backward / PyTorch flash", "dense", _MMA, ("FLASH",), BACKWARD, 0.9, 1.1),
    Bound(f"{_WGMMA} forward / cuDNN, N ≥ 2,048", "dense", _WGMMA, ("CUDNN",), FORWARD, 1.0, 1.15, LONG),
    Bound(f"{_WGMMA} forward / cuDNN, N = 512 and 1,024", "dense", _WGMMA, ("CUDNN",), FORWARD, 0.85,
          1.0, SHORT),
    Bound(f"{_WGMMA} backward / cuDNN, N ≥ 2,048", "dense", _WGMMA, ("CUDNN",), BACKWARD, 0.9, 1.1, LONG),
    *(
        Bound(f"{rung} backward, deterministic / not deterministic", "dense", f"{rung}, deterministic",
              (rung,), BACKWARD, 0.7, 1.0)
        for rung in (_MMA, _WGMMA)
    ),
    *(
        Bound(f"{case} {way} / fastest PyTorch backend", "masks", case, SDPA, (way,), 1.0, 1.3)
        for case in ("boolean mask", "dropout")
        for way in DIRECTIONS
    ),
    *(
        Bound(f"{case} {way} / FlexAttention", "options", case, (FLEX,), (way,), 1.0, 1.3)
        for case in OPTIONS
        for way in DIRECTIONS
    ),
    *(
        Bound(f"{name} {way} / PyTorch float32", "float32", name, ("EFFICIENT", "MATH"), (way,), must, aim)
        for name, must, aim in (("float32", 1.5, 3.0), ("tf32", 3.0, 5.0))
        for way in DIRECTIONS
    ),
)  # fmt: skip


def ratios_of(rows: list[Record], figure: Bound) -> list[float]:
    """Return the ratios that a figure is the mean of."""
    found, (least, most) = [], figure.lengths
    for row in rows:
        by_case = figure.group in ("masks", "options") and row["case"] != figure.ours
        if row["group"] != figure.group or by_case or not least <= row["length"] <= most:
            continue
        for entries in (row.get(way, {}) for way in figure.directions):
            ours = figure.ours if figure.ours in entries else "auto"
            theirs = [name for name in figure.theirs if name in entries]
            if ours in entries and theirs:
                best = min(theirs, key=lambda name: entries[name]["ms"])
                found.append(entries[ours]["times_of"][best])
    return found


def figures(record: Record) -> list[Figure]:
    """Return the ratios of speed, the worst ratios of errors of each dtype, and that of the product."""
    rows, found, peers = record["rows"], list[Figure](), ("MATH", "EFFICIENT")
    for bound in FIGURES:
        if ratios := ratios_of(rows, bound):
            name = f"{bound.name}, {len(ratios)} calls"
            found.append(Figure(name, geometric_mean(ratios), bound.must, bound.aim))
    for dtype, (what, must) in itertools.product(
        ("float16", "bfloat16", "float32"), {"error": 2.0, "gradient_error": 3.0}.items()
    ):
        worst = [
            entry[what] / max(row["errors"][peer][what] for peer in peers if peer in row["errors"])
            for row in rows
            if row["group"] == "accuracy" and row["dtype"] == dtype
            for name, entry in row.get("errors", {}).items()
            if name not in peers
        ]
        name = f"{dtype}, {what.replace('gradient_error', 'error of gradients')} / PyTorch's, worst"
        most = 1.0 if dtype == "float32" else must
        found += [Figure(name, max(worst), most, is_most=True)] if worst else []
    for row in rows:
        if row["group"] == "product" and "ratio" in row:
            found.append(Figure(f"{row['dtype']} {row['case']} / cuBLAS", row["ratio"], 0.7, 0.9))
    return found


class Calls(NamedTuple):
    """Calls that are timed in turn: the key of a row, our contestants, and PyTorch's."""

    group: str
    case: str
    dtype: str
    head_dim: int
    length: int
    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    @property
    def heads(self) -> int:
        """Batch times heads."""
        return max(TOKENS // self.length, 1) * (HIDDEN // self.head_dim)

    @property
    def described(self) -> Any:
        """The case itself."""
        return cases(self.heads, self.length, WINDOW, BLOCK, DOCUMENT)[self.case]

    @property
    def key(self) -> Record:
        """The key of the row."""
        return dict(zip(self._fields[:5], self[:5], strict=True))


def plan(run: Any) -> Iterator[Calls]:
    """Yield all that there is to be timed."""
    masks, tensor_cores = ("dense", "causal"), ("FLASH", "CUDNN")
    for dim, length, case in itertools.product(run.dims, run.lengths, masks):
        for dtype in run.dtypes:
            yield Calls("dense", case, dtype, dim, length, RUNGS, tensor_cores)
        peers = ("EFFICIENT", "MATH") if length < LENGTH else ("EFFICIENT",)
        yield Calls("float32", case, "float32", dim, length, ("float32", "tf32"), peers)
    for dtype in (*run.dtypes, "float32"):
        ours, peer = (("float32",), "EFFICIENT") if dtype == "float32" else (RUNGS, "MATH")
        for dim, case in itertools.product(run.dims, masks):
            yield Calls("accuracy", case, dtype, dim, ACCURACY_LENGTH, ours, (peer,))
    narrow = [dim for dim in run.dims if dim <= 128]
    for dim, case in itertools.product(narrow, ("boolean mask", "dropout")):
        yield Calls("masks", case, "bfloat16", dim, LENGTH, ("auto",), SDPA)
    for dim, case in itertools.product(narrow, OPTIONS):
        yield Calls("options", case, "bfloat16", dim, LENGTH, ("auto",), (FLEX,))


def contestants(torch: Any, one: Calls) -> tuple[Rivals, dict[str, Any], dict[str, str]]:
    """Return the operands, the contestants that have run once, and why others cannot."""
    size = SimpleNamespace(device="cuda", **one.key, heads=one.heads)
    rivals = Rivals(size, one.dtype, torch)
    make = {
        name: partial(
            rivals.call, None if name in OURS else name, one.described, **OURS.get(name, {})
        )
        for name in (*one.ours, *one.theirs)
    }
    return rivals, *ready(make, Exception)  # a peer may raise anything


def compile_for(one: Calls) -> None:
    """Run contestants once in this process: their kernels are then on the disk."""
    torch = load_torch()
    prepare(torch, "cuda")
    contestants(torch, one)


def measure_all(run: Run) -> Iterator[Case]:
    _ = run.pytorch
    run.note(tokens=TOKENS, hidden=HIDDEN)
    todo = [one for one in plan(run) if one.group in run.groups]
    alone = [one._replace(ours=(), theirs=(FLEX,)) for one in todo if FLEX in one.theirs]
    alone += [one._replace(ours=(name,), theirs=()) for one in todo for name in one.ours]
    in_processes(compile_for, [(one,) for one in alone], run.jobs)
    if "product" in run.groups:
        key = {"group": "product", "case": f"matrix product, {PRODUCT}^3", "dtype": "bfloat16"}
        yield key, partial(product, run)
    for one in todo:
        yield one.key, partial(measured, run, one)


def timed(run: Run, steps: Any) -> Any:
    """Return the seconds of each step in every round, with the device busy while the host launches."""

    def hold(repeats: int) -> None:
        run.torch.cuda._sleep(int(repeats * LAUNCHING * CLOCK))

    return run.timed(steps, least=5, shortest=READING, hold=hold)


def measured(run: Run, one: Calls) -> Record:
    """Return of each contestant times, rates and errors, or why it has none."""
    run.torch.cuda.empty_cache()
    case = one.described
    rivals, calls, not_run = contestants(run.torch, one)
    row: Record = {"heads": one.heads, "part": case.part, "not_run": not_run}
    if one.group == "accuracy":
        wanted = reference(case, rivals.first(ACCURACY_HEADS), rivals.dtype)
        row["errors"] = {
            n: errors(call.first_heads(ACCURACY_HEADS), wanted) for n, call in calls.items()
        }
        return row
    times = timed(run, directions(calls))
    shape = one.heads, one.length, one.length, one.head_dim
    counts = (attention_flops(*shape), attention_backward_flops(*shape))
    for way, count in zip(DIRECTIONS, counts, strict=True):
        row[way] = {
            name: {
                "ms": 1e3 * median(times[name, way]),
                "tflops": case.part * count / median(times[name, way]) / 1e12,
                "times_of": {
                    other: ratio(times[other, way], times[name, way])["median"]
                    for other in calls
                    if other != name
                },
            }
            for name in calls
        }
    return row


def product(run: Run) -> Record:
    """Return the rates of a matrix product in bfloat16, ours and cuBLAS's of the same operands."""
    torch, gpu = run.torch, minitorch.CudaBackend
    theirs = [torch.randn((PRODUCT, PRODUCT), device="cuda").bfloat16() for _ in range(2)]
    ours = [minitorch.tensor(x.float().cpu().numpy(), dtype=BFLOAT16, backend=gpu) for x in theirs]
    steps = {"ours": lambda: ours[0] @ ours[1], "cuBLAS": lambda: theirs[0] @ theirs[1]}
    with minitorch.no_grad():
        times = timed(run, steps)
    rates = {name: 2e-12 * PRODUCT**3 / median(times[name]) for name in steps}
    return {"tflops": rates, "ratio": ratio(times["cuBLAS"], times["ours"])["median"]}


CHOICES = {"groups": GROUPS, "dtypes": ("float16", "bfloat16")}
MEASUREMENT = Measurement(
    "against_torch", "Are the tensor-core rungs as fast and exact as PyTorch's backends?", measure_all,
    {"cuda": {"normal": {"dims": (64, 128, 256), "lengths": (512, 1024, 2048, 4096, 8192, 16384),
                         "dtypes": CHOICES["dtypes"], "groups": GROUPS, "jobs": 15, "seconds": 0.05},
              "quick": {"dims": (64,), "lengths": (1024,), "groups": ("dense",), "jobs": 1}}},
    figures=figures, minutes={"cuda": 12}, choices=CHOICES,
)  # fmt: skip
