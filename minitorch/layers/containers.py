"""Modules that hold other modules: in a sequence, a list or a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kernels.common.arguments import listed, shown

from ..module import Module


class Apply(Module):
    """A function as a layer without parameters.

    Args:
        function: A function of one argument, such as ``minitorch.GELU`` or ``minitorch.Tensor.relu``.
    """

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"a layer is a module or a function of one tensor, got {shown(function)}; pass a function "
                "such as minitorch.Tensor.relu"
            )
        self.function = function

    def forward(self, x: Any) -> Any:
        """Call the function."""
        return self.function(x)

    def _sizes(self) -> str:
        return getattr(self.function, "__name__", "")


class ModuleDict(Module):
    """Modules by name, which are children of this module.

    Args:
        modules: Modules by name.

    Raises:
        TypeError: If a value is not a module, or a name is not a string.
        ValueError: If a name is empty, contains a dot, or is an attribute of modules, such as "train".
    """

    def __init__(self, modules: Mapping[str, Module] | None = None):
        super().__init__()
        if not isinstance(modules, Mapping | None):
            raise TypeError(
                f"modules must be a dictionary of modules by name, got {shown(modules)}"
            )
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, key: str, module: Module) -> None:
        if not isinstance(module, Module) or not isinstance(key, str):
            raise TypeError(
                f"{type(self).__name__} holds modules by string, got {shown(module)} for {shown(key)}"
            )
        if not key or "." in key or hasattr(type(self), key) or key in vars(self):
            raise ValueError(
                f"{key!r} cannot be the name of a module: it is empty, contains a dot, or is an attribute "
                "of modules; choose another name"
            )
        setattr(self, key, module)

    def __getitem__(self, key: str) -> Module:
        return self._modules[key]

    def __delitem__(self, key: str) -> None:
        _ = self[key]  # or a KeyError
        delattr(self, key)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules)

    def __contains__(self, key: Any) -> bool:
        return key in self._modules

    def keys(self) -> Iterable[str]:
        """Return the names."""
        return self._modules.keys()

    def values(self) -> Iterable[Module]:
        """Return the modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Module]]:
        """Return pairs of a name and a module."""
        return self._modules.items()


class ModuleList(Module):
    """Modules in order, which are children of this module under the names "0", "1" and so on.

    Args:
        modules: The modules.

    Raises:
        TypeError: If one of them is not a module.
    """

    def __init__(self, modules: Iterable[Any] = ()):
        super().__init__()
        self.extend(modules)

    def append(self, module: Any) -> None:
        """Add a module at the end."""
        setattr(self, str(len(self)), self._checked(module))

    def extend(self, modules: Iterable[Any]) -> None:
        """Add modules at the end."""
        for module in [self._checked(each) for each in listed("modules", modules)]:
            self.append(module)

    def _checked(self, module: Any) -> Module:
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__} holds modules, got {shown(module)}")
        return module

    def __getitem__(self, key: int | slice) -> Any:
        found = self.modules()[key]
        if not isinstance(found, list):
            return found
        part = type(self)()
        part.extend(found)
        return part

    def __setitem__(self, key: int, module: Any) -> None:
        setattr(self, str(range(len(self))[key]), self._checked(module))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules())


class Sequential(ModuleList):
    """Layers that run one after the other.

    Args:
        layers: Modules, or functions of one argument; see :class:`Apply`.
    """

    def __init__(self, *layers: Module | Callable[[Any], Any]):
        super().__init__(layers)

    def _checked(self, module: Any) -> Module:
        return module if isinstance(module, Module) else Apply(module)

    def forward(self, x: Any) -> Any:
        """Apply the layers in order."""
        for layer in self:
            x = layer(x)
        return x
