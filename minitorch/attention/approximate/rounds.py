"""Merge attention over several sets of keys by its log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...tensor import Tensor


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return Σ_r w_r out_r with w_r = e^(lse_r) / Σ_s e^(lse_s): attention over all sets of keys together.

    A key that is in several sets counts several times.

    Args:
        parts: For each set out (…, seq, value_dim) and lse (…, seq), the log-sum-exp of its scores.

    Returns:
        (…, seq, value_dim), of the dtype of the first ``out``; 0 where every lse is minus infinity.

    Source: Kitaev, Kaiser and Levskaya, Reformer (2020), appendix A; the same merge joins the tiles of
    FlashAttention and the devices of ring attention.
    """
    if len(parts) == 1:
        return parts[0][0]
    _, weights, total = _weights([lse for _, lse in parts])
    return _combined(parts, weights, total)


def _weights(lses: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return each row's largest lse, e^(lse - largest) of each set, and their sum or 1; all (…, seq)."""
    largest = lses[0].detach()
    for lse in lses[1:]:
        largest = largest.where(lse.detach() < largest, lse.detach())
    # -inf - (-inf) would be NaN; the shift cancels, so that any finite number will do.
    shift = largest.where(largest > -math.inf, 0.0)
    weights = [(lse - shift).exp() for lse in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    return largest, weights, total + (total.detach() == 0.0)


def _combined(
    parts: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Tensor], total: Tensor
) -> Tensor:
    """Return the sum of the sets by their shares of the weights."""
    outs = [out for out, _ in parts]
    shares = [(weight / total).view(*weight.shape, 1) for weight in weights]
    result = outs[0] * shares[0]
    for out, share in zip(outs[1:], shares[1:], strict=True):
        result = result + out * share
    return result.to(outs[0].dtype)
