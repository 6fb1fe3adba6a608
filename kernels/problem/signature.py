"""The options of attention in the signatures of functions that forward them as ``*args, **options``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from kernels.problem.options import OPTIONS, TYPES, Options, text_of

_PARAMETERS = [
    inspect.Parameter(
        name,
        (
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if option.by_position
            else inspect.Parameter.KEYWORD_ONLY
        ),
        default=option.default,
        annotation=TYPES[name],
    )
    for name, option in OPTIONS.items()
]
_NAMES = frozenset(OPTIONS)
#: The options that may be given by position, as PyTorch has them.
_BY_POSITION = [name for name, option in OPTIONS.items() if option.by_position]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def by_name(function: str, args: Sequence[Any], options: Options) -> Options:
    """Return the options of a call of a function by name, given those by position and those by name.

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
    """Add the options of attention to the signature of a function with ``*args, **options``.

    The function passes ``args`` and ``options`` to :func:`by_name`.  In its docstring, the texts of
    options replace those two.  An option that it names itself, by keyword only, keeps the default and
    the text that it has there.
    """
    own = inspect.signature(function)
    lead = [p for p in own.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY}
    options = [named.pop(p.name, p) for p in _PARAMETERS]
    parameters = [*lead, *options, *named.values()]
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    if function.__doc__ is not None:  # python -OO
        function.__doc__ = _with_options(function.__doc__)
    return function


def _unknown(function: str, names: set[str]) -> TypeError:
    """Return the error for unknown options."""
    hints = []
    for name in sorted(names):
        close = get_close_matches(name, _NAMES, n=1)
        hints.append(f"{name!r}" + (f" (did you mean {close[0]}?)" if close else ""))
    return TypeError(
        f"{function} has no option {', '.join(hints)}; its options are {', '.join(OPTIONS)}"
    )


def _with_options(doc: str) -> str:
    """Return a docstring with the texts of all options in place of ``args`` and ``options``."""
    lines = inspect.cleandoc(doc).split("\n")
    first = lines.index("Args:") + 1
    last = lines.index("", first)
    entries: dict[str, list[str]] = {}
    entry: list[str] = []
    for line in lines[first:last]:
        if not line.startswith(" " * 8):  # else the entry continues
            entry = entries[line.split(":")[0].strip()] = []
        entry.append(line)
    texts = {name: entries.pop(name, None) or text_of(name) for name in OPTIONS}
    placed = {"args": [line for text in texts.values() for line in text], "options": []}
    every = [line for name, entry in entries.items() for line in placed.get(name, entry)]
    return "\n".join([*lines[:first], *every, *lines[last:]])
