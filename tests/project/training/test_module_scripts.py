"""The training scripts of the modules as a user runs them: they learn, they draw, they fail in one line."""

from __future__ import annotations

import gzip
import random
import re
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import parallel_check
import pytest
import run_digits
import run_fast_tensor
import run_manual
import run_scalar
import run_sentiment
import run_tensor
import train_tasks
from data import digits as digits_data
from hypothesis import given
from hypothesis import strategies as st
from training import points

import minitorch
from kernels.runtime.targets import why_no_cuda

from ...support.scripts import refused

pytestmark = pytest.mark.slow

POINT_SCRIPTS = [run_scalar, run_tensor, run_fast_tensor]
XOR = "--DATASET xor --PTS 8 --HIDDEN 2 --RATE 0.05 --EPOCHS 20"
TINY_TASK = "--width 8 --heads 2 --layers 1 --batch 4 --judge 5"
#: A short run of each script.
SHORT: dict[ModuleType, list[str]] = {
    script: options.split()
    for script, options in (
        (run_scalar, XOR),
        (run_tensor, XOR),
        (run_fast_tensor, f"{XOR} --BACKEND cpu"),
        (run_digits, "--train 64 --val 20 --EPOCHS 2"),
        (run_sentiment, "--train 60 --val 20 --EPOCHS 2 --MAPS 4 --dimension 4"),
        (train_tasks, f"--task copy --length 3 --steps 20 {TINY_TASK}"),
    )
}
each_script = pytest.mark.parametrize("script", SHORT, ids=lambda script: script.__name__)
ON_A_GPU = pytest.mark.parametrize(
    "script", [run_fast_tensor, run_digits, run_sentiment, train_tasks], ids=lambda s: s.__name__
)


@pytest.fixture(autouse=True)
def seeds_stay() -> Iterator[None]:
    """The scripts seed the generators of the whole process."""
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def call(script: ModuleType, out: Path, *args: Any) -> None:
    script.main([*map(str, args), "--out", str(out)])


def mnist_arrays(train: int = 64, test: int = 20, side: int = 8) -> dict[str, np.ndarray]:
    """Images of two halves, each black or white: something to learn in one epoch."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", train), ("test", test)):
        y = rng.integers(0, 2, count)
        x = np.zeros((count, side, side), np.uint8)
        x[y == 0, :, : side // 2] = 255
        x[y == 1, :, side // 2 :] = 255
        arrays |= {f"x_{part}": x, f"y_{part}": y.astype(np.uint8)}
    return arrays


@pytest.fixture
def mnist(tmp_path: Path) -> str:
    path = tmp_path / "mnist.npz"
    np.savez(path, **mnist_arrays())  # type: ignore[arg-type]
    return str(path)


def short(script: ModuleType, mnist: str) -> list[str]:
    return [*SHORT[script], *(["--mnist", mnist] if script is run_digits else [])]


# -- they learn, print and draw ----------------------------------------------------------------


@each_script
def test_a_seed_decides_the_losses_that_a_script_prints_before_it_draws_a_picture(
    script: ModuleType, mnist: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, printed = [], ""
    for seed in (1, 1, 2):
        plot = ["--PLOT", "False"] if script in POINT_SCRIPTS and not losses else []
        call(script, tmp_path / f"out{len(losses)}", *short(script, mnist), "--seed", seed, *plot)
        printed = capsys.readouterr().out
        losses.append(re.findall(r"^(?:step|epoch) +\d+  loss +([\d.]+)", printed, re.MULTILINE))
    assert len(losses[0]) >= 2 and losses[0] == losses[1] != losses[2]
    (picture,) = (tmp_path / "out2").glob("*.png")
    assert picture.stat().st_size > 5000 and str(picture) in printed
    assert script not in POINT_SCRIPTS or not [*tmp_path.glob("out0/*.png")]


def test_the_weights_set_by_hand_separate_simple_and_diag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(run_manual, tmp_path)
    call(run_manual, tmp_path, "--DATASET", "diag", "--WEIGHTS", "-10", "-10", "--BIAS", "5")
    printed = capsys.readouterr().out
    assert "simple: 50 of 50" in printed and "diag: 50 of 50" in printed
    assert (tmp_path / "simple.png").exists() and (tmp_path / "diag.png").exists()
    model = run_manual.ManualTrain(0).model
    names = [name for name, _ in model.named_parameters()]
    assert names == ["linear.weight_0_0", "linear.weight_1_0", "linear.bias_0"]


@pytest.mark.parametrize(
    ("trainer", "pts", "epochs"),
    [
        (lambda: run_scalar.ScalarTrain(4), 20, 60),
        (lambda: run_tensor.TensorTrain(4), 20, 60),
        (lambda: run_fast_tensor.FastTrain(8), 50, 100),
    ],
    ids=["scalar", "tensor", "fast"],
)
def test_a_trainer_learns_and_reports_each_epoch(
    trainer: Callable[[], Any], pts: int, epochs: int
) -> None:
    minitorch.manual_seed(0)
    data = minitorch.datasets["Simple"](pts)
    logged: list[tuple[Any, ...]] = []
    it = trainer()
    it.train(data, 0.5 if pts == 20 else 0.1, epochs, lambda *log: logged.append(log))
    assert [epoch for epoch, *_ in logged] == [*range(1, epochs + 1)]
    _, loss, correct, losses = logged[-1]
    assert loss < 0.5 * logged[0][1] and correct >= 0.9 * pts and len(losses) == epochs
    probability = points.probabilities(it, data.X[:1])
    assert probability.shape == (1,) and 0.0 < probability[0] < 1.0
    assert it.model.named_parameters()


def test_modules_1_and_2_train_the_same_network() -> None:
    """The same seed draws the same weights: tensors are Scalars, computed together."""
    histories = []
    for trainer in (run_scalar.ScalarTrain(3), run_tensor.TensorTrain(3)):
        minitorch.manual_seed(5)
        data = minitorch.datasets["Xor"](12)
        losses: list[float] = []
        trainer.train(data, 0.5, 15, lambda *log, kept=losses: kept.extend([log[1]]))
        histories.append(losses)
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-9)


def test_the_digits_of_scikit_learn_are_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    call(run_digits, tmp_path, "--train", "600", "--val", "200", "--EPOCHS", "2")
    found = re.search(r"validation accuracy ([\d.]+)%", capsys.readouterr().out)
    assert found and float(found[1]) > 80.0


# -- what they know of the optimum ---------------------------------------------------------------


@given(st.sampled_from(sorted(train_tasks.TASKS)), st.integers(1, 6), st.integers(0, 99))
def test_the_answer_of_a_task_is_right(name: str, length: int, seed: int) -> None:
    task = train_tasks.TASKS[name]
    for line in task.lines(np.random.default_rng(seed), 5, length):
        read, answer = train_tasks.decode(line).split("=")
        expected = {
            "copy": lambda text: text,
            "reverse": lambda text: text[::-1],
            "sort": lambda text: "".join(sorted(text)),
            "addition": lambda text: str(sum(map(int, text.split("+")))).zfill(length + 1)[::-1],
        }[name](read)
        assert answer == expected
        assert len(read) + 1 == task.prompt_length(length)


def test_exact_matches_are_what_greedy_writing_gives() -> None:
    """Half trained on one digit: right for some lines, wrong for others, and both ways agree."""
    minitorch.manual_seed(0)
    task = train_tasks.TASKS["copy"]
    args = train_tasks.parse_args(
        [*TINY_TASK.split(), "--length", "1", "--steps", "60", "--lr", "0.02"]
    )
    model, rng = train_tasks.build(task, args), np.random.default_rng(0)
    train_tasks.train(task, model, rng, args)
    model.eval()
    lines, prompt = task.lines(rng, 30, 1), task.prompt_length(1)
    fast = train_tasks.exact_matches(model, lines, prompt)
    slow = [
        model.generate(line[:prompt].tolist(), len(line) - prompt, temperature=0) == line.tolist()
        for line in lines
    ]
    assert fast.tolist() == slow and 0 < sum(slow) < 30


# -- files of the user's -------------------------------------------------------------------------


def write_idx(folder: Path, arrays: dict[str, np.ndarray], pack: bool) -> None:
    for name, key in zip(digits_data.IDX_FILES, digits_data.NPZ_NAMES, strict=True):
        array = arrays[key]
        head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        data = head + array.tobytes()
        path = folder / (f"{name}.gz" if pack else name)
        path.write_bytes(gzip.compress(data) if pack else data)


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "gzip"])
def test_idx_files_and_npz_hold_the_same_images(pack: bool, tmp_path: Path, mnist: str) -> None:
    write_idx(tmp_path, mnist_arrays(), pack)
    for ours, theirs in zip(
        digits_data.read_mnist(str(tmp_path)), digits_data.read_mnist(mnist), strict=True
    ):
        assert np.array_equal(ours.X, theirs.X) and np.array_equal(ours.y, theirs.y)
        assert ours.X.dtype == np.float32 and ours.X.max() == 1.0


def test_images_of_the_size_of_mnist_are_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "large.npz", **mnist_arrays(train=48, side=28))  # type: ignore[arg-type]
    call(run_digits, tmp_path, "--mnist", tmp_path / "large.npz", "--EPOCHS", "3")
    printed = capsys.readouterr().out
    assert "28 x 28" in printed and "validation accuracy 100.0%" in printed


def test_a_file_of_sentences_and_one_of_vectors_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, vectors = tmp_path / "data.tsv", tmp_path / "vectors.txt"
    rows = [f"a {'good' if i % 2 else 'bad'} film {i % 7}\t{i % 2}" for i in range(60)]
    data.write_text("sentence\tlabel\n" + "\n".join(rows) + "\n", encoding="utf-8")
    vectors.write_text("good 1 0 0.5\nbad -1 0 0.5\nunseen 9 9 9 9\n", encoding="utf-8")
    call(run_sentiment, tmp_path, "--data", data, "--embeddings", vectors, "--val", "10", "--EPOCHS",
         "3", "--RATE", "0.03")  # fmt: skip
    printed = capsys.readouterr().out
    assert "50 sentences to learn from, 10 to judge by" in printed
    assert "convolutional network: validation accuracy 100.0%" in printed
    assert "the best possible" not in printed  # nobody knows it for a file


# -- they fail in one line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (run_scalar, "--DATASET spiral --PTS 1", "spiral --PTS 2"),
        (run_sentiment, "--embeddings none.txt", "--embeddings none.txt No such"),
        (train_tasks, "--length 18", "--length 17"),
        (run_digits, "--mnist MNIST --train 64 --val 20 --RATE 1e30", "loss --RATE"),
        (train_tasks, f"--steps 20 --lr 1e30 {TINY_TASK}", "loss --lr"),
    ],
)
def test_options_that_cannot_work_are_one_line(
    script: ModuleType, options: str, words: str, mnist: str, tmp_path: Path
) -> None:
    line = refused(script.main, "--out", tmp_path, *options.replace("MNIST", mnist).split())
    assert all(word in line for word in words.split()), line


@pytest.mark.parametrize(
    ("script", "option", "content", "words"),
    [
        (run_digits, "--mnist", b"no archive", "odd"),
        (run_sentiment, "--data", b"a film\t1\nno label here\n", "line 2"),
        (run_sentiment, "--embeddings", b"the 1\nwas 1 2\n", "lengths"),
    ],
)
def test_a_broken_file_is_one_line(
    script: ModuleType, option: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / "odd").write_bytes(content)
    assert words in refused(script.main, option, tmp_path / "odd", "--out", tmp_path)


def on(script: ModuleType, gpu: bool) -> list[str]:
    if script is train_tasks:
        return ["--backend", "cuda" if gpu else "fast"]
    return ["--BACKEND", "gpu" if gpu else "cpu"]


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU, or the emulated one")
@ON_A_GPU
def test_a_missing_gpu_is_one_line(script: ModuleType, tmp_path: Path) -> None:
    line = refused(script.main, *on(script, True), "--out", tmp_path)
    assert " ".join(on(script, True)) in line and "cannot run" in line


@pytest.mark.cuda
@ON_A_GPU
def test_a_gpu_gives_the_losses_of_the_cpu(
    script: ModuleType, mnist: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    dropout = ["--dropout", "0"] if script in (run_digits, run_sentiment) else []
    for gpu in (False, True):
        call(script, tmp_path, *short(script, mnist), *on(script, gpu), *dropout)
        losses.append(re.findall(r"loss +([\d.]+)", capsys.readouterr().out))
    cpu, gpu = (np.array(row, float) for row in losses)
    np.testing.assert_allclose(gpu, cpu, atol=2e-3)


@pytest.mark.usefixtures("ctrl_c")
@each_script
def test_ctrl_c_ends_the_training_and_draws_what_is_learnt(
    script: ModuleType, mnist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    cls: Any = minitorch.Scalar if script is run_scalar else minitorch.Tensor
    backward = cls.backward
    # Late enough for a first report, early enough for work to be left; the bag of words comes first.
    at = {run_scalar: 100, run_tensor: 15, run_fast_tensor: 15, run_digits: 6, run_sentiment: 8,
          train_tasks: 15}[script]  # fmt: skip

    def interrupted(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        backward(self, *args)

    monkeypatch.setattr(cls, "backward", interrupted)
    line = refused(script.main, *short(script, mnist), "--out", tmp_path / "out")
    assert re.match(r"stopped by Ctrl-C after \d+ of \d+ (epoch|step)s$", line), line
    assert len(calls) == at
    assert script is run_sentiment or list((tmp_path / "out").glob("*.png"))

    calls[:] = [1] * (at - 1)  # at the first step: nothing is learnt, nothing is drawn
    line = refused(script.main, *short(script, mnist), "--out", tmp_path / "none")
    assert line == "stopped by Ctrl-C"
    assert not list((tmp_path / "none").glob("*.png"))


@pytest.mark.parametrize("name", ["MAP", "MATRIX MULTIPLY"])
def test_the_diagnostics_show_a_parallel_loop(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel_check.show(name, 1)
    printed = capsys.readouterr().out
    assert f"\n{name}\n" in printed and "Parallel loop listing for" in printed
    assert "(parallel)" in printed or "loop #" in printed
