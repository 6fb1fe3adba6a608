"""The options of attention in every function that hands them on: shown by ``help``, checked by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any

from kernels.problem.question import make_problem

_OPTIONS = list(inspect.signature(make_problem).parameters.values())[3:]


def by_name(args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return options given by position, in the order of ``make_problem``, and by name as one record."""
    if not args:
        return options
    return {**{p.name: arg for p, arg in zip(_OPTIONS, args, strict=False)}, **options}


def takes_attention_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that ends in ``*args, **options`` show and check those of ``make_problem``.

    Their names, order, defaults and meanings thus stand once, and ``help`` and editors see them
    everywhere.  In the docstring the entries of ``make_problem`` take the place of ``args`` and
    ``options``.

    Args:
        function: Hands both on to :func:`kernels.problem.question.make_problem`.

    Returns:
        The function; a name that is no option, or too many of them by position, is a TypeError that
        names what there is.
    """
    own = inspect.signature(function)
    lead = [p for p in own.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    last = [p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY]
    named = [p for p in _OPTIONS if p.kind is p.KEYWORD_ONLY]
    plain = [p for p in _OPTIONS if p.kind is p.POSITIONAL_OR_KEYWORD]
    operands, by_position = [p.name for p in lead], [p.name for p in plain]
    all_names = by_position + [p.name for p in (*named, *last)]
    known = frozenset(operands + all_names)

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        if not known.issuperset(options):
            raise _unknown(function.__name__, set(options) - known, all_names)
        if len(args) > len(operands):  # options by position, which few calls have
            given = by_position[: len(args) - len(operands)]
            if len(args) > len(operands) + len(by_position):
                raise _too_many(function.__name__, operands, by_position, all_names, len(args))
            if not options.keys().isdisjoint(given):
                twice = ", ".join(name for name in given if name in options)
                raise TypeError(
                    f"{function.__name__} got {twice} twice, by position and by name; give it once"
                )
        return function(*args, **options)

    checked.__signature__ = own.replace(parameters=[*lead, *plain, *named, *last])  # type: ignore[attr-defined]
    checked.__doc__ = _with_options(function.__doc__)
    return checked


def _unknown(function: str, names: set[str], options: Sequence[str]) -> TypeError:
    """Return the error for names that are no options."""
    hints = []
    for name in sorted(names):
        close = get_close_matches(name, options, n=1)
        hints.append(f"{name!r}" + (f" (did you mean {close[0]}?)" if close else ""))
    return TypeError(
        f"{function} has no option {', '.join(hints)}; its options are {', '.join(options)}"
    )


def _too_many(
    function: str, operands: Sequence[str], plain: Sequence[str], options: Sequence[str], given: int
) -> TypeError:
    """Return the error for more positional arguments than there are names for."""
    method = operands[0] == "self"
    names = [*operands[method:], *plain]
    return TypeError(
        f"{function} takes at most {len(names)} arguments by position ({', '.join(names)}), got "
        f"{given - method}; give the others by name: {', '.join(options[len(plain) :])}"
    )


def _with_options(doc: str | None) -> str | None:
    """Return a docstring in which ``args`` and ``options`` are the options of ``make_problem``."""
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
    """Split a docstring: what stands before the arguments, the lines of each, what comes after."""
    lines = inspect.cleandoc(doc).split("\n")
    first = lines.index("Args:") + 1
    last = lines.index("", first)
    entries: dict[str, list[str]] = {}
    entry: list[str] = []
    for line in lines[first:last]:
        if not line.startswith(" " * 8):  # else the entry goes on
            entry = entries[line.split(":")[0].strip()] = []
        entry.append(line)
    return lines[:first], entries, lines[last:]
