"""What differs between scalars and tensors, for functions of both."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from ..autodiff import Context
from ..functions import derivatives as of_tensors
from ..scalar import Scalar, ScalarHistory
from ..scalars import derivatives as of_scalars
from ..scalars.graphs import Chain


def _scalar_stand_in(x: Scalar) -> Scalar:
    return Scalar(x.data)


def _join_scalar(leaf: Scalar, x: Scalar) -> None:
    leaf.history = None if x.history is None else ScalarHistory(of_scalars.Same, Context(), (x,))


class VariableKind(NamedTuple):
    """What differs between scalars and tensors.

    Attributes:
        chain: The chain rule that records.
        jvp: The rule of tangents.
        stand_in: Returns a leaf of the same value.
        join: Makes such a leaf what it stands for.
        constant: Returns a value, or a derivative, as a constant.
        number: Returns a derivative as the chain rule of first derivatives takes it.
        filled: Returns a constant like a variable, of one number.
    """

    chain: Chain
    jvp: Callable[..., Any]
    stand_in: Callable[[Any], Any]
    join: Callable[[Any, Any], None]
    constant: Callable[[Any], Any]
    number: Callable[[Any], Any]
    filled: Callable[[Any, float], Any]


TENSORS = VariableKind(
    of_tensors.chain, of_tensors.jvp, of_tensors.stand_in, of_tensors.join,
    lambda x: x.detach(), lambda x: x.detach(), lambda x, number: x.full(x.shape, number),
)  # fmt: skip
SCALARS = VariableKind(
    of_scalars.chain, of_scalars.jvp, _scalar_stand_in, _join_scalar,
    lambda x: Scalar(getattr(x, "data", x), None), attrgetter("data"),
    lambda x, number: Scalar(number, None),
)  # fmt: skip


def kind_of(x: Any) -> VariableKind:
    """Return the kind of a variable."""
    return SCALARS if isinstance(x, Scalar) else TENSORS
