"""The calls that kernels and peers are compared on: each option in the words of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import BlockMask
from kernels.runtime.dtypes import rounded
from kernels.traffic.formulas import HeadShape

Bools = npt.NDArray[np.bool_]
DROPOUT, SOFTCAP, KEPT, DOCUMENTS = 0.1, 30.0, 0.9, 8
#: Of the window, to each side; of a block of the butterfly.
WINDOW, BLOCK = 256, 64


@dataclass(frozen=True)
class Case:
    """One call of self-attention.

    Attributes:
        name: In the table.
        heads: Of q, k and v.
        length: Of queries and keys.
        options: Of ``kernels.flash_attention_forward``; of masks, NumPy arrays.
        textbook: Options that say the same to the textbook, where they are faster there; None: as above.
        sums: Where packed documents begin and end, or None.
        is_causal: The peer has an option for it, too.
        dropout_p: Likewise.
        seen: Makes (length, length), True where a row sees a column, for peers who take it as a mask;
            None where the option is no such thing.
        bias: Makes what is added to the scores, (length, length) or (heads, length, length), likewise.
        visible: (row, col, table) of tensors to booleans, for FlexAttention; None: all.
        score: (torch, score, head, row, col, table) to a score, for FlexAttention; None: as it is.
        table: Array that these two read, or None.
        part: Of the scores, that counts: the work.
        foreign: Why PyTorch's scaled_dot_product_attention cannot do it, or None.
    """

    name: str
    heads: int
    length: int
    options: dict[str, Any] = field(default_factory=dict)
    textbook: dict[str, Any] | None = None
    sums: npt.NDArray[np.int64] | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    seen: Callable[[], Bools] | None = None
    bias: Callable[[], npt.NDArray[np.float32]] | None = None
    visible: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    table: Any = None
    part: float = 1.0
    foreign: str | None = None

    def options_of(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Return the options for operands of a dtype: a floating mask has it, too."""
        mask = self.options.get("attn_mask")
        if mask is None or mask.dtype == bool:
            return dict(self.options)
        return {**self.options, "attn_mask": rounded(mask, dtype)}

    def reference_options(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Return those of the first head alone in float64, the mask rounded; documents are a mask."""
        options = self.options_of(dtype) if self.textbook is None else dict(self.textbook)
        if "alibi_slopes" in options:
            options["alibi_slopes"] = options["alibi_slopes"][:1]
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype != bool:
            options["attn_mask"] = mask.astype(np.float64)
        if self.sums is not None and self.seen is not None:
            options["attn_mask"] = self.seen()
        return options


def cases(
    heads: int,
    length: int,
    window: int = WINDOW,
    block: int = BLOCK,
    document_length: int | None = None,
) -> dict[str, Case]:
    """Return all cases, by name.

    Args:
        heads: Of q, k and v.
        length: Of queries and keys.
        window: To each side.
        block: Of the butterfly.
        document_length: Of packed documents; drawn lengths when None.
    """
    rng = np.random.default_rng(2)
    rows, cols = np.arange(length)[:, None], np.arange(length)

    def pairs(lower: int, upper: int) -> float:
        return HeadShape(length, length, 1, 1, lower, upper).pairs / length**2

    mask = rng.random((length, length)) < KEPT
    bias = rng.standard_normal((length, length), dtype=np.float32)
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    drawn = np.sort(rng.choice(np.arange(1, length), min(DOCUMENTS, length) - 1, replace=False))
    cuts = drawn
    if document_length is not None:
        cuts = np.arange(document_length, length, document_length)
    sums = np.array([0, *cuts, length], np.int64)
    document = np.repeat(np.arange(len(sums) - 1), np.diff(sums))
    window = min(window, length)
    sparse = BlockMask.butterfly(length, length, block)

    def in_butterfly(row: Any, col: Any) -> Any:
        bits = (row // block) ^ (col // block)
        return (bits & (bits - 1)) == 0

    def of_same_document(row: Any, col: Any, table: Any) -> Any:
        return table[row] == table[col]

    by_head = slopes.astype(np.float32)

    def with_distance(score: Any, batch: int, head: int, row: int, col: int) -> Any:
        return score - by_head[head] * abs(row - col)

    def steepness(score: Any, batch: int, head: int, row: int, col: int) -> Any:
        return 1.0

    def distance_bias() -> npt.NDArray[np.float32]:
        distance = np.abs(rows - cols)
        return (-slopes[:, None, None] * distance).astype(np.float32)

    found = (
        Case("dense", heads, length),
        Case(
            "causal", heads, length, {"is_causal": True}, is_causal=True, part=pairs(-length, 0),
            visible=lambda row, col, table: row >= col,
        ),
        Case(
            "boolean mask", heads, length, options={"attn_mask": mask}, seen=lambda: mask,
            visible=lambda row, col, table: table[row, col], table=mask,
        ),
        Case(
            "float mask", heads, length, options={"attn_mask": bias}, bias=lambda: bias,
            score=lambda torch, score, head, row, col, table: score + table[row, col], table=bias,
        ),
        Case(
            "dropout", heads, length, options={"dropout_p": DROPOUT, "seed": 1}, dropout_p=DROPOUT,
        ),
        Case(
            "window", heads, length, {"window_size": (window, window)},
            seen=lambda: np.abs(rows - cols) <= window, part=pairs(-window, window),
            visible=lambda row, col, table: (row - col <= window) & (col - row <= window),
        ),
        Case(
            "softcap", heads, length, options={"softcap": SOFTCAP},
            score=lambda torch, score, *_: SOFTCAP * torch.tanh(score / SOFTCAP),
            foreign="has no softcap",
        ),
        Case(
            "ALiBi", heads, length, options={"alibi_slopes": slopes}, bias=distance_bias,
            score=lambda torch, score, head, row, col, table: score - table[head] * abs(row - col),
            table=by_head,
        ),
        Case(
            "ALiBi as score_mod", heads, length, options={"score_mod": (with_distance, steepness)},
            textbook={"alibi_slopes": slopes}, bias=distance_bias,
            score=lambda torch, score, head, row, col, table: score - table[head] * abs(row - col),
            table=by_head,
        ),
        Case(
            "documents", heads, length, sums=sums, seen=lambda: document[:, None] == document,
            part=float((np.diff(sums) ** 2).sum()) / length**2, visible=of_same_document, table=document,
        ),
        Case(
            "butterfly", heads, length, {"block_mask": sparse}, seen=lambda: sparse.dense()[0],
            visible=lambda row, col, table: in_butterfly(row, col), part=sparse.density,
        ),
    )  # fmt: skip
    return {case.name: case for case in found}
