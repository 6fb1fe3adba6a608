"""Attention calls of a known kind: launched from the layouts and addresses of their operands alone.

To wrap, check and view the arrays of a small call takes longer than to launch it.  So the first call of a
kind runs in full and leaves what repeats it; a later one only describes its operands, looks the kind up
and launches.  A kind is the layout of each operand, the options, and where the call runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from kernels.cuda.runtime.arrays import DeviceArray
from kernels.cuda.runtime.recorder import active
from kernels.cuda.runtime.repeated import VECTOR, address_of
from kernels.launch import CUDA, Plan, keep_plan
from kernels.problem.operands import Operands
from kernels.problem.option_values import check_seed
from kernels.problem.options import ARRAYS, MODS, Options
from kernels.problem.rungs import rung_of_run
from kernels.runtime.targets import current_device


def _of_device_array(array: Any) -> tuple[Any, int]:
    return (array.shape, array.strides, array.dtype), address_of(array)


def _of_torch(tensor: Any) -> tuple[Any, int]:
    about = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return about, tensor.data_ptr()


#: By the type of an operand, the function that returns its layout and its address.
DESCRIBE: dict[type, Callable[[Any], tuple[Any, int]]] = {DeviceArray: _of_device_array}
#: Options that hold more than a kind can tell.
_OPEN = ARRAYS.union(MODS)


class Glance(NamedTuple):
    """What can be told of a call without a look at its arrays.

    Attributes:
        kind: What :attr:`plan` is found by.
        starts: Addresses of the operands.
        seed: Among the options; 0 without.
        plan: The plan of the kind, which repeats the call; None before the first call.
    """

    kind: Any
    starts: list[int]
    seed: int
    plan: Plan | None

    def learn(self, plan: Plan, operands: Operands) -> None:
        """Remember the plan of a call that ran in full, if it repeats calls.

        Args:
            plan: Of the call.
            operands: As the plan was given them.
        """
        if plan.repeat is not None:
            found = [address_of(x) for x in operands if x is not None]
            if found == self.starts:  # else a copy was computed with
                keep_plan(CUDA, self.kind, plan)


def glance(operands: Sequence[Any], options: Options, *rest: Any) -> Glance | None:
    """Return what can be told of a call without a look at its arrays; None if that is too little.

    Args:
        operands: Arrays or data of a type among :data:`DESCRIBE`.
        options: By name.
        *rest: All else that the call depends on.
    """
    if active() is not None:  # launches are noted for a graph
        return None
    kind, starts, seed = [rung_of_run(), current_device(), *rest], list[int](), 0
    try:
        for operand in operands:
            layout, start = DESCRIBE[type(operand)](operand)
            kind += layout, start % VECTOR
            starts.append(start)
        if options:
            given = cast("dict[str, Any]", options)
            if not _OPEN.isdisjoint(given) and any(
                given[x] is not None for x in _OPEN & given.keys()
            ):
                return None
            if (drawn := given.get("seed")) is not None:
                if type(drawn) is not int:
                    return None
                given, seed = {**given, "seed": None}, check_seed(drawn)
            # By type as well: True is 1, and 1.0 is too.
            kind += [*given.items(), *map(type, given.values())]
            if (window := given.get("window_size")) is not None:
                kind += map(type, window)
        own = tuple(kind)
        return Glance(own, starts, seed, CUDA.plans.get(own))
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        return None  # of another type, or wrong: the call in full says what


def learn_type(array: Any) -> None:
    """Let tensors of PyTorch's be described, once one of them has been read."""
    kind = type(array)
    if (kind.__module__, kind.__qualname__) == ("torch", "Tensor"):
        DESCRIBE[kind] = _of_torch
