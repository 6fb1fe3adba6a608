"""How everything here is measured: time in interleaved rounds, peak memory, and what the figures depend on.

The benchmarks and the experiments share this file, so that a millisecond means the same in all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import math
import os
import pickle
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numba
import numpy as np

from kernels.runtime.targets import EventTimer, cuda, device_name
from minitorch.training.model_files import write_file

Step = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)
#: How often each step runs in a row within a round is chosen so that one reading takes so long.
SHORTEST = 0.002


def seconds(
    step: Step, device: str, repeats: int = 1, hold: Callable[[int], Any] | None = None
) -> float:
    """Return the time of one run of a step, until its result is there.

    On a GPU two events on the stream measure it: what the device did between them, and where it waited
    for the host to launch, that too.  Elsewhere it is the clock of the host.

    Args:
        step: To be timed; its kernels are launched on the default stream.
        device: "cpu" or "cuda".
        repeats: Runs one after the other; their mean is returned.
        hold: Of a GPU: called with ``repeats``, it keeps the device busy before the first event for as
            long as the host takes to launch them, so that the device waits for nothing.
    """
    if device == "cuda":
        with EventTimer(hold and partial(hold, repeats)) as timer:
            for _ in range(repeats):
                step()
        return timer.seconds / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def timing_note(device: str) -> str:
    """Return in words what :func:`interleaved` does, for the records."""
    clock = "CUDA events on the stream" if device == "cuda" else "the clock of the host"
    return (
        "medians (with quartiles) of interleaved rounds, in which every contestant has its turn; "
        f"read from {clock}; a run before them, which compiles and warms up, is not counted"
    )


def interleaved(
    steps: Mapping[Name, Step],
    device: str,
    budget: float,
    *,
    least: int = 3,
    most: int = 50,
    at_most_seconds: float = math.inf,
    warm_up: bool = True,
    after: Mapping[Name, Step] | None = None,
    shortest: float = SHORTEST,
    hold: Callable[[int], Any] | None = None,
) -> dict[Name, list[float]]:
    """Return the seconds of each step in every round; a round runs each once, every other one backwards.

    So what disturbs the machine disturbs all of them alike, what one leaves behind for the next is not
    always the same one's gain or loss, and :func:`ratio` of two is fair.

    Args:
        steps: By name.
        device: "cpu" or "cuda".
        budget: Seconds to spend, the warm-up not counted.
        least: Rounds even if they take longer than that.
        most: Rounds at most.
        at_most_seconds: After which no other round begins, however few there were.
        warm_up: Run each step before; what compiles is not counted.  Without, each runs once a round.
        after: By name, what follows the step and is not timed: it may free memory for the next one.  Steps
            then keep their order in every round: one may need what the one before it left.
        shortest: Seconds of a reading at least: a shorter step runs several times.
        hold: As for :func:`seconds`.

    Returns:
        By name, a number for each round: the mean, where a step runs several times.
    """
    repeats, following = dict.fromkeys(steps, 1), after or {}
    if warm_up:
        for name, step in steps.items():
            step()
            once = seconds(step, device, 1, hold)
            repeats[name] = max(1, min(int(shortest / max(once, 1e-9)), 100))
            following.get(name, _nothing)()
    times: dict[Name, list[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    for done in range(most):
        spent = time.perf_counter() - start
        if (done >= least and spent >= budget) or (done and spent >= at_most_seconds):
            break
        for name in [*steps][:: -1 if done % 2 and not following else 1]:
            times[name].append(seconds(steps[name], device, repeats[name], hold))
            following.get(name, _nothing)()
    return times


def _nothing() -> None:
    pass


def spread(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Return median and quartiles: the keys ``median``, ``low``, ``high``, and ``rounds``.

    Args:
        values: One a round.
        scale: Of what is returned; 1e3 turns seconds into milliseconds.
    """
    low, high = np.quantile(values, [0.25, 0.75])
    return {
        "median": scale * median(values),
        "low": scale * float(low),
        "high": scale * float(high),
        "rounds": len(values),
    }


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Return median and quartiles of the ratios within the rounds of two steps."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def wait(device: str) -> None:
    """Wait until the device has done all that was asked of it."""
    if device == "cuda":
        cuda.synchronize()


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 where there is no such figure."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    # Not getrusage: its peak is inherited from the process that started this one.
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def reset_peak_memory() -> int:
    """Let the peak of this process begin anew, where the system can; return what it is then."""
    # glibc keeps what is freed for who comes next, and that would then not be counted.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, ours or PyTorch's, means that memory has run out."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def in_child(
    function: Callable[..., Any], *args: Any, simulator: bool = False, timeout: float | None = None
) -> Any:
    """Call a function of a script in a process of its own and return its result.

    A fresh process has a peak of memory of its own, and the simulator is chosen before numba is imported.

    Args:
        function: Stands at the top level of its file, which can be imported without running it.
        args: What it takes; pickled, as its result is.
        simulator: CUDA kernels run in numba's simulator there.
        timeout: Seconds that it may take.

    Raises:
        RuntimeError: If it fails or takes too long; the last line that it wrote says why.
    """
    file = Path(function.__code__.co_filename).resolve()
    folders = [*sys.path, str(file.parent)]
    code = (
        "import os, pickle, runpy, sys; sys.path[:0] = pickle.load(sys.stdin.buffer); "
        "out = os.fdopen(os.dup(1), 'wb'); os.dup2(2, 1); "  # what it prints is no result
        "file, name, args = pickle.load(sys.stdin.buffer); "
        "result = runpy.run_path(file)[name](*args); out.write(pickle.dumps(result)); out.close()"
    )
    environment = dict(os.environ)
    if simulator:
        environment["NUMBA_ENABLE_CUDASIM"] = "1"
    given = pickle.dumps(folders) + pickle.dumps((str(file), function.__name__, args))
    what = f"{function.__name__} of {file.name}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], input=given, capture_output=True, env=environment,
            timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{what} took more than {timeout:g} s; ask for less") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(
            f"{what} failed in its process (exit code {done.returncode}): {lines[-1]}"
        )
    return pickle.loads(done.stdout)


def processor() -> str:
    """Return the name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def name_of(device: str) -> str:
    """Return the name of a device: of the processor, of the GPU, or the simulator's.

    Args:
        device: "cpu", "cuda" or "simulator".
    """
    return {"cpu": processor, "cuda": device_name}.get(device, lambda: "numba's simulator")()


def slug_of(device: str) -> str:
    """Return the name of the folder of a device's results: "cpu-2-cores", "nvidia-h100"."""
    if device == "cpu":
        return f"cpu-{os.cpu_count()}-cores"
    name = device if device == "simulator" else name_of(device).lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r" \d+gb.*", "", name))  # without its memory


def published_file(device: str, name: str) -> Path:
    """Return the file of a record among the published results.

    Args:
        device: "cpu" or "cuda".
        name: Of the record.
    """
    return Path(__file__).parents[2] / "docs" / "results" / slug_of(device) / f"{name}.json"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, with the commit of this repository."""
    loaded = ("numpy", "numba", "numba_cuda", "torch", "transformers")
    found = {name: sys.modules[name].__version__ for name in loaded if sys.modules.get(name)}
    commit = commit_of_library()
    return {"python": platform.python_version(), **found, **({"commit": commit} if commit else {})}


def commit_of_library() -> str:
    """Return the last commit that changed the library, empty where git does not say.

    Records of the same commit measured the same ``kernels`` and ``minitorch``.  The variable
    ``MINITORCH_COMMIT`` names it for a copy without a ``.git`` folder.
    """
    if named := os.environ.get("MINITORCH_COMMIT"):
        return named
    try:
        answer = subprocess.run(
            [
                "git", "-C", str(Path(__file__).resolve().parents[2]), "log", "-1", "--format=%h",
                "--", "kernels", "minitorch",
            ],
            capture_output=True, check=True, text=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answer.stdout.strip()


def command_line(script: str, argv: list[str], leave_out: tuple[str, ...] = ("--json",)) -> str:
    """Return the command that makes a record again, on any machine.

    Args:
        script: From the root of the repository.
        argv: What followed it.
        leave_out: Options with a value that say only where to write.  ``--publish``, which has none, is
            left out, too.
    """
    kept: list[str] = []
    words = iter(word for word in argv if word != "--publish")
    for word in words:
        option, equals, value = word.partition("=")
        if word in leave_out:
            next(words, None)
        elif option not in leave_out:
            place = Path(value if equals else word)
            kept.append(f"{option}=" * bool(equals) + place.name if place.is_absolute() else word)
    return " ".join(["python", script, *(f'"{word}"' if " " in word else word for word in kept)])


def write_record(path: str | Path, command: str, device: str, **figures: Any) -> None:
    """Write what has been measured so far, with what it depends on.

    Args:
        path: Of the file; it is replaced as a whole, so that an interruption leaves the last one.
        command: That measured it.
        device: Its name.
        figures: The rest of the record.
    """
    record = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "cores": os.cpu_count(),
        "threads": numba.get_num_threads(),
        "versions": versions(),
        **figures,
    }
    write_file(Path(path), (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def read_rows(path: str | Path, *names: str) -> list[dict[str, Any]]:
    """Return the rows of a script's own record, to which it adds; exit with one line if it is another's.

    Args:
        path: Of the file; there are no rows if it does not exist.
        names: Keys that each row has.
    """
    try:
        rows = rows_of(path)
        for row in rows:
            _ = [row[name] for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(
            f"{path}: not a record of this script ({error!r}); delete it, or name another folder or file"
        )
    return rows


def rows_of(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a record; none where there is no file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))["rows"] if Path(path).exists() else []
