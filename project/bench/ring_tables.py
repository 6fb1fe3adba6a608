"""Tables and a plot of the records of ``bench_ring`` and ``bench_data_parallel``."""

from __future__ import annotations

from pathlib import Path

from bench.record_files import Record
from bench.table_cells import cell, colour_of, markdown
from kernels.traffic.formulas import attention_backward_flops, attention_flops

PASSES = {"forward": "forward", "both": "forward and backward"}
PEER = "PyTorch's context parallel"
#: Curves: the name, and the times of a row.
CURVES = {
    "one GPU": lambda row, way: row[f"one_{way}_seconds"],
    "ring attention": lambda row, way: row[f"all_{way}_seconds"],
    PEER: lambda row, way: row["context_parallel"][way]["seconds"],
}


def _measured(record: Record) -> list[Record]:
    return [row for row in record["rows"] if "length" in row]


def ring_table(record: Record) -> str:
    """Return the times of ring attention by length, beside one GPU, the model and PyTorch."""
    lines = []
    for row in _measured(record):
        for way, name in PASSES.items():
            lines.append([
                f"{row['length']:,}, {name}",
                *(cell(1e3 * row[f"{whose}_{way}_seconds"]) for whose in ("one", "all")),
                f"{row[f'efficiency_{way}']:.2f}",
                cell(1e3 * row[f"predicted_{way}_seconds"]),
                cell(1e3 * row["context_parallel"][way]["seconds"]),
                f"{row[f'beside_torch_{way}']:.2f}",
            ])  # fmt: skip
    head = [
        "tokens, pass", "one GPU, ms", f"{record['gpus']} GPUs, ms", "efficiency", "model, ms",
        "PyTorch, ms", "PyTorch's time / ours",
    ]  # fmt: skip
    first = _measured(record)[0]
    call = (
        f"Causal, bfloat16, batch 1, {first['heads']} heads, head_dim {first['head_dim']}; messages have a "
        f"latency of {1e6 * first['latency']:.0f} µs and {first['bandwidth'] / 1e9:.0f} GB/s"
    )
    steps = [
        f"A training step on {row['train']:,} tokens of context ({row['layers']} layers, width "
        f"{row['width']}, activations recomputed) takes {row['step_seconds']:.1f} s."
        for row in record["rows"]
        if "train" in row
    ]
    return "\n\n".join([f"{call}.", markdown(head, lines), *steps])


def data_parallel_table(record: Record) -> str:
    """Return the steps of data parallel training, ours and PyTorch's, beside those of one GPU."""
    (row,) = record["rows"]
    lines = []
    for name, own in (("this library", ""), ("PyTorch's DDP, eager", "torch_")):
        one, every = (row[f"{own}{whose}_seconds"] for whose in ("one", "all"))
        tokens = record["gpus"] * row["batch_per_gpu"] * row["context"] / every
        lines.append([name, cell(1e3 * one), cell(1e3 * every), f"{one / every:.2f}", cell(tokens)])
    head = [
        "a step", "one GPU, ms", f"{record['gpus']} GPUs, ms", "efficiency", "tokens/s",
    ]  # fmt: skip
    batch = f"{row['batch_per_gpu']} x {row['context']:,} tokens per GPU"
    call = f"{row['preset']}, {row['precision']}, {batch}"
    return f"{call}.\n\n{markdown(head, lines)}"


def draw(record: Record, path: Path) -> None:
    """Draw the TFLOP/s of each GPU by length, a panel for each pass."""
    from matplotlib.figure import Figure

    figure = Figure((7.6, 3.4), layout="constrained")
    rows = _measured(record)
    lengths = [row["length"] for row in rows]
    for axes, (way, name) in zip(figure.subplots(1, 2), PASSES.items(), strict=True):
        for curve, seconds in CURVES.items():
            if curve == PEER and any("context_parallel" not in row for row in rows):
                continue
            gpus = 1 if curve == "one GPU" else record["gpus"]
            rates = [_flops(row, way) / seconds(row, way) / gpus / 1e12 for row in rows]
            axes.plot(lengths, rates, "o-", color=colour_of(curve, [*CURVES]), label=curve)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("tokens of the whole sequence")
    figure.axes[0].set_ylabel("TFLOP/s of each GPU")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    call = f"causal, bfloat16, {rows[0]['heads']} heads, head_dim {rows[0]['head_dim']}"
    figure.suptitle(f"{record['gpus']} x {record['device']}, {call}", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _flops(row: Record, way: str) -> float:
    size = row["heads"], row["length"], row["length"], row["head_dim"]
    flops = attention_flops(*size, causal=True)
    return flops if way == "forward" else flops + attention_backward_flops(*size, causal=True)
