"""Performer: random features whose products estimate the softmax without bias (FAVOR+)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kernels.common.arguments import as_host_array, number, whole
from kernels.runtime.dtypes import BFLOAT16

from ...functions.indexing import ExpDifference
from ...module import Module
from ...nn import max as max_over
from ...tensor import Tensor
from .kernel_sums import attend_by_features
from .support import (
    Masked,
    check_operands,
    check_options,
    check_same_length,
    kept_keys,
    shared_constant,
    widened,
)

#: Added to the features of keys in the causal form.  Their square, in the gradient, does not underflow.
LEAST, LEAST_OF_DOUBLE = 2.0**-60, 2.0**-500


@lru_cache(maxsize=64)
def orthogonal_features(count: int, head_dim: int, seed: int) -> Any:
    """Draw Gaussian vectors that are orthogonal within each block of head_dim vectors.

    Args:
        count: Number of vectors; more than head_dim of them are drawn in several independent blocks.
        head_dim: Size of a vector.
        seed: Equal seeds draw equal vectors.

    Returns:
        (count, head_dim), float64, read-only.

    Source: Choromanski et al., Rethinking attention with Performers (2021), section 2.4.
    """
    random = np.random.default_rng([seed, count, head_dim])
    blocks = []
    for first in range(0, count, head_dim):
        # Q of a Gaussian matrix is uniform among orthogonal ones once the diagonal of R is positive.
        basis, upper = np.linalg.qr(random.standard_normal((head_dim, head_dim)))
        basis = (basis * np.sign(np.diag(upper))).T
        norms = np.linalg.norm(random.standard_normal((head_dim, head_dim)), axis=1)
        blocks.append((basis * norms[:, None])[: count - first])
    features = np.concatenate(blocks)
    features.setflags(write=False)
    return features


def _checked(features: Any, head_dim: int) -> Any:
    """Return the features of a caller as an array.

    Raises:
        ValueError: If their shape does not fit, or one of them is NaN or infinite.
    """
    features = as_host_array("features", features)
    if features.ndim != 2 or features.shape[1] != head_dim or len(features) == 0:
        raise ValueError(
            f"features must have shape (count, {head_dim}), got {features.shape}; see orthogonal_features"
        )
    if not np.isfinite(features).all():
        raise ValueError("features must be finite, got NaN or infinity; see orthogonal_features")
    return features


def performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_mask: Any = None,
    num_features: int = 256,
    features: Any = None,
    seed: int = 0,
    chunk: int = 64,
) -> Tensor:
    """Approximate softmax attention by positive random features, in time and memory linear in the sequence.

    o_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j)) with φ(x) = exp(W y - ‖y‖² / 2) / √m and
    y = √scale x: the mean of φ(q)ᵀφ(k) over W is e^(scale q·k).  The error falls as 1 / √m.

    Args:
        q: (…, heads, seq_q, head_dim).
        k: (…, heads, seq_k, head_dim).
        v: (…, heads, seq_k, value_dim).
        attn_mask: Not supported.
        dropout_p: Not supported: there are no probabilities to drop.
        is_causal: Position i attends only to positions j <= i; seq_k must be seq_q.
        scale: Factor of the scores, positive; 1 / sqrt(head_dim) when None.
        key_mask: (…, seq_k); False or 0 masks a key.
        num_features: m, if ``features`` is None.
        features: W (m, head_dim), an array; None draws :func:`orthogonal_features`.
        seed: Seed of that draw.
        chunk: Number of positions in a chunk of the causal scan.

    Returns:
        (…, heads, seq_q, value_dim).

    Raises:
        TypeError: If an operand is not a tensor, or the operands differ in dtype or backend.
        ValueError: If a shape does not fit, or for an option that the method does not support.

    Features of keys are scaled by their maximum over the whole sequence. In the causal form, this
    maximum may come from a later key and be so large that the features of all visible keys
    underflow. If scores differ by more than 40 in float32, or 350 in float64, early positions tend
    to the mean of their visible values.

    Source: Choromanski et al., Rethinking attention with Performers (2021), lemma 1.
    """
    check_options("performer", Masked(attn_mask, dropout_p, is_causal, scale))
    check_operands("performer", q, k, v)
    check_same_length("performer", q, k, is_causal)
    head_dim = q.shape[-1]
    factor = head_dim**-0.5 if scale is None else number("scale", scale)
    if not 0.0 < factor < np.inf:
        raise ValueError(
            f"performer attention needs a positive, finite scale, got {factor}; for a negative one negate q"
        )
    if features is None:
        count = whole("num_features", num_features, 1)
        features = orthogonal_features(count, head_dim, whole("seed", seed, 0))
    else:
        features = _checked(features, head_dim)
    weights = shared_constant(q, features.T)  # (head_dim, m)
    y_q, y_k = (widened(t) * factor**0.5 for t in (q, k))
    log_k = y_k @ weights - (y_k * y_k).sum(-1) * 0.5  # (…, seq_k, m)
    # Two shifts that cancel keep every exponential at 1 or below: one for each feature moves from the keys
    # to the queries, one for each query is in numerator and denominator, and so are e^(-‖y_q‖² / 2) and
    # 1 / √m, which are left out.
    shift = max_over(log_k.detach(), -2)  # (…, 1, m)
    log_q = y_q @ weights + shift  # (…, seq_q, m)
    # Features are the largest tensors here.  Their products round to bfloat16 in any case; in float16 a sum
    # could overflow.
    v = v if v.dtype == BFLOAT16 else widened(v)
    phi_k = ExpDifference.apply(log_k, shift, v.dtype)
    phi_q = ExpDifference.apply(log_q, max_over(log_q.detach(), -1), v.dtype)
    if is_causal:  # where the features of all visible keys underflow, the weights become equal
        phi_k = phi_k + (LEAST_OF_DOUBLE if v.dtype == np.float64 else LEAST)
    keep = kept_keys(key_mask, k, v.dtype)
    phi_k = phi_k if keep is None else phi_k * keep
    size = whole("chunk", chunk, 1)
    return attend_by_features(phi_q, phi_k, v, is_causal, size).to(q.dtype)


class Performer(Module):
    """Performer attention that draws new features during training.

    New features from time to time keep a model from adapting to the errors of one draw.

    Args:
        num_features: See :func:`performer`.
        seed: Seed of the first draw, from which the later ones follow.
        redraw_every: Number of calls in training between two draws; 0 keeps the first.
        chunk: See :func:`performer`.
    """

    def __init__(
        self, num_features: int = 256, seed: int = 0, redraw_every: int = 1000, chunk: int = 64
    ):
        super().__init__()
        self.num_features = whole("num_features", num_features, 1)
        self.seed, self.redraw_every = (
            whole("seed", seed, 0),
            whole("redraw_every", redraw_every, 0),
        )
        self.chunk = whole("chunk", chunk, 1)
        self.calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Compute attention; see :func:`performer`."""
        draw = self.calls // self.redraw_every if self.redraw_every else 0
        self.calls += self.training
        return performer(
            q, k, v, num_features=self.num_features, seed=self.seed + draw, chunk=self.chunk, **options
        )  # fmt: skip
