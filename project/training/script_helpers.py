"""What the training scripts share: checks, progress, the learning rate, a clean end, pictures."""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from common.notebooks import show_picture, without_bar
from tqdm import tqdm

import minitorch

#: One part of a picture: it draws on the axes that it gets.
Panel = Callable[[Any], None]


# -- before the training -------------------------------------------------------------------------


def check_backend(option: str, backend: minitorch.TensorBackend) -> None:  # beyond module 2
    """Exit with one line if the machine does not have what a backend needs.

    Args:
        option: How the user asked for it.
        backend: The backend.
    """
    reason = backend.memory.why_not()
    if reason is not None:
        sys.exit(f"{option} cannot run: {reason}")


def make_folder(path: str) -> Path:
    """Make the folder of the results; exit with one line if nothing can be written there."""
    out = Path(path)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (OSError, ValueError) as error:
        sys.exit(f"--out {path} cannot be written ({error}); name another folder")
    return out


# -- while it runs -------------------------------------------------------------------------------


SCHEDULES = ("cosine", "constant")  # beyond module 3
#: Part of the steps over which the learning rate rises.  # beyond module 3
WARM_UP = 0.05  # beyond module 3


def learning_rate(  # beyond module 3
    progress: float, highest: float, schedule: str = "cosine", warm_up: float = WARM_UP
) -> float:
    """Rise linearly, then fall to a tenth along a cosine, or stay.

    Args:
        progress: From 0 to 1.
        highest: Where the rise ends.
        schedule: One of :data:`SCHEDULES`.
        warm_up: Part of the progress over which it rises, 0 to below 1.
    """
    if progress < warm_up:
        return highest * min(max(progress, 0.001) / warm_up, 1.0)
    if schedule == "constant":
        return highest
    fall = math.cos(math.pi * (progress - warm_up) / (1.0 - warm_up))
    return highest * (0.1 + 0.45 * (1.0 + fall))


def check_loss(value: float, what: str, lr: float, option: str = "--lr") -> float:
    """Return a loss; exit with one line if it is no number.

    Args:
        value: The loss.
        what: Which loss it is.
        lr: The learning rate that led to it.
        option: The option that sets the learning rate.
    """
    if not math.isfinite(value):
        sys.exit(
            f"{what} is {value}; {remedy(lr, option)}, or run again with MINITORCH_DETECT_ANOMALY=1 in the "
            "environment to see which operation made it"
        )
    return value


def remedy(lr: float, option: str = "--lr") -> str:
    """Return what helps when a loss is no number; arguments as for :func:`check_loss`."""
    return f"lower {option}, now {lr}"


class CtrlC:  # beyond module 5
    """Within the context, the first Ctrl-C only sets ``asked``; the second ends the program."""

    def __enter__(self) -> CtrlC:
        self.asked = False
        self.before = signal.getsignal(signal.SIGINT)
        if callable(
            self.before
        ):  # not where the signal is ignored, as in the background of a shell
            signal.signal(signal.SIGINT, self.first)
        return self

    def first(self, *_: Any) -> None:
        """Ask for the end."""
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this step; Ctrl-C again ends at once", file=sys.stderr)

    def __exit__(self, *_: Any) -> None:
        if callable(self.before):
            signal.signal(signal.SIGINT, self.before)


class Progress:
    """A bar where there is a terminal, and some ten lines that stay, wherever the output goes.

    Within its context Ctrl-C ends the training only: what it has learnt is then judged and drawn.

    Args:
        total: How many units the training takes.
        unit: What is counted: "epoch" or "step".

    Attributes:
        done: Units so far.
        stopped: True after Ctrl-C.
    """

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit = total, unit
        self.done, self.stopped = 0, False
        self._line_every = max(1, total // 10)
        self._seconds: float | None = None

    def __enter__(self) -> Progress:
        self._start = time.perf_counter()
        self._bar = tqdm(
            total=self.total, unit=self.unit, disable=without_bar(), dynamic_ncols=True
        )
        return self

    def update(self, done: int, figures: str) -> None:
        """Show how far the training is.

        Args:
            done: Units so far.
            figures: What is known then, in one line.
        """
        before, self.done = self.done, done
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(done - before)
        if done // self._line_every > before // self._line_every or done == self.total:
            width = len(str(self.total))
            tqdm.write(f"{self.unit} {done:{width}}  {figures}", file=sys.stdout)

    @property
    def seconds(self) -> float:
        """How long the training took, or has taken so far."""
        return time.perf_counter() - self._start if self._seconds is None else self._seconds

    @property
    def speed(self) -> str:
        """The time of one unit, in words."""
        return f"{self.seconds / max(self.done, 1):.3g} s per {self.unit}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self._bar.close()
        self._seconds = self.seconds
        if isinstance(error, FloatingPointError):  # of detect_anomaly
            sys.exit(f"after {self.unit} {self.done}: {error}")
        self.stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.stopped and self.done > 0  # before the first figures nothing is learnt

    def end(self) -> None:
        """Exit with one line if Ctrl-C has shortened the training."""
        if self.stopped:
            sys.exit(f"stopped by Ctrl-C after {self.done} of {self.total} {self.unit}s")


@contextmanager
def ends_in_one_line(smaller: str) -> Iterator[None]:
    """Turn Ctrl-C, a lack of memory, and what ``minitorch.detect_anomaly`` finds into one line.

    Args:
        smaller: The options that decide how much memory is needed.
    """
    try:
        with np.errstate(all="ignore"):  # NaN or infinity ends the run with a line of its own
            yield
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
    except MemoryError:
        sys.exit(f"out of memory; take a smaller {smaller}")
    except FloatingPointError as error:  # of detect_anomaly
        sys.exit(str(error))


# -- pictures ------------------------------------------------------------------------------------


def draw(path: Path, *panels: Panel) -> None:
    """Draw panels side by side into a file, if matplotlib is there; say what happened.

    Args:
        path: Of a PNG file.
        panels: What to draw, from left to right.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f'no picture {path}: matplotlib is missing (pip install -e ".[plot]")')
        return
    # Not by pyplot, whose settings are those of the notebook that runs a script.
    figure = Figure(figsize=(5.0 * len(panels), 4.2), layout="constrained")
    grid: Any = figure.subplots(1, len(panels), squeeze=False)
    for panel, axes in zip(panels, grid[0], strict=True):
        panel(axes)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        sys.exit(f"the picture cannot be written ({error}); name another folder with --out")
    print(f"picture {path}")
    show_picture(path)


def curves(
    x_label: str, y_label: str, *lines: tuple[str, Sequence[float], Sequence[float]],
    optimum: float | None = None, log_x: bool = False,
) -> Panel:  # fmt: skip
    """Return a panel of curves.

    Args:
        x_label: Below the picture.
        y_label: Beside it.
        lines: Name, x and y of each curve.
        optimum: A level that no model can pass, if one is known.
        log_x: Whether x is shown in powers of two.
    """

    def panel(axes: Any) -> None:
        for name, x, y in lines:
            axes.plot(x, y, label=name, linewidth=1.2)
        if optimum is not None:
            axes.axhline(optimum, color="#166534", linestyle="--", label=f"optimum {optimum:.3g}")
        axes.set(xlabel=x_label, ylabel=y_label)
        if log_x:
            axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        if len(lines) > 1 or optimum is not None:
            axes.legend()

    return panel
