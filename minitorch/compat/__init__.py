"""Switches for behaviour of the published course that differs from this library's."""

from __future__ import annotations

from minitorch.tensors.factories import set_leaves_by_default


class published:
    """Make tensors as the published course does: ``tensor`` and ``rand`` return leaves by default.

    A leaf collects its gradient in ``backward``.  Here both factories return constants unless a call
    passes ``requires_grad=True``; scripts written for the published course do not pass it.  An explicit
    ``requires_grad`` always takes precedence, and integer tensors stay constants.

    Call it once at the top of a script, or use it in a ``with`` statement, which restores the previous
    setting at its end.  It applies to all threads.  The environment variable ``MINITORCH_PUBLISHED=1``
    switches it on for a whole run.

    Args:
        on: False switches back to this library's default.

    Example:
        >>> minitorch.compat.published()
        >>> x = minitorch.tensor([1.0, 2.0])
        >>> (x * x).sum().backward()
        >>> x.grad
        [2.00 4.00]
    """

    def __init__(self, on: bool = True):
        self._before = set_leaves_by_default(on)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        set_leaves_by_default(self._before)
