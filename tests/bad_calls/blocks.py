"""Wrong calls of block masks and of the dropout bits: ``BlockMask`` and its builders, ``dropout_mask``."""

from __future__ import annotations

import numpy as np

import kernels
from kernels import BlockMask

# Wrong types are what is tested.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

BLOCKS = [
    (lambda o: BlockMask([[3]], 5, 5), ValueError, "0 hidden, 1 full", "to 3"),
    (lambda o: BlockMask([[1, 1]], 5, 5), ValueError, "(heads, 1, 1)", "(1, 1, 2)"),
    (lambda o: BlockMask([[1]], 5, -5), ValueError, "seq_k must be 0 or more", "-5"),
    (lambda o: BlockMask([[1]], 5, 5, 17), ValueError, "multiple of 16", "17", "(32, 32)"),
    (lambda o: BlockMask([[1]], 5, 5, (16,) * 3), TypeError, "(rows, columns)", "pass 64"),
    (lambda o: BlockMask([[2]], 5, 5, 16, np.ones((1, 16, 16))), TypeError, "boolean", "float64"),
    (lambda o: BlockMask([[2]], 5, 5, 16, np.ones((1, 4, 4), bool)), ValueError, "(count, 16, 16)"),
    (lambda o: BlockMask.causal(10**9, 10**9), ValueError, "blocks of (64, 64)", "larger blocks"),
    (lambda o: BlockMask.stack([1]), TypeError, "list of BlockMask", "1 (int)"),
    (lambda o: BlockMask.stack(None), TypeError, "masks must be a list", "None"),
    (lambda o: BlockMask.stack([BlockMask.causal(5, 5), BlockMask.causal(6, 5)]), ValueError, "seq_q=6"),
    (lambda o: BlockMask.causal(5, 5) & 1, TypeError, "unsupported", "'int'"),
    (lambda o: BlockMask.causal(5, 5) & BlockMask.causal(6, 5), ValueError, "same lengths"),
    (lambda o: BlockMask.bigbird(5, 5, window=2), ValueError, "must be odd", "got 2", "use 3"),
    (lambda o: BlockMask.bigbird(5, 5, heads=2**63), ValueError, f"heads={2**63}", "fewer heads"),
    (lambda o: BlockMask.local_global(5, 5, 1, global_tokens=[9]), ValueError, "0 to 4", "9 to 9"),
    (lambda o: BlockMask.from_dense(np.ones((5, 5))), TypeError, "boolean", "float64", "mask != 0"),
    (lambda o: BlockMask.from_dense(o.mask[0]), ValueError, "(seq_q, seq_k)", "(5,)"),
    (lambda o: BlockMask.from_mask_mod(3, 5, 5), TypeError, "a function", "got int"),
    (lambda o: BlockMask.from_mask_mod(lambda row: True, 5, 5), TypeError, "(batch, head, row, col)"),
    (lambda o: BlockMask.causal(5, 5).picture(head=2), ValueError, "0 to 0", "got 2"),
    (lambda o: BlockMask.causal(5, 5).visible(0, 9, 0, 5), ValueError, "the mask's 5", "fewer"),
    (lambda o: kernels.dropout_mask((3,), 0.1, 1), ValueError, "seq_k", "(3,)"),
    (lambda o: kernels.dropout_mask(3, 0.1, 1), TypeError, "seq_k", "pass a tuple"),
    (lambda o: kernels.dropout_mask((3, 2), "a", 1), TypeError, "a number", "'a'"),
    (lambda o: kernels.dropout_mask((3, 2), 0.1, None), ValueError, "needs a seed"),
    (lambda o: BlockMask([[-1]], 5, 5), ValueError, "0 hidden, 1 full", "from -1"),
    (lambda o: BlockMask.from_dense(np.ones((1, 1, 4, 4), bool)), ValueError, "batch", "attn_mask"),
    (lambda o: BlockMask.bigbird(5, 5, heads=2) | BlockMask.bigbird(5, 5, heads=3), ValueError,
     "2 and 3 heads"),
]  # fmt: skip
