"""Optimisers: how a parameter moves along its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels.dtypes import acc_dtype, is_floating

from .fused_functions import dense, rounded
from .module import Parameter
from .scalar import Scalar

if TYPE_CHECKING:
    from .tensor import Tensor


class Optimizer:
    """Holds the parameters; a subclass says how they move.

    Args:
        parameters: What to optimise, scalars or tensors.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self.parameters = parameters

    def zero_grad(self) -> None:
        """Drop the gradient of every parameter."""
        for p in self.parameters:
            if hasattr(p.value, "derivative"):
                p.value.derivative = None
            if hasattr(p.value, "grad"):
                p.value.grad = None

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        raise NotImplementedError("a subclass of Optimizer defines step")


class SGD(Optimizer):
    """Gradient descent: value - lr * gradient.

    Args:
        parameters: What to optimise.
        lr: Learning rate.
    """

    def __init__(self, parameters: Sequence[Parameter], lr: float = 1.0):
        super().__init__(parameters)
        self.lr = lr

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for p in self.parameters:
            value = p.value
            if isinstance(value, Scalar):
                if value.derivative is not None:
                    p.update(Scalar(value.data - self.lr * value.derivative))
            elif value is not None and value.grad is not None:
                p.update(self._moved(value.detach(), value.grad))

    def _moved(self, value: Tensor, grad: Tensor) -> Tensor:
        fused = value.f.fused
        if fused is None or not is_floating(value.dtype):
            return value - grad * self.lr
        _same_shape(value, grad)
        moved = fused.sgd_step(dense(value), dense(grad, value.dtype), self.lr)
        return rounded(value, moved)


class Adam(Optimizer):
    """Adam, or AdamW with ``weight_decay``: steps scaled by running moments of the gradient.

    Moments of parameters of 16 bits are float32: a mean that moves by a thousandth would not move there.

    Args:
        parameters: What to optimise, tensors.
        lr: Learning rate.
        beta1: Decay of the running mean.
        beta2: Decay of the running mean of squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Decoupled from the gradient; applied to parameters of two or more dimensions.

    Source: Kingma and Ba (2015), Algorithm 1; Loshchilov and Hutter (2019), Algorithm 2.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters)
        self.lr, self.beta1, self.beta2, self.eps = lr, beta1, beta2, eps
        self.weight_decay = weight_decay
        self.steps = 0
        # Keyed by the Parameter: its value is a new tensor after each step.
        self.moments: dict[Parameter, tuple[Tensor, Tensor]] = {}

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        for p in self.parameters:
            if isinstance(p.value, Scalar):
                raise TypeError("Adam moves tensors, got a Scalar; take SGD for scalars")
            if p.value is not None and p.value.grad is not None:
                p.update(self._moved(p))

    def _moved(self, p: Parameter) -> Tensor:
        value, grad = p.value.detach(), p.value.grad
        if p not in self.moments:
            m, v = (value.full(value.shape, 0.0, acc_dtype(value.dtype)) for _ in range(2))
            self.moments[p] = (m, v)
        m, v = self.moments[p]
        _same_shape(value, grad, m)
        # They follow a parameter that was moved to another backend or dtype.
        m, v = (t.to(value.backend).to(acc_dtype(value.dtype)) for t in (m, v))
        self.moments[p] = (m, v)
        decay = self.weight_decay if value.dims >= 2 else 0.0
        fused = value.f.fused
        if fused is None:
            return self._composed(p, value, grad, decay)
        moved = fused.adam_step(
            dense(value), dense(grad, value.dtype), m.array(), v.array(), lr=self.lr,
            beta1=self.beta1, beta2=self.beta2, eps=self.eps, step=self.steps, weight_decay=decay,
        )  # fmt: skip
        return rounded(value, moved)

    def _composed(self, p: Parameter, value: Tensor, grad: Tensor, decay: float) -> Tensor:
        m, v = self.moments[p]
        wide, grad = value.to(m.dtype), grad.to(m.dtype)
        m = m * self.beta1 + grad * (1.0 - self.beta1)
        v = v * self.beta2 + grad * grad * (1.0 - self.beta2)
        self.moments[p] = (m, v)
        m_hat = m / (1.0 - self.beta1**self.steps)
        v_hat = v / (1.0 - self.beta2**self.steps)
        step = m_hat / (v_hat**0.5 + self.eps) * self.lr
        return (wide * (1.0 - self.lr * decay) - step).to(value.dtype)


def _same_shape(value: Tensor, grad: Tensor, past: Tensor | None = None) -> None:
    """Refuse a gradient of another shape: a kernel would read or write beyond the smaller one."""
    past = value if past is None else past
    if not value.shape == grad.shape == past.shape:
        raise ValueError(
            f"a parameter of shape {value.shape} has a gradient of shape {grad.shape} and past "
            f"gradients of shape {past.shape}; make a new optimiser for another parameter"
        )
