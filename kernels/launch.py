"""From the question to the kernel: pick a rung and a tile, allocate, call.  No arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kernels import reference
from kernels.checks import check_tile
from kernels.cpu import flash2 as cpu_flash2
from kernels.cuda import flash1, flash1_backward, flash2_backward
from kernels.cuda import flash2 as cuda_flash2
from kernels.cuda import naive as cuda_naive
from kernels.cuda.memory import DeviceMemory
from kernels.cuda.sizes import SIZES
from kernels.memory import HostMemory, Memory
from kernels.problem import Problem, unknown_rung, unusable_rung

Tile = tuple[int, int]


def _anything(problem: Problem, tile: Tile | None) -> str | None:
    return None


@dataclass(frozen=True)
class Rung:
    """One step of the ladder on one target.

    Attributes:
        name: What a user asks for.
        forward: ``(problem, tile, q, k, v, out, lse)``, fills out and lse.
        backward: ``(problem, tile, dout, q, k, v, out, lse, dq, dk, dv)``, fills dq, dk and dv.
        tile: (block_q, block_k) for a problem, unless the caller asks for another.
        backward_tile: Likewise for the backward pass.
        why_not: The reason why this rung cannot run a problem with a tile (None: its own), or None.
    """

    name: str
    forward: Callable[..., None]
    backward: Callable[..., None]
    tile: Callable[[Problem], Tile]
    backward_tile: Callable[[Problem], Tile]
    why_not: Callable[[Problem, Tile | None], str | None] = _anything


@dataclass(frozen=True)
class Target:
    """Where kernels run, and the rungs that are there, fastest first."""

    name: str
    memory: Memory
    rungs: tuple[Rung, ...]

    def pick(self, problem: Problem, tile: Tile | None = None) -> Rung:
        """Return the rung asked for, or the fastest that can run the problem.

        Raises:
            ValueError: If no rung has that name, or the named one is not here or cannot run the
                problem, or the machine has no such memory.
        """
        if problem.rung not in ("auto", *RUNGS):
            raise unknown_rung(problem.rung, RUNGS)
        missing = self.memory.why_not()
        if missing is not None:
            raise ValueError(f"no rung of the {self.name} target runs here: {missing}")
        reasons = {rung.name: rung.why_not(problem, tile) for rung in self.rungs}
        usable = [rung for rung in self.rungs if reasons[rung.name] is None]
        for rung in usable:
            if problem.rung in ("auto", rung.name):
                return rung
        known = {"auto": "; ".join(f"{name}: {reason}" for name, reason in reasons.items())}
        why = {**known, **reasons}.get(problem.rung) or f"the {self.name} target has no such rung"
        raise unusable_rung(problem.rung, why, self.name, [rung.name for rung in usable])


def _naive_forward(
    problem: Problem, tile: Tile, q: Any, k: Any, v: Any, out: Any, lse: Any
) -> None:
    out[...], lse[...] = reference.attention(problem, q, k, v)


def _naive_backward(
    problem: Problem, tile: Tile, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
    dq: Any, dk: Any, dv: Any,
) -> None:  # fmt: skip
    dq[...], dk[...], dv[...] = reference.attention_backward(problem, dout, q, k, v, out, lse)


def _rung(name: str, forward: Any, backward: Any, tile: Tile, why_not: Any = _anything) -> Rung:
    """Return a rung with one tile for every problem and both passes."""
    return Rung(name, forward, backward, lambda problem: tile, lambda problem: tile, why_not)


_HOST = HostMemory()
_NAIVE = _rung("naive", _naive_forward, _naive_backward, (1, 1))

#: NumPy on the host: the readable form.
NUMPY = Target(
    "numpy",
    _HOST,
    (
        _rung("flash2", reference.tiled_attention, reference.tiled_attention_backward, (64, 64)),
        _NAIVE,
    ),
)
#: Compiled loops on the host, parallel over heads and tiles.
CPU = Target(
    "cpu", _HOST, (_rung("flash2", cpu_flash2.forward, cpu_flash2.backward, (128, 64)), _NAIVE)
)
#: Kernels on a GPU, or in numba's simulator.
CUDA = Target(
    "cuda",
    DeviceMemory(),
    (
        Rung(
            "flash2",
            cuda_flash2.forward,
            flash2_backward.backward,
            cuda_flash2.tile,
            flash2_backward.tile,
            flash2_backward.why_not,
        ),
        Rung(
            "flash1",
            flash1.forward,
            flash1_backward.backward,
            flash1.tile,
            flash1.backward_tile,
            flash1.why_not,
        ),
        _rung(
            "naive", cuda_naive.forward, cuda_naive.backward, SIZES.product_tile, cuda_naive.why_not
        ),
    ),
)

#: Every name that a rung has on some target, the fastest first.
RUNGS = tuple(dict.fromkeys(rung.name for target in (CUDA, CPU, NUMPY) for rung in target.rungs))


def forward(
    target: Target, problem: Problem, q: Any, k: Any, v: Any, tile: Tile | None = None
) -> tuple[Any, Any]:
    """Compute attention.

    Args:
        target: Where the operands are.
        problem: The checked call.
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        tile: (block_q, block_k); the rung's own when None.

    Returns:
        out (…, heads, seq_q, value_dim) and lse (…, heads, seq_q).

    Raises:
        TypeError: If the tile is no pair of whole numbers.
        ValueError: If it is beyond the limits, or no rung can run the call; see ``Target.pick``.
    """
    tile = check_tile(tile)
    rung, memory = target.pick(problem, tile), target.memory
    out = memory.empty(problem.out_shape, problem.dtype)
    lse = memory.empty(problem.lse_shape, problem.dtype)
    view = partial(_four_dims, memory, problem)
    rung.forward(
        problem,
        tile or rung.tile(problem),
        *(view(array) for array in (q, k, v, out)),
        memory.rows(view(memory.column(lse))),
    )
    return out, lse


def _four_dims(memory: Memory, problem: Problem, array: Any) -> Any:
    """View an operand, (…, heads, seq, dim), as a kernel takes it: (batch, heads, seq, dim).

    Where query heads share a head of k and v, each group of them is the heads of an entry of the batch:
    k and v repeat within it, by a stride of 0.
    """
    if problem.groups > 1:
        array = memory.split_heads(array, problem.key_lead[-1])
    return memory.four_dims(array, (*problem.grouped_lead, *array.shape[-2:]))


def backward(
    target: Target,
    problem: Problem,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    tile: Tile | None = None,
) -> tuple[Any, Any, Any]:
    """Compute the gradients of attention; operands as in :func:`forward`, out and lse its results.

    Returns:
        dq, dk and dv of the broadcast shapes ``problem.q_shape``, ``k_shape`` and ``v_shape``.
    """
    tile = check_tile(tile)
    rung, memory = target.pick(problem, tile), target.memory
    dq = memory.empty(problem.q_shape, problem.dtype)
    # A head of k and v that several query heads share gets a gradient from each.
    dk, dv = (
        memory.empty((*problem.grouped_lead, *shape[-2:]), problem.dtype)
        for shape in (problem.k_shape, problem.v_shape)
    )
    view = partial(_four_dims, memory, problem)
    rung.backward(
        problem,
        tile or rung.backward_tile(problem),
        *(view(array) for array in (dout, q, k, v, out)),
        memory.rows(view(memory.column(lse))),
        view(dq),
        *(memory.four_dims(gradient, gradient.shape) for gradient in (dk, dv)),
    )
    if problem.groups > 1:
        dk, dv = (
            memory.sum_to(gradient, (*problem.key_lead, 1, *shape[-2:])).reshape(shape)
            for gradient, shape in ((dk, problem.k_shape), (dv, problem.v_shape))
        )
    return dq, dk, dv
