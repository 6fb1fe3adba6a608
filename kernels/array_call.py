"""One call of attention on arrays: its target, its problem and its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from kernels import launch
from kernels.call_plan import CallPlan, plan_by_running  # beyond module 5
from kernels.common.arguments import as_host_array, as_plain
from kernels.cuda.runtime.arrays import device_view, element_strides, is_device_array
from kernels.interop.libraries import Library, as_array, library_of
from kernels.known_calls import Glance, glance, learn_type
from kernels.problem.argument_types import check_types
from kernels.problem.operands import in_order, make_operands
from kernels.problem.options import ARRAYS, Options
from kernels.problem.question import Problem, check_gradient_operands, problem_of

#: The operands of the backward pass in addition to q, k and v; callers may leave out the last one.
_RESULTS = ("dout", "out", "lse", "dlse", "lse_rest")


class Call:
    """A checked call: target, problem and operands.

    Args:
        q: (…, heads, seq_q, head_dim), an array of any library.
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        options: Options of ``make_problem``, by name.
        results: For a gradient, dout, out, lse, dlse or None, and the rest of lse if there is one.
        make: Builds the problem, as :func:`kernels.problem.question.problem_of` does.

    Raises:
        TypeError: Also if operands are not all on the host or all on one device.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        options: Options,
        results: tuple[Any, ...] | None = None,
        make: Callable[[Any, Any, Any, Options], Problem] = problem_of,
    ):
        q, k, v = as_operand(q), as_operand(k), as_operand(v)
        options, arrays = with_arrays(options)
        self.problem = make(q, k, v, options)
        places = [q, k, v]
        given: dict[str, Any] = {}
        if results is not None:
            given = {n: as_operand(x) for n, x in zip(_RESULTS, results, strict=False)}
            check_gradient_operands(self.problem, *[given[n] for n in _RESULTS[:4]])
            places += [array for array in given.values() if array is not None]
        self.target = _target(places)
        if arrays and self.target is launch.CPU:
            check_on_host(arrays)
        operands = make_operands(self.target.memory, self.problem, q, k, v, *in_order(arrays))
        self.operands = operands.having(**given)

    def plan(self, tile: Any, backward: bool = False) -> CallPlan:  # beyond module 5
        """Return the plan of the call; for the backward pass, the plan of the gradients of q, k and v."""
        check_types(backward=backward)
        operands = self.operands
        if backward:
            out, lse, rest = self.forward(tile)
            operands = operands.having(out=out, lse=lse, lse_rest=rest, dout=out)
        wanted = launch.Wanted(backward=bool(backward))
        plan = launch.plan_of(self.target, self.problem, operands, tile, wanted)
        return plan_by_running(plan, self.problem, operands)

    def forward(self, tile: Any, seen: Glance | None = None) -> tuple[Any, Any, Any]:
        """Return out, lse and its rest.

        Args:
            tile: (block_q, block_k); the rung's own when None.
            seen: Stores the plan for later calls.
        """
        plan = launch.plan_of(self.target, self.problem, self.operands, tile)
        results = plan.run(self.problem, self.operands)
        if seen is not None:
            seen.learn(plan, self.operands)
        return results

    def backward(
        self,
        tile: Any,
        with_mask: bool = False,
        with_sink: bool = False,
        seen: Glance | None = None,
    ) -> tuple[Any, ...]:
        """Return dq, dk and dv, in the operands' shapes, and the gradients of mask and sinks if wanted.

        Args:
            tile: (block_q, block_k); the rung's own when None.
            with_mask: Also return the gradient of the floating mask.
            with_sink: Also return the gradient of the sinks.
            seen: Stores the plan for later calls.
        """
        check_types(mask_gradient=with_mask, sink_gradient=with_sink)
        if with_mask and self.problem.mask != "float":
            raise ValueError(
                "mask_gradient needs a floating attn_mask, but the call has none; leave it at False"
            )
        if with_sink and not self.problem.sink:
            raise ValueError(
                "sink_gradient needs a call with sink, but this one has none; leave it at False"
            )
        operands, wanted = self.operands, launch.Wanted(True, with_mask, with_sink)
        plan = launch.plan_of(self.target, self.problem, operands, tile, wanted)
        gradients = plan.run(self.problem, operands)
        own = [
            self._own(gradient, operand)
            for gradient, operand in zip(
                gradients, (operands.q, operands.k, operands.v), strict=False
            )
        ]
        if seen is not None and all(a is b for a, b in zip(own, gradients, strict=False)):
            seen.learn(plan, operands)
        others = (gradients.dmask,) * with_mask + (gradients.dsink,) * with_sink
        return *own, *others

    def _own(self, gradient: Any, operand: Any) -> Any:
        """Return the gradient of an operand from that of its broadcast shape."""
        memory = self.target.memory
        summed = memory.sum_to(gradient, tuple(operand.shape))
        # Where nothing was summed, ``launch.backward`` has laid it out.
        return gradient if summed is gradient else memory.laid_as(summed, operand)


def forward(
    q: Any, k: Any, v: Any, options: Options, tile: Any, with_rest: bool = False
) -> tuple[Any, ...]:
    """Return out, lse and, if wanted, its rest; see :func:`kernels.flash_attention_forward`."""
    library = library_of(q)
    if library is not None and (place := library.place(q)) is not None:
        with place:
            return forward(q, k, v, options, tile, with_rest)
    seen = glance((q, k, v), options, "forward", tile)
    count = 2 + with_rest
    if seen is not None and seen.plan is not None:
        return _repeated(seen, library, q)[:count]
    return results_of(library, Call(q, k, v, options).forward(tile, seen)[:count])


def backward(
    operands: tuple[Any, Any, Any],
    results: tuple[Any, ...],
    options: Options,
    tile: Any,
    with_mask: bool,
    with_sink: bool,
) -> tuple[Any, ...]:
    """Return gradients; see :func:`kernels.flash_attention_backward`.

    Args:
        operands: q, k and v.
        results: dout, out, lse, dlse or None, and the rest of lse if there is one.
        options: Options by name.
        tile: (block_q, block_k); the rung's own when None.
        with_mask: Also return the gradient of the floating mask.
        with_sink: Also return the gradient of the sinks.
    """
    library = library_of(operands[0])
    if library is not None and (place := library.place(operands[0])) is not None:
        with place:
            return backward(operands, results, options, tile, with_mask, with_sink)
    dout, out, lse, dlse, *rest = results
    given = (*operands, out, lse, *rest, dout, *(() if dlse is None else (dlse,)))
    seen = glance(given, options, "backward", tile, with_mask, with_sink)
    if seen is not None and seen.plan is not None:
        return _repeated(seen, library, operands[0])[:3]
    call = Call(*operands, options, results)
    return results_of(library, call.backward(tile, with_mask, with_sink, seen))


def _repeated(seen: Glance, library: Library | None, like: Any) -> tuple[Any, ...]:
    """Return the results of a known call as arrays of the caller's library."""
    assert seen.plan is not None, "the caller looks first"
    repeat = seen.plan.repeat
    if library is None:
        return tuple(repeat.arrays(seen.starts, seen.seed))
    return tuple(library.repeat(repeat, seen.starts, seen.seed, like))


def results_of(library: Library | None, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return NumPy's or numba's arrays as arrays of a library, without a copy.

    Args:
        library: The caller's library; None for NumPy and numba.
        arrays: The results of a call.
    """
    return arrays if library is None else tuple(map(library.result, arrays))


def as_operand(array: Any) -> Any:
    """Return an operand, or None, as NumPy's or numba's array; see ``arguments.as_plain``.

    A device array with a negative stride is copied: no view of it could begin at its lowest address.
    """
    if isinstance(array, np.ndarray):  # and so memory of the host that a device can read
        is_usual = type(array) is np.ndarray and array.dtype.isnative
        return array if is_usual else as_plain(array)
    if array is None:
        return None
    if not is_device_array(array):
        array = as_array(foreign := array)
        learn_type(foreign)
    if is_device_array(array) and min(array.strides, default=0) < 0:
        return launch.CUDA.memory.laid_as(array, array)
    return array


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
    """Check that the option arrays of a call on the host can be read there.

    Args:
        arrays: NumPy's or numba's arrays, or None, by the name of the option.

    Raises:
        TypeError: If one is on a device, because nothing is copied from a device implicitly.
    """
    for name, array in arrays.items():
        if is_device_array(array):
            raise TypeError(
                f"{name} is on a CUDA device, but q, k and v are on the host; move all of them to one place"
            )


def heads_first(array: Any) -> Any:
    """View (total, heads, dim) as (heads, total, dim), or back; nothing is copied."""
    if isinstance(array, np.ndarray):
        return array.swapaxes(0, 1)
    (rows, heads, dim), (row_step, head_step, step) = array.shape, element_strides(array)
    return device_view(array, (heads, rows, dim), (head_step, row_step, step))


def _target(operands: Sequence[Any]) -> launch.Target:
    if {type(operand) for operand in operands} == {np.ndarray}:  # as of most calls
        return launch.CPU
    if all(map(is_device_array, operands)):
        return launch.CUDA
    if all(isinstance(operand, np.ndarray) for operand in operands):
        return launch.CPU
    places = "; ".join(dict.fromkeys(map(_place, operands)))
    raise TypeError(
        f"kernels take arrays that are all on the host, or all on one CUDA device, got {places}; convert "
        "them with numpy.asarray or numba.cuda.to_device, or PyTorch tensors with x.to(device)"
    )


def _place(operand: Any) -> str:
    name = type(operand).__name__
    if isinstance(operand, np.ndarray):
        return f"{name} on the host"
    return f"{name} on a CUDA device" if is_device_array(operand) else name
