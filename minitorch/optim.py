"""Optimisers and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kernels.common.arguments import listed, shown
from kernels.runtime.dtypes import acc_dtype

from .backends.memory import memories  # beyond module 5
from .module import Parameter
from .scalars.modes import modes  # beyond module 5
from .tensor import Tensor
from .training.optimiser_states import Moments, State  # beyond module 5
from .training.steps import (
    adam_step,  # beyond module 3
    same_shape,  # beyond module 3
    sgd_step,
)


class Optimizer(
    State,  # beyond module 5
):
    """Base class of optimisers; a subclass defines `step`.

    Args:
        parameters: The parameters to optimise, scalars or tensors; or groups of them, dictionaries such as
            ``{"params": [...], "lr": 0.1}`` with rates that differ from those of the optimiser.
    """

    def __init__(self, parameters: Iterable[Any]):
        parameters = listed("parameters", parameters)
        parameters = self._ungrouped(parameters)  # beyond module 5
        for p in parameters:
            if not isinstance(p, Parameter):
                raise TypeError(
                    f"parameters must be Parameters, got {shown(p)}; pass model.parameters(), or make a "
                    "tensor one with minitorch.Parameter"
                )
        self.parameters: Sequence[Parameter] = parameters

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

    def _update(self, p: Parameter, value: Any) -> None:
        """Move a parameter to its new value."""
        if modes.observer:  # beyond module 5
            modes.observer.check_step(self, p, value)
        if getattr(value, "_tensor", 0) is not getattr(p.value, "_tensor", 0):  # beyond module 5
            memories.refuse(
                f"moves its parameters by {type(self).__name__} to new memory",
                "use minitorch.AdamW on CUDA with contiguous parameters, which it updates in place",
                on_host=not getattr(getattr(p.value, "backend", None), "cuda", False),
            )
        p.update(value)


class SGD(Optimizer):
    """Gradient descent: value - lr * gradient.

    Args:
        parameters: The parameters to optimise, scalars or tensors, or groups of them.
        lr: Learning rate.
    """

    def __init__(self, parameters: Iterable[Any], lr: float = 1.0):
        super().__init__(parameters)
        self._check_numbers({"lr": lr})  # beyond module 5
        self.lr = float(lr)

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for p in self.parameters:
            value, lr = p.value, self.lr
            lr = self._rates_of.get(p, {}).get("lr", lr)  # beyond module 5
            if hasattr(value, "derivative"):
                if value.derivative is not None:
                    self._update(p, type(value)(value.data - lr * value.derivative))
            elif value is not None and value.grad is not None:
                self._update(p, sgd_step(value.detach(), value.grad, lr))


class Adam(  # beyond module 3
    Moments,  # beyond module 5
    Optimizer,
):
    """The Adam optimiser, or AdamW with ``weight_decay``.

    Moments of fp16 and bf16 parameters are float32: a 16-bit mean would lose most small changes.

    Args:
        parameters: The parameters to optimise, tensors, or groups of them.
        lr: Learning rate.
        beta1: Decay of the running mean.
        beta2: Decay of the running mean of squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Decoupled from the gradient; applied to parameters of two or more dimensions.

    Source: Kingma and Ba (2015), Algorithm 1; Loshchilov and Hutter (2019), Algorithm 2.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters)
        self._check_numbers({  # beyond module 5
            "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay,
        })  # fmt: skip
        self.lr, self.beta1, self.beta2 = float(lr), float(beta1), float(beta2)
        self.eps, self.weight_decay = float(eps), float(weight_decay)
        self.steps = 0
        # Keyed by the Parameter: its value is a new tensor after each step.
        self.moments: dict[Parameter, tuple[Tensor, Tensor]] = {}

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        for p in self.parameters:
            if hasattr(p.value, "derivative"):
                raise TypeError(
                    "the parameters of Adam must be tensors, got a Scalar; use SGD for scalars"
                )
            if p.value is not None and p.value.grad is not None:
                self._update(p, self._moved(p))

    def _step_numbers(self, rates: dict[str, float]) -> dict[str, Any]:
        """Return the number of the current step, and the rates; those of a group take precedence."""
        return {
            "lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps,
            "step": self.steps, "weight_decay": self.weight_decay, **rates,
        }  # fmt: skip

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
        numbers = self._step_numbers({})
        numbers = self._step_numbers(self._rates_of.get(p, {}))  # beyond module 5
        if value.dims < 2:
            numbers["weight_decay"] = 0.0
        moved, m, v = adam_step(value, grad, m, v, **numbers)
        self.moments[p] = (m, v)
        return moved
