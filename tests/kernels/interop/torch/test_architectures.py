"""Architectures of transformers compute with our attention what they do with their own."""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers"
)

from ....support.models.architectures import KINDS, tried  # noqa: E402

RECORD = json.loads(
    (Path(__file__).parents[4] / "docs/results/cpu-2-cores/architectures.json").read_text()
)
RESULTS = {row["architecture"]: row["result"] for row in RECORD["rows"]}
IS_THAT_VERSION = RECORD["versions"]["transformers"] == transformers.__version__


@pytest.mark.skipif(not IS_THAT_VERSION, reason="the record is of another version of transformers")
def test_every_architecture_of_the_registry_has_a_result() -> None:
    assert set(RESULTS) == set(KINDS)
    assert not [name for name, result in RESULTS.items() if "FAILS" in result]


#: Others every day.
DRAWN = random.Random(date.today().toordinal()).sample(
    [name for name in KINDS if RESULTS.get(name, "").startswith(("tested", "refused"))], 15
)


@pytest.mark.parametrize("name", DRAWN)
def test_an_architecture_has_the_result_of_the_record(name: str) -> None:
    result = tried(name)
    assert result.startswith(RESULTS[name]) or ("FAILS" not in result and not IS_THAT_VERSION)
