"""The classifier of long documents as a user runs it, its corpus, and its scores."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from bench import harness
from data import documents as corpus
from hypothesis import given
from hypothesis import strategies as st
from training import document_loop

pytestmark = pytest.mark.slow

SMALL = ["--contexts", "4", "16", "--steps", "160", "--judge-every", "40", "--quick", "--lr", "0.02",
         "--device", "cpu"]  # fmt: skip


def run(out: Path, *options: str) -> None:
    places = ["--folder", str(out), "--json", str(out / "documents.json")]
    figure = ["--figure", str(out / "documents.png")]
    assert harness.run(harness.load("documents"), [*SMALL, *places, *figure, *options]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two labels, whose words come after the first four."""
    place = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    for number in range(60):
        own = [label for label in ("cats", "dogs") if random.integers(2)] or ["cats"]
        text = "one two three four " + " ".join(own) + " and more" * 3
        for label in own:
            (place / label).mkdir(exist_ok=True)
            (place / label / f"{number}.txt").write_text(text)
    return place


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    run(out, "--data", str(folder))
    return out


def test_who_reads_more_knows_more(finished: Path) -> None:
    record = json.loads((finished / "documents.json").read_text())
    short, long = record["rows"]
    assert record["labels"] == ["cats", "dogs"]
    assert (short["context"], long["context"], short["cut"], long["cut"]) == (4, 16, 1.0, 0.0)
    # How training rounds differs from one processor to the next: one document in 15 may be missed, and the
    # most frequent label may be joined by the other one for all documents.
    assert short["micro_f1"] == pytest.approx(record["without_reading"], abs=0.02)
    assert short["micro_f1"] < 0.9 < long["micro_f1"]
    low, high = record["gain_interval"]
    assert low <= record["gain"] <= high
    assert long["peak_bytes"] >= 0 and long["step_ms"] > 0
    pytest.importorskip("matplotlib")
    assert (finished / "documents.png").stat().st_size > 1000


def test_import_statements_are_blanked_wherever_they_stand() -> None:
    source = (
        "import os, xml.dom as d\nif True:\n    from re import (\n        compile,\n    )\n"
        "from . import near\nfrom .json import x\ndef f():\n    import sys; sys.exit()\n    return os.sep\n"
    )
    text, modules = corpus.without_imports(source)
    assert modules == {"os", "xml", "re", "sys"}
    assert "import" not in text and "os.sep" in text and len(text.split("\n")) == 11
    kept = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    assert text.split("\n")[kept[0].lineno - 1] == "    return os.sep"


def test_the_corpus_has_the_modules_that_most_files_import(tmp_path: Path) -> None:
    sources = {
        "a": "import os\n" + "x = os.sep\n" * 9,
        "b": "import os, re\n" + "y\n" * 20,
        "c": "import re, abc\n" + "z\n" * 20,
        "short": "import abc",
        "bad": "(" * 20,
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = corpus.python_library(10, tmp_path, 2)
    assert found.labels == ("os", "re") and len(found.texts) == 3
    assert found.targets.tolist() == [[True, False], [True, True], [False, True]]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_no_threshold_is_better_than_the_best(documents: int, labels: int, seed: int) -> None:
    targets, scores = np.random.default_rng(seed).integers(
        0, [[[2]], [[4]]], (2, documents, labels)
    )

    def f1(threshold: float) -> float:
        return document_loop.micro_f1(document_loop.counts_of(scores >= threshold, targets > 0))

    best = f1(document_loop.best_threshold(scores.astype(float), targets > 0))
    assert best == pytest.approx(max(f1(threshold) for threshold in np.unique(scores)))


def test_the_interval_of_a_gain_holds_it() -> None:
    random = np.random.default_rng(0)
    first, second = random.integers(0, 4, (2, 80, 3))
    low, high = document_loop.gain_interval(first, second)
    gain = document_loop.micro_f1(second) - document_loop.micro_f1(first)
    assert low < gain < high
    assert document_loop.gain_interval(first, first) == (0.0, 0.0)
