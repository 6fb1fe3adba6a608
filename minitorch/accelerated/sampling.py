"""Choose tokens on a GPU, by tensor operations on all rows at once, so that logits stay there."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..functions.indexing import argsorted, gathered, inverted, table_like
from ..nn import argmax
from ..nn import max as maximum
from ..tensor import Tensor
from ..tensors.factories import from_numpy

FLOAT64 = np.dtype(np.float64)


def choose_tokens(logits: Tensor, settings: Any) -> Tensor:
    """Choose a token for each row of logits; see :func:`minitorch.models.sampling.choose_tokens`.

    Args:
        logits: (rows, n_vocab).
        settings: (4, rows, 1), (2, rows, 1) or (0, rows, 1) float64, on the host.

    Returns:
        The tokens, (rows, 1) float64; -1 for a row whose largest logit is NaN or infinite.
    """
    count, scores = logits.shape[1], logits.detach().to(FLOAT64)
    places = table_like(scores, np.arange(count, dtype=FLOAT64)[None])  # (1, n_vocab)
    if not len(settings):  # the first of the largest
        return -maximum((-places).where(argmax(scores, 1), -float(count)), 1)
    own = from_numpy(settings, logits.backend)
    largest = maximum(scores, 1)  # (rows, 1)
    probs = ((scores - largest) / own[0]).exp()
    if len(settings) > 2:
        order = argsorted(-scores, 1)  # of equal ones, the first remain
        ranked = gathered(probs, 1, order) * (places < own[2])
        before = ranked.cumsum(1, exclusive=True)  # of the tokens that are more likely
        ranked = ranked * (before < own[3] * ranked.sum(1))
        probs = gathered(ranked, 1, inverted(order))
    sums = probs.cumsum(1)
    later = (own[1] < sums / maximum(sums, 1)).sum(1)  # the chosen token and those after it
    return (count - later).where(largest - largest == 0.0, -1.0)
