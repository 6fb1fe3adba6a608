"""From the question to the kernel: pick a rung and a tile, allocate, call.  No arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels import reference
from kernels.cpu import flash2 as cpu_flash2
from kernels.problem import Problem

Tile = tuple[int, int]


@dataclass(frozen=True)
class Rung:
    """One step of the ladder on one target.

    Attributes:
        name: What a user asks for.
        forward: ``(problem, tile, q, k, v, out, lse)``, fills out and lse.
        backward: ``(problem, tile, dout, q, k, v, out, lse, dq, dk, dv)``, fills dq, dk and dv.
        tile: (block_q, block_k) unless the caller asks for another.
        why_not: The reason why this rung cannot run a problem, or None.
    """

    name: str
    forward: Callable[..., None]
    backward: Callable[..., None]
    tile: Tile
    why_not: Callable[[Problem], str | None] = lambda problem: None


@dataclass(frozen=True)
class Target:
    """Where kernels run, and the rungs that are there, fastest first."""

    name: str
    rungs: tuple[Rung, ...]

    def pick(self, problem: Problem) -> Rung:
        """Return the rung asked for, or the fastest that can run the problem.

        Raises:
            ValueError: If no rung has that name here, or the named one cannot run the problem.
            NotImplementedError: If the target has no rungs yet.
        """
        if not self.rungs:
            raise NotImplementedError(
                f"attention on the {self.name.upper()} backend comes with the {self.name.upper()} "
                "rungs; move the tensors with .cpu()"
            )
        reasons = {rung.name: rung.why_not(problem) for rung in self.rungs}
        usable = [rung for rung in self.rungs if reasons[rung.name] is None]
        for rung in usable:
            if problem.rung in ("auto", rung.name):
                return rung
        why = reasons.get(problem.rung) or f"the {self.name} target has no such rung"
        raise ValueError(
            f"rung {problem.rung!r} cannot run this call: {why}; use 'auto' or one of "
            f"{[rung.name for rung in usable]}"
        )


def _naive_forward(
    problem: Problem, tile: Tile, q: Any, k: Any, v: Any, out: Any, lse: Any
) -> None:
    out[...], lse[...] = reference.attention(problem, q, k, v)


def _naive_backward(
    problem: Problem, tile: Tile, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
    dq: Any, dk: Any, dv: Any,
) -> None:  # fmt: skip
    dq[...], dk[...], dv[...] = reference.attention_backward(problem, dout, q, k, v, out, lse)


_NAIVE = Rung("naive", _naive_forward, _naive_backward, tile=(1, 1))

#: NumPy on the host: the readable form.
NUMPY = Target(
    "numpy",
    (
        Rung("flash2", reference.tiled_attention, reference.tiled_attention_backward, (64, 64)),
        _NAIVE,
    ),
)
#: Compiled loops on the host, parallel over heads and tiles.
CPU = Target("cpu", (Rung("flash2", cpu_flash2.forward, cpu_flash2.backward, (128, 64)), _NAIVE))


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
    """
    rung = target.pick(problem)
    out = np.empty(problem.out_shape, problem.dtype)
    lse = np.empty(problem.lse_shape, problem.dtype)
    rung.forward(
        problem, _checked(tile or rung.tile),
        four_dims(q, problem.q_shape), four_dims(k, problem.k_shape), four_dims(v, problem.v_shape),
        four_dims(out, out.shape), four_dims(lse[..., None], (*lse.shape, 1))[..., 0],
    )  # fmt: skip
    return out, lse


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
    rung = target.pick(problem)
    dq, dk, dv = (
        np.empty(shape, problem.dtype)
        for shape in (problem.q_shape, problem.k_shape, problem.v_shape)
    )
    rung.backward(
        problem, _checked(tile or rung.tile), four_dims(dout, problem.out_shape),
        four_dims(q, problem.q_shape), four_dims(k, problem.k_shape), four_dims(v, problem.v_shape),
        four_dims(out, problem.out_shape), four_dims(lse[..., None], (*lse.shape, 1))[..., 0],
        four_dims(dq, dq.shape), four_dims(dk, dk.shape), four_dims(dv, dv.shape),
    )  # fmt: skip
    return dq, dk, dv


def four_dims(array: Any, shape: tuple[int, ...]) -> Any:
    """View an operand as (batch, heads, seq, dim), broadcast to ``shape``.

    Nothing is copied unless three or more leading dimensions do not lie evenly in memory, or the
    machine cannot address the array as it is (misaligned, or of the other byte order).
    """
    array = np.broadcast_to(array, shape) if tuple(array.shape) != shape else array
    if not (array.flags.aligned and array.dtype.isnative):
        array = np.array(array, array.dtype.newbyteorder("="))
    lead = (1, 1, *shape[:-2])
    batch = int(np.prod(lead[:-1]))
    return array.reshape(batch, lead[-1], *shape[-2:])


def _checked(tile: Tile) -> Tile:
    block_q, block_k = tile
    if not (isinstance(block_q, int) and isinstance(block_k, int) and min(tile) >= 1):
        raise ValueError(f"tile is (block_q, block_k), two positive ints; got {tile!r}")
    return tile
