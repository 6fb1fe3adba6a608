"""Sums of products by Einstein's convention, composed of permutations, products and sums."""

from __future__ import annotations

import math
import string
from collections import Counter
from typing import Any

from kernels.common.arguments import shown

from ..functions.base import check_tensor
from ..tensor import Tensor


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Multiply tensors whose dimensions have names, and sum over the names that the result lacks.

    Operands are combined from left to right.

    Args:
        equation: The names of each operand's dimensions, separated by commas, then ``->`` and those of the
            result: ``"bij,bjk->bik"`` multiplies batches of matrices.  A name is a letter, and ``...``
            stands for all other dimensions, counted from the right.  A name that occurs twice in an
            operand takes its diagonal.  Without ``->``, the result has the other dimensions, and then the
            names that occur once, in alphabetical order.
        operands: At least one tensor.  Sizes of a name are equal, or 1, which is repeated.

    Returns:
        A tensor with the dimensions that the equation names.

    Raises:
        TypeError: If the equation is not a string, or an operand not a tensor.
        ValueError: If they do not fit together.
    """
    for each in operands:
        check_tensor("each operand of einsum", each)
    inputs, output = _names(equation, operands)
    sizes: dict[str, int] = {}
    for names, each in zip(inputs, operands, strict=True):
        for name, size in zip(names, each.shape, strict=True):
            if sizes.setdefault(name, size) == 1:
                sizes[name] = size
            if size not in (1, sizes[name]):
                raise ValueError(
                    f"{equation!r} gives the sizes {sizes[name]} and {size} to one dimension, in operands "
                    f"of shapes {', '.join(str(x.shape) for x in operands)}; sizes must be equal or 1"
                )
    out: Any = None
    own = ""
    for i, (names, each) in enumerate(zip(inputs, operands, strict=True)):
        names, each = _plain(names, each, sizes)
        later = {*output}.union(*inputs[i + 1 :])
        names, each = _summed(names, each, later | {*own})
        own, out = (names, each) if out is None else _product(own, out, names, each, later)
        own, out = _summed(own, out, later)
    missing = [name for name in output if name not in own]  # each of size 1
    out = out.reshape(*out.shape, *[1] * len(missing))
    own += "".join(missing)
    return out.permute(*(own.index(name) for name in output))


def _names(equation: str, operands: tuple[Any, ...]) -> tuple[list[str], str]:
    """Return a letter for each dimension of each operand, and of the result."""
    if not isinstance(equation, str):
        raise TypeError(f"the equation of einsum must be a string, got {shown(equation)}")
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    letters = {*left.replace("...", "").replace(",", "")}
    if len(inputs) != len(operands) or not letters <= {*string.ascii_letters}:
        raise ValueError(
            f"{equation!r} must name the dimensions of {len(operands)} operands, with a letter each; "
            "for example, einsum('ij,jk->ik', a, b)"
        )
    # Letters of other alphabets stand for the dimensions of "...", the last one first.
    others = [
        x.dims - len(names.replace("...", "")) for names, x in zip(inputs, operands, strict=True)
    ]
    unnamed = [chr(0x3B1 + i) for i in range(max(others))]
    for i, (names, x, count) in enumerate(zip(inputs, operands, others, strict=True)):
        if count < 0 or (count and "..." not in names) or names.count(".") not in (0, 3):
            raise ValueError(
                f"{names!r} in {equation!r} does not name the dimensions of shape {x.shape}; give one "
                "letter for each, or ... for the rest"
            )
        inputs[i] = names.replace("...", "".join(reversed(unnamed[:count])))
    every = "".join(reversed(unnamed))
    if not arrow:
        once = [name for name, count in Counter(left).items() if count == 1 and name in letters]
        return inputs, every + "".join(sorted(once))
    found = output.replace("...", every)
    if len({*found}) < len(found) or not {*found} <= letters | {*every}:
        raise ValueError(
            f"the result {output!r} of {equation!r} must name dimensions of the operands, each once"
        )
    return inputs, found


def _plain(names: str, x: Any, sizes: dict[str, int]) -> tuple[str, Any]:
    """Drop dimensions of size 1 that are repeated, and take the diagonal of each name that occurs twice."""
    kept = [i for i, name in enumerate(names) if x.shape[i] != 1]
    x, names = x.reshape([x.shape[i] for i in kept]), "".join(names[i] for i in kept)
    while (pair := next((name for name in names if names.count(name) > 1), None)) is not None:
        first, second = names.index(pair), names.rindex(pair)
        rest = [i for i in range(x.dims) if i not in (first, second)]
        size, shape = sizes[pair], [x.shape[i] for i in rest]
        x = x.permute(*rest, first, second).reshape(*shape, size * size)[..., :: size + 1]
        names = "".join(names[i] for i in rest) + pair
    return names, x


def _summed(names: str, x: Any, kept: set[str]) -> tuple[str, Any]:
    """Sum over the names that are not needed any more."""
    dims = tuple(i for i, name in enumerate(names) if name not in kept)
    return "".join(n for n in names if n in kept), x.sum(dims, keepdim=False) if dims else x


def _product(a_names: str, a: Any, b_names: str, b: Any, kept: set[str]) -> tuple[str, Any]:
    """Multiply two tensors, and sum over the names that both have and that are not needed any more."""
    both = [name for name in a_names if name in b_names]
    batch = [name for name in both if name in kept]
    inner = [name for name in both if name not in kept]
    of_a = [name for name in a_names if name not in both]
    of_b = [name for name in b_names if name not in both]
    size_of = {
        **dict(zip(a_names, a.shape, strict=True)),
        **dict(zip(b_names, b.shape, strict=True)),
    }

    def laid(x: Any, names: str, *groups: list[str]) -> Any:
        order = [names.index(name) for group in groups for name in group]
        return x.permute(*order).reshape([math.prod(size_of[n] for n in group) for group in groups])

    if inner:
        out = laid(a, a_names, batch, of_a, inner) @ laid(b, b_names, batch, inner, of_b)
    else:
        out = laid(a, a_names, batch, of_a, []) * laid(b, b_names, batch, [], of_b)
    names = "".join([*batch, *of_a, *of_b])
    return names, out.reshape([size_of[name] for name in names])
