"""Choose the next token of a text from its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import not_negative, number, short, whole

from ..layers.indices import integer_array

Logits = npt.NDArray[np.float64]


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


def make_sampler(
    temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, seed: int | None = None
) -> Callable[[Logits], int]:
    """Return a function that draws a token from (n_vocab,) logits.

    Args:
        temperature: Divisor of the logits before sampling; 0 takes the most likely token.
        top_k: Sample among this many of the most likely tokens; None for all.
        top_p: Sample among the fewest most likely tokens whose probabilities, at this temperature and among
            the ``top_k``, sum to at least this.
        seed: Seed of the sampling; None draws a random one.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the temperature or the seed is negative, top_k below 1, or top_p not in (0, 1].

    Source: Fan et al. (2018), Hierarchical neural story generation (top-k); Holtzman et al. (2020), The
    curious case of neural text degeneration (top-p).
    """
    temperature = not_negative("temperature", temperature, hint="; 0 takes the most likely token")
    if top_k is not None:
        whole("top_k", top_k, 1)
    if not 0.0 < number("top_p", top_p) <= 1.0:
        raise ValueError(
            f"top_p must be above 0 and at most 1, got {short(top_p)}; 1 keeps all tokens"
        )
    rng = np.random.default_rng(None if seed is None else whole("seed", seed, 0))

    def sample(logits: Logits) -> int:
        if temperature == 0:
            return int(logits.argmax())
        ids = np.arange(len(logits))
        if top_k is not None and top_k < len(logits):
            ids = np.sort(np.argpartition(logits, -top_k)[-top_k:])
        scores = logits[ids]  # (n_vocab or top_k,)
        probs = np.exp((scores - scores.max()) / temperature)
        probs /= probs.sum()
        if top_p < 1.0:
            order = np.argsort(-scores, kind="stable")
            before = np.cumsum(probs[order]) - probs[order]  # of the tokens that are more likely
            probs[order[before >= top_p]] = 0.0
            probs /= probs.sum()
        return int(ids[rng.choice(len(ids), p=probs)])

    return sample
