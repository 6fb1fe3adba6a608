"""Block masks of FlexAttention as those of the kernels, and back."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kernels.common.geometry import ceil_div
from kernels.sparsity.block_mask import FULL, PARTIAL, BlockMask

#: Number of partial blocks whose elements are evaluated at once.
_AT_ONCE = 64
_KNOWN: WeakKeyDictionary[Any, BlockMask] = WeakKeyDictionary()


def block_mask_from_flex(mask: Any) -> BlockMask:
    """Convert a block mask of FlexAttention; its ``mask_mod`` is evaluated in its partial blocks.

    Converting the same object again returns the first result.

    Args:
        mask: A ``torch.nn.attention.flex_attention.BlockMask`` with one batch, on any device, with
            blocks whose sides are multiples of 16.

    Returns:
        A mask with the same blocks, for the option ``block_mask`` of every function of attention.

    Raises:
        ValueError: If its batches have masks of their own, or the size of its blocks is not supported.
    """
    if mask not in _KNOWN:
        _KNOWN[mask] = _converted(mask)
    return _KNOWN[mask]


def block_mask_to_flex(mask: BlockMask, device: Any = "cpu") -> Any:
    """Convert a block mask to one of FlexAttention.

    Args:
        mask: The mask.
        device: The device of the operands of FlexAttention.

    Returns:
        A ``torch.nn.attention.flex_attention.BlockMask`` with one batch and the heads of the mask.
    """
    # It imports the compiler, which takes seconds.
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    states = torch.tensor(mask.states, device=device)  # (heads, query blocks, key blocks)
    hidden = np.zeros((1, mask.block_q, mask.block_k), bool)
    patterns = torch.tensor(np.concatenate([mask.patterns, hidden]), device=device)

    def shows(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        head = head if mask.heads > 1 else head * 0
        state = states[head, row // mask.block_q, col // mask.block_k]
        number = torch.where(state < PARTIAL, len(patterns) - 1, state - PARTIAL)
        return (state == FULL) | patterns[number, row % mask.block_q, col % mask.block_k]

    lists = []
    for chosen in (states >= PARTIAL, states == FULL):
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        lists += [x[None].int() for x in (chosen.sum(-1), order)]
    size, lengths = (mask.block_q, mask.block_k), (mask.seq_q, mask.seq_k)
    return FlexMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=shows, seq_lengths=lengths)


def _converted(mask: Any) -> BlockMask:
    if mask.kv_num_blocks.shape[0] != 1:
        raise ValueError(
            f"block_mask has {mask.kv_num_blocks.shape[0]} batches, but one pattern must serve all; build "
            "it with B=None, or pass a mask_mod, or a boolean attn_mask"
        )
    seq, size = tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE)
    shape = mask.kv_num_blocks.shape[1], *map(ceil_div, seq, size)
    states = np.zeros(shape, np.int32)
    states[_listed(mask.full_kv_num_blocks, mask.full_kv_indices, shape)] = FULL
    partial = _listed(mask.kv_num_blocks, mask.kv_indices, shape)
    places = torch.from_numpy(np.argwhere(partial)).to(mask.kv_indices.device)  # (count, 3)
    states[partial] = PARTIAL + np.arange(len(places))
    if not len(places):
        return BlockMask(states, *seq, size)
    patterns = [_elements(mask.mask_mod, x, seq, size) for x in places.split(_AT_ONCE)]
    return BlockMask(states, *seq, size, torch.cat(patterns).cpu().numpy())


def _listed(counts: Tensor | None, indices: Tensor | None, shape: tuple[int, ...]) -> Any:
    """Return the blocks of lists, of the shape of the states, bool."""
    found = np.zeros(shape, bool)
    if counts is not None and indices is not None:
        is_used = torch.arange(indices.shape[-1], device=counts.device) < counts[0, ..., None]
        heads, rows, places = (x.cpu().numpy() for x in is_used.nonzero(as_tuple=True))
        found[heads, rows, indices[0].cpu().numpy()[heads, rows, places]] = True
    return found


def _elements(mod: Any, blocks: Tensor, seq: Any, size: tuple[int, ...]) -> Tensor:
    """Return the elements of blocks (head, row, column), as (count, block_q, block_k) bool."""
    head, *firsts = blocks.T[..., None, None]
    # Nothing reads an element beyond the last row or column; an index there could be out of bounds.
    row, col = (
        (first * n + torch.arange(n, device=blocks.device)).clamp(max=most - 1)
        for first, n, most in zip(firsts, size, seq, strict=True)
    )
    shape = len(blocks), *size
    places = [x.expand(shape).flatten() for x in (head * 0, head, row.mT, col)]
    return torch.vmap(mod)(*places).view(shape)
