"""Choose the next token of a text from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import not_negative, number, short, whole

from ..backends.operations import operation  # beyond module 5
from ..layers.indices import integer_array
from ..tensor import Tensor
from ..tensors.factories import from_numpy

Array = npt.NDArray[np.float64]


def prompt_ids(prompt: Any, n_vocab: int) -> list[int]:
    """Return a prompt as a list of token ids.

    Raises:
        TypeError: If it holds anything but whole numbers.
        ValueError: If it is empty, is not one-dimensional, or has an id out of range.
    """
    ids = integer_array(prompt, n_vocab, "tokens of the prompt")
    if ids.ndim != 1:
        raise ValueError(
            f"the prompt must be one list of token ids, got shape {ids.shape}; pass one text"
        )
    if len(ids) == 0:
        raise ValueError("the prompt must hold at least one token; pass a space, or a line break")
    return ids.tolist()


class Sampler:
    """The settings and the stream of random numbers by which the tokens of a text are drawn.

    Args:
        temperature: Divisor of the logits before sampling; 0 takes the most likely token.
        top_k: Sample among this many of the most likely tokens; None for all.
        top_p: Sample among the fewest most likely tokens whose probabilities, at this temperature and among
            the ``top_k``, sum to at least this.
        seed: Seed of the sampling; None draws a random one.

    Attributes:
        is_greedy: Whether the most likely token is always taken.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the temperature or the seed is negative, top_k below 1, or top_p not in (0, 1].
    """

    def __init__(
        self, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0,
        seed: int | None = None,
    ):  # fmt: skip
        temperature = not_negative(
            "temperature", temperature, hint="; 0 takes the most likely token"
        )
        most = np.inf if top_k is None else whole("top_k", top_k, 1)
        if not 0.0 < number("top_p", top_p) <= 1.0:
            raise ValueError(
                f"top_p must be above 0 and at most 1, got {short(top_p)}; 1 keeps all tokens"
            )
        self.is_greedy = temperature == 0.0
        self._options = (1.0, 1, 1.0) if self.is_greedy else (temperature, most, top_p)
        self._rng = np.random.default_rng(None if seed is None else whole("seed", seed, 0))
        self._uniform = self._rng.random()

    @property
    def settings(self) -> tuple[float, ...]:
        """The settings of the next token; see :func:`choose_tokens`."""
        temperature, top_k, top_p = self._options
        return temperature, self._uniform, top_k, top_p

    def accept(self, token: float) -> int:
        """Return a chosen token, and draw the random number of the one after it.

        Raises:
            ValueError: If the logits were NaN or infinite.
        """
        self._uniform = self._rng.random()
        if token < 0:
            raise ValueError(
                "the logits of the next token contain NaN or infinity; check the weights of the model"
            )
        return int(token)


def settings_of(samplers: Sequence[Sampler]) -> Array:
    """Return the settings of the next tokens of several texts for :func:`choose_tokens`."""
    if all(sampler.is_greedy for sampler in samplers):
        return np.empty((0, len(samplers), 1))
    found = np.array([sampler.settings for sampler in samplers]).T[..., None]  # (4, rows, 1)
    keeps_all = (found[2] == np.inf).all() and (found[3] == 1.0).all()
    return found[:2].copy() if keeps_all else found.copy()


@operation  # beyond module 5
def choose_tokens(logits: Tensor, settings: Any) -> Tensor:
    """Choose a token for each row of logits.

    The interval [0, 1) is divided among the tokens that remain after top-k and top-p, in the order of their
    ids and in proportion to their probabilities.  The random number lies in the part of the chosen token.

    Args:
        logits: (rows, n_vocab).
        settings: Temperature, random number, top-k and top-p of each row, (4, rows, 1) float64 on the host.
            With shape (2, rows, 1), top-k and top-p are left out, and all tokens remain.  With shape
            (0, rows, 1), the most likely token is chosen.

    Returns:
        The tokens, (rows, 1) float64; -1 for a row whose largest logit is NaN or infinite.

    Source: Fan et al. (2018), Hierarchical neural story generation (top-k); Holtzman et al. (2020), The
    curious case of neural text degeneration (top-p).
    """
    rows = logits.to_numpy().astype(np.float64)
    found = [_choose(row, *settings[:, i, 0].tolist()) for i, row in enumerate(rows)]
    return from_numpy(np.array(found, np.float64)[:, None], logits.backend)


def _choose(
    logits: Array, temperature: float = 0.0, uniform: float = 0.0, top_k: float = np.inf,
    top_p: float = 1.0,
) -> int:  # fmt: skip
    """Choose a token by (n_vocab,) logits."""
    if temperature == 0.0 or top_k == 1:
        return int(logits.argmax())
    largest, ids = logits.max(), np.arange(len(logits))
    if not np.isfinite(largest):
        return -1
    if top_k < len(logits):
        k = int(top_k)
        least = np.partition(logits, -k)[-k]
        ids = np.flatnonzero(logits >= least)
        ties = np.flatnonzero(logits[ids] == least)
        ids = np.delete(ids, ties[len(ties) - (len(ids) - k) :])  # of equal ones, the first remain
    scores = logits[ids]  # (n_vocab or top_k,)
    probs = np.exp((scores - largest) / temperature)
    if top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        ranked = probs[order]
        before = np.cumsum(ranked) - ranked  # of the tokens that are more likely
        probs[order[before >= top_p * ranked.sum()]] = 0.0
    sums = np.cumsum(probs)
    return int(ids[np.searchsorted(sums / sums[-1], uniform, side="right")])
