"""Find the plan of an attention call on a GPU by the layouts of its operands, without wrapping them.

Wrapping, checking and viewing the arrays of a small call takes longer than launching it.  The first call
of a kind runs in full and stores its plan.  Later calls describe their operands by layout and address, look
up the plan and repeat its launches.  A kind consists of the layout of each operand, the options and the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from kernels.cuda.runtime.arrays import DeviceArray
from kernels.cuda.runtime.recorder import active
from kernels.cuda.runtime.repeated import VECTOR, address_of
from kernels.interop.libraries import Torch, library_of
from kernels.launch import CUDA, Plan, keep_plan
from kernels.problem.operands import Operands
from kernels.problem.option_values import check_seed
from kernels.problem.options import ARRAYS, Options
from kernels.problem.rungs import rung_of_run
from kernels.runtime.targets import current_device
from kernels.scores.mods import KEPT, with_kept_mods


def _of_device_array(array: Any) -> tuple[Any, int]:
    return (array.shape, array.strides, array.dtype), address_of(array)


#: For each type of operand, the function that returns its layout and its address.
DESCRIBE: dict[type, Callable[[Any], tuple[Any, int]]] = {DeviceArray: _of_device_array}


class Glance(NamedTuple):
    """The description of a call by the layouts and addresses of its operands.

    Attributes:
        kind: The key of :attr:`plan`.
        starts: The addresses of the operands.
        seed: The option ``seed``; 0 if it is not given.
        plan: The plan that repeats calls of this kind; None before the first call.
    """

    kind: Any
    starts: list[int]
    seed: int
    plan: Plan | None

    def learn(self, plan: Plan, operands: Operands) -> None:
        """Store the plan of this call, which has run in full, if it can repeat calls.

        Args:
            plan: The plan of the call.
            operands: The operands that the plan received.
        """
        if plan.repeat is not None:
            found = [address_of(x) for x in operands if x is not None]
            if found == self.starts:  # otherwise the call used a copy of an operand
                keep_plan(CUDA, self.kind, plan)


def glance(operands: Sequence[Any], options: Options, *rest: Any) -> Glance | None:
    """Describe a call by the layouts of its operands; None if it has to run in full.

    Args:
        operands: Arrays of a type in :data:`DESCRIBE`.
        options: Options by name.
        *rest: Other values that the call depends on.
    """
    # Arrays of the host are not described, and launches are being recorded for a graph if one is active.
    if type(operands[0]) not in DESCRIBE or active() is not None:
        return None
    kind, starts, seed = [rung_of_run(), current_device(), *rest], list[int](), 0
    try:
        for operand in operands:
            layout, start = DESCRIBE[type(operand)](operand)
            kind += layout, start % VECTOR
            starts.append(start)
        if options:
            given = cast("dict[str, Any]", options)
            if any(given[name] is not None for name in ARRAYS & given.keys()):
                return None  # a call with such an array runs in full
            if not given.keys().isdisjoint(KEPT):
                given = with_kept_mods(given)
            if (drawn := given.get("seed")) is not None:
                if type(drawn) is not int:
                    return None
                given, seed = {**given, "seed": None}, check_seed(drawn)
            # With the types, because True == 1 == 1.0.
            kind += [*given.items(), *map(type, given.values())]
            if (window := given.get("window_size")) is not None:
                kind += map(type, window)
        own = tuple(kind)
        return Glance(own, starts, seed, CUDA.plans.get(own))
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        return None  # an unknown type or a wrong value: the full call raises the error


def learn_type(array: Any) -> None:
    """Describe later tensors of PyTorch by layout and address, given one that has been read."""
    library = library_of(array)
    if isinstance(library, Torch):
        DESCRIBE[type(array)] = library.describe
