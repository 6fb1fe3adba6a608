"""Training the GPT presets beside PyTorch: speed, memory and losses, and whether they reach their bounds.

    python project/bench_training.py --against torch --device cuda       all figures
    python project/bench_training.py --against torch --quick             tiny sizes, on any machine
    python project/bench_training.py --device cuda --figures attention context
    python project/bench_training.py --device cuda --figures context --contexts 65536

Both sides train the same weights on the same batches in one process, a few steps each in turn: forward,
backward, AdamW, no clipping, no loss read.  On a GPU our steps are captured (``minitorch.graph_step``), as
``train_gpt.py`` takes them; the figures "eager", and ``--eager``, launch them kernel by kernel.  PyTorch is
eager, or compiled for the figures "compiled", with the fused attention that it prefers, its fused AdamW,
and batches that lie on the device before; its bfloat16 is autocast over float32 weights, ours is the policy
of ``minitorch.Precision``.  A speed is the median of ratios within rounds, a peak of memory that of a
process of its own, a curve's difference the largest of all
steps, relative to PyTorch's loss; curves are trained with the clipping of the preset.  Losses in bfloat16
are held to PyTorch's own distance from its float32: their quotient is the figure; beside those in float32
stands how far PyTorch is from itself when its attention is the composed one, and both sides from float64.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from bench.measuring import (
    command_line,
    in_child,
    interleaved,
    name_of,
    out_of_memory,
    ratio,
    rows_of,
    spread,
    timing_note,
    write_record,
)
from bench.record_files import folder_of
from bench.torch_attention import load_torch
from bench.training_contestants import (
    BACKENDS,
    COMPILED,
    OURS,
    THEIRS,
    Run,
    Size,
    peak_of_training,
    size_of,
)
from bench.training_figures import FIGURES, Figure, Row, details, difference, table
from common.command_line import COUNT, POSITIVE, OneLineParser
from tqdm import tqdm
from training.gpt_presets import PRESETS, peak_tflops, utilisation

import minitorch
from kernels.cuda.runtime.arrays import pool
from kernels.runtime.targets import why_no_cuda

ROOT = Path(__file__).resolve().parents[1]
RESULTS, BUILD = ROOT / "docs" / "results", ROOT / "build"
#: Seconds of a reading at least: short steps are read many at a time.
READING = 0.1
#: The name of PyTorch's curve beside which one of bfloat16 is noisy, and of that of its other attention,
#: which says how far a training is from itself when only roundings differ.
BASE, CONTROL, EXACT = f"{THEIRS} float32", f"{THEIRS}, math attention", f"{THEIRS} float64"


#: That the context of the figure "context" is compared with.
SHORT_CONTEXT = 2048


class Bench:
    """What measures figures on one device.

    Args:
        args: Of the command line.
        torch: PyTorch; None measures ours alone.
    """

    def __init__(self, args: argparse.Namespace, torch: Any):
        self.args, self.torch, self.device = args, torch, args.device
        self.names = (OURS,) if torch is None else (OURS, THEIRS)
        self.reading = READING / 10 if args.quick else READING

    def row(self, figure: Figure) -> Row:
        """Measure one figure; where memory runs out, its value is None and ``why_not`` says so."""
        size = size_of(figure.preset, figure.context, self.args.quick)
        row: Row = {
            **figure._asdict(),
            "context": size.context,
            "batch": size.batch,
            "is_judged": figure.kind == "losses" or (self.device == "cuda" and not self.args.quick),
            "value": None,
        }
        try:
            row |= KINDS[figure.kind](self, figure, size)
        except Exception as error:
            if not out_of_memory(error):
                raise
            row["why_not"] = f"out of memory: {error}".splitlines()[0]
        gc.collect()  # a model and its graph are cycles
        if self.device == "cuda":  # neither side keeps what the other one may need
            if (own := pool()) is not None:
                own.trim()
            if self.torch is not None:
                self.torch.cuda.empty_cache()
        return row

    def _timed(self, runs: dict[str, Run]) -> tuple[dict[str, list[float]], Row]:
        """Return the seconds a step of each in every round, and the spreads of tokens a second."""
        steps = {name: run.timed_step() for name, run in runs.items()}
        times = interleaved(steps, self.device, self.args.seconds, least=5, shortest=self.reading)
        rates = {
            name: spread([runs[name].tokens / each for each in seconds])
            for name, seconds in times.items()
        }
        return times, {"tokens_per_second": rates}

    @property
    def _captures(self) -> bool:
        return self.device == "cuda" and not self.args.eager

    def _ours(
        self, figure: Figure, size: Size, attention: str = "flash", clip: float | None = None
    ) -> Run:
        """Return ours in training as a figure asks for it."""
        captures = self._captures and figure.kind != "eager"
        capture = minitorch.graph_step if captures else None
        given = OURS, size, self.device, figure.precision, attention
        return Run(*given, capture=capture, clip=clip, recompute=self.args.recompute)

    def speed(self, figure: Figure, size: Size) -> Row:
        """Compare steps of ours with PyTorch's, eager or compiled: its time over ours."""
        peer = COMPILED if figure.kind == "compiled" else THEIRS
        runs = {OURS: self._ours(figure, size)}
        if self.torch is not None:
            source = runs[OURS].model
            runs[peer] = Run(peer, size, self.device, figure.precision, source=source)
        times, row = self._timed(runs)
        how = "captured step" if self._captures and figure.kind != "eager" else "eager step"
        row["figure"] = (
            f"{figure.preset} {figure.precision}, context {size.context:,}, {how} / {peer}"
        )
        if peer in times:
            row["value"] = ratio(times[peer], times[OURS])["median"]
        return row

    def attention(self, figure: Figure, size: Size) -> Row:
        """Compare flash with naive attention here, on a batch for which naive has the memory."""
        while True:
            try:
                runs = {name: self._ours(figure, size, name) for name in ("naive", "flash")}
                times, row = self._timed(runs)
                break
            except Exception as error:
                if not out_of_memory(error) or size.batch == 1:
                    raise
            runs = {}
            gc.collect()
            size = size._replace(batch=size.batch // 2)
        row["figure"] = (
            f"{figure.preset} {figure.precision}, context {size.context:,} x {size.batch}: flash / naive"
        )
        value = ratio(times["naive"], times["flash"])["median"]
        return {**row, "batch": size.batch, "value": value}

    def context(self, figure: Figure, size: Size) -> Row:
        """Compare operations a second at a long context with those at a short one."""
        short = size_of(figure.preset, SHORT_CONTEXT, self.args.quick)
        runs = {f"context {one.context}": self._ours(figure, one) for one in (size, short)}
        times, row = self._timed(runs)
        work = [run.tokens * run.flops for run in runs.values()]
        row["figure"] = (
            f"{figure.preset} {figure.precision}: tokens/s x FLOP a token, context "
            f"{size.context:,} / {short.context:,}"
        )
        long_times, short_times = times.values()
        value = work[0] / work[1] * ratio(short_times, long_times)["median"]
        peak = peak_tflops(BACKENDS[self.device], figure.precision)
        row["utilisation"] = {
            name: utilisation(row["tokens_per_second"][name]["median"], run.flops, peak)
            for name, run in runs.items()
        }
        return {**row, "value": value, "flops_per_token": [run.flops for run in runs.values()]}

    def memory(self, figure: Figure, size: Size) -> Row:
        """Compare the peaks of processes that train one model each."""
        peaks = {
            name: in_child(
                peak_of_training, name, size, self.device, figure.precision, self._captures
            )
            for name in self.names
        }
        title = (
            f"{figure.preset} {figure.precision}, context {size.context:,}: peak memory / PyTorch"
        )
        both = len(peaks) == 2 and all(peaks.values())
        return {
            "figure": title,
            "peak_bytes": peaks,
            "value": peaks[OURS] / peaks[THEIRS] if both else None,
        }

    def losses(self, figure: Figure, size: Size) -> Row:
        """Compare the losses of steps from the same weights on the same batches."""
        precision, steps = figure.precision, self.args.steps
        clip = PRESETS[figure.preset].get("clip")
        runs = {OURS: self._ours(figure, size, clip=clip)}
        source = runs[OURS].model  # bfloat16 begins from rounded weights, on all sides
        if self.torch is not None:
            runs[THEIRS] = Run(THEIRS, size, self.device, precision, source=source, clip=clip)
            controls = {CONTROL: ("float32", "naive"), EXACT: ("float64", "naive")}
            for name, of in (controls if precision == "float32" else {BASE: ("float32",)}).items():
                runs[name] = Run(THEIRS, size, self.device, *of, source=source, clip=clip)
        curves = {key: run.losses(steps, f"{key}, {precision}") for key, run in runs.items()}
        row: Row = {"steps": steps, "curves": curves}
        bad = [key for key, curve in curves.items() if not all(map(math.isfinite, curve))]
        what = f"{figure.preset} {precision}, largest difference of the losses of {steps} steps"
        if precision == "float32":
            row["figure"] = f"{what} / PyTorch's losses"
        else:
            row["figure"] = f"{what} from PyTorch float32 / that of PyTorch's {precision}"
        if bad:  # JSON has no such numbers
            row["curves"] = {key: curve for key, curve in curves.items() if key not in bad}
            row["why_not"] = f"a loss is no number: {', '.join(bad)}"
        elif THEIRS in curves and precision == "float32":
            row["value"] = difference(curves[OURS], curves[THEIRS])
            row["differences"] = {CONTROL: difference(curves[CONTROL], curves[THEIRS])} | {
                f"{name} from {EXACT}": difference(curves[name], curves[EXACT])
                for name in (OURS, THEIRS)
            }
        elif THEIRS in curves:
            found = {name: difference(curves[name], curves[BASE]) for name in self.names}
            noise = found[THEIRS]
            found["ours from PyTorch's"] = difference(curves[OURS], curves[THEIRS])
            row |= {"differences": found, "value": found[OURS] / noise if noise else None}
        return row


KINDS: dict[str, Callable[[Bench, Figure, Size], Row]] = {
    "speed": Bench.speed,
    "eager": Bench.speed,
    "compiled": Bench.speed,
    "losses": Bench.losses,
    "memory": Bench.memory,
    "context": Bench.context,
    "attention": Bench.attention,
}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--against", choices=["torch"], help="also measure PyTorch, and what is compared with it")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one, else cpu)")
    add("--presets", nargs="+", choices=[*PRESETS], default=[*PRESETS], help="(default: all)")
    add("--figures", nargs="+", choices=[*KINDS], default=[*KINDS], help="(default: all)")
    add(
        "--steps",
        type=COUNT,
        metavar="N",
        help="of the curves of losses (default: 200; 20 if quick)",
    )
    add("--seconds", type=POSITIVE, metavar="X", help="of a comparison (default: 20; 0.3 if quick)")
    add(
        "--quick",
        action="store_true",
        help="tiny sizes: what is printed is no figure of the presets",
    )
    add("--contexts", type=COUNT, nargs="+", metavar="N", help="of the figures (default: all)")
    add(
        "--recompute",
        action="store_true",
        help="keep only what goes into our layers, as train_gpt.py",
    )
    add("--eager", action="store_true", help="launch our steps kernel by kernel, on a GPU too")
    add("--json", metavar="FILE", help="also write the rows there")
    add("--go-on", action="store_true", help="keep the rows that FILE has, and measure the others")
    add("--publish", action="store_true", help="write the rows to docs/results, once all are there")
    args = parser.parse_args(argv)
    missing = why_no_cuda()
    if args.device == "cuda" and missing is not None:
        sys.exit(missing)
    args.device = args.device or ("cpu" if missing else "cuda")
    args.steps = args.steps or (20 if args.quick else 200)
    args.seconds = args.seconds or (0.3 if args.quick else 20.0)
    is_part = (
        args.contexts
        or {*args.figures} != {*KINDS}
        or {*args.presets} != {*PRESETS}
        or not args.against
    )
    if args.publish and (args.quick or args.eager or args.recompute or args.json or is_part):
        parser.error(
            "--publish writes the whole table to docs/results; add --against torch, and leave out --quick, "
            "--eager, --recompute, --json, --figures, --presets and --contexts"
        )
    return args


def is_there(figure: Figure, rows: list[Row], quick: bool) -> bool:
    """Tell whether a figure is among rows."""
    context = size_of(figure.preset, figure.context, quick).context
    wanted = figure.kind, figure.preset, figure.precision, context
    names = "kind", "preset", "precision", "context"
    return any(wanted == tuple(row[name] for name in names) for row in rows)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the record as rows come; return 0 if every figure is reached."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    torch = load_torch() if args.against else None
    if args.against and torch is None:
        print("PyTorch is not installed (pip install torch): these are ours alone", file=sys.stderr)
    if torch is not None:
        torch.set_num_threads(numba.get_num_threads())
        torch.set_float32_matmul_precision("highest")
    todo = [one for one in FIGURES if one.kind in args.figures and one.preset in args.presets]
    if args.contexts:
        own = {one: one.context or PRESETS[one.preset]["context"] for one in todo}
        todo = [one for one in todo if own[one] in args.contexts]
    bench, code = Bench(args, torch), 0
    folder = folder_of(args.device, RESULTS) if args.publish else ""
    path = BUILD / folder / "bench_training.json" if args.publish else args.json
    rows = rows_of(path) if path and args.go_on else []
    todo = [one for one in todo if not is_there(one, rows, args.quick)]
    command = command_line("project/bench_training.py", argv)
    try:
        for one in tqdm(todo, unit="figure", desc="bench_training"):
            rows.append(bench.row(one))
            if path:  # at once: the next one may take long
                write_record(
                    path, command, name_of(args.device), timing=timing_note(args.device),
                    quick=args.quick, rows=rows,
                )  # fmt: skip
    except KeyboardInterrupt:
        print(f"interrupted: {len(rows)} of {len(FIGURES)} figures are done", file=sys.stderr)
        code = 130
    if args.publish and path and rows and code == 0:
        target = RESULTS / folder / "bench_training.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    beside = "without PyTorch" if torch is None else f"PyTorch {torch.__version__}"
    sizes = "; tiny sizes, which say nothing of the presets" if args.quick else ""
    found = table(rows)
    print(f"{name_of(args.device)}, {beside}{sizes}\n\n{found}\n\n{details(rows)}")
    return code or int("| NO |" in found or any("why_not" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
