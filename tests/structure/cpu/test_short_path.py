"""How many functions of ours a call of attention enters, from the method to its compiled loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
import minitorch
from kernels.runtime.jit import JIT_DISABLED

from ...support.frames import entered

#: Most functions of a repeated call with its gradients recorded, of one without, and of a first call.
WITH_GRADIENTS, WITHOUT, FIRST = 24, 18, 300
#: Query rows and keys: few rows run by another loop than many, and by two if there are many keys.
SIZES = [(8, 8), (16, 16), (1, 700)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"window_size": (3, 3), "softcap": 2.0},
    {"dropout_p": 0.1},
]


def tensors(rows: int, cols: int, requires_grad: bool = False) -> list[minitorch.Tensor]:
    """Return q, k and v."""
    draw = np.random.default_rng(0)
    return [
        minitorch.from_numpy(draw.standard_normal((1, 2, n, 8), np.float32), requires_grad=requires_grad)
        for n in (rows, cols, cols)
    ]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_repeated_call_enters_few_functions(size: tuple[int, int], options: Any) -> None:
    assert not JIT_DISABLED
    for requires_grad, most in ((False, WITHOUT), (True, WITH_GRADIENTS)):
        q, k, v = tensors(*size, requires_grad)
        q.flash_attention(k, v, **options)
        names = entered(lambda q=q, k=k, v=v: q.flash_attention(k, v, **options))
        more = 5 if "dropout_p" in options else 0  # to draw a seed
        more += 7 if size == (1, 700) else 0  # to merge the parts
        assert len(names) <= most + more, names


def test_a_repeated_backward_pass_checks_and_plans_nothing() -> None:
    q, k, v = tensors(16, 16, requires_grad=True)
    for _ in range(2):
        q.flash_attention(k, v).sum().backward()
    names = entered(q.flash_attention(k, v).sum().backward)
    # From the function's own pass, which is the last one, to its gradients.
    own = names[len(names) - names[::-1].index("backward") :]
    assert own.index("wrap_tuple") <= 40, own
    assert not {"in_full", "pick", "tile_table"} & {*own}


def test_a_first_call_enters_few_functions() -> None:
    q, k, v = tensors(11, 23, requires_grad=True)
    tensors(11, 24)[0].flash_attention(*tensors(11, 24)[1:])  # what is done once for all calls
    names = entered(lambda: q.flash_attention(k, v))
    assert len(names) <= FIRST, len(names)


def test_a_repeated_call_of_arrays_enters_few_functions() -> None:
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, 2, n, 8), np.float32) for n in (9, 11, 11))
    every: list[Any] = [{}, {"attn_mask": np.tri(9, 11, dtype=bool)}]
    for options in every:
        kernels.flash_attention_forward(q, k, v, **options)
        names = entered(lambda own=options: kernels.flash_attention_forward(q, k, v, **own))
        assert len(names) <= WITHOUT + 3 * len(options), names
