"""Numba-cuda's inliner, told to share what it copies.

Where numba-cuda inlines a function it copies the function's blocks one by one, and each copy takes the
whole scope along: all variables of the function.  Kernels here are made of hundreds of small functions,
and half of the time to compile a large one went there.  In a function the blocks share their variables;
here their copies do, too.  The code that comes out is the same.
"""

from __future__ import annotations

import copy
from typing import Any

from kernels.runtime.targets import cuda


class Copies:
    """Stands in the inliner for the module ``copy``.

    Args:
        block: The class of a function's blocks.
    """

    def __init__(self, block: type):
        self._block = block
        self._scope: Any = None
        self._memo: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(copy, name)

    def deepcopy(self, x: Any, memo: dict[int, Any] | None = None) -> Any:
        """Return a deep copy; blocks of one scope that are copied one after another share theirs."""
        if memo is not None or not isinstance(x, self._block):
            return copy.deepcopy(x, memo)
        block: Any = x
        if block.scope is not self._scope or id(x) in self._memo:  # another function, or it again
            self._scope, self._memo = block.scope, {}
        return copy.deepcopy(x, self._memo)


def share_copies() -> None:
    """Let numba-cuda's inliner copy the variables of a function once; other owners' is left as it is."""
    core = getattr(cuda, "core", None)
    inliner: Any = getattr(core, "inline_closurecall", None)
    if getattr(inliner, "copy", None) is copy and hasattr(core, "ir"):
        inliner.copy = Copies(cuda.core.ir.Block)
