"""Tables of attention beside PyTorch, each from one record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import geometric_mean
from typing import Any

from bench.records import Record
from bench.table_cells import cell, markdown
from measurements.against_torch import DIRECTIONS, FIGURES, ratios_of

#: Of the tables that show a part of the lengths of a record.
LENGTHS = (1024, 8192)
#: How the columns of PyTorch's backends are headed.
SDPA = {"FLASH": "PyTorch, flash", "CUDNN": "PyTorch, cuDNN", "EFFICIENT": "PyTorch, efficient"}
SDPA |= {"MATH": "PyTorch, math", "FlexAttention": "FlexAttention"}


def _rows(record: Record, group: str, **wanted: Any) -> list[Record]:
    return [
        row for row in record["rows"] if row["group"] == group and wanted.items() <= row.items()
    ]


def _rate(row: Record, direction: str, name: str) -> str:
    entry = row.get(direction, {}).get(name)
    return "" if entry is None else f"{entry['tflops']:.0f}"


def _mask(row: Record) -> str:
    return "causal" if row["case"] == "causal" else "full"


def _sides(
    rows: Iterable[Record], direction: str, names: dict[str, str], first: Callable[[Record], str]
) -> str:
    """Return a table of TFLOP/s: a line for each row, a column for each contestant."""
    lines = [[first(row), *(_rate(row, direction, name) for name in names)] for row in rows]
    return markdown([f"{direction}, TFLOP/s", *names.values()], lines)


def _call(row: Record) -> str:
    return f"d {row['head_dim']}, {_mask(row)}, N {row['length']:,}"


def attention_ratios(record: Record) -> str:
    """Return the geometric means of PyTorch's time over ours."""
    lines = [
        [figure.name, f"{geometric_mean(ratios):.2f}", str(len(ratios))]
        for figure in FIGURES
        if (ratios := ratios_of(record["rows"], figure))
    ]
    return markdown(["speed of the first / speed of the second", "ratio", "number of calls"], lines)


def attention_dense(record: Record) -> str:
    """Return TFLOP/s in bfloat16 of both tensor-core rungs and PyTorch's two fastest backends."""
    rows = [row for row in _rows(record, "dense", dtype="bfloat16") if row["length"] in LENGTHS]
    peers = {name: SDPA[name] for name in ("FLASH", "CUDNN")}
    forward = {"flash2_mma": "flash2_mma", "flash3_wgmma": "flash3_wgmma", **peers}
    backward = {**forward, "flash3_wgmma, deterministic": "flash3_wgmma, deterministic"}
    return "\n\n".join(
        _sides(rows, direction, names, _call)
        for direction, names in zip(DIRECTIONS, (forward, backward), strict=True)
    )


def attention_float32(record: Record) -> str:
    """Return TFLOP/s of float32 operands."""
    rows = [row for row in _rows(record, "float32") if row["length"] in LENGTHS]
    names = {"float32": "ours, float32", "tf32": "ours, TF32"}
    names |= {name: SDPA[name] for name in ("EFFICIENT", "MATH")}
    return "\n\n".join(_sides(rows, d, names, _call) for d in DIRECTIONS)


def attention_options(record: Record) -> str:
    """Return TFLOP/s of calls with an option, beside the backends that have it."""
    rows = [row for group in ("masks", "options") for row in _rows(record, group)]
    names = {"auto": "ours", **{name: SDPA[name] for name in ("FLASH", "CUDNN", "FlexAttention")}}

    def call(row: Record) -> str:
        return f"{row['case']}, d {row['head_dim']}"

    merged: dict[str, Record] = {}
    # A boolean mask is in both groups, with different peers and a reading of ours in each.
    for row in rows:
        kept = merged.setdefault(call(row), {**row, "forward": {}, "backward": {}})
        for direction in DIRECTIONS:
            kept[direction] = {**row[direction], **kept[direction]}
    ordered = sorted(merged.values(), key=lambda row: row["head_dim"])
    return "\n\n".join(_sides(ordered, d, names, call) for d in DIRECTIONS)


def option_costs(record: Record) -> str:
    """Return the time of calls with an option, divided by that of a plain call."""
    rows = _rows(record, "options")
    plain = {row["head_dim"]: row for row in rows if row["case"] == "dense"}
    rows += [row for row in _rows(record, "masks") if row["case"] == "dropout"]

    def cost(case: str, head_dim: int, direction: str) -> str:
        row = next(row for row in rows if (row["case"], row["head_dim"]) == (case, head_dim))
        ours, base = (each[direction]["auto"]["ms"] for each in (row, plain[head_dim]))
        return f"{ours / base:.2f}"

    lines = [
        [case, *(cost(case, head_dim, direction) for head_dim in plain for direction in DIRECTIONS)]
        for case in dict.fromkeys(row["case"] for row in rows)
        if case != "dense"
    ]
    head = [f"d {head_dim}, {direction}" for head_dim in plain for direction in DIRECTIONS]
    return markdown(["time / time of a plain call", *head], lines)


def peers(record: Record) -> str:
    """Return milliseconds of a call for each case, a column for each contestant that can do one."""
    rows = [row for row in record["rows"] if "forward" in row]
    names = list(dict.fromkeys(row["peer"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    workload = record["workload"]
    (dtype,) = {row["dtype"] for row in rows}
    found = {(row["case"], row["peer"]): row for row in rows}
    shown = [
        f"{workload['heads']} heads, {workload['length']:,} keys, head_dim {workload['head_dim']}, "
        f"{dtype}. An empty cell means that the backend lacks the option or cannot compile it."
    ]
    for direction in DIRECTIONS:
        head = [f"{direction}, ms", *(SDPA.get(name, "ours") for name in names)]
        lines = []
        for case in cases:
            entries = [found.get((case, name)) for name in names]
            times = [entry and entry[direction]["ms"]["median"] for entry in entries]
            lines.append([case, *("" if time is None else cell(time) for time in times)])
        shown.append(markdown(head, lines))
    return "\n\n".join(shown)


def user_functions(record: Record) -> str:
    """Return milliseconds of calls with a user's mask or score function, ours and FlexAttention's."""
    workload = record["workload"]
    found = {(row["case"], row["peer"]): row for row in record["rows"]}
    lines, ratios = [], []
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        ours, theirs = found[case, "kernels"], found[case, "FlexAttention"]
        cells = [case + " (held out)" * ours["held_out"]]
        for direction in DIRECTIONS:
            cells.append(cell(ours[direction]["ms"]["median"]))
            peer = theirs.get(direction)
            cells += [cell(peer["ms"]["median"]), f"{peer['ratio']:.2f}"] if peer else ["", ""]
        lines.append(cells)
        if "forward" in theirs:
            ratios.append([theirs[direction]["ratio"] for direction in DIRECTIONS])
    means = (f"{geometric_mean(column):.2f}" for column in zip(*ratios, strict=True))
    lines.append(["geometric mean", *(each for mean in means for each in ("", "", mean))])
    head = [f"head_dim {workload['head_dim']}"]
    for direction in DIRECTIONS:
        head += [f"{direction}, ms: ours", "FlexAttention", "FlexAttention / ours"]
    return markdown(head, lines)


def product(record: Record) -> str:
    """Return the rates of a matrix product, ours and cuBLAS's."""
    (row,) = _rows(record, "product")
    rates = [f"{rate:.0f} TFLOP/s" for rate in row["tflops"].values()]
    return markdown(
        ["matrix product", "ours", "cuBLAS"], [[f"{row['dtype']} {row['case']}", *rates]]
    )


def torch_operator(record: Record) -> str:
    """Return the times of our operator of PyTorch beside the backends of SDPA, in milliseconds."""
    names = list(record["rows"][0]["ms"])
    lines = []
    for row in record["rows"]:
        what = "GPT-2 small, a " + row["kind"]
        if row["kind"] == "call":
            batch, heads, seq, dim = row["shape"]
            what = f"one call: batch {batch}, {heads} heads, N {seq:,}, d {dim}"
        times = [row["ms"].get(name) for name in names]
        cells = [cell(None if ms is None else ms["median"]) for ms in times]
        lines.append([what, *cells, f"{row['ratio']['median']:.2f}"])
    heads = [name.removesuffix("_ATTENTION") for name in names]
    return markdown(
        ["forward and backward, bfloat16, ms", *heads, "fastest other's time / ours"], lines
    )


def accuracy(record: Record) -> str:
    """Return errors of out and of the gradients, beside PyTorch's most accurate backend."""
    lines = []
    for row in _rows(record, "accuracy"):
        found = row["errors"]
        peer = next(name for name in ("MATH", "EFFICIENT") if name in found)
        ours = [entry for name, entry in found.items() if name not in ("MATH", "EFFICIENT")]
        cells = []
        for key in ("error", "gradient_error"):
            cells += [f"{max(each[key] for each in ours):.1e}", f"{found[peer][key]:.1e}"]
        call = f"{row['dtype']}, d {row['head_dim']}, {_mask(row)}, N {row['length']:,}"
        lines.append([call, *cells])
    sides = [f"{what}: {side}" for what in ("out", "gradients") for side in ("ours", "PyTorch")]
    head = ["largest error against float64", *sides]
    return markdown(head, lines)
