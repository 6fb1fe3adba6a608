"""A transformer encoder that gives a long document several labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.runtime.dtypes import acc_dtype

from ..backends.matmul_precision import in_own_precision
from ..functions.indexing import constant_like
from ..modules_basic import Embedding, Linear, lookup
from ..tensor import Tensor
from .sequence_classifier import SequenceClassifier


class DocumentClassifier(SequenceClassifier):
    """A bidirectional encoder with one attention query for each label.

    The query of a label attends to all tokens of a document, so that a few tokens can decide,
    wherever they are. Each label has its own weights, which turn the result of its query into a
    logit. Documents are packed, without padding. Position embeddings are initialised with 0,
    because only long documents reach the last positions.

    Args:
        n_vocab: Number of tokens in the vocabulary.
        n_embd: Width of the model.
        n_head: Number of heads of the encoder.
        n_positions: Maximum length of a document.
        n_labels: Number of labels.
        p_dropout: Dropout probability of the embeddings and of all branches.
        options: Further options of :class:`minitorch.SequenceClassifier`.

    Source: the attention by label of Mullenbach et al., Explainable prediction of medical codes from
    clinical text (2018), on a transformer encoder.
    """

    def __init__(
        self, n_vocab: int, n_embd: int, n_head: int, n_positions: int, n_labels: int,
        p_dropout: float = 0.1, **options: Any,
    ):  # fmt: skip
        super().__init__(n_vocab, n_embd, n_head, n_positions, n_labels, p_dropout, **options)
        table = self.token_embeddings.weights.value
        positions = self.position_embeddings.weights
        positions.update(positions.value.zeros(positions.value.shape))
        self.queries = Embedding(n_labels, n_embd, table.backend, table.dtype, 1.0)
        self.keys = Linear(n_embd, n_embd, False, table.backend, table.dtype)

    @in_own_precision
    def forward(self, idx: Any, lengths: Any = None) -> Tensor:
        """Return the logits of the labels, (count, n_labels).

        Args:
            idx: Token ids of all documents, one after the other, (total,).
            lengths: Number of tokens of each document, (count,).

        Raises:
            ValueError: If the ids and the lengths do not fit, or there are no lengths.
        """
        if lengths is None:
            raise ValueError(
                "a document classifier reads packed documents; pass ids of shape (total,) and the lengths"
            )
        x, sums = self.read_packed(idx, np.asarray(lengths))  # (total, n_embd)
        count, labels, width = len(sums) - 1, self.n_classes, self.n_embd
        rows = np.tile(np.arange(labels), count)
        q = lookup(self.queries.weights.value, rows).view(count * labels, 1, width)
        k, v = (own.view(x.shape[0], 1, width) for own in (self.keys(x), x))
        found = q.flash_attention_varlen(k, v, np.arange(count + 1) * labels, sums)
        own = self.head.weights.value.permute(1, 0).contiguous().view(1, labels, width)
        assert self.head.bias is not None, "the head has a bias"
        scores = (found.contiguous().view(count, labels, width) * own).sum(2)
        return scores.view(count, labels) + self.head.bias.value

    @in_own_precision
    def loss(self, idx: Any, targets: Any, lengths: Any = None) -> Tensor:
        """Return the mean binary cross entropy of all labels in nats, of shape (1,).

        Args:
            idx: Token ids, as for :meth:`forward`.
            targets: (count, n_labels), True or 1 for the labels of a document.
            lengths: As for :meth:`forward`.

        Raises:
            ValueError: If the shapes of targets and logits differ.
        """
        logits = self(idx, lengths)
        wanted = np.asarray(targets)
        if wanted.shape != logits.shape:
            raise ValueError(
                f"targets must have the shape of the logits, {logits.shape}, got {wanted.shape}; pass one "
                "value for each label of each document"
            )
        logits = logits.to(acc_dtype(logits.dtype))
        signs = constant_like(logits, np.where(wanted, 1.0, -1.0).astype(logits.dtype))
        # log(1 + exp(-s)), where s is the logit with the sign of its target.
        s = logits * signs
        distance = s.relu() + (-s).relu()
        return ((-s).relu() + ((-distance).exp() + 1.0).log()).mean().view(1)

    def decided(self, logits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return 1 for the labels whose probability is above 1/2, 0 for the others; (count, n_labels)."""
        return (logits > 0).astype(np.int64)
