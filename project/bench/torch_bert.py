"""The BERT in PyTorch, eager and padded: the same weights, the same arithmetic, PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import numpy as np

import minitorch
from bench.torch_gpt import FUSED, TorchGPT
from minitorch.models.encoder_lm import IGNORED


class TorchBERT(TorchGPT):
    """A copy of a masked language model, with its optimiser; see :class:`TorchGPT`.

    As ours, it scores the predicted positions only.
    """

    def __init__(
        self, model: minitorch.EncoderLM, device: str, lr: float, beta2: float, weight_decay: float,
        precision: str,
    ):  # fmt: skip
        super().__init__(
            model, FUSED, device, lr, beta2, weight_decay, precision, attend=self._masked
        )
        self._key_mask: Any = None

    def _masked(self, q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, self._key_mask)

    def placed(self, ids: Any, targets: Any, lengths: Any) -> tuple[tuple[Any, ...], Any]:
        """Return a batch on the device, as :meth:`step` takes it."""
        shown = (np.arange(ids.shape[1]) < lengths[:, None])[:, None, None]
        places = np.flatnonzero(targets != IGNORED)
        inputs = tuple(map(self.place, (ids, shown, places)))
        return inputs, self.place(targets.reshape(-1)[places])

    def loss(self, inputs: Any, targets: Any) -> Any:
        """Return the mean cross entropy of the predicted positions of a batch of :meth:`placed`."""
        functional = self.torch.nn.functional
        ids, self._key_mask, places = inputs
        words, positions, segments = (
            self.weights[f"{name}_embeddings.weights"] for name in ("token", "position", "segment")
        )
        x = functional.embedding(ids, words) + (positions[: ids.shape[1]] + segments[0])
        x = self._norm(x, "ln")  # (batch, seq, width)
        for name in self.layers:
            x = self._norm(x + self._attend(x, f"{name}.attention"), f"{name}.ln_1")
            middle = functional.gelu(self._linear(x, f"{name}.ff.linear_in"), approximate="tanh")
            x = self._norm(x + self._linear(middle, f"{name}.ff.linear_out"), f"{name}.ln_2")
        rows = functional.gelu(self._linear(x.flatten(0, 1)[places], "head"), approximate="tanh")
        scores = functional.linear(self._norm(rows, "head_ln"), words, self.weights["head_bias"])
        return functional.cross_entropy(scores, targets)
