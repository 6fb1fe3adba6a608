"""The states of optimisers: numbers, and the moments of parameters, which files of training runs hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from kernels.common.arguments import not_negative, number, shown, whole
from kernels.runtime.dtypes import is_floating

from ..module import Parameter
from ..tensor import Tensor

#: The rates of optimisers, which are never negative, and what each must be less than.
RATES = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf, "beta1": 1.0, "beta2": 1.0}


class State:
    """The state of an optimiser whose only state is its numbers."""

    parameters: Sequence[Parameter]

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
            if name == "steps":
                if whole(name, value, 0) >= 2**53:
                    raise ValueError(f"steps must be less than 2**53, got {shown(value)}")
            elif name in RATES:
                not_negative(name, value, RATES[name])
            else:
                number(name, value)

    def _load_tensors(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            raise ValueError(
                f"the state of {type(self).__name__} has no tensors, got {sorted(tensors)}; load the state "
                "of an optimiser of the same class"
            )


class Moments(State):
    """The state of an optimiser with two moments for each parameter."""

    moments: dict[Parameter, tuple[Tensor, Tensor]]

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


def copy_of(t: Tensor) -> Tensor:
    """Return a copy of a tensor, on its device."""
    return t.f.id_map(t.detach(), t.empty(t.shape))
