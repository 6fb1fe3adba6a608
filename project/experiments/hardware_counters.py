"""What a GPU's own counters say of the traffic of each rung, by Nsight Compute.

    python project/experiments/hardware_counters.py

Three places are read.  What the kernels ask for, in whole sectors of 32 bytes, is what the formulas
count, but for threads of a warp that read one element together: a warp asks once.  What L2 hands on is
less where L1 answers, and what DRAM hands on is less where L2 does: the key tiles that neighbouring blocks
read at the same time come from DRAM once.  So flash2, which asks for K and V again for each query tile,
hardly reads them from DRAM more than once, while S and P of the naive rung fit in no cache.

The counters need Nsight Compute (``ncu``, part of the CUDA toolkit), and the right to read them.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from bench.contestants import ArrayCall
from common.command_line import COUNT
from harness import Experiment, Record, Report, Result, markdown

from kernels.metering.rung_traffic import RUNGS, PassTraffic, call_traffic, problem_of
from kernels.runtime.launch_notes import Launched, launches_noted
from kernels.runtime.targets import cuda
from kernels.traffic.formulas import total

#: Batch · heads and length.
WORKLOADS = {"quick": (64, 512), "normal": (1024, 1024), "full": (1024, 1024)}
GLOBAL = "l1tex__t_bytes_pipe_lsu_mem_global_op_{}.sum"
#: Key of a row → the metrics that it adds up, in bytes; cp.async is a load, an atomic addition both.
METRICS = {
    "asked_read": tuple(GLOBAL.format(op) for op in ("ld", "ldgsts", "red", "atom")),
    "asked_write": tuple(GLOBAL.format(op) for op in ("st", "red", "atom")),
    "l2_read": ("lts__t_sectors_op_read.sum",),
    "l2_write": ("lts__t_sectors_op_write.sum",),
    "dram_read": ("dram__bytes_read.sum",),
    "dram_write": ("dram__bytes_write.sum",),
}
#: Bytes of a sector, for metrics that count these.
SECTOR = 32
DENIED = "ERR_NVGPUCTRPERM"


def options(parser: Any) -> None:
    parser.add_argument("--batch-heads", type=COUNT, help="batch · heads")
    parser.add_argument("--length", type=COUNT, help="of queries and keys")
    parser.option("--head-dim", int, 64, "of q, k and v")
    parser.add_argument("--profiled", metavar="FILE", help=argparse.SUPPRESS)


def find_ncu() -> str:
    """Return the path of Nsight Compute.

    Raises:
        SystemExit: If it is not on this machine.
    """
    known = ("cuda*/bin/ncu", "cuda*/nsight-compute*/ncu")
    places = [path for pattern in known for path in sorted(Path("/usr/local").glob(pattern))]
    places += sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
    found = shutil.which("ncu") or (str(places[-1]) if places else None)
    if found is None:
        sys.exit(
            "there is no ncu; install Nsight Compute (package cuda-nsight-compute), or add it to PATH"
        )
    return found


def profiled(args: argparse.Namespace) -> None:
    """Under ncu: launch each rung once in its range, after a run that compiles; write which kernels."""
    launched: list[Record] = []
    for name, rung in RUNGS.items():
        call = ArrayCall("cuda", args.batch_heads, args.length, head_dim=args.head_dim, **rung)
        for way in PassTraffic._fields:  # the first call: later ones repeat its launches, unnoted
            with launches_noted() as launches:
                getattr(call, way)()
            names = [one.kernel for one in launches if isinstance(one, Launched)]
            launched.append({"rung": name, "pass": way, "kernels": names})
        for way in PassTraffic._fields:
            cuda.synchronize()
            cuda.profile_start()
            getattr(call, way)()
            cuda.synchronize()
            cuda.profile_stop()
    Path(args.profiled).write_text(json.dumps(launched), encoding="utf-8")


def known_metrics(ncu: str) -> list[str]:
    """Return the metrics that this GPU has, of those asked for."""
    wanted = dict.fromkeys(metric for group in METRICS.values() for metric in group)
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    has = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    return [metric for metric in wanted if metric.removesuffix(".sum") in has] or list(wanted)


def parse(text: str) -> list[dict[str, Any]]:
    """Return what ncu wrote as CSV, its raw page: the name of each kernel, and its metrics as numbers.

    Raises:
        ValueError: If there is no such table.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table in what ncu wrote: {text[-400:]!r}")
    rows = [
        row for row in csv.DictReader(lines[start:]) if (row["ID"] or "").strip()
    ]  # not the units
    return [
        {"kernel": row["Kernel Name"]}
        | {key: _number(value) for key, value in row.items() if key and key.endswith(".sum")}
        for row in rows
    ]


def _number(text: str | None) -> float:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:  # "n/a": the GPU does not count that
        return 0.0


def by_pass(kernels: list[dict[str, Any]], launched: list[Record]) -> list[Record]:
    """Return the bytes of each rung and pass, summed over its kernels.

    Args:
        kernels: What ncu measured, in order.
        launched: What was launched, in order.

    Raises:
        ValueError: If these are not the same kernels.
    """
    names = [name for entry in launched for name in entry["kernels"]]
    same = len(names) == len(kernels) and all(
        name in found["kernel"] for name, found in zip(names, kernels, strict=True)
    )
    if not same:
        raise ValueError(
            f"ncu profiled {[found['kernel'] for found in kernels]}, launched were {names}"
        )
    rows, rest = [], iter(kernels)
    for entry in launched:
        own = [next(rest) for _ in entry["kernels"]]
        row = dict(entry)
        for key, metrics in METRICS.items():
            counted = sum(found.get(metric, 0.0) for found in own for metric in metrics)
            row[f"{key}_gb"] = 1e-9 * counted * (SECTOR if "sectors" in metrics[0] else 1)
        for place in ("asked", "l2", "dram"):
            row[f"{place}_gb"] = row[f"{place}_read_gb"] + row[f"{place}_write_gb"]
        rows.append(row)
    return rows


def measure(args: argparse.Namespace, report: Report) -> None:
    batch_heads, length = WORKLOADS[args.size]
    args.batch_heads, args.length = args.batch_heads or batch_heads, args.length or length
    if args.profiled:
        return profiled(args)
    size = args.batch_heads, args.length, args.length, args.head_dim
    workload = {name: getattr(args, name) for name in ("batch_heads", "length", "head_dim")}
    ncu = find_ncu()
    with tempfile.TemporaryDirectory() as folder:
        log, launched = Path(folder) / "ncu.csv", Path(folder) / "launched.json"
        command = [
            ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
            "--print-units", "base", "--metrics", ",".join(known_metrics(ncu)), "--log-file", str(log),
            sys.executable, __file__, "--profiled", str(launched), "--head-dim", str(args.head_dim),
            "--batch-heads", str(args.batch_heads), "--length", str(args.length),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        said = text + done.stdout + done.stderr
        if DENIED in said:
            sys.exit(
                f"the driver lets only an administrator read the counters ({DENIED}); run as root with "
                "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
            )
        if done.returncode or not launched.exists():
            sys.exit(f"ncu failed with exit code {done.returncode}: {said.strip()[-600:]}")
        rows = by_pass(parse(text), json.loads(launched.read_text(encoding="utf-8")))
    report.note(
        workload=workload,
        note="each kernel starts with cold caches, as ncu empties them before it; clocks are not locked",
    )
    for row in rows:
        counts = getattr(call_traffic(row["rung"], problem_of(row["rung"], *size)), row["pass"])
        report.add(**row, formula_gb=4e-9 * args.batch_heads * total(counts).moved)


def table(record: Record) -> str:
    head = [
        "rung, pass",
        "kernels",
        "formula GB",
        "requested GB",
        "L2 GB",
        "DRAM reads GB",
        "writes GB",
    ]
    keys = ("formula_gb", "asked_gb", "l2_gb", "dram_read_gb", "dram_write_gb")
    lines = [
        [f"{row['rung']}, {row['pass']}", str(len(row["kernels"])), *(row[key] for key in keys)]
        for row in record["rows"]
    ]
    return markdown(head, lines)


def draw(figure: Any, results: list[Result]) -> None:
    places = {"formula_gb": "formula", "asked_gb": "requested", "l2_gb": "L2", "dram_gb": "DRAM"}
    drawn = harness.panels(figure, results)
    for axes, result in drawn:
        labels = [f"{row['rung']}, {row['pass']}" for row in result.rows]
        for i, (key, name) in enumerate(places.items()):
            widths, rows = [row[key] for row in result.rows], range(len(labels))
            colour = harness.colour_of(name, list(places.values()))
            axes.barh([y + 0.2 * i for y in rows], widths, 0.2, label=name, color=colour)
        axes.set(xlabel="GB", xscale="log")
        axes.set_yticks([y + 0.3 for y in range(len(labels))], labels)
        axes.invert_yaxis()
        workload = result.record["workload"]
        harness.headline(
            axes,
            f"traffic of a call: {workload['batch_heads']:,} heads, {workload['length']:,} keys, "
            f"head_dim {workload['head_dim']}, float32",
        )
    harness.legend(figure, [axes for axes, _ in drawn])


CAPTION = (
    "Bytes of one call of each rung on a logarithmic axis: by the formula, as requested by the "
    "kernels, at the second-level cache, and at DRAM."
)
EXPERIMENT = Experiment(
    "hardware_counters", __doc__, measure, table, draw, devices=("cuda",), options=options,
    caption=CAPTION,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(harness.run(EXPERIMENT))
