"""A transformer encoder that classifies sequences, or pairs of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array, shape_of, shown, whole
from kernels.cuda.backend import computed
from kernels.runtime.dtypes import acc_dtype

from ..backends.matmul_precision import in_own_precision
from ..functions.indexing import constant_like
from ..layers.indices import integer_array, kept_range
from ..layers.linear_cross_entropy import linear_cross_entropy
from ..module import Module
from ..modules_basic import Dropout, Embedding, Linear, lookup
from ..scalars.modes import no_grad
from ..tensor import Tensor
from ..tensors.joining import cat
from ..training.recompute import checkpoint
from ..transformer import TransformerLayer
from .config import Config, configured
from .evaluation import evaluating
from .positions import grid_sines, packed_positions

#: Standard deviation of the initial embeddings.  With 0.1, exact attention learns ListOps later.
EMBEDDING_STD = 0.5


class SequenceClassifier(Module):
    """A bidirectional transformer encoder with a linear head on the mean of its outputs.

    The model consists of token and position embeddings, ``n_layer`` transformer layers, a layer
    norm, the mean over positions that are not padding, and a linear layer. With ``documents=2``,
    the same encoder processes two documents, and the input of the head is [u, v, u ⊙ v, abs(u - v)]
    for their means u and v.

    Sequences of unequal length may be packed: pass the ids of all sequences, one after the other,
    as (total,), and their ``lengths``. No computation is then spent on padding. Packing needs flash
    attention.

    Further options are those of :class:`minitorch.Config`; the layers are always bidirectional.

    Args:
        n_classes: Number of classes.
        pad_id: Token that pads shorter sequences.  It is masked as a key and left out of the mean.
            None if every token counts, as for pixels.
        documents: Number of documents per example: 1, or 2 for pairs.
        side: Side of the square images whose pixels are the tokens, row by row. The position
            embeddings are then initialised with sines of rows and columns instead of random
            numbers. None for sequences.

    Raises:
        ValueError: If there are neither one nor two documents, ``side`` squared is not ``n_positions``, and
            as for the Config.

    Source: the encoder of the Long-Range Arena (Tay et al., 2021), and its two-tower form for Retrieval.
    """

    @configured(
        "n_vocab n_embd n_head n_positions n_classes", "p_dropout",
        "n_layer middle_dim attention attention_dropout attention_options ln_eps recompute backend dtype "
        "precision", n_layer=2, middle_dim=128,
    )  # fmt: skip
    def __init__(
        self, config: Config, n_classes: int, pad_id: int | None = None, documents: int = 1,
        side: int | None = None,
    ):  # fmt: skip
        super().__init__()
        c = replace(config, causal=False)
        self.precision, self.recompute = c.policy, c.recompute
        if documents not in (1, 2):
            raise ValueError(
                f"documents must be 1, or 2 to classify pairs of documents, got {shown(documents)}"
            )
        self.n_vocab, self.n_embd, self.n_positions = c.n_vocab, c.n_embd, c.n_positions
        self.n_classes, self.pad_id, self.documents = (
            whole("n_classes", n_classes, 1),
            pad_id,
            documents,
        )
        made = c.n_embd, c.backend, c.dtype, EMBEDDING_STD
        self.token_embeddings = Embedding(c.n_vocab, *made)
        self.position_embeddings = Embedding(c.n_positions, *made)
        if side is not None:
            if whole("side", side, 1) ** 2 != c.n_positions:
                raise ValueError(
                    f"an image with a side of {side} has {side**2} pixels, and n_positions is "
                    f"{c.n_positions}; make them equal"
                )
            begin = 2.0**0.5 * EMBEDDING_STD * grid_sines(side, c.n_embd)
            positions = self.position_embeddings.weights
            positions.update(constant_like(positions.value, begin).to(positions.value.dtype))
        self.layer_names = [f"t_layer_{i + 1}" for i in range(c.n_layer)]
        for name in self.layer_names:
            setattr(self, name, TransformerLayer(c))
        self.dropout = Dropout(c.p_dropout)
        self.ln = c.make_norm()
        features = c.n_embd if documents == 1 else 4 * c.n_embd
        self.head = Linear(features, n_classes, True, c.backend, c.dtype)

    @in_own_precision
    def forward(self, idx: Any, lengths: Any = None) -> Tensor:
        """Return the logits of the classes, (batch, n_classes).

        Args:
            idx: Token ids, (batch, seq), or (batch, 2, seq) for pairs; seq <= n_positions.  With
                ``lengths``, (total,).
            lengths: Number of tokens of each packed sequence, (batch,), an integer array.

        Raises:
            ValueError: If the shape does not fit.
        """
        return self.head(self.features(idx, lengths))

    @in_own_precision
    def encode(self, idx: Any, lengths: Any = None) -> Tensor:
        """Return the mean of the encoder's outputs over the tokens of each sequence, (batch, n_embd).

        Args:
            idx: Token ids, (batch, seq), or (total,) with ``lengths``; the mean of a sequence of padding
                alone is 0.
            lengths: As for :meth:`forward`.

        Raises:
            ValueError: If ids without lengths do not have two dimensions, a sequence is empty or too long,
                or the lengths do not sum to total.
        """
        if lengths is not None:
            lengths = as_host_array("lengths", lengths)
            x, _ = self.read_packed(idx, lengths)  # (total, n_embd)
            owners = np.repeat(np.arange(len(lengths)), lengths)
            shares = (np.arange(len(lengths))[:, None] == owners) / lengths[:, None]
            return constant_like(x, shares).to(x.dtype) @ x
        shape = shape_of("token ids", idx)
        if len(shape) != 2 or 0 in shape or shape[1] > self.n_positions:
            raise ValueError(
                "a sequence classifier reads ids of shape (batch, seq) with 1 to "
                f"{self.n_positions} tokens, got shape {shape}; cut longer sequences, or build the model "
                "with a larger n_positions"
            )
        ids = integer_array(idx, self.n_vocab, "token ids")
        shown = None
        if self.pad_id is not None:
            shown = computed(lambda: ids != self.pad_id, ids)  # (batch, seq)
        return self.pool(self.embed(ids), shown)

    def read_packed(self, idx: Any, lengths: npt.NDArray[Any]) -> tuple[Tensor, Any]:
        """Return the encoder's outputs, (total, n_embd), and the cumulative lengths, (batch + 1,).

        Args:
            idx: Token ids of all sequences, (total,).
            lengths: Number of tokens of each sequence, (batch,).

        Raises:
            ValueError: If the ids and the lengths do not fit.
        """
        shape, fits = shape_of("token ids", idx), lengths.ndim == 1 and lengths.dtype.kind in "iu"
        fits = fits and len(shape) == 1 and bool(len(lengths)) and lengths.sum() == shape[0]
        if not (fits and lengths.min() >= 1 and lengths.max() <= self.n_positions):
            raise ValueError(
                "packed sequences are ids of shape (total,) and their lengths, whole numbers from 1 to "
                f"{self.n_positions} that sum to total, got ids of shape {shape} and lengths "
                f"{shown(lengths)}; cut longer sequences"
            )
        if self.pad_id is not None:
            raise ValueError(
                f"packed sequences have no padding, and this model masks token {self.pad_id}; build it "
                "with pad_id=None"
            )
        ids = integer_array(idx, self.n_vocab, "token ids")
        sums, positions = packed_positions(lengths)  # (batch + 1,), (total,)
        x = self.token_embeddings(ids) + self.position_embeddings(positions)
        x = self._through_layers(x.view(1, *x.shape), cu_seqlens=sums)  # (1, total, n_embd)
        return x.view(*x.shape[1:]), sums

    @in_own_precision
    def embed(self, ids: Any) -> Tensor:
        """Return the sum of token and position embeddings, (batch, seq, n_embd).

        Args:
            ids: Token ids, an integer array (batch, seq).
        """
        return self.token_embeddings(ids) + self.position_embeddings(kept_range(0, ids.shape[1]))

    @in_own_precision
    def pool(self, x: Tensor, shown: Any = None) -> Tensor:
        """Apply the layers to embedded tokens, and return the mean of the outputs, (batch, n_embd).

        Args:
            x: The result of :meth:`embed`, (batch, seq, n_embd).
            shown: (batch, seq), False for padding; None if every token counts.
        """
        batch, seq, width = x.shape
        x = self._through_layers(x, key_mask=shown)
        if shown is None:
            return (x.sum(1) * (1.0 / seq)).view(batch, width)
        dtype = acc_dtype(x.dtype)
        weights = computed(lambda: _shares(shown).astype(dtype), shown)  # (batch, seq, 1)
        pooled = (x * constant_like(x, weights)).sum(1)  # (batch, 1, n_embd)
        return pooled.to(x.dtype).view(batch, width)

    def _through_layers(self, x: Tensor, **masked: Any) -> Tensor:
        """Apply dropout, the layers and the last norm to embedded tokens, (batch, seq, n_embd)."""
        x = self.dropout(x)
        for name in self.layer_names:
            layer = partial(getattr(self, name), **masked)
            x = checkpoint(layer, x) if self.recompute else layer(x)
        return self.ln(x)

    def features(self, idx: Any, lengths: Any = None) -> Tensor:
        """Return the input of the head: (batch, n_embd), or (batch, 4 n_embd) for pairs.

        Args:
            idx: As for :meth:`forward`.
            lengths: As for :meth:`forward`; not for pairs.

        Raises:
            ValueError: If the shape does not fit.
        """
        if self.documents == 1:
            return self.encode(idx, lengths)
        if lengths is not None:
            raise ValueError(
                "pairs of documents cannot be packed; pass ids of shape (batch, 2, seq) without lengths"
            )
        shape = shape_of("token ids", idx)
        if len(shape) != 3 or shape[1] != 2:
            raise ValueError(
                f"a classifier of pairs reads ids of shape (batch, 2, seq), got {shape}; stack the two "
                "documents of each pair, or build the model with documents=1"
            )
        ids = integer_array(idx, self.n_vocab, "token ids")
        both = self.encode(ids.reshape(-1, shape[2]))  # (2 batch, n_embd)
        u, v = (lookup(both, kept_range(first, len(ids) * 2, 2)) for first in (0, 1))
        difference = u - v
        parts = (u, v, u * v, difference.relu() + (-difference).relu())  # each (batch, n_embd)
        return cat(parts, 1)

    @in_own_precision
    def loss(self, idx: Any, targets: Any, lengths: Any = None) -> Tensor:
        """Return the mean cross entropy in nats, of shape (1,).

        Args:
            idx: Token ids, as for :meth:`forward`.
            targets: (batch,) classes, an integer array.
            lengths: Lengths of packed sequences, as for :meth:`forward`.
        """
        classes = integer_array(targets, self.n_classes, "targets")
        weights, bias = self.head.weights.value, self.head.bias
        assert bias is not None, "the head has a bias"
        return linear_cross_entropy(self.features(idx, lengths), weights, classes, bias.value)

    def decided(self, logits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class of the largest logit of each row."""
        return logits.argmax(-1)

    @no_grad()
    def predict(self, idx: Any, lengths: Any = None) -> npt.NDArray[np.int64]:
        """Return the most likely class of each example, (batch,), without dropout.

        Args:
            idx: Token ids, as for :meth:`forward`.
            lengths: As for :meth:`forward`.
        """
        with evaluating(self):
            return self.decided(self(idx, lengths).to_numpy())


def _shares(shown: Any) -> Any:
    """Return the share of each position in the mean of its sequence, (batch, seq, 1)."""
    return (shown / np.maximum(shown.sum(-1, keepdims=True), 1))[..., None]
