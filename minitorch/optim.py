"""Optimisers and gradient clipping."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from kernels.common.arguments import flag, listed, not_negative, number, short, shown, whole
from kernels.runtime.dtypes import acc_dtype, is_floating

from .autodiff import modes, no_grad
from .backends.memory import memories
from .backends.operations import operation
from .module import Parameter
from .scalar import Scalar
from .tensor import Tensor
from .tensors.factories import zeros
from .training.anomaly import check_step


class Optimizer:
    """Base class of optimisers; a subclass defines `step`.

    Args:
        parameters: The parameters to optimise, scalars or tensors.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        for p in listed("parameters", parameters):
            if not isinstance(p, Parameter):
                raise TypeError(
                    f"parameters must be Parameters, got {shown(p)}; pass model.parameters()"
                )
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
        raise NotImplementedError("define step in the subclass of Optimizer")

    def __repr__(self) -> str:
        facts = {k: v for k, v in self._numbers().items() if k != "optimizer"}
        facts["parameters"] = len(self.parameters)
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in facts.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state, without the parameters: numbers, and tensors by name.

        The tensors are copies, which later steps do not change.
        """
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if isinstance(value, Real)}
        plain = {k: v if isinstance(v, int) else float(v) for k, v in found.items()}  # also NumPy's
        return {"optimizer": type(self).__name__, **plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned; it is copied.

        Args:
            state: The state of an optimiser of this class, with parameters of the same shapes and order.

        Raises:
            ValueError: If the state does not fit this optimiser, which is then unchanged.
        """
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in state.items() if key not in tensors}
        own = self._numbers()
        if numbers.get("optimizer") != own["optimizer"] or numbers.keys() != own.keys():
            raise ValueError(
                f"a state of {numbers.get('optimizer')} with {', '.join(map(str, numbers))} does not fit "
                f"{own['optimizer']}, which has {', '.join(own)}; make an optimiser of the class that "
                "saved it"
            )
        try:
            self._check_numbers({key: x for key, x in numbers.items() if key != "optimizer"})
        except (OverflowError, TypeError) as error:
            raise ValueError(f"the state cannot be loaded: {error}") from None
        self._load_tensors(tensors)
        vars(self).update({key: value for key, value in numbers.items() if key != "optimizer"})

    def _check_numbers(self, numbers: dict[str, Any]) -> None:
        """Check the types and ranges of the numbers of a state, or of those that the constructor got."""
        for name, value in numbers.items():
            number(name, value)

    def _load_tensors(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            raise ValueError(
                f"the state of {type(self).__name__} has no tensors, got {sorted(tensors)}; load the state "
                "of an optimiser of the same class"
            )

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
            memories.refuse(
                f"moves its parameters by {type(self).__name__} to new memory",
                "use minitorch.AdamW on CUDA with contiguous parameters, which it updates in place",
                on_host=not getattr(getattr(p.value, "backend", None), "cuda", False),
            )
        p.update(value)


def _check_rates(below_1: dict[str, Any] | None = None, **rates: Any) -> None:
    """Check that rates are finite numbers of at least 0.

    Args:
        below_1: Rates that must also be less than 1, by name.
        rates: The other rates, by name.

    Raises:
        TypeError: If one is not a number.
        ValueError: If one is negative, infinite or NaN, or too large.
    """
    for most, numbers in ((1.0, below_1 or {}), (math.inf, rates)):
        for name, value in numbers.items():
            not_negative(name, value, most)


class SGD(Optimizer):
    """Gradient descent: value - lr * gradient.

    Args:
        parameters: The parameters to optimise, scalars or tensors.
        lr: Learning rate.
    """

    def __init__(self, parameters: Sequence[Parameter], lr: float = 1.0):
        super().__init__(parameters)
        self._check_numbers({"lr": lr})
        self.lr = float(lr)

    def _check_numbers(self, numbers: dict[str, Any]) -> None:
        super()._check_numbers(numbers)
        _check_rates(lr=numbers["lr"])

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for p in self.parameters:
            value = p.value
            if isinstance(value, Scalar):
                if value.derivative is not None:
                    self._update(p, Scalar(value.data - self.lr * value.derivative))
            elif value is not None and value.grad is not None:
                self._update(p, sgd_step(value.detach(), value.grad, self.lr))


@operation
def sgd_step(value: Tensor, grad: Tensor, lr: float) -> Tensor:
    """Return value - lr * grad."""
    return value.expand(value - grad * lr)  # of shape () where a number's is (1,)


class Adam(Optimizer):
    """The Adam optimiser, or AdamW with ``weight_decay``.

    Moments of fp16 and bf16 parameters are float32: a 16-bit mean would lose most small changes.

    Args:
        parameters: The parameters to optimise, tensors.
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
        rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        self._check_numbers({**rates, "steps": 0})
        self.lr, self.beta1, self.beta2 = float(lr), float(beta1), float(beta2)
        self.eps, self.weight_decay = float(eps), float(weight_decay)
        self.steps = 0
        # Keyed by the Parameter: its value is a new tensor after each step.
        self.moments: dict[Parameter, tuple[Tensor, Tensor]] = {}

    def _check_numbers(self, numbers: dict[str, Any]) -> None:
        super()._check_numbers(numbers)
        below_1, rates = (
            {name: numbers[name] for name in names}
            for names in (("beta1", "beta2"), ("lr", "eps", "weight_decay"))
        )
        _check_rates(below_1, **rates)
        if whole("steps", numbers["steps"], 0) >= 2**53:
            raise ValueError(f"steps must be less than 2**53, got {shown(numbers['steps'])}")

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        for p in self.parameters:
            if isinstance(p.value, Scalar):
                raise TypeError(
                    "the parameters of Adam must be tensors, got a Scalar; use SGD for scalars"
                )
            if p.value is not None and p.value.grad is not None:
                self._update(p, self._moved(p))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state, without the parameters: numbers, and copies of the moments.

        The moments of ``parameters[3]`` are "m.3" and "v.3"; they are missing until this parameter
        has had a gradient.
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
            if not all(
                t is not None and t.shape == p.value.shape and is_floating(t.dtype) for t in pair
            ):
                kinds = [t if t is None else f"{t.shape} of {t.dtype}" for t in pair]
                raise ValueError(
                    f"the moments {' and '.join(names)} are {kinds}, but their parameter is "
                    f"{p.value.shape} of {p.value.dtype}; load the state of an optimiser of the same model"
                )
            m, v = (copy_of(t.to(p.value.backend)) for t in pair if t is not None)
            moments[p] = m, v
            known |= {*names}
        if tensors.keys() != known:
            raise ValueError(
                f"an optimiser of {len(self.parameters)} parameters has no moments "
                f"{sorted(tensors.keys() - known)}; load the state of an optimiser of the same model"
            )
        self.moments = moments

    def _moved(self, p: Parameter) -> Tensor:
        value, grad = p.value.detach(), p.value.grad
        if p not in self.moments:
            m, v = (value.full(value.shape, 0.0, acc_dtype(value.dtype)) for _ in range(2))
            self.moments[p] = (m, v)
        m, v = self.moments[p]
        same_shape(value, grad, m)
        # They follow a parameter that was moved to another backend or dtype.
        m, v = (t.to(value.backend).to(acc_dtype(value.dtype)) for t in (m, v))
        self.moments[p] = (m, v)
        decay = self.weight_decay if value.dims >= 2 else 0.0
        moved, m, v = adam_step(
            value, grad, m, v, lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps,
            step=self.steps, weight_decay=decay,
        )  # fmt: skip
        self.moments[p] = (m, v)
        return moved


@operation
def adam_step(
    value: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, lr: float, beta1: float, beta2: float,
    eps: float, step: int, weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the value of a parameter after a step of Adam, and its moments; see :class:`Adam`.

    Args:
        value: The parameter.
        grad: Its gradient.
        m: The running mean of gradients, in the dtype of sums.
        v: The running mean of their squares, likewise.
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


def checked_norm(max_norm: Any) -> float:
    """Check that a maximum norm is above 0, and return it; the reciprocal of a tiny one is infinite."""
    norm = number("max_norm", max_norm)
    if not norm >= sys.float_info.min:
        raise ValueError(f"max_norm must be a number above 0, got {short(max_norm)}; 1.0 is common")
    return norm


@no_grad()
def clip_grad_norm_(
    parameters: Iterable[Parameter], max_norm: float, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients by one factor, so that their total norm is at most ``max_norm``.

    Call it between ``backward`` and the optimiser's ``step``.  Gradients whose norm is already small enough
    are unchanged bit for bit.

    Args:
        parameters: Parameters that are tensors of any backend; those without a gradient are skipped.
        max_norm: Maximum norm, above 0; infinity only computes the norm.
        error_if_nonfinite: Raise if the norm is NaN or infinite; this synchronises with a GPU.

    Returns:
        The norm before scaling, the root of the sum of all squares, float64 of shape (1,).  The squares are
        added in the order of the parameters, in float64, because they may overflow float32.

    Raises:
        ValueError: If ``max_norm`` is not above 0.
        TypeError: If it is not a number, or a parameter is a Scalar.
        FloatingPointError: If ``error_if_nonfinite`` is set and the norm is NaN or infinite; the gradients
            are unchanged.  Without it, the scaled gradients become NaN.

    Source: Pascanu, Mikolov and Bengio (2013), Algorithm 1.
    """
    max_norm = checked_norm(max_norm)
    parameters = listed("parameters", parameters)
    flag("error_if_nonfinite", error_if_nonfinite)
    for p in parameters:
        if not isinstance(p, Parameter) or isinstance(p.value, Scalar):
            raise TypeError(
                f"the parameters of clip_grad_norm_ must be Parameters that hold tensors, got {shown(p)}"
            )
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
            "minitorch.detect_anomaly() to find the operation that produced it"
        )
    if max_norm < math.inf:
        # max_norm / max(norm, max_norm), without reading it from the device.  It must be exactly 1 for a
        # small norm, which a / a is not: a quotient of tensors is a product with the reciprocal.
        scale = 1.0 / (1.0 + (norm - max_norm).relu() / max_norm)
        for value in values:
            grad = value.grad
            clipped = grad.to(np.float64) * scale.to(grad.backend)
            value.grad = grad.expand(clipped).to(
                grad.dtype
            )  # of shape () where the scale's is (1,)
    return norm


def copy_of(t: Tensor) -> Tensor:
    """Return a copy of a tensor, on its device."""
    return t.f.id_map(t.detach(), t.empty(t.shape))


def same_shape(value: Tensor, grad: Tensor, past: Tensor | None = None) -> None:
    """Check the shape of a gradient: a kernel would read or write out of bounds of a smaller one."""
    past = value if past is None else past
    if not value.shape == grad.shape == past.shape:
        raise ValueError(
            f"a parameter of shape {value.shape} has a gradient of shape {grad.shape} and moments of shape "
            f"{past.shape}; make a new optimiser after replacing a parameter"
        )
