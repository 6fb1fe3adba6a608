"""The tables of wrong calls by area; ``python -O -m tests.bad_calls.areas`` walks them without asserts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from minitorch import FastBackend, SimpleBackend

from . import approximate as bad_calls_approximate
from . import blocks as bad_calls_blocks
from . import factories as bad_calls_factories
from . import kernels as bad_calls_kernels
from . import layers as bad_calls_layers
from . import models as bad_calls_models
from . import scripts as bad_calls_scripts
from . import tensors as bad_calls_tensors
from .cases import Wrong, judge

ON_HOST = {"simple": SimpleBackend, "fast": FastBackend}
#: Area → its tables, and the backends on which its cases differ.
AREAS: dict[str, tuple[list[list[tuple[Any, ...]]], dict[str, Any]]] = {
    "attention on arrays": (
        [bad_calls_kernels.OPERANDS, bad_calls_kernels.OPTIONS, bad_calls_kernels.GRADIENTS],
        {"arrays": FastBackend},
    ),
    "packed sequences": ([bad_calls_kernels.PACKED], {"arrays": FastBackend}),
    "block masks": ([bad_calls_blocks.BLOCKS], {"arrays": FastBackend}),
    "tensor operations": ([bad_calls_tensors.OPERATIONS], ON_HOST),
    "indexing and shapes": ([bad_calls_tensors.SHAPES], ON_HOST),
    "derivatives": ([bad_calls_tensors.DERIVATIVES], ON_HOST),
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


def all_cases() -> Iterator[tuple[str, str, Wrong, str, Any]]:
    """Yield each case: its area, its label, the case, and the name and value of its backend."""
    for area, (tables, backends) in AREAS.items():
        for number, (call, error, *words) in enumerate(case for table in tables for case in table):
            for name, backend in backends.items():
                label = f"{area}: {number} {words[0]}"
                yield area, label, Wrong(call, error, tuple(words)), name, backend


def main() -> int:
    """Print the cases that do not hold; the interpreter may have removed every ``assert``."""
    failed = 0
    for _, label, case, backend_name, backend in all_cases():
        try:
            judge(case, backend)
        except Exception as error:  # noqa: PERF203 (of any type)
            failed += 1
            print(f"{label}-{backend_name}: {error!r}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
