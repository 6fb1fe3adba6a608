"""Attention as an implementation of the flash backend of PyTorch's ``scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

import kernels

#: The name to pass to ``torch.nn.attention.activate_flash_attention_impl``.
NAME = "minitorch"


class _Handle:
    """What PyTorch keeps while the implementation is active: the replaced operators."""

    def __init__(self, library: Library):
        self._library: Library | None = library

    def remove(self) -> None:
        """Give the operators back to PyTorch."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def register_with_sdpa() -> None:
    """Register attention with PyTorch as the implementation ``"minitorch"`` of SDPA's flash backend.

    An unchanged CUDA model then uses this implementation wherever PyTorch selects the flash backend::

        register_with_sdpa()
        torch.nn.attention.activate_flash_attention_impl("minitorch")
        …
        torch.nn.attention.restore_flash_attention_impl()

    Dropout is not supported; SDPA raises an error for it while the implementation is active.

    Raises:
        RuntimeError: If this version of PyTorch has no such registry (before 2.11).
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; update "
            "it, or call kernels.interop.torch.flash_attention"
        )
    register(NAME, register_fn=_activate)


def _activate() -> _Handle:
    library = Library("aten", "IMPL", "CUDA")
    library.impl("_scaled_dot_product_flash_attention", forward, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CUDA")
    return _Handle(library)


def _check(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p or return_debug_mask:
        what = f"dropout_p={dropout_p}" if dropout_p else "return_debug_mask"
        raise RuntimeError(
            f"the implementation {NAME!r} of SDPA's flash backend does not support {what}; call "
            "kernels.interop.torch.flash_attention, which has dropout, or "
            "torch.nn.attention.restore_flash_attention_impl()"
        )


# PyTorch calls both with tensors that require grad, and records their results itself.
@torch.no_grad()
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Do what ``aten::_scaled_dot_product_flash_attention`` does.

    Returns:
        out, lse, no cumulative lengths, seq_q, seq_k, two numbers of a random generator that nothing reads,
        and an empty mask.
    """
    _check(dropout_p, return_debug_mask)
    groups = key.shape[1] != query.shape[1]
    out, lse = kernels.flash_attention_forward(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=groups
    )
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    return out, lse, None, None, *lengths, state, offset, query.new_empty(0)


@torch.no_grad()
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Do what ``aten::_scaled_dot_product_flash_attention_backward`` does; see :func:`forward`."""
    # Before them the cumulative and the maximum lengths, after them the state of a random generator.
    dropout_p, is_causal = others[4:6]
    _check(dropout_p)
    return kernels.flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
