"""AdamW for GPUs: one launch for all parameters, float32 master weights, fused gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from operator import is_
from typing import Any, NamedTuple

from kernels.cuda.backend import active
from kernels.runtime.dtypes import FLOAT32, is_floating, is_half

from ..backends.writes import wrote
from ..module import Parameter
from ..optim import Adam
from ..tensor import Tensor
from .clipping import checked_norm, clip_grad_norm_
from .optimiser_states import copy_of
from .steps import same_shape


class _Place(NamedTuple):
    """Where a parameter and what belongs to it lie.

    Attributes:
        data: Of the parameter.
        master: Its master, or None.
        moments: Its moments.
        moved: The arrays of all of them, and a gradient.
    """

    data: Any
    master: Tensor | None
    moments: tuple[Tensor, Tensor]
    moved: Any

    def holds(self, value: Tensor, master: Tensor | None, moments: Any) -> bool:
        """Tell whether all of them lie there still."""
        return self.data is value._tensor and self.master is master and self.moments is moments


class AdamW(Adam):
    """AdamW with one launch per kind of parameter, where the backend has the fused kernel.

    An fp16 or bf16 parameter is the rounded copy of a float32 master weight, which the step updates: a step
    is often smaller than half a 16-bit unit in the last place, and would be lost.  On a backend with the
    kernel, values are updated in place, and tensors that share a parameter's memory change with it.

    Args:
        parameters: The parameters to optimise, tensors, or groups of them.
        lr: Learning rate.
        beta1: Decay of the running mean.
        beta2: Decay of the running mean of squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Decoupled from the gradient; applied to parameters of two or more dimensions.
        max_norm: Scale the gradients so that their total norm is at most this; None does not clip.

    Attributes:
        masters: The master weights of the 16-bit parameters that have had a gradient.
        grad_norm: The norm of the gradients of the last step before clipping, (1,), float64, on the
            device; None without max_norm.

    Raises:
        ValueError: If ``max_norm`` is not above 0.

    Source: Loshchilov and Hutter (2019), Algorithm 2; Micikevicius et al., Mixed precision training (2018),
    section 3.1.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm: float | None = None,
    ):
        super().__init__(parameters, lr, beta1, beta2, eps, weight_decay)
        self.max_norm = math.inf if max_norm is None else checked_norm(max_norm)
        self.masters: dict[Parameter, Tensor] = {}
        self._copies: dict[Parameter, Tensor] = {}  # the rounded values of the masters
        self._places: dict[Parameter, _Place] = {}
        self.grad_norm: Tensor | None = None

    def _check_numbers(self, numbers: dict[str, Any]) -> None:
        super()._check_numbers(numbers)
        checked_norm(numbers.get("max_norm", math.inf))

    def step(self) -> None:
        """Clip the gradients, and update every parameter that has one."""
        moving = [p for p in self.parameters if getattr(p.value, "grad", None) is not None]
        if not moving or not all(_is_listed(p.value, moving[0].value) for p in moving):
            if self.max_norm < math.inf:
                self.grad_norm = clip_grad_norm_(self.parameters, self.max_norm)
            super().step()
            return
        self.steps += 1
        like = moving[0].value
        fused, memory = like.f.ops.kernels, like.f.memory
        values = [p.value.detach().contiguous() for p in moving]
        grads = [p.value.grad.contiguous().array() for p in moving]
        clip = None
        if self.max_norm < math.inf:
            clip = fused.clip_of(grads, self.max_norm)
            self.grad_norm = like.wrap(memory.part(clip, 0, 1))
        moved = [self._listed(*each) for each in zip(moving, values, grads, strict=True)]
        for _, rates in self._groups or [(moving, {})]:
            of_group = [self._rates_of.get(p, rates) is rates for p in moving]
            if any(of_group):
                numbers = partial(self._step_numbers, rates)
                own = [*compress(moved, of_group)]
                fused.adam_many(own, clip, **numbers(), again=numbers)
        storages = [value._tensor._storage for value in values]
        wrote(*storages)
        for p, value in zip(moving, values, strict=True):
            self._update(p, value)
        if (recording := active()) is not None:
            recording.actions += [self._count, partial(wrote, *storages)]
            recording.guards.append(self._guard())

    def _listed(self, p: Parameter, value: Tensor, grad: Any) -> Any:
        """Return the arrays of a parameter; views of those that lie where they did are kept."""
        same_shape(value, p.value.grad)
        known, master = self._places.get(p), self.masters.get(p)
        is_own = master is None or self._copies.get(p) is p.value
        if known is not None and is_own and known.holds(value, master, self.moments.get(p)):
            return known.moved._replace(grad=grad)
        master = self._master(p)
        m, v = (moment.array() for moment in self._moments(p, master))
        copy = value.array() if is_half(value.dtype) else None
        target = value if copy is None else master
        moved = value.f.ops.kernels.Moved(target.array(), grad, m, v, value.dims >= 2, copy)
        self._places[p] = _Place(value._tensor, self.masters.get(p), self.moments[p], moved)
        return moved

    def _count(self) -> None:
        self.steps += 1

    def _guard(self) -> Callable[[], bool]:
        """Return a function that tells whether a recorded step is still valid.

        It becomes invalid when ``update`` replaces a parameter, or ``load_state_dict`` the moments, because
        their addresses change.
        """

        def places() -> list[Any]:
            own = [p.value for p in self.parameters]
            pairs = (t for pair in self.moments.values() for t in pair)
            tensors = [*own, *pairs, *self.masters.values()]
            return [self.max_norm, *(getattr(t, "_tensor", None) for t in tensors)]

        known = places()

        def is_unmoved() -> bool:
            found = places()
            return len(found) == len(known) and all(map(is_, found, known))

        return is_unmoved

    def _master(self, p: Parameter) -> Tensor:
        """Return the tensor to update for a parameter: its master weight if it has 16 bits, else itself."""
        value = p.value.detach()
        if not is_half(value.dtype):
            self.masters.pop(p, None)
            return value
        # A value that the caller assigned replaces the master.
        if self._copies.get(p) is not p.value:
            self.masters[p], self._copies[p] = value.to(FLOAT32), p.value
        return self.masters[p]

    def _moments(self, p: Parameter, master: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moments of a parameter, on its device; zeros at first."""
        if p not in self.moments:
            m, v = (master.full(master.shape, 0.0, master.dtype) for _ in range(2))
        else:
            m, v = (t.to(master.backend).to(master.dtype) for t in self.moments[p])
        same_shape(master, m, v)
        self.moments[p] = m, v
        return m, v

    def _moved(self, p: Parameter) -> Tensor:
        """Return the next value of a parameter that the fused launch does not support."""
        value = p.value
        if not is_half(value.dtype):
            return super()._moved(p)
        p.value, grad = self._master(p), value.grad
        p.value.grad = grad
        try:  # as if it were its master
            self.masters[p] = super()._moved(p)
        finally:
            p.value = value
        return self.masters[p].to(value.dtype)

    def _update(self, p: Parameter, value: Any) -> None:
        super()._update(p, value)
        if p in self.masters:
            self._copies[p] = p.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :meth:`Adam.state_dict`, and copies of the masters, such as "master.3"."""
        state = super().state_dict()
        for place, p in enumerate(self.parameters):
            if p in self.masters:
                state[f"master.{place}"] = copy_of(self.masters[p])
        return state

    def _load_tensors(self, tensors: dict[str, Tensor]) -> None:
        own = {name: t for name, t in tensors.items() if name.startswith("master.")}
        boxes = {f"master.{place}": p for place, p in enumerate(self.parameters)}
        for name, t in own.items():
            if name not in boxes or (boxes[name].value.shape, FLOAT32) != (t.shape, t.dtype):
                raise ValueError(
                    f"no parameter fits {name} of shape {t.shape} and {t.dtype}; load the state of an "
                    "optimiser of the same model"
                )
        super()._load_tensors({name: t for name, t in tensors.items() if name not in own})
        self.masters = {
            boxes[name]: t.to(boxes[name].value.backend).detach() for name, t in own.items()
        }
        self._copies = {p: p.value for p in self.masters}


def _is_listed(value: Any, like: Tensor) -> bool:
    """Tell whether the fused launch supports a parameter."""
    return (
        isinstance(value, Tensor)
        and value.backend is like.backend
        and "adam_many" in value.f.ops
        and is_floating(value.dtype)
        and value.size > 0
    )
