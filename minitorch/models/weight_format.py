"""Layouts of pre-trained weights: the configuration, and the parameters that each weight belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..training.model_files import CheckpointError


class ConfigFile(NamedTuple):
    """A config.json that was read.

    Attributes:
        values: Its contents.
        source: Its path, for errors.
    """

    values: Mapping[str, Any]
    source: Path

    def get(self, name: str, default: Any) -> Any:
        """Return a value, the default where it is missing or null."""
        found = self.values.get(name)
        return default if found is None else found

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number, 1 or more; the default where it is missing or null.

        Raises:
            CheckpointError: If it is not such a number.
        """
        found = self.get(name, default)
        if type(found) is not int or found < 1:
            raise self.error(f"{name} must be a whole number, 1 or more; got {found!r:.40}")
        return found

    def number(
        self, name: str, default: float, least: float = 0.0, below: float = math.inf
    ) -> float:
        """Return a number of at least ``least`` and less than ``below``; the default where it is missing.

        Raises:
            CheckpointError: If it is not such a number.
        """
        found = self.get(name, default)
        if type(found) not in (int, float) or not least <= found < below:
            bounds = (
                f"at least {least:g} and {'finite' if below == math.inf else f'below {below:g}'}"
            )
            raise self.error(f"{name} must be a number, {bounds}; got {found!r:.40}")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """Return True or False; the default where it is missing or null.

        Raises:
            CheckpointError: If it is neither.
        """
        found = self.get(name, default)
        if not isinstance(found, bool):
            raise self.error(f"{name} must be true or false, got {found!r:.40}")
        return found

    def check(self, name: str, allowed: Iterable[Any], default: Any) -> None:
        """Check that a value is one of those that are supported.

        Raises:
            CheckpointError: If it is not.
        """
        allowed = tuple(allowed)
        found = self.values.get(name, default)
        if not any(found is one or (isinstance(one, str) and found == one) for one in allowed):
            raise self.error(
                f"{name} is {found!r:.40}, supported is {' or '.join(map(str, allowed))}"
            )

    def error(self, text: str) -> CheckpointError:
        """Return an error that names the file."""
        return CheckpointError(f"{self.source}: {text}")


class Weight(NamedTuple):
    """An array of a file.

    Attributes:
        ours: Names of the parameters that it holds, side by side in the last dimension.
        transposed: Whether it is stored as (out, in) and ours as (in, out).
    """

    ours: tuple[str, ...]
    transposed: bool = False


class Format(NamedTuple):
    """A layout of weights.

    Attributes:
        name: The architecture in words, for errors.
        class_name: Its class in ``transformers``.
        model_types: Values of ``model_type`` that can be read; the first is written.
        prefix: Prefix of the names of all weights but that of the head, which a file may lack.
        table: Name of the token embeddings.
        buffers: Suffixes of the names of arrays that are not weights.
        options: Returns the arguments of :class:`minitorch.DecoderLM` for a configuration.
        shapes: Returns the names and shapes of weights that together have all sizes of such arguments.
        weights: Returns the weights of a model by name.
        why_not: Returns why a model cannot be written in this layout, or None.
        config: Returns the configuration of a model.
    """

    name: str
    class_name: str
    model_types: tuple[str, ...]
    prefix: str
    table: str
    buffers: tuple[str, ...]
    options: Callable[[ConfigFile], dict[str, Any]]
    shapes: Callable[[dict[str, Any]], Iterable[tuple[str, tuple[int, ...]]]]
    weights: Callable[[Any], dict[str, Weight]]
    why_not: Callable[[Any], str | None]
    config: Callable[[Any], dict[str, Any]]


HEAD = "lm_head.weight"


def head_of(model: Any) -> dict[str, Weight]:
    """Return the weight of the logits of a model, none if the embeddings serve as the head."""
    return {} if model.lm_head is None else {HEAD: Weight(("lm_head.weights",), True)}
