"""The options of attention in the signatures of functions that forward them as ``*args, **options``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from kernels.problem.options import Options
from kernels.problem.question import make_problem

_OPTIONS = list(inspect.signature(make_problem).parameters.values())[3:]


_NAMES = frozenset(option.name for option in _OPTIONS)
#: The options that may be given by position, as PyTorch has them.
_BY_POSITION = [p.name for p in _OPTIONS if p.kind is p.POSITIONAL_OR_KEYWORD]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def by_name(function: str, args: Sequence[Any], options: Options) -> Options:
    """Return the options of a call by name.

    Args:
        function: The name of the called function, for error messages.
        args: Options given by position, in the order of ``make_problem``.
        options: Options given by name.

    Raises:
        TypeError: For an unknown option, an option given twice, or too many by position.
    """
    if not args and _NAMES.issuperset(options):
        return options
    if unknown := set(options) - _NAMES:
        raise _unknown(function, unknown)
    if len(args) > len(_BY_POSITION):
        raise TypeError(
            f"{function} takes at most {len(_BY_POSITION)} options by position "
            f"({', '.join(_BY_POSITION)}), got {len(args)}; give the others by name"
        )
    given: Any = dict(zip(_BY_POSITION, args, strict=False))
    if twice := [name for name in given if name in options]:
        raise TypeError(
            f"{function} got {', '.join(twice)} twice, by position and by name; give it once"
        )
    return cast("Options", {**given, **options})


def takes_attention_options(function: _Function) -> _Function:
    """Add the options of ``make_problem`` to the signature of a function with ``*args, **options``.

    The names, order, defaults and descriptions of options are thus defined once.  In the docstring, the
    entries of ``make_problem`` replace ``args`` and ``options``.

    Args:
        function: A function whose body passes ``args`` and ``options`` to :func:`by_name`.
    """
    own = inspect.signature(function)
    lead = [p for p in own.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    last = [p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*lead, *_OPTIONS, *last])  # type: ignore[attr-defined]
    function.__doc__ = _with_options(function.__doc__)
    return function


def _unknown(function: str, names: set[str]) -> TypeError:
    """Return the error for unknown options."""
    hints = []
    for name in sorted(names):
        close = get_close_matches(name, _NAMES, n=1)
        hints.append(f"{name!r}" + (f" (did you mean {close[0]}?)" if close else ""))
    every = ", ".join(option.name for option in _OPTIONS)
    return TypeError(f"{function} has no option {', '.join(hints)}; its options are {every}")


def _with_options(doc: str | None) -> str | None:
    """Return a docstring with the options of ``make_problem`` in place of ``args`` and ``options``."""
    if doc is None or make_problem.__doc__ is None:  # python -OO
        return doc
    before, entries, after = _arguments(doc)
    _, all_entries, _ = _arguments(make_problem.__doc__)
    lines = [*before]
    for name, entry in entries.items():
        if name == "args":
            lines += [line for option in _OPTIONS for line in all_entries[option.name]]
        elif name != "options":
            lines += entry
    return "\n".join([*lines, *after])


def _arguments(doc: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Split a docstring into the lines before the arguments, those of each argument, and the rest."""
    lines = inspect.cleandoc(doc).split("\n")
    first = lines.index("Args:") + 1
    last = lines.index("", first)
    entries: dict[str, list[str]] = {}
    entry: list[str] = []
    for line in lines[first:last]:
        if not line.startswith(" " * 8):  # else the entry continues
            entry = entries[line.split(":")[0].strip()] = []
        entry.append(line)
    return lines[:first], entries, lines[last:]
