"""The traffic of each rung by a GPU's own counters, read by Nsight Compute.

Three places are read.  The bytes that the kernels request, in whole sectors of 32 bytes, are those that the
formulas count, but for threads of a warp that read one element together: a warp requests it once.  L2
delivers less where L1 answers, and DRAM delivers less where L2 does: the key tiles that neighbouring blocks
read at the same time come from DRAM once.

It needs Nsight Compute (``ncu``, part of the CUDA toolkit), and the right to read the counters.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.contestants import DIRECTIONS, random_call
from bench.kit import Case, Measurement, Panel, Record, Run, markdown
from bench.processes import child_command

from kernels.metering.rung_traffic import RUNGS, call_traffic, problem_of
from kernels.runtime.launch_notes import Launched, launches_noted
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
    """Return the path of Nsight Compute; exit if it is not on this machine."""
    known = ("cuda*/bin/ncu", "cuda*/nsight-compute*/ncu")
    places = [path for pattern in known for path in sorted(Path("/usr/local").glob(pattern))]
    places += sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
    found = shutil.which("ncu") or (str(places[-1]) if places else None)
    if found is None:
        sys.exit(
            "there is no ncu; install Nsight Compute (package cuda-nsight-compute), or add it to PATH"
        )
    return found


def profiled(file: str, batch_heads: int, length: int, head_dim: int) -> None:
    """Under ncu: launch each rung once in its range, after a run that compiles; write which kernels."""
    launched: list[Record] = []
    for name, rung in RUNGS.items():
        call = random_call("cuda", batch_heads, length, head_dim=head_dim, **rung)
        for way in DIRECTIONS:  # the first call: later ones repeat its launches, unnoted
            with launches_noted() as launches:
                getattr(call, way)()
            names = [one.kernel for one in launches if isinstance(one, Launched)]
            launched.append({"rung": name, "pass": way, "kernels": names})
        for way in DIRECTIONS:
            cuda.synchronize()
            cuda.profile_start()
            getattr(call, way)()
            cuda.synchronize()
            cuda.profile_stop()
    Path(file).write_text(json.dumps(launched), encoding="utf-8")


def known_metrics(ncu: str) -> list[str]:
    """Return the metrics that this GPU has, of those that are needed."""
    wanted = dict.fromkeys(metric for group in METRICS.values() for metric in group)
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    has = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    return [metric for metric in wanted if metric.removesuffix(".sum") in has] or list(wanted)


def parse(text: str) -> list[Record]:
    """Return the rows of the CSV that ncu wrote: the name of each kernel, and its metrics as numbers."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table in the output of ncu: {text[-400:]!r}")

    def number(value: str | None) -> float:
        try:
            return float((value or "").replace(",", ""))
        except ValueError:  # "n/a": the GPU does not count that
            return 0.0

    return [
        {"kernel": row["Kernel Name"]}
        | {key: number(value) for key, value in row.items() if key and key.endswith(".sum")}
        for row in csv.DictReader(lines[start:])
        if (row["ID"] or "").strip()  # not the units
    ]


def by_pass(kernels: list[Record], launched: list[Record]) -> list[Record]:
    """Return the bytes of each rung and pass, summed over its kernels."""
    names = [name for entry in launched for name in entry["kernels"]]
    measured = [found["kernel"] for found in kernels]
    if len(names) != len(measured) or not all(a in b for a, b in zip(names, measured, strict=True)):
        raise ValueError(f"ncu profiled {measured}, launched were {names}")
    rows, rest = [], iter(kernels)
    for row in map(dict, launched):
        own = [next(rest) for _ in row["kernels"]]
        for key, metrics in METRICS.items():
            counted = sum(found.get(metric, 0.0) for found in own for metric in metrics)
            row[f"{key}_gb"] = 1e-9 * counted * (SECTOR if "sectors" in metrics[0] else 1)
        for place in ("asked", "l2", "dram"):
            row[f"{place}_gb"] = row[f"{place}_read_gb"] + row[f"{place}_write_gb"]
        rows.append(row)
    return rows


def profile(run: Run) -> list[Record]:
    """Run all rungs under ncu and return the bytes of each."""
    ncu = find_ncu()
    with tempfile.TemporaryDirectory() as folder:
        log, launched = Path(folder) / "ncu.csv", Path(folder) / "launched.json"
        given = (str(launched), run.batch_heads, run.length, run.head_dim)
        command = [
            ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
            "--print-units", "base", "--metrics", ",".join(known_metrics(ncu)), "--log-file", str(log),
            *child_command(profiled, *given),
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
        return by_pass(parse(text), json.loads(launched.read_text(encoding="utf-8")))


def cases(run: Run) -> Iterator[Case]:
    run.note(
        workload=run.chosen("batch_heads", "length", "head_dim"),
        note="each kernel starts with cold caches, as ncu empties them before it; clocks are not locked",
    )
    for row in profile(run):
        problem = problem_of(row["rung"], run.batch_heads, run.length, run.length, run.head_dim)
        moved = total(getattr(call_traffic(row["rung"], problem), row["pass"])).moved
        yield row, lambda moved=moved: {"formula_gb": 4e-9 * run.batch_heads * moved}


def table(record: Record) -> str:
    titles = {
        "formula_gb": "formula GB", "asked_gb": "requested GB", "l2_gb": "L2 GB",
        "dram_read_gb": "DRAM reads GB", "dram_write_gb": "writes GB",
    }  # fmt: skip
    lines = (
        [f"{row['rung']}, {row['pass']}", str(len(row["kernels"])), *(row[key] for key in titles)]
        for row in record["rows"]
    )
    return markdown(["rung, pass", "kernels", *titles.values()], lines)


def draw(record: Record) -> list[Panel]:
    places = {"formula_gb": "formula", "asked_gb": "requested", "l2_gb": "L2", "dram_gb": "DRAM"}
    bars = {
        name: {f"{row['rung']}, {row['pass']}": row[key] for row in record["rows"]}
        for key, name in places.items()
    }
    size = "{batch_heads:,} heads, {length:,} keys, head_dim {head_dim}, float32".format(
        **record["workload"]
    )
    return [Panel(f"traffic of a call: {size}", "GB", bars=bars, log="x")]


MEASUREMENT = Measurement(
    "hardware_counters", "Do the counters of a GPU see the traffic that the formulas give?", cases,
    {"cuda": {"quick": {"batch_heads": 64, "length": 512},
              "normal": {"batch_heads": 1024, "length": 1024, "head_dim": 64}}},
    table=table, draw=draw, minutes={"cuda": 2}, paths=("kernels",),
    caption="Bytes of one call of each rung on a logarithmic axis: by the formula, as requested by the "
    "kernels, at the second-level cache, and at DRAM.",
)  # fmt: skip
