"""The names and types of the options of attention, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from kernels.sparsity.block_mask import BlockMask


class Options(TypedDict, total=False):
    """Options of one attention call; :func:`kernels.make_problem` describes them and has the defaults."""

    attn_mask: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    causal_offset: int
    window_size: tuple[int, int] | None
    softcap: float
    alibi_slopes: Any
    sink: Any
    block_mask: BlockMask | None
    mask_mod: Callable[..., Any] | None
    score_mod: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]] | None
    seed: int | None
    precision: str | None
    deterministic: bool
    return_lse: bool
    rung: str


#: The options that are arrays.
ARRAYS = frozenset(("attn_mask", "alibi_slopes", "sink"))
