"""Optimisers: how a parameter moves along its gradient, and how far at most."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from kernels.common.arguments import shown
from kernels.cuda.backend import refuse
from kernels.runtime.dtypes import acc_dtype, is_floating

from .autodiff import modes, no_grad
from .functions.fused import dense, rounded
from .module import Parameter
from .scalar import Scalar
from .tensor import Tensor
from .tensors.factories import zeros
from .training.anomaly import check_step


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

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides the steps to come, but for the parameters: numbers, and tensors by name.

        The tensors are copies; what the optimiser does later leaves them as they are.
        """
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if isinstance(value, Real)}
        plain = {k: v if isinstance(v, int) else float(v) for k, v in found.items()}  # also NumPy's
        return {"optimizer": type(self).__name__, **plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` returned; it is copied.

        Args:
            state: Of an optimiser of this class, with parameters of the same shapes in the same order.

        Raises:
            ValueError: If it is none of this optimiser; nothing has changed then.
        """
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in state.items() if key not in tensors}
        own = self._numbers()
        if numbers.get("optimizer") != own["optimizer"] or numbers.keys() != own.keys():
            raise ValueError(
                f"a state of {numbers.get('optimizer')} with {', '.join(map(str, numbers))} is none of "
                f"{own['optimizer']}, which has {', '.join(own)}; make the optimiser that it was saved "
                "from"
            )
        self._load_tensors(tensors)
        vars(self).update({key: value for key, value in numbers.items() if key != "optimizer"})

    def _load_tensors(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            raise ValueError(f"{type(self).__name__} remembers no tensors, got {sorted(tensors)}")

    def _update(self, p: Parameter, value: Any) -> None:
        """Move a parameter to its new value."""
        if modes.anomaly:
            what = (
                f"the parameter {p.name}"
                if p.name
                else f"parameters[{[*self.parameters].index(p)}]"
            )
            new, old = (x.data if isinstance(x, Scalar) else x for x in (value, p.value))
            gradient = p.value.derivative if isinstance(p.value, Scalar) else p.value.grad
            check_step(type(self).__name__, what, new, old, gradient)
        if getattr(value, "_tensor", None) is not getattr(p.value, "_tensor", None):
            refuse(
                f"moves its parameters by {type(self).__name__} to new memory",
                "take minitorch.AdamW on a backend of CUDA, and contiguous parameters: it writes in place",
                on_host=not getattr(getattr(p.value, "backend", None), "cuda", False),
            )
        p.update(value)


def _check_rates(below_1: dict[str, Any] | None = None, **rates: Any) -> None:
    """Refuse what is no number from 0 on.

    Args:
        below_1: Those that are less than 1 too, by name.
        rates: The others.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is negative, infinite or NaN, or too large.
    """
    for most, numbers in ((1.0, below_1 or {}), (math.inf, rates)):
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {shown(value)}")
            if not 0.0 <= float(value) < most:
                bound = "less than 1" if most == 1.0 else "finite"
                raise ValueError(f"{name} must be at least 0 and {bound}, got {shown(value)}")


class SGD(Optimizer):
    """Gradient descent: value - lr * gradient.

    Args:
        parameters: What to optimise.
        lr: Learning rate.
    """

    def __init__(self, parameters: Sequence[Parameter], lr: float = 1.0):
        super().__init__(parameters)
        _check_rates(lr=lr)
        self.lr = lr

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for p in self.parameters:
            value = p.value
            if isinstance(value, Scalar):
                if value.derivative is not None:
                    self._update(p, Scalar(value.data - self.lr * value.derivative))
            elif value is not None and value.grad is not None:
                self._update(p, self._moved(value.detach(), value.grad))

    def _moved(self, value: Tensor, grad: Tensor) -> Tensor:
        fused = value.f.fused
        if fused is None or not is_floating(value.dtype):
            return value.expand(value - grad * self.lr)  # of shape () where a number's is (1,)
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
        _check_rates({"beta1": beta1, "beta2": beta2}, lr=lr, eps=eps, weight_decay=weight_decay)
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
                self._update(p, self._moved(p))

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides the steps to come: numbers, and copies of the moments.

        Those of ``parameters[3]`` are called "m.3" and "v.3"; a parameter that has had no gradient yet has
        none.
        """
        state = super().state_dict()
        for place, p in enumerate(self.parameters):
            if p in self.moments:
                m, v = self.moments[p]
                state |= {f"m.{place}": copy_of(m), f"v.{place}": copy_of(v)}
        return state

    def _load_tensors(self, tensors: dict[str, Tensor]) -> None:
        moments: dict[Parameter, tuple[Tensor, Tensor]] = {}
        known: set[str] = set()
        for place, p in enumerate(self.parameters):
            names = f"m.{place}", f"v.{place}"
            if not any(name in tensors for name in names):
                continue
            pair = [tensors.get(name) for name in names]
            if not all(t is not None and t.shape == p.value.shape for t in pair):
                shapes = [None if t is None else t.shape for t in pair]
                raise ValueError(
                    f"the moments {' and '.join(names)} have the shapes {shapes}, their parameter "
                    f"{p.value.shape}; load the state of an optimiser of the same model"
                )
            m, v = (copy_of(t.to(p.value.backend)) for t in pair if t is not None)
            moments[p] = m, v
            known |= {*names}
        if tensors.keys() != known:
            raise ValueError(
                f"moments of {len(self.parameters)} parameters cannot be called "
                f"{sorted(tensors.keys() - known)}; load the state of an optimiser of the same model"
            )
        self.moments = moments

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
        # To their own shape: () times a number, of shape (1,), has shape (1,).
        m = value.expand(m * self.beta1 + grad * (1.0 - self.beta1))
        v = value.expand(v * self.beta2 + grad * grad * (1.0 - self.beta2))
        self.moments[p] = (m, v)
        m_hat = m / (1.0 - self.beta1**self.steps)
        v_hat = v / (1.0 - self.beta2**self.steps)
        step = m_hat / (v_hat**0.5 + self.eps) * self.lr
        return value.expand(wide * (1.0 - self.lr * decay) - step).to(value.dtype)


@no_grad()
def clip_grad_norm_(
    parameters: Iterable[Parameter], max_norm: float, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients by one number, so that the norm of them all is at most ``max_norm``.

    Call it between ``backward`` and the optimiser's ``step``.  The direction stays; one odd batch cannot
    throw the parameters far away.  A gradient that is short enough keeps its bits.

    Args:
        parameters: Tensors of any backend; those without a gradient count nothing.
        max_norm: Above 0; infinity only measures.
        error_if_nonfinite: Raise if the norm is no number; to know, a GPU is waited for.

    Returns:
        The norm before: the root of the sum of all squares, float64 of shape (1,).  The squares are added
        in the order of the parameters, in float64: those of a float32 may be beyond its range.

    Raises:
        ValueError: If ``max_norm`` is not above 0.
        TypeError: If a parameter is a Scalar.
        FloatingPointError: If the norm is NaN or infinite, and ``error_if_nonfinite`` says so.  The
            gradients are as they were.  Without it NaN and infinity end as NaN, which the loss shows.

    Source: Pascanu, Mikolov and Bengio (2013), Algorithm 1.
    """
    if not max_norm >= sys.float_info.min:  # the reciprocal of a smaller one is infinite
        raise ValueError(f"max_norm is a number above 0, got {max_norm!r}; 1.0 is common")
    parameters = list(parameters)
    for p in parameters:
        if isinstance(p.value, Scalar):
            raise TypeError("clip_grad_norm_ takes parameters that are tensors, got a Scalar")
    values = [p.value for p in parameters if getattr(p.value, "grad", None) is not None]
    if not values:
        return zeros((1,), dtype=np.float64)
    total = zeros((1,), values[0].backend, dtype=np.float64)
    for value in values:
        grad = value.grad.to(np.float64)
        total = total + (grad * grad).sum().to(total.backend)
    norm = total**0.5
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise FloatingPointError(
            f"the norm of the gradients is {norm.item()}; lower the learning rate, or run the step within "
            "minitorch.detect_anomaly() to see which operation made it"
        )
    if max_norm < math.inf:
        # max_norm / max(norm, max_norm), on the device and unread; exactly 1 where nothing is to be done,
        # which a / a is not: a quotient of tensors is a product with the reciprocal.
        scale = 1.0 / (1.0 + (norm - max_norm).relu() / max_norm)
        for value in values:
            grad = value.grad
            clipped = grad.to(np.float64) * scale.to(grad.backend)
            value.grad = grad.expand(clipped).to(
                grad.dtype
            )  # of shape () where the scale's is (1,)
    return norm


def copy_of(t: Tensor) -> Tensor:
    """Return a tensor of its own with the same elements, where they lie."""
    return t.f.id_map(t.detach(), t.empty(t.shape))


def _same_shape(value: Tensor, grad: Tensor, past: Tensor | None = None) -> None:
    """Refuse a gradient of another shape: a kernel would read or write beyond the smaller one."""
    past = value if past is None else past
    if not value.shape == grad.shape == past.shape:
        raise ValueError(
            f"a parameter of shape {value.shape} has a gradient of shape {grad.shape} and past "
            f"gradients of shape {past.shape}; make a new optimiser for another parameter"
        )
