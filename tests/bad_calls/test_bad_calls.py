"""Every wrong call of the tables raises what is documented, says what to do, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minitorch import FastBackend, SimpleBackend

from . import approximate as bad_calls_approximate
from . import blocks as bad_calls_blocks
from . import factories as bad_calls_factories
from . import kernels as bad_calls_kernels
from . import layers as bad_calls_layers
from . import models as bad_calls_models
from . import scripts as bad_calls_scripts
from . import tensors as bad_calls_tensors
from .cases import Operands, Wrong

ON_HOST = {"simple": SimpleBackend, "fast": FastBackend}
#: Area → its tables, and the backends on which its cases differ.
AREAS: dict[str, tuple[list[dict[str, Wrong]], dict[str, Any]]] = {
    "attention on arrays": (
        [bad_calls_kernels.OPERANDS, bad_calls_kernels.OPTIONS, bad_calls_kernels.GRADIENTS],
        {"arrays": FastBackend},
    ),
    "packed sequences": ([bad_calls_kernels.PACKED], {"arrays": FastBackend}),
    "block masks": ([bad_calls_blocks.BLOCKS], {"arrays": FastBackend}),
    "tensor operations": ([bad_calls_tensors.OPERATIONS], ON_HOST),
    "indexing and shapes": ([bad_calls_tensors.SHAPES], ON_HOST),
    "gather, sort and sums": ([bad_calls_approximate.INDEXING], ON_HOST),
    "approximate attention": ([bad_calls_approximate.APPROXIMATE], ON_HOST),
    "factories": ([bad_calls_factories.FACTORIES], ON_HOST),
    "attention on tensors": ([bad_calls_factories.ATTENTION], ON_HOST),
    "layers as functions": ([bad_calls_layers.FUNCTIONS], ON_HOST),
    "modules": ([bad_calls_layers.MODULES], ON_HOST),
    "language models and caches": ([bad_calls_models.MODELS], ON_HOST),
    "training": ([bad_calls_models.TRAINING], ON_HOST),
    "files and data": ([bad_calls_scripts.FILES], {"host": FastBackend}),
    "scripts": ([bad_calls_scripts.ARGUMENTS], {"host": FastBackend}),
}


def cases() -> Iterator[Any]:
    for area, (tables, backends) in AREAS.items():
        for table in tables:
            for name, case in table.items():
                for backend_name, backend in backends.items():
                    label = f"{area}: {name}"
                    yield pytest.param(area, label, case, backend, id=f"{label}-{backend_name}")


@pytest.fixture
def somewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts and files write to the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("area", "label", "case", "backend"), [*cases()])
def test_a_wrong_call_says_what_to_do(
    area: str, label: str, case: Wrong, backend: Any, record_property: Any
) -> None:
    operands = Operands(backend)
    record_property("bad_call", (area, label))
    with pytest.raises(case.error) as raised:
        case.call(operands)
    message = str(raised.value)
    record_property("raised", type(raised.value).__name__)
    missing = [word for word in case.words if word not in message]
    assert not missing, f"{missing} missing in: {message}"
    changed = [name for name, seen in operands.state().items() if seen != operands.before[name]]
    assert not changed, f"{changed} changed"


def test_there_are_many_cases_and_none_twice() -> None:
    labels = [
        f"{area}: {name}"
        for area, (tables, _) in AREAS.items()
        for table in tables
        for name in table
    ]
    assert len(labels) >= 150 and len(set(labels)) == len(labels)
