"""Wrong calls as data: what is called, what it raises, and the words that its message must hold.

A table stands in a file of its own for each part of the library.  Each refusal has one case: a call, the
type of its error, and words of the message.  Where one line checks several things, each has a case.
``test_bad_calls.py`` walks them all, and ``python project/measure.py bad_calls`` counts them.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import kernels
import minitorch as mt
from minitorch import Tensor, from_numpy

Errors = type[BaseException] | tuple[type[BaseException], ...]


class Wrong(NamedTuple):
    """A wrong call of some :class:`Operands`, what it raises, and what the message must hold."""

    call: Callable[[Any], Any]
    error: Errors
    words: tuple[str, ...]


class Operands:
    """Tensors on a backend and arrays to call things with, and what they looked like.

    Args:
        backend: Of the tensors.
    """

    def __init__(self, backend: Any):
        def on(array: Any, grad: bool = False) -> Tensor:
            return from_numpy(array, backend, requires_grad=grad)

        self.backend = backend
        self.matrix = on(np.arange(6.0).reshape(2, 3), True)
        self.matrix.grad = on(np.full((2, 3), 7.0))
        self.flipped = on(np.arange(6.0).reshape(2, 3).T)  # (3, 2), permuted
        self.vector = on(np.ones(4))
        self.image = on(np.ones((1, 2, 4, 4)))
        self.signal = on(np.ones((2, 3, 4)))
        self.ids = on(np.array([[0, 1, 5]]))
        self.heads = on(np.linspace(-1.0, 1.0, 24).reshape(1, 2, 3, 4), True)
        self.packed = on(np.ones((5, 2, 4)))
        rng = np.random.default_rng(0)
        self.x: Any = rng.standard_normal((2, 5, 4)).astype(np.float32)
        self.wide: Any = rng.standard_normal((2, 5, 4))
        self.out, self.lse = kernels.flash_attention_forward(self.x, self.x, self.x)
        self.rows: Any = np.ones((5, 2, 4), np.float32)
        self.mask: Any = np.ones((5, 5), bool)
        self.bias: Any = np.zeros((5, 5), np.float32)
        self.tokens: Any = np.zeros((1, 2), np.int64)
        self.before = self.state()

    def state(self) -> dict[str, Any]:
        """Return all that a call must not change: bits, shapes, strides, histories and gradients."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                data, grad = value._tensor, value.grad
                kept = None if grad is None else (grad.shape, bits(grad.to_numpy()))
                own = data.shape, data.strides, bits(value.to_numpy())
                found[name] = (*own, value.backend, id(value.history), kept)
            elif isinstance(value, np.ndarray):
                found[name] = value.shape, value.strides, value.flags.writeable, bits(value)
        return found


def judge(case: Wrong, backend: Any) -> str:
    """Make a wrong call; return the name of what it raised.

    Raises:
        AssertionError: If it raised something else or nothing, its message lacks a word, or an operand has
            changed.
    """
    operands = Operands(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            case.call(operands)
        except case.error as error:
            raised = error
        else:
            raise AssertionError(f"nothing was raised, expected {case.error}")
    if missing := [word for word in case.words if word not in str(raised)]:
        raise AssertionError(f"{missing} missing in: {raised}")
    now = operands.state()
    if changed := [name for name, seen in now.items() if seen != operands.before[name]]:
        raise AssertionError(f"{changed} changed")
    return type(raised).__name__


def bits(array: Any) -> tuple[str, bytes]:
    return str(array.dtype), np.ascontiguousarray(array).tobytes()


def elsewhere(operands: Operands) -> Any:
    """Return the other backend on the host."""
    return mt.SimpleBackend if operands.backend is mt.FastBackend else mt.FastBackend


def model(backend: Any, **options: Any) -> mt.DecoderLM:
    """Return a language model of 5 tokens, width 4, 2 heads, a context of 3 and one layer."""
    return mt.DecoderLM(5, 4, 2, 3, n_layer=1, middle_dim=4, backend=backend, **options)


def run(main: Callable[[list[str]], Any], *args: str) -> None:
    """Call a script's ``main`` in this process; a SystemExit has what the user would read as its text.

    Raises:
        SystemExit: As the script ends.
        AssertionError: If it ends well.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            main([*args])
    except SystemExit as ended:
        if ended.code in (None, 0):
            raise AssertionError(f"{args} are taken") from None
        text = ended.code if isinstance(ended.code, str) else errors.getvalue()
        raise SystemExit(text.strip()) from None
