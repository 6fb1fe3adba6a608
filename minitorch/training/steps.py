"""What optimisers compute for one parameter."""

from __future__ import annotations

from ..backends.operations import operation  # beyond module 5
from ..tensor import Tensor


@operation  # beyond module 5
def sgd_step(value: Tensor, grad: Tensor, lr: float) -> Tensor:
    """Return value - lr * grad."""
    return value.expand(value - grad * lr)  # of shape () where a number's is (1,)


@operation  # beyond module 5
def adam_step(  # beyond module 3
    value: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, lr: float, beta1: float, beta2: float,
    eps: float, step: int, weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the value of a parameter after a step of Adam, and its moments; see :class:`Adam`.

    Args:
        value: The parameter.
        grad: Its gradient.
        m: The running mean of gradients, in the dtype of sums.
        v: The running mean of their squares, in the dtype of sums.
        lr: Learning rate.
        beta1: Decay of m.
        beta2: Decay of v.
        eps: Added to the root of v.
        step: Number of this step, from 1.
        weight_decay: Decoupled from the gradient.
    """
    wide, grad = value.to(m.dtype), grad.to(m.dtype)
    # To their own shape: () times a number, of shape (1,), has shape (1,).
    m = value.expand(m * beta1 + grad * (1.0 - beta1))
    v = value.expand(v * beta2 + grad * grad * (1.0 - beta2))
    m_hat = m / (1.0 - beta1**step)
    v_hat = v / (1.0 - beta2**step)
    moved = wide * (1.0 - lr * weight_decay) - m_hat / (v_hat**0.5 + eps) * lr
    return value.expand(moved).to(value.dtype), m, v


def same_shape(value: Tensor, grad: Tensor, past: Tensor | None = None) -> None:  # beyond module 3
    """Check the shape of a gradient: a kernel would read or write out of bounds of a smaller one."""
    past = value if past is None else past
    if not value.shape == grad.shape == past.shape:
        raise ValueError(
            f"a parameter of shape {value.shape} has a gradient of shape {grad.shape} and moments of shape "
            f"{past.shape}; make a new optimiser after replacing a parameter"
        )
