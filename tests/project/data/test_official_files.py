"""The loaders of the Long-Range Arena on tiny folders, the stand-ins, and what is missing or foreign."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data import official_files
from data.long_range import load_task


@pytest.fixture
def imdb(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for label in ("pos", "neg"):
            folder = tmp_path / "aclImdb" / part / label
            folder.mkdir(parents=True)
            for number in range(10):
                (folder / f"{number}_7.txt").write_text(f"{label} {part} {number} é", "utf-8")
    return tmp_path


@pytest.fixture
def aan(tmp_path: Path) -> Path:
    for name in official_files.AAN_FILES.values():
        lines = [f"{i % 2}.0\tA{i}\tB{i}\tfirst {i}\tsecond {i}" for i in range(6)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in (*official_files.CIFAR_TRAIN, official_files.CIFAR_TEST):
        records = random.integers(256, size=(4, official_files.CIFAR_RECORD)).astype(np.uint8)
        records[:, 0] = np.arange(4)
        records[0, 1:1025], records[0, 1025:2049], records[0, 2049:] = 100, 50, 10
        records.tofile(folder / name)
    return tmp_path


def test_imdb_is_read_as_bytes_with_a_tenth_held_out(imdb: Path) -> None:
    parts = official_files.imdb(imdb, 12)
    assert [len(parts[part].y) for part in ("train", "valid", "test")] == [18, 2, 20]
    for part, examples in parts.items():
        for tokens, label in zip(examples.X, examples.y, strict=True):
            text = tokens[tokens > 0].tobytes().decode("utf-8", "ignore")
            words = ("pos" if label else "neg") + (" test" if part == "test" else " train")
            assert text.startswith(words) and len(tokens) == 12
    few = official_files.imdb(imdb, 12, {"train": 5, "valid": 1, "test": 3})
    assert [len(examples.y) for examples in few.values()] == [5, 1, 3]


def test_aan_is_read_as_pairs(aan: Path) -> None:
    task = load_task("retrieval", aan, aan, length=10)
    assert task.documents == 2 and task.source == "AAN" and not task.is_stand_in
    X, y = task.parts["valid"]
    assert X.shape == (6, 2, 10)
    texts = [[document[document > 0].tobytes().decode() for document in pair] for pair in X]
    for (first, second), label in zip(texts, y, strict=True):
        number = int(first.removeprefix("first "))
        assert second == f"second {number}" and label == number % 2


def test_cifar_is_read_in_grey(cifar: Path) -> None:
    parts = official_files.cifar10(cifar)
    assert parts["train"].X.shape == (18, 1024) and len(parts["valid"].y) == 2
    test = parts["test"]
    grey = test.X[test.y == 0][0]
    assert (grey == round(0.299 * 100 + 0.587 * 50 + 0.114 * 10)).all()


def test_stand_ins_say_so_and_a_seed_decides_them(tmp_path: Path) -> None:
    for name, shape in (("text", (40, 200)), ("retrieval", (40, 2, 200))):
        task = load_task(name, tmp_path / "a", examples=40, length=200)
        again = load_task(name, tmp_path / "b", examples=40, length=200)
        other = load_task(name, tmp_path / "c", examples=40, length=200, seed=1)
        assert task.is_stand_in and task.source.startswith("stand-in: bytes of Python's")
        X, y = task.parts["train"]
        assert X.shape == shape and 0.2 < y.mean() < 0.8
        np.testing.assert_array_equal(X, again.parts["train"].X)
        assert not np.array_equal(X, other.parts["train"].X)
