"""The states of optimisers: numbers, and the moments of parameters, which files of training runs hold."""

from __future__ import annotations

import inspect
import math
from collections import ChainMap
from collections.abc import Sequence
from numbers import Real
from typing import Any

from kernels.common.arguments import listed, not_negative, number, shown, whole
from kernels.runtime.dtypes import is_floating

from ..module import Parameter
from ..tensor import Tensor

#: The rates of optimisers, which are never negative, and what each must be less than.
RATES = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf, "beta1": 1.0, "beta2": 1.0}


class State:
    """The state of an optimiser whose only state is its numbers."""

    parameters: Sequence[Parameter]
    #: The parameters of each group with its own rates, and the rates by parameter; empty without groups.
    _groups: list[tuple[list[Parameter], dict[str, float]]]
    _rates_of: dict[Parameter, dict[str, float]]

    @property
    def param_groups(self) -> list[ChainMap[str, Any]]:
        """Return a dictionary for each group, with its parameters as "params" and its rates.

        The rates may be set.  A group without a rate of its own has the rate of the optimiser, such as
        ``optimizer.lr``.
        """
        if not self._groups:
            return [ChainMap(vars(self), {"params": self.parameters})]
        return [ChainMap(rates, {"params": own}, vars(self)) for own, rates in self._groups]

    def _ungrouped(self, parameters: list[Any]) -> list[Any]:
        """Return the parameters of all groups, and remember the groups."""
        self._groups, self._rates_of = [], {}
        if not any(isinstance(each, dict) for each in parameters):
            return parameters
        known = [name for name in inspect.signature(type(self)).parameters if name in RATES]
        for group in parameters:
            if not isinstance(group, dict) or not {"params"} <= group.keys() <= {"params", *known}:
                found = ", ".join(map(str, group)) if isinstance(group, dict) else shown(group)
                raise TypeError(
                    f"a group of {type(self).__name__} is a dictionary of params and, if they differ from "
                    f"the optimiser's, {', '.join(known)}; got {found}"
                )
            own, rates = (
                listed("params", group["params"]),
                {k: group[k] for k in known if k in group},
            )
            self._check_numbers(rates)
            rates = {name: float(rate) for name, rate in rates.items()}
            members = [p for p in own if isinstance(p, Parameter)]
            if any(p in self._rates_of for p in members):
                raise ValueError("a parameter is in two groups; leave it out of one of them")
            self._rates_of |= dict.fromkeys(members, rates)
            self._groups.append((own, rates))
        return [p for own, _ in self._groups for p in own]

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
        for place, (_, rates) in enumerate(self._groups):
            found |= {f"group{place}/{key}": value for key, value in rates.items()}
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
        for key, value in numbers.items():
            group, _, name = key.rpartition("/")
            if key != "optimizer":
                own = self._groups[int(group[len("group") :])][1] if group else vars(self)
                own[name] = value

    def _check_numbers(self, numbers: dict[str, Any]) -> None:
        """Check the types and ranges of the numbers of a state, or of those that the constructor got."""
        for key, value in numbers.items():
            name = key.rpartition("/")[2]
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
