"""A whole training step as one launch: run eagerly at first, recorded, and replayed as a CUDA graph."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kernels.common.arguments import whole
from kernels.cuda.backend import Arena, Graph, Recording, active, pool, refuse, watching_numba
from kernels.runtime.cuda_errors import CaptureError as CaptureError
from kernels.runtime.targets import BLOCKING, IS_SIMULATOR, current_device, driver, why_no_cuda

from ..autodiff import modes
from ..functions.base import is_tensor
from ..optim import copy_of
from ..tensor import Tensor

#: Calls that run eagerly before three are recorded: kernels compile, an optimiser makes its moments.
WARM_UP = 2
#: Calls that are recorded, each while it runs: the first says how much memory they take, and what the
#: others do not have in common is no part of a graph.
RECORDED = 3


class GraphStep:
    """What :func:`graph_step` returns: call it as the function itself.

    Args:
        fn: See :func:`graph_step`.
        warm_up: Likewise.

    Attributes:
        calls: So far, since the beginning or the last :meth:`reset`.
        why_eager: Why calls run eagerly for good, in words; None where they are captured.
    """

    def __init__(self, fn: Callable[..., Any], warm_up: int = WARM_UP):
        self._fn, self._warm_up = fn, whole("warm_up", warm_up, 1)
        self.why_eager = _why_eager()
        self.reset()

    def reset(self) -> None:
        """Forget the graph and let its memory go; the calls that follow are the first ones again."""
        self.calls = 0
        self._graph: Graph | None = None
        self._inputs: list[Any] = []
        self._arena: Arena | None = None
        self._recording: Recording | None = None
        self._outputs: Any = None
        self._device = -1

    @property
    def is_captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._graph is not None

    @property
    def kernels(self) -> int:
        """Kernels of a replay; 0 before there is one."""
        return 0 if self._graph is None else self._graph.size

    @property
    def memory(self) -> int:
        """Bytes on the device that are kept for what a replay computes; 0 before there is one."""
        return 0 if self._graph is None else self._graph.memory

    def __call__(self, *inputs: Any) -> Any:
        """Do what the function does with these inputs; return what it returns.

        Raises:
            TypeError: If an input is neither an array nor a tensor, or the function returns something else
                than tensors.
            ValueError: If an input has another shape or dtype than before, or requires a gradient.
            CaptureError: While it is recorded, if it does what a graph cannot hold.
        """
        if self.why_eager is not None or modes.anomaly or active() is not None:
            return self._fn(*inputs)
        if self._graph is not None and not (
            self._device == current_device() and self._graph.is_valid()
        ):
            self.reset()  # the optimiser's state was loaded, or a parameter got another value
        self._take(inputs)
        self.calls += 1
        if self._graph is not None:
            self._graph.replay()
            return _owned(self._outputs)
        if self.calls <= self._warm_up:
            return self._fn(*inputs)
        return self._record()

    def _take(self, inputs: tuple[Any, ...]) -> None:
        """Copy the inputs to where recorded calls find them."""
        if not self._inputs:
            self._inputs = [_place_for(x) for x in inputs]
        given = [(x.shape, x.dtype) for x in map(_checked, inputs)]
        known = [(x.shape, x.dtype) for x in self._inputs]
        if given != known:
            raise ValueError(
                f"graph_step takes inputs of the same shapes and dtypes in each call, {_shown(known)} in "
                f"the first, got {_shown(given)}; call the function itself with these, or make another "
                "graph_step for them"
            )
        for place, x in zip(self._inputs, inputs, strict=True):
            if not is_tensor(place):
                np.copyto(place, x)
            elif place.backend.cuda:
                place.f.id_map(x.detach(), place)
            else:
                np.copyto(place.to_numpy(), x.to_numpy())

    def _record(self) -> Any:
        """Call the function on the inputs and record it; make the graph of the last two such calls."""
        source = pool()
        assert source is not None, "or calls are eager"
        before, arena = self._recording, self._arena or Arena(source, driver.CUdeviceptr)
        self._recording = self._arena = None  # a call that fails is followed by a first one
        hosts = [x.to_numpy() if is_tensor(x) else x for x in self._inputs if _is_host(x)]
        recording, state = Recording(arena, hosts, before), _random_state()
        with _uncollected(), recording, watching_numba(_refuse_numba):
            outputs = self._fn(*self._inputs)
        if not recording.launches:
            self.why_eager = "the function launches nothing on a CUDA device"
            return outputs
        recording.check_host()
        _check_draws(recording, state)
        if before is None:
            self._arena, self._recording = arena, recording if arena.is_laid_out else None
        else:
            self._graph, self._outputs = Graph(before, recording, source), outputs
            self._device = current_device()
        return _owned(outputs)


def graph_step(fn: Callable[..., Any], warm_up: int = WARM_UP) -> GraphStep:
    """Capture a function that is called again and again, a training step say, as a CUDA graph.

    The first ``warm_up`` calls run as they are, then three are recorded while they run, and every later
    call is a replay: the inputs are copied, the host launches once, and no Python of the function runs.
    Results are those of calling it, bit for bit where its kernels are deterministic. On a machine without
    CUDA, in the simulator, for a model on the host, and while ``MINITORCH_CUDA_SYNC`` or ``detect_anomaly``
    looks at every kernel, all calls simply run the function.

    A replay brings anew its inputs, and what layers make of them on the host; the seeds of dropout, from
    Python's ``random`` as an eager call draws them; and the step, the learning rate and the other rates of
    :class:`minitorch.AdamW`.  All else is what it was when the call was recorded: numbers of Python, modes
    such as ``model.eval()``, ``matmul_precision``.  What differs between two recorded calls is an
    error, and not frozen.  A parameter that gets another value by ``update``, or a state that is loaded
    into the optimiser, is noticed: the calls that follow are the first ones again.  What Python keeps of
    the recorded call, ``optimizer.grad_norm`` say, holds the numbers of the last replay.

    Args:
        fn: Takes NumPy arrays and tensors of shapes that do not change, and returns tensors on the device:
            one, None, or tuples, lists and dicts of them.  It begins with ``zero_grad``, and whatever it
            keeps from call to call it writes in place, as :class:`minitorch.AdamW` does with parameters and
            moments.  All its work is launched by this library, from one thread.
        warm_up: Calls that run eagerly first, 1 or more: kernels compile, and moments are made.

    Returns:
        A function of the same arguments, with ``is_captured``, ``why_eager`` and ``reset()``.  What it
        returns belongs to the caller: the next call leaves it as it is.

    Raises:
        TypeError: If ``warm_up`` is no whole number.
        ValueError: If it is below 1.

    Example:
        >>> step = minitorch.graph_step(train_step)
        >>> losses = [step(*batch) for batch in batches]

    Source: CUDA Programming Guide, CUDA Graphs.
    """
    return GraphStep(fn, warm_up)


def _why_eager() -> str | None:
    """Return why no call on this machine is captured, or None."""
    if IS_SIMULATOR:
        return "the simulator has no graphs"
    if (reason := why_no_cuda()) is not None:
        return reason
    if driver is None or pool() is None:
        return "graphs need numba-cuda with its driver, and device memory from the driver's pool"
    return "each launch waits for its kernel, as MINITORCH_CUDA_SYNC asks" if BLOCKING else None


def _checked(x: Any) -> Any:
    if not (is_tensor(x) or isinstance(x, np.ndarray)):
        raise TypeError(
            f"graph_step takes NumPy arrays and tensors, got {type(x).__name__}; a number that changes "
            "from call to call goes in as an array of one element, one that stays belongs into the function"
        )
    if not isinstance(x, np.ndarray) and x.requires_grad():
        raise ValueError(
            "an input of graph_step is a constant, and this tensor requires a gradient; pass its detach(), "
            "and let the function close over what is learnt"
        )
    return x


def _place_for(x: Any) -> Any:
    """Return an array or tensor for the numbers of an input."""
    return x.empty(x.shape) if is_tensor(_checked(x)) else np.empty(x.shape, x.dtype)


def _is_host(x: Any) -> bool:
    return not (is_tensor(x) and x.backend.cuda)


def _shown(kinds: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in kinds) or "none"


def _refuse_numba(what: str) -> None:
    refuse(what, "take operations of minitorch, or do it outside of the function")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let no garbage be collected: memory is then given back at the same moments in every call."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _random_state() -> tuple[Any, Any]:
    """Return where Python's random numbers stand, and NumPy's."""
    numpys: Any = np.random.get_state()
    return random.getstate(), (numpys[1].tobytes(), *numpys[2:])


def _check_draws(recording: Recording, before: tuple[Any, Any]) -> None:
    """Check that a replay leaves the random numbers as the recorded call did.

    Raises:
        CaptureError: If the function drew others than seeds of dropout.
    """
    after = _random_state()
    random.setstate(before[0])
    for _, again in recording.draws:
        again()
    expected = random.getstate(), before[1]
    random.setstate(after[0])
    if after != expected:
        raise CaptureError(
            "the function draws random numbers on the host (random or numpy.random) beside the seeds of "
            "dropout, and a graph would keep these for ever; draw them outside and pass them as inputs"
        )


def _owned(outputs: Any) -> Any:
    """Return the results of a call in memory that the next call does not write to."""
    if outputs is None:
        return None
    if isinstance(outputs, (tuple, list)):
        found = map(_owned, outputs)
        return outputs._make(found) if hasattr(outputs, "_make") else type(outputs)(found)  # type: ignore
    if isinstance(outputs, dict):
        return {name: _owned(x) for name, x in outputs.items()}
    if isinstance(outputs, Tensor) and outputs.backend.cuda:
        return copy_of(outputs)
    kind = "one on the host" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise TypeError(
        f"a function for graph_step returns tensors on the device, got {kind}: a replay runs no Python "
        "that could make another; return the tensor and read it outside"
    )
