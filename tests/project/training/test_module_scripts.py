"""The training scripts of the modules as a user runs them: they learn, they draw, they fail in one line."""

from __future__ import annotations

import gzip
import math
import random
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from kernels.runtime.targets import why_no_cuda

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "project"))  # as for a script that runs there
import parallel_check  # noqa: E402
import run_digits  # noqa: E402
import run_fast_tensor  # noqa: E402
import run_manual  # noqa: E402
import run_scalar  # noqa: E402
import run_sentiment  # noqa: E402
import run_tensor  # noqa: E402
import train_tasks  # noqa: E402
from data import digits as digits_data  # noqa: E402
from data import sentiment as sentiment_data  # noqa: E402
from training import points  # noqa: E402

pytestmark = pytest.mark.slow

POINT_SCRIPTS = [run_scalar, run_tensor, run_fast_tensor]
TINY_TASK = ["--width", "8", "--heads", "2", "--layers", "1", "--batch", "4", "--judge", "5"]
TINY_SENTIMENT = [
    "--train",
    "60",
    "--val",
    "20",
    "--EPOCHS",
    "2",
    "--MAPS",
    "4",
    "--dimension",
    "4",
]
#: A short run of each script, and what it is called in the options of the learning rate.
SHORT: dict[ModuleType, list[str]] = {
    run_scalar: ["--PTS", "8", "--HIDDEN", "2", "--EPOCHS", "20"],
    run_tensor: ["--PTS", "8", "--HIDDEN", "2", "--EPOCHS", "20"],
    run_fast_tensor: ["--PTS", "20", "--HIDDEN", "4", "--EPOCHS", "20"],
    run_digits: ["--train", "64", "--val", "20", "--EPOCHS", "2"],
    run_sentiment: TINY_SENTIMENT,
    train_tasks: ["--task", "copy", "--length", "3", "--steps", "20", *TINY_TASK],
}


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


def refused(capsys: pytest.CaptureFixture[str], script: ModuleType, *args: Any) -> str:
    """Run a script; return the one line with which it ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        script.main([str(arg) for arg in args])
    if isinstance(ended.value.code, str):  # Python prints it, and the exit code is 1
        return ended.value.code
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# -- they learn, print and draw ----------------------------------------------------------------


@pytest.mark.parametrize("script", SHORT, ids=lambda script: script.__name__)
def test_a_script_prints_its_progress_and_draws_a_picture(
    script: ModuleType, mnist: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(script, tmp_path / "out", *short(script, mnist))
    printed = capsys.readouterr().out
    unit = "step" if script is train_tasks else "epoch"
    assert len(re.findall(rf"^{unit} +\d+  loss", printed, re.MULTILINE)) >= 2, printed
    pictures = list((tmp_path / "out").glob("*.png"))
    assert len(pictures) == 1 and pictures[0].stat().st_size > 5000
    assert str(pictures[0]) in printed


@pytest.mark.parametrize("script", SHORT, ids=lambda script: script.__name__)
def test_the_same_seed_gives_the_same_losses_and_another_one_others(
    script: ModuleType, mnist: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for seed in (1, 1, 2):
        plot = ["--PLOT", "False"] if script in POINT_SCRIPTS else []
        call(script, tmp_path, *short(script, mnist), "--seed", seed, *plot)
        losses.append(re.findall(r"loss +[\d.]+", capsys.readouterr().out))
    assert losses[0] == losses[1] != losses[2]


def test_the_weights_set_by_hand_separate_simple_and_diag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(run_manual, tmp_path)
    call(run_manual, tmp_path, "--DATASET", "diag", "--WEIGHTS", "-10", "-10", "--BIAS", "5")
    printed = capsys.readouterr().out
    assert "simple: 50 of 50" in printed and "diag: 50 of 50" in printed
    assert (tmp_path / "simple.png").exists() and (tmp_path / "diag.png").exists()


def test_the_model_set_by_hand_has_the_published_parameters() -> None:
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
def test_a_trainer_learns_and_reports_as_the_protocol_says(
    trainer: Callable[[], Any], pts: int, epochs: int
) -> None:
    minitorch.manual_seed(0)
    data = minitorch.datasets["Simple"](pts)
    logged: list[tuple[int, float, int, int]] = []

    def log(epoch: int, total_loss: float, correct: int, losses: list[float]) -> None:
        logged.append((epoch, total_loss, correct, len(losses)))

    it = trainer()
    it.train(data, 0.5 if pts == 20 else 0.1, epochs, log)
    assert [entry[0] for entry in logged] == [1, *range(10, epochs + 1, 10)]
    assert all(count == epoch for epoch, _, _, count in logged)
    assert logged[-1][1] < 0.5 * logged[0][1]
    assert logged[-1][2] >= 0.9 * pts
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


@pytest.mark.parametrize("script", POINT_SCRIPTS, ids=lambda script: script.__name__)
def test_published_flags_are_taken(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = ["--BACKEND", "cpu"] if script is run_fast_tensor else []
    call(script, tmp_path, "--PTS", 6, "--HIDDEN", 2, "--RATE", 0.05, "--DATASET", "xor", "--EPOCHS",
         2, "--PLOT", "False", *backend)  # fmt: skip
    assert "xor:" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_the_digits_of_scikit_learn_are_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    call(run_digits, tmp_path, "--train", "600", "--val", "200", "--EPOCHS", "2")
    found = re.search(r"validation accuracy ([\d.]+)%", capsys.readouterr().out)
    assert found and float(found[1]) > 80.0


def test_a_sentence_classifier_learns_and_the_log_has_what_is_published() -> None:
    minitorch.manual_seed(0)
    pairs = [("so good here", 1), ("so bad here", 0)] * 20
    words = sentiment_data.vocabulary([sentence for sentence, _ in pairs])
    data = sentiment_data.encode(pairs, words, 5)
    cnn = run_sentiment.CNNSentimentKim(8, 6)
    trainer = run_sentiment.SentenceSentimentTrain(
        run_sentiment.WordNetwork(cnn, len(words) + 1, 6)
    )
    logged: list[Any] = []
    trainer.train(data, 0.02, 10, 8, data, lambda *figures: logged.append(figures))
    epoch, loss, losses, seen, seen_right, predicted, right = logged[-1]
    assert epoch == 8 and losses[-1] == loss < losses[0]
    assert seen.shape == predicted.shape == (40,)
    assert right == 1.0 and seen_right > 0.5


# -- what they know of the optimum ---------------------------------------------------------------


def test_the_rule_of_the_sentences_has_the_stated_optimum() -> None:
    """Read with the rule, 95 % of the labels are right; by the words alone, 72.5 % can be."""
    random.seed(0)
    good, bad = set(sentiment_data.GOOD), set(sentiment_data.BAD)
    by_rule, plain, negated = [], [], []
    for _ in range(4000):
        text, label = sentiment_data.make_sentence()
        words = text.split()
        signs = [(i, word in good) for i, word in enumerate(words) if word in good | bad]
        assert len(signs) == 2 and words.count("not") <= 1
        if "not" in words:
            # "not" turns over the first adjective after it.
            place = words.index("not")
            turned = min(i for i, _ in signs if i > place)
            read = [sign != (i == turned) for i, sign in signs]
            negated.append(signs[0][1] != signs[1][1])
        else:
            read = [sign for _, sign in signs]
            plain.append(label)
        assert read[0] == read[1]
        by_rule.append(read[0] == label)
    assert np.mean(by_rule) == pytest.approx(sentiment_data.BEST_ACCURACY, abs=0.015)
    assert all(negated) and len(negated) == pytest.approx(2000, abs=150)
    assert np.mean(plain) == pytest.approx(0.5, abs=0.05)


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


@pytest.mark.parametrize("name", train_tasks.TASKS)
def test_the_best_loss_of_a_task_is_that_of_who_knows_the_answer(name: str) -> None:
    task, length = train_tasks.TASKS[name], 4
    lines = task.lines(np.random.default_rng(0), 1, length)
    nats = []
    for i in range(1, lines.shape[1]):
        is_digit = lines[0, i] < 10
        is_read = i < task.prompt_length(length) and is_digit
        nats.append(math.log(10.0) if is_read else 0.0)
    assert task.best_loss(length) == pytest.approx(np.mean(nats))


def test_exact_matches_are_what_greedy_writing_gives() -> None:
    """Half trained on one digit: right for some lines, wrong for others, and both ways agree."""
    minitorch.manual_seed(0)
    task = train_tasks.TASKS["copy"]
    args = train_tasks.parse_args([*TINY_TASK, "--length", "1", "--steps", "60", "--lr", "0.02"])
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
        (run_tensor, "--PLOT perhaps", "--PLOT True False"),
        (run_sentiment, "--embeddings none.txt", "--embeddings none.txt No such"),
        (train_tasks, "--length 18", "--length 17"),
        (train_tasks, "--width 9 --heads 2", "multiple 9 2"),
    ],
)
def test_options_that_cannot_work_are_one_line(
    script: ModuleType, options: str, words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = refused(capsys, script, "--out", tmp_path, *options.split())
    assert "\n" not in line and all(word in line for word in words.split()), line


@pytest.mark.parametrize(
    "script", [run_digits, run_sentiment, train_tasks], ids=lambda script: script.__name__
)
def test_a_learning_rate_that_is_too_high_is_one_line(
    script: ModuleType, mnist: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = "--lr" if script is train_tasks else "--RATE"
    line = refused(capsys, script, *short(script, mnist), rate, "1e30", "--out", tmp_path)
    assert "\n" not in line and "loss" in line and rate in line


def test_a_dead_network_is_said_to_be_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(run_tensor, tmp_path, *SHORT[run_tensor], "--RATE", "1e30", "--PLOT", "False")
    assert "no better than that of a guess" in capsys.readouterr().out
    call(run_fast_tensor, tmp_path, "--EPOCHS", "100", "--PLOT", "False")
    assert "a guess" not in capsys.readouterr().out


def test_broken_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mnist(change: Callable[[dict[str, np.ndarray]], Any]) -> str:
        arrays = mnist_arrays()
        change(arrays)
        np.savez(tmp_path / "odd.npz", **arrays)  # type: ignore[arg-type]
        return refused(capsys, run_digits, "--mnist", tmp_path / "odd.npz", "--out", tmp_path)

    assert "y_test is missing" in mnist(lambda a: a.pop("y_test"))
    assert "do not fit" in mnist(lambda a: a.update(y_train=a["y_train"][1:]))
    assert "from 0 to 9" in mnist(lambda a: a.update(y_train=a["y_train"] + 9))
    assert "pooled" in mnist(lambda a: a.update(x_train=np.zeros((64, 9, 9), np.uint8)))
    (tmp_path / "odd.npz").write_bytes(b"no archive")
    line = refused(capsys, run_digits, "--mnist", tmp_path / "odd.npz", "--out", tmp_path)
    assert "odd.npz" in line and "\n" not in line

    folder = tmp_path / "idx"
    folder.mkdir()
    assert "missing" in refused(capsys, run_digits, "--mnist", folder, "--out", tmp_path)
    write_idx(folder, mnist_arrays(), False)
    path = folder / digits_data.IDX_FILES[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert "cut off" in refused(capsys, run_digits, "--mnist", folder, "--out", tmp_path)
    path.write_bytes(b"P5 not idx")
    assert "not an idx file" in refused(capsys, run_digits, "--mnist", folder, "--out", tmp_path)

    table = tmp_path / "odd.tsv"
    table.write_text("a film\t1\nno label here\n", encoding="utf-8")
    line = refused(capsys, run_sentiment, "--data", table, "--out", tmp_path)
    assert "line 2" in line and "no label here" in line
    table.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused(capsys, run_sentiment, "--data", table, "--out", tmp_path)
    table.write_text("a film\t1\n", encoding="utf-8")
    assert "at least 2" in refused(capsys, run_sentiment, "--data", table, "--out", tmp_path)
    vectors = tmp_path / "odd.txt"
    for text, word in (("the 1\nwas 1 2\n", "lengths"), ("the one\n", "line 1"), ("", "no word")):
        vectors.write_text(text, encoding="utf-8")
        assert word in refused(capsys, run_sentiment, "--embeddings", vectors, "--out", tmp_path)


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU, or the simulator")
@pytest.mark.parametrize("script", [run_fast_tensor, run_digits, run_sentiment, train_tasks],
                         ids=lambda script: script.__name__)  # fmt: skip
def test_a_missing_gpu_is_one_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ["--backend", "cuda"] if script is train_tasks else ["--BACKEND", "gpu"]
    line = refused(capsys, script, *option, "--out", tmp_path)
    assert "\n" not in line and " ".join(option) in line and "cannot run" in line


@pytest.mark.cuda
@pytest.mark.parametrize("script", [run_fast_tensor, run_digits, run_sentiment, train_tasks],
                         ids=lambda script: script.__name__)  # fmt: skip
def test_a_gpu_gives_the_losses_of_the_cpu(
    script: ModuleType, mnist: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for name in ("cpu", "gpu"):
        choice = ["--BACKEND", name]
        if script is train_tasks:
            choice = ["--backend", {"cpu": "fast", "gpu": "cuda"}[name]]
        dropout = ["--dropout", "0"] if script in (run_digits, run_sentiment) else []
        call(script, tmp_path, *short(script, mnist), *choice, *dropout)
        losses.append(re.findall(r"loss +([\d.]+)", capsys.readouterr().out))
    cpu, gpu = (np.array(row, float) for row in losses)
    np.testing.assert_allclose(gpu, cpu, atol=2e-3)


def test_without_matplotlib_a_script_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # its import fails
    call(run_manual, tmp_path, "--PTS", "5")
    assert "matplotlib is missing" in capsys.readouterr().out


def test_without_scikit_learn_the_digits_say_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    line = refused(capsys, run_digits, "--out", tmp_path)
    assert "scikit-learn" in line and "--mnist" in line


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("script", SHORT, ids=lambda script: script.__name__)
def test_ctrl_c_ends_the_training_and_draws_what_is_learnt(
    script: ModuleType, mnist: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    backward, calls = minitorch.Tensor.backward, []
    cls: Any = minitorch.Scalar if script is run_scalar else minitorch.Tensor
    backward = cls.backward
    # Late enough for a first report, early enough for work to be left; the bag of words comes first.
    at = {run_scalar: 100, run_tensor: 15, run_fast_tensor: 25, run_digits: 6, run_sentiment: 8,
          train_tasks: 15}[script]  # fmt: skip

    def interrupted(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        backward(self, *args)

    monkeypatch.setattr(cls, "backward", interrupted)
    line = refused(capsys, script, *short(script, mnist), "--out", tmp_path / "out")
    assert re.match(r"stopped by Ctrl-C after \d+ of \d+ (epoch|step)s$", line), line
    assert len(calls) == at
    assert script is run_sentiment or list((tmp_path / "out").glob("*.png"))

    calls[:] = [1] * (at - 1)  # at the first step: nothing is learnt, nothing is drawn
    line = refused(capsys, script, *short(script, mnist), "--out", tmp_path / "none")
    assert line == "stopped by Ctrl-C"
    assert not list((tmp_path / "none").glob("*.png"))


@pytest.mark.parametrize("name", parallel_check.LOOPS)
def test_the_diagnostics_show_a_parallel_loop(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel_check.show(name, 1)
    printed = capsys.readouterr().out
    assert f"\n{name}\n" in printed and "Parallel loop listing for" in printed
    assert "(parallel)" in printed or "loop #" in printed


def test_the_diagnostics_are_of_all_four_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(parallel_check, "show", lambda *args: shown.append(args))
    parallel_check.main([])
    assert shown == [(name, 3) for name in ("MAP", "ZIP", "REDUCE", "MATRIX MULTIPLY")]
