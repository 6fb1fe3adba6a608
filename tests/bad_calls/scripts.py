"""Wrong files and wrong arguments: what checkpoints, data and the scripts of ``project/`` refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minitorch.training.model_files import CheckpointError, load_parameters, read_checkpoint

from .cases import model, run

sys.path[:0] = [str(Path(__file__).parents[2] / "project")]  # as for a script there
import measure  # noqa: E402
import run_manual  # noqa: E402
import run_scalar  # noqa: E402
from data import text as text_data  # noqa: E402
from training import gpt_options  # noqa: E402

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportReturnType=false


def written(content: bytes, use: Callable[[str], Any]) -> Any:
    """Return a call that writes a file and uses it."""

    def call(_: Any) -> Any:
        Path("wrong.bin").write_bytes(content)
        return use("wrong.bin")

    return call


def given(script: ModuleType, *args: str) -> Any:
    """Return a call that runs a script with some arguments."""
    return lambda _: run(script.main, *args)


def options(*args: str) -> Any:
    """Return a call that reads the arguments of the GPT's training script."""
    return lambda _: run(lambda argv: gpt_options.parse_args("", argv), *args)


def measurement(name: str, *args: str) -> Any:
    """Return a call that runs a measurement with some arguments."""
    return lambda _: run(lambda argv: measure.main([name, *argv]), *args)


FILES = [
    (lambda o: read_checkpoint("none"), CheckpointError, "none", "no such checkpoint"),
    (written(b"", read_checkpoint), CheckpointError, "wrong.bin", "cannot be read"),
    (lambda o: load_parameters(model(o.backend), {"a": np.ones(2)}, "x"), CheckpointError, "x"),
    (lambda o: text_data.read_text("none"), SystemExit, "none", "pass the path"),
    (written(b"\xff\xfe", text_data.read_text), SystemExit, "not UTF-8", "convert it"),
    (lambda o: text_data.Corpus.from_text("abc", 8), SystemExit, "3 characters"),
    (lambda o: text_data.encode("ab", "a"), ValueError, "'b'", "'a'"),
]  # fmt: skip

ARGUMENTS = [
    (options("--steps", "0"), SystemExit, "--steps", "1 or more", "got 0"),
    (options("--lr", "nan"), SystemExit, "--lr", "above 0", "nan"),
    (options("--nonsense"), SystemExit, "--nonsense", "--help"),
    (given(run_scalar, "--PTS", "0"), SystemExit, "--PTS", "1 or more", "got 0"),
    (given(run_scalar, "--out", "/proc/none"), SystemExit, "/proc/none", "name another"),
    (given(run_manual, "--WEIGHTS", "1"), SystemExit, "--WEIGHTS", "expected 2"),
    (measurement("bench_attention", "--lengths", "0"), SystemExit, "--lengths", "1 or more"),
    (measurement("bench_attention", "--head-dim", "999"), SystemExit, "at most 512", "999", "more heads"),
    (measurement("bench_cpu", "--seconds", "nan"), SystemExit, "--seconds", "above 0", "nan"),
    (measurement("io_table", "--length", "-3"), SystemExit, "--length", "got -3"),
]  # fmt: skip
