"""Save and restore the states of random generators, in JSON types."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernels.common.arguments import shown

Generators = Mapping[str, np.random.Generator]
#: The largest number in the state of a generator, by name; others have at most 128 bits.  With a larger
#: position, NumPy reads out of bounds.
_MOST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": 2**32 - 1}


def random_state(generators: Generators | None = None) -> dict[str, Any]:
    """Return the states of all random generators, in JSON types.

    Args:
        generators: The caller's generators, by name.  Python's ``random``, which provides the seeds of
            dropout, and ``numpy.random`` are always included.
    """
    version, words, gauss = random.getstate()
    return {
        "python": [version, [*words], gauss],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "generators": {
            name: _plain(rng.bit_generator.state) for name, rng in (generators or {}).items()
        },
    }


def set_random_state(state: Mapping[str, Any], generators: Generators | None = None) -> None:
    """Restore the random generators from a state of :func:`random_state`.

    Args:
        state: The state, also after a round trip through JSON.
        generators: The caller's generators, by the names passed to :func:`random_state`.

    Raises:
        ValueError: If a state is missing or damaged, or belongs to a different kind of generator; no
            generator is changed then.
    """
    prepared_random_state(state, generators)()


def prepared_random_state(
    state: Mapping[str, Any], generators: Generators | None = None
) -> Callable[[], None]:
    """Check the arguments of :func:`set_random_state`; return a function that restores the generators."""
    generators = generators or {}
    try:
        saved = state["generators"]
        if generators.keys() != saved.keys():
            raise ValueError(
                f"got the generators {sorted(generators)}, but {sorted(saved)} were saved"
            )
        own = {
            name: _like(rng.bit_generator.state, saved[name]) for name, rng in generators.items()
        }
        numpys = _like(np.random.get_state(legacy=False), state["numpy"])
        version, words, gauss = state["python"]
        python = version, tuple(words), None if gauss is None else float(gauss)
        random.Random().setstate(python)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"the state of the random numbers cannot be restored ({error})") from None

    def restore() -> None:
        for name, rng in generators.items():
            rng.bit_generator.state = own[name]
        np.random.set_state(numpys)
        random.setstate(python)

    return restore


def _plain(x: Any) -> Any:
    """Return a generator's state with lists for arrays."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else x


def _like(own: Any, saved: Any, name: str = "the state") -> Any:
    """Return a saved state as NumPy takes it.

    Raises:
        ValueError: If it does not have the form and the ranges of a generator's own state.
    """
    if isinstance(own, Mapping):
        if own.keys() != saved.keys():
            raise ValueError(f"{name} has {sorted(saved)}, expected {sorted(own)}")
        return {key: _like(own[key], saved[key], key) for key in own}
    if isinstance(own, np.ndarray):
        if (
            isinstance(saved, list)
            and len(saved) == len(own)
            and all(type(x) is int for x in saved)
        ):
            return np.array(saved, own.dtype)
    elif isinstance(own, float):
        if type(saved) in (int, float) and math.isfinite(saved):
            return float(saved)
    elif type(saved) is int and isinstance(own, int):
        if 0 <= saved <= _MOST.get(name, 2**128 - 1):
            return saved
    elif saved == own:  # the name of the generator
        return saved
    raise ValueError(f"{name} is {shown(saved)}, which no generator like {shown(own)} has")
