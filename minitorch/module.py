"""Modules, which form the tree of a model, and their parameters."""

from __future__ import annotations

import copy  # beyond module 5
import html  # beyond module 5
import textwrap
from typing import Any

_changes = 0  # beyond module 5


def changes() -> int:  # beyond module 5
    """Return how many times an attribute of any module has been set, not counting the training mode.

    While the number is unchanged, cached facts about the parts of a model remain valid.
    """
    return _changes


class Module:
    """A node of the tree that makes up a model.

    Assigning a `Parameter` or another `Module` to an attribute registers it here. A Parameter or
    Module inside a list is not registered (use `add_parameter` or `setattr` with a made-up name). A
    subclass calls `super().__init__()` before its first assignment and defines `forward`.

    Reading an attribute that has not been set returns None instead of raising an error, so spell
    names with care. Names that start with two underscores do raise an error, because Python's own
    protocols (copy, pickle, doctest) need it.

    Attributes:
        training: True in training mode, the mode a module starts in.
    """

    _modules: dict[str, Module]
    _parameters: dict[str, Parameter]
    training: bool

    def __init__(self) -> None:
        self._modules = {}
        self._parameters = {}
        self.training = True

    def modules(self) -> list[Module]:
        """List the direct children, in the order in which they were assigned."""
        return list(self._modules.values())

    def train(self) -> None:
        """Put this module and everything below it into training mode."""
        # TASK 0.4: Set training here, then do the same to each child.
        self.training = True
        for child in self.modules():
            child.train()
        # END TASK 0.4

    def eval(self) -> None:
        """Put this module and everything below it into evaluation mode."""
        # TASK 0.4: As train, with the other value.
        self.training = False
        for child in self.modules():
            child.eval()
        # END TASK 0.4

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """List every parameter of the tree with its path.

        Returns:
            Pairs of name and parameter: this module's own first, under their bare names, then each
            child's, with the child's name and a dot in front ("layer1.weights").
        """
        # TASK 0.4: Own ones from _parameters, then each child's, its name and a dot in front.
        named = list(self._parameters.items())
        for child_name, child in self._modules.items():
            named += [(f"{child_name}.{name}", p) for name, p in child.named_parameters()]
        return named
        # END TASK 0.4

    def parameters(self) -> list[Parameter]:
        """List every parameter of the tree, in the order of `named_parameters`."""
        # TASK 0.4: named_parameters without the names.
        return [p for _, p in self.named_parameters()]
        # END TASK 0.4

    def state_dict(self) -> dict[str, Any]:  # beyond module 5
        """Return copies of the values of all parameters, by the names of `named_parameters`."""
        return {name: _copy(p.value) for name, p in self.named_parameters()}

    def load_state_dict(  # beyond module 5
        self, state: dict[str, Any], strict: bool = True, assign: bool = False
    ) -> tuple[list[str], list[str]]:
        """Set the parameters to the values that `state_dict` returned; on an error, none is changed.

        Args:
            state: Values by name, of the parameters' types, shapes and dtypes, on any backend.
            strict: False loads the names that the state and this module have in common.
            assign: True shares the memory of the values where it can, instead of copying them.

        Returns:
            The names that the state lacks, and those that this module lacks.

        Raises:
            TypeError: If a value has another type than its parameter, such as an array for a tensor.
            ValueError: If a name is missing or unknown, or a value has the wrong shape or dtype.
        """
        named = dict(self.named_parameters())
        missing = [name for name in named if name not in state]
        unknown = [name for name in state if name not in named]
        if strict and (missing or unknown):
            raise ValueError(
                f"the state is not that of this {type(self).__name__}: it lacks {missing[:3]} "
                f"({len(missing)} names), and it has {unknown[:3]} ({len(unknown)} names), which the "
                "module lacks; build the same module, or pass strict=False"
            )
        pairs = {name: (p.value, state[name]) for name, p in named.items() if name in state}
        for name, (own, value) in pairs.items():
            if not isinstance(value, type(own)):
                raise TypeError(
                    f"{name} must be a {type(own).__name__}, got {type(value).__name__}; convert it first"
                )
            for fact in ("shape", "dtype"):
                found, wanted = (getattr(x, fact, None) for x in (value, own))
                if found != wanted:
                    raise ValueError(
                        f"{name} has {fact} {found}, that of the module has {wanted}; build the module "
                        "with that of the state, or convert the value"
                    )
        for name, (own, value) in pairs.items():
            value = value.detach() if assign and hasattr(value, "detach") else _copy(value)
            named[name].update(value.to(own.backend) if hasattr(own, "backend") else value)
        return missing, unknown

    def add_parameter(self, k: str, v: Any) -> Parameter:
        """Wrap a value in a parameter and register it under a name chosen at run time.

        Args:
            k: The attribute name to register it under.
            v: The value, of any kind: a tensor, a scalar, a plain number.

        Returns:
            The new parameter.
        """
        parameter = Parameter(v, k)
        setattr(self, k, parameter)
        return parameter

    def __setattr__(self, key: str, val: Any) -> None:
        global _changes  # beyond module 5
        _changes += key != "training"  # beyond module 5
        own = self.__dict__
        home: dict[str, Any] = own
        if isinstance(val, (Parameter, Module)):
            if "_parameters" not in own:
                raise AttributeError(
                    f"cannot assign the {type(val).__name__} {key!r} to a "
                    f"{type(self).__name__} that is not set up: call super().__init__() first, at "
                    f"the top of {type(self).__name__}.__init__"
                )
            home = self._parameters if isinstance(val, Parameter) else self._modules
        # A name lives in one place: a stale entry elsewhere would hide the new value from
        # attribute access, or leave a replaced parameter in the optimizer's list.
        for place in (own.get("_parameters", {}), own.get("_modules", {}), own):
            if place is not home:
                place.pop(key, None)
        if home is own:
            super().__setattr__(key, val)
        else:
            home[key] = val

    def __delattr__(self, key: str) -> None:
        global _changes  # beyond module 5
        _changes += 1  # beyond module 5
        for table in (self._parameters, self._modules):
            if key in table:
                del table[key]
                return
        super().__delattr__(key)

    def __getattr__(self, key: str) -> Any:
        # Python calls this only for a name that is in neither the instance nor the class.
        # Through __dict__: before __init__ has run, self._parameters would recurse without end.
        own = self.__dict__
        for table in (own.get("_parameters"), own.get("_modules")):
            if table and key in table:
                return table[key]
        if key.startswith("__"):
            # copy and pickle probe for optional hooks such as __deepcopy__, and take None for one.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {key!r}")
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` on the arguments.

        Raises:
            TypeError: If the class defines no `forward`.
        """
        forward = self.forward
        if forward is None:
            raise TypeError(
                f"{type(self).__name__} was called but has no forward method: define "
                f"forward(self, ...) in the class, or call one of its children"
            )
        return forward(*args, **kwargs)

    def __repr__(self) -> str:
        name, sizes = type(self).__name__, self._sizes()
        if not self._modules:
            return f"{name}({sizes})"
        lines = "\n".join(f"({key}): {child!r}" for key, child in self._modules.items())
        return f"{name}({sizes}\n{textwrap.indent(lines, '  ')}\n)"

    def _sizes(self) -> str:
        """Return the numbers and the shapes of the parameters that this module itself has."""
        own = [(k, v) for k, v in vars(self).items() if k != "training" and k[0] != "_"]
        facts = [f"{key}={value}" for key, value in own if isinstance(value, (int, float))]
        shapes = [(k, getattr(p.value, "shape", None)) for k, p in self._parameters.items()]
        return ", ".join(
            [*facts, *(f"{key}={shape}" for key, shape in shapes if shape is not None)]
        )

    def _repr_html_(self, key: str = "") -> str:  # beyond module 5
        """Return the tree of modules for a notebook, whose parts open and close."""
        text = html.escape(f"{key}{type(self).__name__}({self._sizes()})")
        if not self._modules:
            return f"<div>{text}</div>"
        parts = "".join(child._repr_html_(f"{name}: ") for name, child in self._modules.items())
        inner = f'<div style="margin-left: 1.5em">{parts}</div>'
        return f"<details {'' if key else 'open'}><summary>{text}</summary>{inner}</details>"


def _copy(value: Any) -> Any:  # beyond module 5
    """Copy the value of a parameter, without history."""
    return value.detach().clone() if hasattr(value, "clone") else copy.deepcopy(value)


class Parameter:
    """A container for a value that training replaces.

    A module registers the container. An optimizer stores a new value in it, and all code that reads
    the parameter then gets the new value.

    Args:
        x: The value, of any kind. Its `requires_grad_` method is called if it has one.
        name: A name to pass on to such a value, for drawing and debugging.
    """

    def __init__(self, x: Any, name: str | None = None) -> None:
        if not isinstance(name, str | None):
            raise TypeError(f"the name of a parameter is a string, not a {type(name).__name__}")
        self.name = name
        self.update(x)

    def update(self, x: Any) -> None:
        """Replace the value, and make the new value track its gradient."""
        self.value = x
        track = getattr(x, "requires_grad_", None)
        if track is not None:
            track(True)
            if self.name:
                x.name = self.name

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)
