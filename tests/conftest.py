"""One hypothesis profile for the suite, and what a test run says about the machine it ran on."""

from __future__ import annotations

import gc  # beyond module 2
import os
import signal  # beyond module 5
import sys
from collections.abc import Iterator  # beyond module 2
from importlib.util import find_spec  # beyond module 5
from pathlib import Path

import pytest  # beyond module 2
from hypothesis import HealthCheck, Phase, settings

from kernels.runtime.targets import EMULATED, why_no_cuda  # beyond module 2

# Scripts import what lies beside them.
sys.path.insert(0, str(Path(__file__).parents[1] / "project"))

#: MINITORCH_SHRINK=0 shows the first example that fails, and does not look for the smallest.
SHRINKING = os.environ.get("MINITORCH_SHRINK") != "0"

settings.register_profile(
    "minitorch",
    deadline=None,  # the first example of a test may compile a kernel
    derandomize=bool(os.environ.get("CI")),
    max_examples=int(os.environ.get("MINITORCH_EXAMPLES", "30")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
    report_multiple_bugs=SHRINKING,
    phases=[p for p in Phase if SHRINKING or p not in (Phase.shrink, Phase.explain)],
)
settings.load_profile("minitorch")


@pytest.fixture(scope="module", autouse=True)  # beyond module 2
def _collector_of_a_file() -> None:  # beyond module 2
    """Let the collector of garbage look at what the tests of a file make, and at nothing before them.

    Of modules, tests and compiled kernels there are millions of objects, and some tests collect often.
    Not where a cycle of references among them may hold a GPU's memory.
    """
    if _why_skipped("cuda"):
        gc.collect()
        gc.freeze()


@pytest.fixture  # beyond module 5
def ctrl_c() -> Iterator[None]:  # beyond module 5
    """Let SIGINT raise KeyboardInterrupt: a run in the background, or under nohup, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _why_skipped(mark: str) -> str | None:  # beyond module 2
    if mark == "cuda" and (EMULATED or why_no_cuda() is not None):
        return "needs a GPU: " + (why_no_cuda() or "this run is on the emulated one")
    if mark == "emulated" and why_no_cuda() is not None:
        return "runs on the emulated GPU (MINITORCH_EMULATE=1) or on a GPU"
    return None


def pytest_collection_modifyitems(  # beyond module 2
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip what this machine cannot run."""
    for mark in ("cuda", "emulated"):
        reason = _why_skipped(mark)
        if reason:
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(  # beyond module 2
    terminalreporter: pytest.TerminalReporter,
) -> None:
    """Say in one loud line what a green run did not cover."""
    loud: dict[str, bool] = {"yellow": True, "bold": True}
    reason, skipped = _why_skipped("emulated"), terminalreporter.stats.get("skipped", [])
    if reason and (count := sum(reason in str(report.longrepr) for report in skipped)):
        chosen = terminalreporter.config.option.markexpr
        marks = " and ".join([f"({chosen})"] * bool(chosen) + ["emulated", "not cuda"])
        terminalreporter.write_line(
            f"NO CUDA KERNEL HAS BEEN TESTED: {count} skipped, without a GPU; the emulated one runs them: "
            f'MINITORCH_EMULATE=check python -m pytest -m "{marks}"', **loud
        )  # fmt: skip
    elif reason := _why_skipped("cuda"):  # beyond module 5
        terminalreporter.write_line(f"NO GPU TEST HAS RUN: {reason}", **loud)
    optional = {  # beyond module 5
        "torch": "torch",
        "transformers": "torch",
        "tokenizers": "tokenizers",
        "mpi4py": "mpi",
    }
    if missing := [name for name in optional if find_spec(name) is None]:  # beyond module 5
        names, extras = ", ".join(missing), sorted({optional[name] for name in missing})
        reason = f"{names} missing; pip install -e '.[{','.join(extras)}]'"
        terminalreporter.write_line(f"NO TEST OF {names.upper()} HAS RUN: {reason}", **loud)
