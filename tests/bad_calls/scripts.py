"""Wrong files and wrong arguments: what checkpoints, data and the scripts of ``project/`` refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minitorch.training.model_files import CheckpointError, load_parameters, read_checkpoint

from .cases import model, run, wrong

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "project")]  # as for a script there
import measure  # noqa: E402
import run_digits  # noqa: E402
import run_fast_tensor  # noqa: E402
import run_manual  # noqa: E402
import run_scalar  # noqa: E402
import run_sentiment  # noqa: E402
import run_tensor  # noqa: E402
import train_tasks  # noqa: E402
from data import digits as digits_data  # noqa: E402
from data import sentiment as sentiment_data  # noqa: E402
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


#: Of a small model, as a checkpoint has it.
CONFIG: dict[str, Any] = {
    "characters": "ab", "prompt": "a", "width": 4, "heads": 2, "layers": 1, "context": 4,
    "dropout": 0.0, "attention": "flash", "tie_weights": False,
}  # fmt: skip

FILES = {
    "no checkpoint": wrong(
        lambda o: read_checkpoint("none"), CheckpointError, "none", "no such checkpoint"
    ),
    "an empty checkpoint": wrong(
        written(b"", read_checkpoint), CheckpointError, "wrong.bin", "cannot be read"
    ),
    "a cut checkpoint": wrong(
        written(b"\xff" * 20, read_checkpoint), CheckpointError, "wrong.bin", "cannot be read"
    ),
    "a pickle": wrong(
        written(b"\x80\x04N.", read_checkpoint), CheckpointError, "wrong.bin", "cannot be read"
    ),
    "a folder": wrong(lambda o: read_checkpoint("."), CheckpointError, "no such checkpoint"),
    "parameters of another model": wrong(
        lambda o: load_parameters(model(o.backend), {"a": np.ones(2)}, "x"), CheckpointError, "x",
        "another model"
    ),
    "no text": wrong(lambda o: text_data.read_text("none"), SystemExit, "none", "pass the path"),
    "a text of bytes": wrong(
        written(b"\xff\xfe", text_data.read_text), SystemExit, "not UTF-8", "convert it"
    ),
    "a text too short": wrong(
        lambda o: text_data.Corpus.from_text("abc", 8), SystemExit, "3 characters",
        "longer text or a shorter"
    ),
    "an unknown character": wrong(lambda o: text_data.encode("ab", "a"), ValueError, "'b'", "'a'"),
    "no images": wrong(
        lambda o: digits_data.read_mnist("none"), SystemExit, "--mnist none", "pass a folder"
    ),
    "images of text": wrong(
        written(b"text", digits_data.read_mnist), SystemExit, "--mnist wrong.bin", "not an .npz"
    ),
    "half a file of images": wrong(
        written(b"\0\0\x08\x01\0\0\0\x05ab", lambda path: digits_data.read_idx(Path(path))),
        ValueError, "need 5 bytes", "holds 2", "fetch it again"
    ),
    "no sentences": wrong(
        lambda o: sentiment_data.read_sentences("none"), SystemExit, "none", "pass the path"
    ),
    "a sentence without a label": wrong(
        written(b"good\t1\nbad", sentiment_data.read_sentences), SystemExit, "line 2",
        "a tab and 0 or 1", "'bad'"
    ),
    "a sentence with another label": wrong(
        written(b"so so\t2\n", sentiment_data.read_sentences), SystemExit, "line 1", "0 or 1"
    ),
}  # fmt: skip

ARGUMENTS = {
    "train_gpt: no steps": wrong(
        options("--steps", "0"), SystemExit, "--steps", "1 or more", "got 0"
    ),
    "train_gpt: half a step": wrong(
        options("--steps", "1.5"), SystemExit, "--steps", "whole number", "1.5"
    ),
    "train_gpt: a rate of NaN": wrong(options("--lr", "nan"), SystemExit, "--lr", "above 0", "nan"),
    "train_gpt: a rate below 0": wrong(options("--lr", "-1"), SystemExit, "--lr", "above 0", "-1"),
    "train_gpt: a rate of nothing": wrong(
        options("--lr"), SystemExit, "--lr", "expected one argument"
    ),
    "train_gpt: everything dropped": wrong(
        options("--dropout", "1"), SystemExit, "--dropout", "below 1", "got 1"
    ),
    "train_gpt: no heads": wrong(
        options("--heads", "0"), SystemExit, "--heads", "1 or more", "got 0"
    ),
    "train_gpt: a backend": wrong(
        options("--backend", "gpu"), SystemExit, "--backend", "'gpu'", "fast"
    ),
    "train_gpt: an attention": wrong(
        options("--attention", "x"), SystemExit, "--attention", "'x'", "flash"
    ),
    "train_gpt: a seed": wrong(options("--seed", "-1"), SystemExit, "--seed", "0 or more", "-1"),
    "train_gpt: a temperature": wrong(
        options("--temperature", "-1"), SystemExit, "--temperature", "0 or more"
    ),
    "train_gpt: an unknown option": wrong(
        options("--nonsense"), SystemExit, "--nonsense", "--help"
    ),
    "train_gpt: a shape of a model": wrong(
        lambda o: gpt_options.check_config({**CONFIG, "width": 5}),
        ValueError, "--width", "5 and 2", "equal share",
    ),
    "run_scalar: no points": wrong(
        given(run_scalar, "--PTS", "0"), SystemExit, "--PTS", "1 or more", "got 0"
    ),
    "run_scalar: a data set": wrong(
        given(run_scalar, "--DATASET", "moons"), SystemExit, "'moons'", "xor"
    ),
    "run_scalar: a rate of 0": wrong(
        given(run_scalar, "--RATE", "0"), SystemExit, "--RATE", "above 0", "got 0"
    ),
    "run_scalar: no folder": wrong(
        given(run_scalar, "--out", "/proc/none"), SystemExit, "/proc/none", "name another"
    ),
    "run_tensor: no hidden units": wrong(
        given(run_tensor, "--HIDDEN", "0"), SystemExit, "--HIDDEN", "1 or more"
    ),
    "run_tensor: epochs below 0": wrong(
        given(run_tensor, "--EPOCHS", "-1"), SystemExit, "--EPOCHS", "got -1"
    ),
    "run_tensor: an option": wrong(given(run_tensor, "--bogus"), SystemExit, "--bogus", "--help"),
    "run_fast_tensor: a backend": wrong(
        given(run_fast_tensor, "--BACKEND", "tpu"), SystemExit, "'tpu'", "cpu"
    ),
    "run_fast_tensor: a seed": wrong(
        given(run_fast_tensor, "--seed", "1.5"), SystemExit, "--seed", "1.5"
    ),
    "run_manual: one weight": wrong(
        given(run_manual, "--WEIGHTS", "1"), SystemExit, "--WEIGHTS", "expected 2"
    ),
    "run_manual: a bias": wrong(
        given(run_manual, "--BIAS", "x"), SystemExit, "--BIAS", "a number", "x"
    ),
    "run_digits: no images": wrong(
        given(run_digits, "--train", "0"), SystemExit, "--train", "1 or more"
    ),
    "run_digits: everything dropped": wrong(
        given(run_digits, "--dropout", "1"), SystemExit, "--dropout", "below 1"
    ),
    "run_sentiment: no maps": wrong(
        given(run_sentiment, "--MAPS", "0"), SystemExit, "--MAPS", "1 or more"
    ),
    "run_sentiment: no file": wrong(
        given(run_sentiment, "--data", "none"), SystemExit, "--data none", "pass the path"
    ),
    "train_tasks: a task": wrong(
        given(train_tasks, "--task", "fly"), SystemExit, "--task", "'fly'", "copy"
    ),
    "train_tasks: no length": wrong(
        given(train_tasks, "--length", "0"), SystemExit, "--length", "1 or more"
    ),
    "bench_attention: no rows": wrong(
        measurement("bench_attention", "--lengths", "0"), SystemExit, "--lengths", "1 or more"
    ),
    "bench_attention: wide heads": wrong(
        measurement("bench_attention", "--head-dim", "999"), SystemExit, "at most 256", "999", "more heads"
    ),
    "bench_attention: a device": wrong(
        measurement("bench_attention", "--device", "tpu"), SystemExit, "'tpu'", "cpu"
    ),
    "bench_cpu: no seconds": wrong(
        measurement("bench_cpu", "--seconds", "nan"), SystemExit, "--seconds", "above 0", "nan"
    ),
    "measurements: rows below 0": wrong(
        measurement("io_table", "--length", "-3"), SystemExit, "--length", "got -3"
    ),
    "measurements: a peer": wrong(
        measurement("peers", "--peers", "nobody"), SystemExit, "--peers", "'nobody'"
    ),
}  # fmt: skip
