"""Capture a whole training step as a CUDA graph, and replay it with one launch."""

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

#: Number of eager calls before recording, in which kernels compile and optimisers create their moments.
WARM_UP = 2
#: Number of recorded calls: the first measures their memory, and the others must be identical but for the
#: inputs.
RECORDED = 3


class GraphStep:
    """The result of :func:`graph_step`, which is called like the function itself.

    Args:
        fn: The function, which takes arrays and tensors and returns tensors on the device.
        warm_up: Number of eager calls before recording, at least 1.

    Attributes:
        calls: Number of calls since creation or the last :meth:`reset`.
        why_eager: The reason why calls are never captured, in words; None if they are.
    """

    def __init__(self, fn: Callable[..., Any], warm_up: int = WARM_UP):
        self._fn, self._warm_up = fn, whole("warm_up", warm_up, 1)
        self.why_eager = _why_eager()
        self.reset()

    def reset(self) -> None:
        """Drop the graph and free its memory; the next calls warm up and record again."""
        self.calls = 0
        self._graph: Graph | None = None
        self._inputs: list[Any] = []
        self._arena: Arena | None = None
        self._recording: Recording | None = None
        self._outputs: Any = None
        self._device = -1

    @property
    def is_captured(self) -> bool:
        """Whether the next call replays the graph."""
        return self._graph is not None

    @property
    def kernels(self) -> int:
        """Number of kernels in the graph; 0 before it exists."""
        return 0 if self._graph is None else self._graph.size

    @property
    def memory(self) -> int:
        """Device memory reserved for the graph, in bytes; 0 before it exists."""
        return 0 if self._graph is None else self._graph.memory

    def __call__(self, *inputs: Any) -> Any:
        """Call the function, or replay its graph, with these inputs; return its results.

        Raises:
            TypeError: If an input is neither an array nor a tensor, or the function returns anything but
                tensors.
            ValueError: If the shape or dtype of an input changes, or an input requires a gradient.
            CaptureError: During recording, if the function does something that a graph cannot contain.
        """
        if self.why_eager is not None or modes.anomaly or active() is not None:
            return self._fn(*inputs)
        if self._graph is not None and not (
            self._device == current_device() and self._graph.is_valid()
        ):
            self.reset()  # the optimiser's state was loaded, or a parameter was replaced
        self._take(inputs)
        self.calls += 1
        if self._graph is not None:
            self._graph.replay()
            return _owned(self._outputs)
        if self.calls <= self._warm_up:
            return self._fn(*inputs)
        return self._record()

    def _take(self, inputs: tuple[Any, ...]) -> None:
        """Copy the inputs to the buffers of the graph."""
        if not self._inputs:
            self._inputs = [_place_for(x) for x in inputs]
        given = [(x.shape, x.dtype) for x in map(_checked, inputs)]
        known = [(x.shape, x.dtype) for x in self._inputs]
        if given != known:
            raise ValueError(
                f"graph_step needs inputs of the same shapes and dtypes in each call, {_shown(known)} in "
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
        """Call the function on the inputs and record it; build the graph after the last recorded call."""
        source = pool()
        assert source is not None, "or calls are eager"
        before, arena = self._recording, self._arena or Arena(source, driver.CUdeviceptr)
        self._recording = self._arena = None  # after a failed call, start again
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
    """Capture a function that is called repeatedly, such as a training step, as a CUDA graph.

    The first ``warm_up`` calls run eagerly, the next three are recorded while they run, and every later
    call is a replay: it copies the inputs and launches once, without running the function's Python code.
    Results are those of an eager call, bit for bit if the kernels are deterministic.  Without CUDA, in the
    simulator, for a model on the host, and under ``MINITORCH_CUDA_SYNC`` or ``detect_anomaly``, all calls
    run the function.

    A replay updates its inputs and the data that layers derive from them on the host; the seeds of dropout,
    drawn from Python's ``random`` as in an eager call; and the step, the learning rate and the other rates
    of :class:`minitorch.AdamW`.  It exchanges tensors with other ranks again through an ``NcclGroup``, as
    :class:`minitorch.distributed.GradientAverage` does, between several graphs.  Everything else is fixed
    at recording: Python numbers, modes such as ``model.eval()``, and ``matmul_precision``.  If two recorded
    calls differ in anything else, an error is raised.  If ``update`` replaces a parameter, or a state is
    loaded into the optimiser, the step is recorded again.  Tensors that Python keeps from the recorded
    call, such as ``optimizer.grad_norm``, hold the values of the last replay.

    Args:
        fn: Takes NumPy arrays and tensors of constant shapes, and returns tensors on the device: one, None,
            or tuples, lists and dicts of them.  It begins with ``zero_grad``, and updates state that it
            keeps between calls in place, as :class:`minitorch.AdamW` does with parameters and moments.  All
            its work is launched by this library, from one thread.
        warm_up: Number of eager calls before recording, at least 1.

    Returns:
        A function of the same arguments, with ``is_captured``, ``why_eager`` and ``reset()``.  Later calls
        do not overwrite its results.

    Raises:
        TypeError: If ``warm_up`` is not a whole number.
        ValueError: If ``warm_up`` is below 1.

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
            f"inputs of graph_step must be NumPy arrays or tensors, got {type(x).__name__}; pass a number "
            "that changes as an array of one element, and put a constant into the function"
        )
    if not isinstance(x, np.ndarray) and x.requires_grad():
        raise ValueError(
            "inputs of graph_step must be constants, but this tensor requires a gradient; pass its "
            "detach(), and let the function close over the parameters"
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
    """Disable garbage collection, so that every call frees memory at the same points."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _random_state() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's random generators."""
    numpys: Any = np.random.get_state()
    return random.getstate(), (numpys[1].tobytes(), *numpys[2:])


def _check_draws(recording: Recording, before: tuple[Any, Any]) -> None:
    """Check that the recorded call drew no random numbers that a replay would not draw.

    Raises:
        CaptureError: If the function drew other random numbers than seeds of dropout.
    """
    after = _random_state()
    random.setstate(before[0])
    for _, again in recording.draws:
        again()
    expected = random.getstate(), before[1]
    random.setstate(after[0])
    if after != expected:
        raise CaptureError(
            "the function draws random numbers on the host (random or numpy.random) in addition to the "
            "seeds of dropout, and each replay would repeat them; draw them outside and pass them as inputs"
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
        f"a function for graph_step must return tensors on the device, got {kind}, which a replay cannot "
        "compute because it runs no Python; return the tensor and read it outside"
    )
