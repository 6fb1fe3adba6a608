"""The traffic of each rung by a GPU's own counters, read by Nsight Compute.

Three places are read.  The bytes that the kernels request, in whole sectors of 32 bytes, are those that the
formulas count, but for threads of a warp that read one element together: a warp requests it once.  L2
delivers less where L1 answers, and DRAM delivers less where L2 does: the key tiles that neighbouring blocks
read at the same time come from DRAM once.

It needs Nsight Compute (``ncu``, part of the CUDA toolkit), and the right to read the counters.
"""

from __future__ import annotations

import csv
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from bench.contestants import DIRECTIONS, random_call
from bench.kit import Case, Measurement, Panel, Record, Run, Unavailable, columns, workload_text
from bench.processes import child_command

from kernels.metering.rung_traffic import RUNGS, call_traffic, problem_of
from kernels.runtime.targets import cuda
from kernels.traffic.formulas import total

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


def find_ncu() -> str:
    """Return the path of Nsight Compute."""
    known = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
    places = [path for pattern in known for path in sorted(Path("/").glob(pattern))]
    found = shutil.which("ncu") or (str(places[-1]) if places else None)
    if found is None:
        raise Unavailable("there is no ncu; install Nsight Compute, or add it to PATH")
    return found


def launch(rung: str, way: str, batch_heads: int, length: int, head_dim: int) -> None:
    """Under ncu: run one pass of a rung in the profiled range, after a call that compiles."""
    call = random_call("cuda", batch_heads, length, head_dim=head_dim, **RUNGS[rung])
    for each in DIRECTIONS:
        getattr(call, each)()
    cuda.synchronize()
    cuda.profile_start()
    getattr(call, way)()
    cuda.synchronize()
    cuda.profile_stop()


def summed(text: str) -> Record:
    """Return the names of the kernels in the CSV that ncu wrote, and the GB of each place over all."""
    table = text[max(text.find('"ID"'), 0) :].splitlines()
    kernels = [
        row for row in csv.DictReader(table) if (row.get("ID") or "").isdigit()
    ]  # not the units
    if not kernels:
        raise ValueError(f"no table in the output of ncu: {text[-400:]!r}")

    def number(value: str | None) -> float:
        with suppress(ValueError):  # "n/a": the GPU does not count that
            return float((value or "0").replace(",", ""))
        return 0.0

    found: Record = {"kernels": [row["Kernel Name"] for row in kernels]}
    for key, metrics in METRICS.items():
        unit = SECTOR if "sectors" in metrics[0] else 1
        counted = sum(number(row.get(metric)) for row in kernels for metric in metrics)
        found[f"{key}_gb"] = 1e-9 * counted * unit
    for place in ("asked", "l2", "dram"):
        found[f"{place}_gb"] = found[f"{place}_read_gb"] + found[f"{place}_write_gb"]
    return found


def counted(run: Run, rung: str, way: str) -> Record:
    """Run one pass of a rung under ncu and return its bytes, beside those of the formula."""
    size = run.batch_heads, run.length, run.head_dim
    metrics = dict.fromkeys(metric for group in METRICS.values() for metric in group)
    command = [
        find_ncu(), "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
        "--print-units", "base", "--metrics", ",".join(metrics), *child_command(launch, rung, way, *size),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if DENIED in done.stdout + done.stderr:
        raise Unavailable(
            f"the driver lets only an administrator read the counters ({DENIED}); run as root with "
            "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    problem = problem_of(rung, run.batch_heads, run.length, run.length, run.head_dim)
    moved = total(getattr(call_traffic(rung, problem), way)).moved
    return {**summed(done.stdout + done.stderr), "formula_gb": 4e-9 * run.batch_heads * moved}


def cases(run: Run) -> Iterator[Case]:
    run.note(
        workload=run.chosen("batch_heads", "length", "head_dim"),
        note="each kernel starts with cold caches, as ncu empties them before it; clocks are not locked",
    )
    for rung, way in itertools.product(RUNGS, DIRECTIONS):
        yield {"rung": rung, "pass": way}, partial(counted, run, rung, way)


def table(record: Record) -> str:
    return columns(record["rows"], {
        "rung, pass": lambda row: f"{row['rung']}, {row['pass']}",
        "kernels": lambda row: str(len(row["kernels"])),
        "formula GB": "formula_gb", "requested GB": "asked_gb", "L2 GB": "l2_gb",
        "DRAM reads GB": "dram_read_gb", "writes GB": "dram_write_gb",
    })  # fmt: skip


def draw(record: Record) -> list[Panel]:
    places = {"formula_gb": "formula", "asked_gb": "requested", "l2_gb": "L2", "dram_gb": "DRAM"}
    bars = {
        name: {f"{row['rung']}, {row['pass']}": row[key] for row in record["rows"]}
        for key, name in places.items()
    }
    return [Panel(f"traffic of a call: {workload_text(record)}", "GB", bars=bars, log="x")]


MEASUREMENT = Measurement(
    "hardware_counters", "Do the counters of a GPU see the traffic that the formulas give?", cases,
    {"cuda": {"quick": {"batch_heads": 64, "length": 512},
              "normal": {"batch_heads": 1024, "length": 1024, "head_dim": 64}}},
    table=table, draw=draw, minutes={"cuda": 2}, paths=("kernels",),
    caption="Bytes of one call of each rung on a logarithmic axis: by the formula, as requested by the "
    "kernels, at the second-level cache, and at DRAM.",
)  # fmt: skip
