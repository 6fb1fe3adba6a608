"""One call of attention on arrays: its target, its problem and its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from kernels import launch
from kernels.bound_calls import find  # beyond module 5
from kernels.call_plan import CallPlan, plan_by_running  # beyond module 5
from kernels.common.arguments import as_host_array, flag
from kernels.cuda.runtime.arrays import device_view, element_strides, is_device_array
from kernels.interop.libraries import Library, library_of  # beyond module 5
from kernels.operand_types import as_operand
from kernels.problem.operands import make_operands
from kernels.problem.option_values import check_seed
from kernels.problem.options import ARRAYS, WITH_GRADIENT, Options, field_of
from kernels.problem.question import Problem, check_further_operands, problem_of

_TANGENTS = ("q_tangent", "k_tangent", "v_tangent")  # beyond module 5
#: The operands of a pass in addition to q, k, v and the options, by ``Wanted.backward`` and ``.tangent``.
_FURTHER = {
    (False, False): (),
    (True, False): ("out", "lse", "lse_rest", "dout", "dlse"),
    (False, True): _TANGENTS,  # beyond module 5
    (True, True): ("dout", "dlse", *_TANGENTS),  # beyond module 5
}
#: Builds the problem of a call from q, k, v and the options.
Make = Callable[[Any, Any, Any, Options], Problem]


class Call:
    """A checked call on arrays of any library: target, problem and operands.

    ``further`` are the operands of its pass by name, ``make`` is that of :func:`attend`, and ``known`` is
    the bound call, which has been checked.  Operands must all be on the host or all on one device;
    otherwise a TypeError is raised.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        options: Options,
        further: Mapping[str, Any] | None = None,
        make: Make = problem_of,
        known: launch.BoundCall | None = None,
    ):
        q, k, v = as_operand(q), as_operand(k), as_operand(v)
        options, arrays = with_arrays(options)
        if known is None:
            self.problem = make(q, k, v, options)
        else:
            self.problem = known.problem.with_seed(check_seed(options.get("seed") or 0))
        places = [q, k, v]
        given: dict[str, Any] = {}
        if further:
            given = {name: as_operand(x) for name, x in further.items()}
            if known is None:
                check_further_operands(self.problem, q, k, v, given)
            places += [array for array in given.values() if array is not None]
        self.target = target_of(places)
        if arrays and self.target is launch.CPU:
            check_on_host(arrays)
        operands = make_operands(self.target.memory, self.problem, q, k, v, arrays)
        self.operands = operands.having(**given)

    def plan(self, tile: Any, backward: bool = False) -> CallPlan:  # beyond module 5
        """Return the plan of the call; for the backward pass, the plan of the gradients of q, k and v."""
        backward = flag("backward", backward)
        operands = self.operands
        if backward:
            out, lse, rest = launch.forward(self.target, self.problem, operands, tile)
            operands = operands.having(out=out, lse=lse, lse_rest=rest, dout=out)
        wanted = launch.Wanted(backward=backward)
        call = launch.BoundCall(self.target, self.problem, tile, wanted)
        return plan_by_running(call, self.problem, operands)

    def operand_gradient(self, gradient: Any, operand: Any) -> Any:
        """Return the gradient of an operand from that of its broadcast shape."""
        memory = self.target.memory
        summed = memory.sum_to(gradient, tuple(operand.shape))
        # Where nothing was summed, ``launch.backward`` has laid it out.
        return gradient if summed is gradient else memory.laid_as(summed, operand)


def attend(
    operands: tuple[Any, Any, Any],
    options: Options,
    tile: Any,
    wanted: launch.Wanted = launch.FORWARD,
    results: tuple[Any, ...] = (),
    make: Make = problem_of,
    count: int | None = None,
) -> tuple[Any, ...]:
    """Compute attention of q, k and v of any library, or its gradients, as arrays of the library of q.

    ``results`` are the further operands of the pass, in the order of ``_FURTHER``: for gradients out,
    lse, the rest of lse or None, dout, and dlse or None. The tile is the rung's own when None, ``make``
    builds the problem, and ``count`` is how many results are returned, all when None: those of
    ``launch.forward``, or of ``launch.backward`` with dq, dk and dv in the shapes of the operands.
    """
    library = found = known = None
    if type(operands[0]) is not np.ndarray:  # beyond module 5
        library = library_of(operands[0])
        if library is not None and (context := library.context(operands[0])) is not None:
            with context:
                return attend(operands, options, tile, wanted, results, make, count)
    given = [array for array in results if array is not None]
    rest = tile, wanted, *[array is None for array in results]
    found = find(operands, options, *rest, make=make, results=given)  # beyond module 5
    known = found and found.call  # beyond module 5
    if found is not None and known is not None and known.reads_given:  # beyond module 5
        if library is not None and not found.on_host:
            repeat = library.repeat(known.repeat, found.starts, found.seed, operands[0])
            return tuple([array for array in repeat if array is not None][:count])
        arrays = known.repeat.arrays(found.starts, found.seed, found.arrays)
        if arrays is not None:
            return results_of(library, tuple([x for x in arrays if x is not None][:count]))
    names = _FURTHER[wanted.backward, wanted.tangent]
    own = Call(*operands, options, dict(zip(names, results, strict=True)), make, known)
    if known is None:
        _check_wanted(own.problem, wanted)
    arrays = launch.run(found, own.target, own.problem, own.operands, wanted, tile)
    if wanted.backward:
        gradients = map(own.operand_gradient, arrays[:3], own.operands[:3])
        arrays = (*gradients, *[x for x in arrays[3:] if x is not None])
    return results_of(library, tuple(arrays[:count]))


def _check_wanted(problem: Problem, wanted: launch.Wanted) -> None:
    """Check that a call has the options whose gradients are wanted."""
    for name, is_wanted, can in zip(WITH_GRADIENT, wanted[1:], problem.has_gradients, strict=False):
        field = field_of(name)
        if flag(f"{field}_gradient", is_wanted) and not can:
            kind = "a floating attn_mask" if field == "mask" else name
            raise ValueError(
                f"{field}_gradient needs a call with {kind}, but this one has none; leave it at False"
            )


def results_of(library: Library | None, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return NumPy's or numba's arrays as those of a library, or as they are for None, uncopied."""
    return arrays if library is None else tuple(map(library.result, arrays))


def with_arrays(options: Options) -> tuple[Options, dict[str, Any]]:
    """Convert the options that are arrays; return all options, and the arrays alone, by name.

    The arrays become NumPy's or numba's.  An option with a number for each head may also be a list.
    """
    if ARRAYS.isdisjoint(options):
        return options, {}
    arrays, every = {}, cast("dict[str, Any]", options)
    for name in ARRAYS & every.keys():
        if (array := every[name]) is None:
            continue
        if name == "attn_mask":
            arrays[name] = as_operand(array) if _is_array(array) else array
        else:
            is_list = isinstance(array, (list, tuple))
            arrays[name] = as_host_array(name, array) if is_list else as_operand(array)
    return cast("Options", {**every, **arrays}), arrays


def _is_array(mask: Any) -> bool:
    return any(hasattr(mask, name) for name in ("dtype", "__dlpack__", "__cuda_array_interface__"))


def check_on_host(arrays: dict[str, Any]) -> None:
    """Check that the option arrays of a call on the host, by the name of the option, can be read there.

    Nothing is copied from a device implicitly, so one that is there raises a TypeError.
    """
    for name, array in arrays.items():
        if is_device_array(array):
            raise TypeError(
                f"{name} is on a CUDA device, but q, k and v are on the host; move all of them to one place"
            )


def heads_first(array: Any) -> Any:  # beyond module 5
    """View (total, heads, dim) as (heads, total, dim), or back; nothing is copied."""
    if isinstance(array, np.ndarray):
        return array.swapaxes(0, 1)
    (rows, heads, dim), (row_step, head_step, step) = array.shape, element_strides(array)
    return device_view(array, (heads, rows, dim), (head_step, row_step, step))


def target_of(operands: Sequence[Any]) -> launch.Target:
    """Return the target of arrays; a TypeError says that they are in different places."""
    if {type(operand) for operand in operands} == {np.ndarray}:  # as of most calls
        return launch.CPU
    if all(map(is_device_array, operands)):
        return launch.CUDA
    if all(isinstance(operand, np.ndarray) for operand in operands):
        return launch.CPU
    places = "; ".join(dict.fromkeys(map(_described, operands)))
    raise TypeError(
        f"kernels take arrays that are all on the host, or all on one CUDA device, got {places}; convert "
        "them with numpy.asarray or numba.cuda.to_device, or PyTorch tensors with x.to(device)"
    )


def _described(operand: Any) -> str:
    name = type(operand).__name__
    if isinstance(operand, np.ndarray):
        return f"{name} on the host"
    return f"{name} on a CUDA device" if is_device_array(operand) else name
