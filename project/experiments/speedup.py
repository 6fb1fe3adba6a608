"""Time against length, and how many times faster flash attention is than naive: forward, backward and both.

    python project/experiments/speedup.py                  on the CPU
    python project/experiments/speedup.py --device cuda    on a GPU

In inference the operands are constants and no graph is recorded; in training it is, and a backward pass
follows.  The baseline is attention composed of this library's own tensor operations, called ``naive`` on
the CPU and ``composed`` on CUDA, where ``naive`` is the kernel of Algorithm 0; ``published`` is composed of
the kernels of the published course.  Published for such a baseline: nearly 40 times faster forward and 16
times backward at 2,048 (``REPORTED``).  Who would take longer than the limit for one pass, or runs out of
memory, is left out from there on.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from harness import (
    Experiment,
    Record,
    Report,
    Result,
    cell,
    colour_of,
    headline,
    legend,
    markdown,
    panels,
    run,
)

# isort: split
from bench.contestants import Bound, Contestant, contestants, random_arrays
from bench.measuring import interleaved, out_of_memory, ratio, spread, timing_note, wait

#: What is timed: a forward pass on constants; one that records, what follows it, and their sum.
QUANTITIES = ("inference", "forward", "backward", "training")
STYLES = dict(zip(QUANTITIES, (":", "--", "-.", "-"), strict=True))
#: Whose speed-up is shown, and over whom.
FLASH = {"cpu": "flash", "cuda": "flash2"}
BASELINES = {"cpu": ("naive",), "cuda": ("published", "composed", "naive")}
#: The speed-ups that the published report gives, by quantity: length and factor.
REPORTED = {"forward": (2048, 40.0), "backward": (2048, 16.0)}
HEAD_DIM = 64
#: Up to this length steps are short, and run several times a round.
SHORT = 1024


class Size(NamedTuple):
    """Of one device.

    Attributes:
        heads: Batch times heads: they are alike to attention.
        lengths: Of queries and keys.
        seconds: To spend on each length.
        limit: Seconds that one forward and backward pass may take.
    """

    heads: int
    lengths: tuple[int, ...]
    seconds: float
    limit: float


def _lengths(most: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(7, 15) if 2**power <= most)


SIZES = {
    "cpu": {
        "quick": Size(2, _lengths(512), 0.2, 1.0),
        "normal": Size(4, _lengths(8192), 2.0, 4.0),
        "full": Size(4, _lengths(16384), 4.0, 20.0),
    },
    "cuda": {
        "quick": Size(16, _lengths(2048), 0.5, 0.5),
        "normal": Size(64, _lengths(16384), 1.0, 2.5),
        "full": Size(64, _lengths(16384), 4.0, 20.0),
    },
}


class Recording(Bound):
    """A contestant in training: a pass records its graph."""

    def one_pass(self) -> None:
        """Run forward and backward once."""
        self.forward()
        self.backward()
        self.release()


class Constant(Bound):
    """A contestant in inference: its operands want no gradient, and nothing is recorded."""

    def __init__(self, contestant: Contestant, arrays: list[Any]):
        super().__init__(contestant, arrays)
        self.operands = [x.detach() for x in self.operands]


def measure(args: argparse.Namespace, report: Report) -> None:
    """Time every length, and every contestant as far as it gets."""
    device, size = args.device, SIZES[args.device][args.size]
    found = contestants(device, causal=False)
    running = {name: found[name] for name in (*BASELINES[device], FLASH[device])}
    report.note(timing=timing_note(device), heads=size.heads, head_dim=HEAD_DIM)
    expected: dict[str, float] = {}
    for length in report.progress(size.lengths, "length"):
        left_out = {name for name, seconds in expected.items() if seconds > size.limit}
        running = {name: one for name, one in running.items() if name not in left_out}
        if not running:
            break
        row = measure_length(running, device, size, length)
        report.add(length=length, **row)
        expected = {
            name: 4e-3 * row[name]["training"]["median"] if name in row else float("inf")
            for name in running
        }
    report.note()


def measure_length(
    running: dict[str, Contestant], device: str, size: Size, length: int
) -> dict[str, Any]:
    """Return milliseconds and speed-ups of one length; who runs out of memory is not among them."""
    arrays = random_arrays((size.heads, length, HEAD_DIM))
    steps: dict[tuple[str, str], Any] = {}
    after: dict[tuple[str, str], Any] = {}
    for name, contestant in running.items():
        try:
            recording, constant = Recording(contestant, arrays), Constant(contestant, arrays)
            for one in (recording.one_pass, constant.forward, constant.release):  # compiles
                one()
                wait(device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            continue
        steps |= {
            (name, "inference"): constant.forward,
            (name, "forward"): recording.forward,
            (name, "backward"): recording.backward,
        }
        after |= {(name, "inference"): constant.release, (name, "backward"): recording.release}
    times = interleaved(
        steps, device, size.seconds, warm_up=length <= SHORT, after=after,
        at_most_seconds=max(5 * size.limit, size.seconds),
    )  # fmt: skip
    names = list(dict.fromkeys(name for name, _ in steps))
    for name in names:
        pairs = zip(times[name, "forward"], times[name, "backward"], strict=True)
        times[name, "training"] = [sum(pair) for pair in pairs]
    row: dict[str, Any] = {
        name: {quantity: spread(times[name, quantity], 1e3) for quantity in QUANTITIES}
        for name in names
    }
    if (flash := FLASH[device]) in names:
        row["speedup"] = {
            name: {q: ratio(times[name, q], times[flash, q]) for q in QUANTITIES}
            for name in names
            if name != flash
        }
    return row


def names_of(rows: list[Record]) -> list[str]:
    """Return who was measured, the baselines first."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in found if name not in ("length", "speedup")]


def table(record: Record) -> str:
    """Return a table for each quantity: milliseconds, and how many times those of flash they are."""
    rows, names = record["rows"], names_of(record["rows"])
    shown = []
    for quantity in QUANTITIES:
        lines = []
        for row in rows:
            line = [f"{row['length']:,}"]
            for name in names:
                if name not in row:
                    line.append("left out")
                    continue
                beside = row.get("speedup", {}).get(name)
                times = f" ({beside[quantity]['median']:.1f}×)" if beside else ""
                line.append(f"{cell(row[name][quantity]['median'])}{times}")
            lines.append(line)
        shown.append(markdown([f"{quantity}, ms (ratio to {names[-1]})", *names], lines))
    return "\n\n".join(shown)


def workload_of(record: Record) -> str:
    """Return the sizes of a call, for a title."""
    return f"{record['heads']} heads, head_dim {record['head_dim']}, float32"


def draw(figure: Any, results: list[Result]) -> None:
    """Draw time by length, and the speed-up over each baseline."""
    names = list(dict.fromkeys(name for result in results for name in names_of(result.rows)))
    drawn: tuple[list[Any], list[Any]] = ([], [])
    for (time, speedup), result in panels(figure, results, rows=2, sharex="col"):
        for name in names_of(result.rows):
            own = [row for row in result.rows if name in row]
            for quantity in ("inference", "training"):
                time.plot(
                    [row["length"] for row in own],
                    [row[name][quantity]["median"] for row in own],
                    STYLES[quantity], marker=".", color=colour_of(name, names),
                    label=name if quantity == "training" else None,
                )  # fmt: skip
            own = [row for row in own if name in row.get("speedup", {})]
            for quantity in QUANTITIES if own else ():
                speedup.plot(
                    [row["length"] for row in own],
                    [row["speedup"][name][quantity]["median"] for row in own],
                    STYLES[quantity], marker=".", color=colour_of(name, names),
                )  # fmt: skip
        for quantity, style in STYLES.items():
            speedup.plot([], [], style, color="#444", label=quantity)
        for quantity, place in REPORTED.items():
            speedup.plot(
                *place, "*", color="black", markersize=9, linestyle="none",
                fillstyle="full" if quantity == "forward" else "none",
                label=f"{quantity}, published report",
            )  # fmt: skip
        time.set_xscale("log", base=2)
        time.set(yscale="log", ylabel="ms")
        headline(time, f"time of a call: {workload_of(result.record)}")
        speedup.set(yscale="log", xlabel="length", ylabel="times the time of flash attention")
        headline(speedup, "baseline / flash attention, by pass")
        speedup.axhline(1.0, color="#999", linewidth=0.8)
        drawn[0].append(time)
        drawn[1].append(speedup)
    legend(figure, [*drawn[0], *drawn[1]], columns=6)


CAPTION = (
    "Time of a call by length, and the ratio of each baseline's time to that of flash attention. "
    "A dotted line is a forward pass without a graph; a solid line is forward and backward "
    "together. The stars are the figures of the published course's report."
)
EXPERIMENT = Experiment(
    "speedup", __doc__, measure, table, draw, height=3.2, caption=CAPTION
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(run(EXPERIMENT))
