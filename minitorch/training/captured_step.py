"""Capture a whole training step as a CUDA graph, and replay it with one launch."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kernels.common.arguments import whole
from kernels.cuda.backend import (
    Graph,
    Recording,
    active,
    pool,
    recorded_by,
    refuse,
)
from kernels.runtime.cuda_errors import CaptureError as CaptureError
from kernels.runtime.memory import uncollected
from kernels.runtime.numba_patches import watching_numba
from kernels.runtime.targets import (
    BLOCKING,
    cuda,
    current_device,
    driver,
    why_no_cuda,
)

from ..functions.base import is_tensor
from ..scalars.modes import modes
from ..tensor import Tensor
from .optimiser_states import copy_of

#: Number of eager calls before recording, in which kernels compile and optimisers create their moments.
WARM_UP = 2
#: Number of recorded calls, which must be identical except for the inputs.
RECORDED = 2


class _Kind:
    """Calls with inputs of the same shapes and dtypes.

    Args:
        inputs: Inputs of the first call.

    Attributes:
        places: Arrays and tensors that hold the inputs of a call, where a graph reads them.
        calls: Number of calls.
        before: The first recorded call; None before it, and with the graph.
        graph: The graph; None before the last recorded call.
        outputs: The results of a replay.
    """

    def __init__(self, inputs: tuple[Any, ...]):
        self.places = [_place_for(x) for x in inputs]
        self.calls = 0
        self.before: Recording | None = None
        self.graph: Graph | None = None
        self.outputs: Any = None

    def take(self, inputs: tuple[Any, ...]) -> None:
        """Copy the inputs to their places."""
        for place, x in zip(self.places, inputs, strict=True):
            if not is_tensor(place):
                np.copyto(place, x)
            elif place.backend.cuda:
                place.f.id_map(x.detach(), place)
            else:
                np.copyto(place.to_numpy(), x.to_numpy())


class GraphStep:
    """The result of :func:`graph_step`, which is called like the function itself.

    Args:
        fn: The function, which takes arrays and tensors and returns tensors on the device.
        warm_up: Number of eager calls before recording, at least 1.
        most_shapes: Number of different shapes and dtypes of the inputs that are captured, at least
            1.

    Attributes:
        calls: Number of calls since creation or the last :meth:`reset`.
        why_eager: The reason why calls are never captured, as text; None if they can be.
    """

    def __init__(self, fn: Callable[..., Any], warm_up: int = WARM_UP, most_shapes: int = 1):
        self._fn, self._warm_up = fn, whole("warm_up", warm_up, 1)
        self._most = whole("most_shapes", most_shapes, 1)
        self.why_eager = _why_eager()
        self._scratch: Any = None
        self.reset()

    def reset(self) -> None:
        """Drop the graphs and free their memory; the next calls warm up and record again."""
        has_memory, self._scratch = self._scratch is not None, None
        self.calls, self._device = 0, -1
        self._kinds: dict[Any, _Kind] = {}
        if has_memory:
            pool().trim()

    @property
    def _graphs(self) -> list[Graph]:
        return [kind.graph for kind in self._kinds.values() if kind.graph is not None]

    @property
    def is_captured(self) -> bool:
        """Whether the next call replays a graph, for every shape of the inputs seen so far."""
        return bool(self._kinds) and len(self._graphs) == len(self._kinds)

    @property
    def kernels(self) -> int:
        """Number of kernels in all graphs; 0 before there are any."""
        return sum(graph.size for graph in self._graphs)

    @property
    def memory(self) -> int:
        """Device memory reserved for the graphs, in bytes; 0 before there are any."""
        graphs = self._graphs
        every = {x for graph in graphs for x in (graph.scratch.gpu_data, *graph.kept.values())}
        return sum(memory.size for memory in every)

    def __call__(self, *inputs: Any) -> Any:
        """Call the function, or replay its graph, with these inputs; return its results.

        Raises:
            TypeError: If an input is neither an array nor a tensor, or the function returns anything but
                tensors.
            ValueError: If the inputs have different shapes or dtypes than before, and there are graphs for
                ``most_shapes`` already, or an input requires a gradient.
            CaptureError: During recording, if the function does something that a graph cannot contain.
        """
        if self.why_eager is not None or modes.observer or active() is not None:
            return self._fn(*inputs)
        kind = self._kind_of(inputs)
        if kind.graph is not None and not (
            self._device == current_device() and kind.graph.is_valid()
        ):
            self.reset()  # the optimiser's state was loaded, or a parameter was replaced
            kind = self._kind_of(inputs)
        kind.take(inputs)
        self.calls += 1
        kind.calls += 1
        if kind.graph is not None:
            kind.graph.replay()
            return _owned(kind.outputs)
        return self._fn(*inputs) if kind.calls <= self._warm_up else self._record(kind)

    def _kind_of(self, inputs: tuple[Any, ...]) -> _Kind:
        given = tuple((tuple(x.shape), x.dtype) for x in map(_checked, inputs))
        if given not in self._kinds:
            if len(self._kinds) == self._most:
                known = " or ".join(map(_shown, self._kinds))
                raise ValueError(
                    f"graph_step needs inputs of the same shapes and dtypes in each call, {known} in "
                    f"those before, got {_shown(given)}; call the function itself with these, make another "
                    "graph_step for them, or pass a larger most_shapes"
                )
            self._kinds[given] = _Kind(inputs)
        return self._kinds[given]

    def _record(self, kind: _Kind) -> Any:
        """Call the function on the inputs and record it; build the graph after the last recorded call."""
        before, kind.before = kind.before, None  # after a failed call, start again
        hosts = [x.to_numpy() if is_tensor(x) else x for x in kind.places if _is_host(x)]
        recording, state = Recording(hosts, before), _random_state()
        gc.collect()  # every call frees memory at the same points
        with uncollected(), recorded_by(recording), watching_numba(cuda, _refuse_numba):
            outputs = self._fn(*kind.places)
        if not recording.launches:
            self.why_eager = "the function launches nothing on a CUDA device"
            return outputs
        _check_draws(recording, state)
        results = _owned(outputs)
        if before is None:
            kind.before = recording
        else:
            kept, locations = recording.held(), list[Any]()
            if self._most > 1:  # graphs share all memory but that of their results
                _owned(outputs, lambda x: locations.append(recording.locate(x.array())))
                kept = {n: kept[n] for n, _ in filter(None, locations) if n is not None}
            kind.graph, kind.outputs = Graph(before, recording, kept, self._scratch), outputs
            self._scratch, self._device = kind.graph.scratch, current_device()
        return results


def graph_step(fn: Callable[..., Any], warm_up: int = WARM_UP, most_shapes: int = 1) -> GraphStep:
    """Capture a function that is called repeatedly, such as a training step, as a CUDA graph.

    The first ``warm_up`` calls run eagerly, the next two are recorded while they run, and every later
    call is a replay: it copies the inputs and launches once, without running the function's Python code.
    Results are those of an eager call, bit for bit if the kernels are deterministic.  Without CUDA, on the
    emulated GPU, for a model on the host, and under ``MINITORCH_CUDA_SYNC`` or ``detect_anomaly``, all
    calls run the function.

    A replay updates its inputs and the data that layers derive from the inputs on the host.  It draws the
    seeds of dropout from Python's ``random``, as an eager call does.  It reads the step, the learning rate
    and the other rates of :class:`minitorch.AdamW`.  Everything else is fixed at recording: Python numbers,
    modes such as ``model.eval()``, and ``matmul_precision``.  If the two recorded calls differ in one of
    these values, an error is raised.  If ``update`` replaces a parameter, or a state is loaded into the
    optimiser, the step is recorded again.

    Exchanges with other ranks through an ``NcclGroup``, such as the exchanges of
    :class:`minitorch.distributed.GradientAverage`, divide the step into several graphs.  A replay repeats
    these exchanges between the graphs.  Tensors that Python keeps from the recorded call, such as
    ``optimizer.grad_norm``, hold the values of the last replay.  This does not hold if the inputs have had
    several shapes, because the graphs of all shapes compute in the same memory.

    Args:
        fn: Takes NumPy arrays and tensors, of constant shapes or of a few different ones, and returns
            tensors on the device: one, None, or tuples, lists and dicts of them.  It begins with
            ``zero_grad``.  State that lasts from call to call must be updated in place, as
            :class:`minitorch.AdamW` updates parameters and moments.  All its work is launched by this
            library, from one thread.
        warm_up: Number of eager calls before recording, at least 1.
        most_shapes: Number of different shapes and dtypes of the inputs.  Each combination has its own
            warm-up and recorded calls, and its own graph.

    Returns:
        A function of the same arguments, with ``is_captured``, ``why_eager`` and ``reset()``.  Later calls
        do not overwrite its results.

    Raises:
        TypeError: If ``warm_up`` or ``most_shapes`` is not a whole number.
        ValueError: If one of them is below 1.

    Example:
        >>> step = minitorch.graph_step(train_step)
        >>> losses = [step(*batch) for batch in batches]

    Source: CUDA Programming Guide, CUDA Graphs.
    """
    return GraphStep(fn, warm_up, most_shapes)


def _why_eager() -> str | None:
    """Return why no call on this machine is captured, or None."""
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


def _shown(kinds: Iterable[tuple[Any, Any]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in kinds) or "none"


def _refuse_numba(what: str) -> None:
    refuse(what, "use operations of minitorch, or do it outside the function")


def _random_state() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's random generators."""
    numpys: Any = np.random.get_state()
    return random.getstate(), (numpys[1].tobytes(), *numpys[2:])


def _check_draws(recording: Recording, before: tuple[Any, Any]) -> None:
    """Check that the recorded call drew no random numbers that a replay would not draw.

    Raises:
        CaptureError: If the function drew random numbers other than seeds of dropout.
    """
    after = _random_state()
    random.setstate(before[0])
    for draw in recording.draws.values():
        draw()
    expected = random.getstate(), before[1]
    random.setstate(after[0])
    if after != expected:
        raise CaptureError(
            "the function draws random numbers on the host (random or numpy.random) in addition to the "
            "seeds of dropout, and each replay would repeat them; draw them outside and pass them as inputs"
        )


def _owned(outputs: Any, copy: Callable[[Tensor], Any] = copy_of) -> Any:
    """Return the results of a call in memory that the next call does not write to."""
    if outputs is None:
        return None
    if isinstance(outputs, (tuple, list)):
        found = [_owned(x, copy) for x in outputs]
        return outputs._make(found) if hasattr(outputs, "_make") else type(outputs)(found)  # type: ignore
    if isinstance(outputs, dict):
        return {name: _owned(x, copy) for name, x in outputs.items()}
    if isinstance(outputs, Tensor) and outputs.backend.cuda:
        return copy(outputs)
    kind = "one on the host" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise TypeError(
        f"a function for graph_step must return tensors on the device, got {kind}, which a replay cannot "
        "compute because it runs no Python; return the tensor and read it outside"
    )
