"""A bidirectional transformer encoder with BERT's structure: masked language model and classifier."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import as_host_array, shape_of, shown, whole
from kernels.cuda.backend import computed

from ..backends.matmul_precision import in_own_precision
from ..functions.base import is_tensor
from ..layers.indices import integer_array, kept_range
from ..layers.linear import linear
from ..layers.linear_cross_entropy import linear_cross_entropy
from ..module import Module, Parameter
from ..modules_basic import Dropout, Embedding, Linear, lookup
from ..scalars.modes import no_grad
from ..tensor import Tensor
from ..transformer import TransformerLayer
from .config import Config, configured
from .evaluation import evaluating
from .positions import packed_positions

#: Target of a position that is not predicted, as in PyTorch's cross entropy.
IGNORED = -100
#: Standard deviation of the initial embeddings.
EMBEDDING_STD = 0.02


class _Layout(NamedTuple):
    """The positions of a batch of sequences, and what the attention needs to keep them apart.

    Attributes:
        positions: Positions within the sequences, (seq,) or (total,).
        firsts: Rows of the first tokens of the sequences, (count,), among all rows of the batch.
        masked: Arguments of the layers: ``cu_seqlens``, ``key_mask`` for attention that takes none, or
            neither.
    """

    positions: Any
    firsts: Any
    masked: dict[str, Any]


def _bounds(lengths: Any, shape: tuple[int, ...], keys: bool) -> npt.NDArray[np.int64]:
    """Return the cumulative lengths of queries, or of keys, in ids of a shape.

    Padding is a sequence of queries without keys and one of keys without queries, which cost nothing.  They
    follow each sequence of a padded batch, or all of a packed one, even if there is no padding: steps of
    equal shapes then launch the same.

    Args:
        lengths: Number of tokens of each sequence, (count,).
        shape: (count, seq), or (total,).
        keys: Whether those of keys are wanted.
    """
    if len(shape) == 2:
        gaps, none = shape[1] - lengths, np.zeros_like(lengths)
        parts = np.stack([lengths, none, gaps] if keys else [lengths, gaps, none], 1)
    else:
        gap = shape[0] - lengths.sum()
        parts = np.append(lengths, [0, gap] if keys else [gap, 0])
    return np.concatenate([[0], np.cumsum(parts, dtype=np.int64)])


class EncoderLM(Module):
    """A masked language model with the structure of BERT.

    The model consists of token, position and segment embeddings with a layer norm, post-norm
    transformer layers without a causal mask, and a head that predicts masked tokens: a linear
    layer, GELU, a layer norm, and logits with the embedding table.

    All methods take a batch in one of two forms.  A padded batch has ids (batch, seq) and ``lengths``, the
    number of tokens of each sequence, or None if no sequence is shorter than seq.  A packed batch has ids
    (total,) of all sequences, one after the other, and the ``lengths`` of the sequences, whose sum is at
    most total.  Ids after the last sequence are padding, so that several batches can have the same total.
    Both forms give the same results up to rounding.  Packed batches save the computation on padding.

    Further options are those of :class:`minitorch.Config`.  The layers are always bidirectional and
    post-norm.

    Args:
        middle_dim: Width of the feed-forward networks; 4 n_embd when None.
        n_segments: Number of segments, such as the sentences of a pair.

    Raises:
        ValueError: If a size is below 1, and as for the Config.

    Source: Devlin et al. (2019), BERT, without the prediction of the next sentence, which does not help
    according to Liu et al. (2019), RoBERTa.
    """

    @configured(
        "n_vocab n_embd n_head n_positions", "p_dropout",
        "n_layer middle_dim attention attention_dropout ln_eps backend dtype precision",
        n_layer=2, middle_dim=None, ln_eps=1e-12,
    )  # fmt: skip
    def __init__(self, config: Config, n_segments: int = 2):
        super().__init__()
        middle = 4 * config.n_embd if config.middle_dim is None else config.middle_dim
        c = replace(config, causal=False, norm_first=False, middle_dim=middle)
        self.precision, self.is_flash = c.policy, c.attention == "flash"
        self.n_vocab, self.n_embd, self.n_positions = c.n_vocab, c.n_embd, c.n_positions
        self.n_segments, self.n_head = whole("n_segments", n_segments, 1), c.n_head
        made = c.n_embd, c.backend, c.dtype, EMBEDDING_STD
        self.token_embeddings = Embedding(c.n_vocab, *made)
        self.position_embeddings = Embedding(c.n_positions, *made)
        self.segment_embeddings = Embedding(n_segments, *made)
        self.ln = c.make_norm()
        self.dropout = Dropout(c.p_dropout)
        self.layer_names = [f"t_layer_{i + 1}" for i in range(c.n_layer)]
        for name in self.layer_names:
            setattr(self, name, TransformerLayer(c))
        self.head = Linear(c.n_embd, c.n_embd, True, c.backend, c.dtype)
        self.head_ln = c.make_norm()
        self.head_bias = Parameter(self.token_embeddings.weights.value.zeros((c.n_vocab,)))

    @in_own_precision
    def forward(self, idx: Any, lengths: Any = None, segments: Any = None) -> Tensor:
        """Return the logits of the token at every position, (batch, seq, n_vocab) or (total, n_vocab).

        Args:
            idx: Token ids, (batch, seq) or (total,).
            lengths: Lengths of the sequences, (count,); see the class.
            segments: Segment of each token, of the shape of idx; 0 for all when None.

        Raises:
            ValueError: If the shapes, lengths, tokens or segments do not fit.
        """
        rows, _ = self._rows(idx, lengths, segments)
        weights, bias = self._head_weights()
        scores = linear(self._transformed(rows), weights, bias)
        return scores.view(*shape_of("token ids", idx), self.n_vocab)

    @in_own_precision
    def loss(self, idx: Any, targets: Any, lengths: Any = None, segments: Any = None) -> Tensor:
        """Return the mean cross entropy in nats of the predicted positions, of shape (1,).

        The head computes logits for these positions only.

        Args:
            idx: Token ids, as for :meth:`forward`, of which some are masked.
            targets: The original token at each position to predict and -100 elsewhere, an integer array of
                the shape of idx.
            lengths: As for :meth:`forward`.
            segments: As for :meth:`forward`.

        Raises:
            ValueError: As in :meth:`forward`, or if no position is to be predicted.
        """
        wanted = _on_host("targets", targets)
        if wanted.shape != (shape := shape_of("token ids", idx)):
            raise ValueError(
                f"targets must have the shape of the ids, {shape}, got {wanted.shape}; pass "
                f"{IGNORED} at positions that are not predicted"
            )
        places = computed(lambda: np.flatnonzero(wanted != IGNORED), wanted)  # (predicted,)
        if not len(places):
            raise ValueError(
                f"no position is to be predicted: all targets are {IGNORED}; mask at least one token of "
                "the batch"
            )
        rows, _ = self._rows(idx, lengths, segments)
        chosen = self._transformed(lookup(rows, places))  # (predicted, n_embd)
        tokens = computed(lambda: wanted[wanted != IGNORED], wanted)
        weights, bias = self._head_weights()
        return linear_cross_entropy(chosen, weights, tokens, bias)

    @in_own_precision
    def hidden(self, idx: Any, lengths: Any = None, segments: Any = None) -> Tensor:
        """Return the output of the last layer, (batch, seq, n_embd) or (total, n_embd).

        Rows of padding have finite but meaningless values.  The arguments are those of :meth:`forward`.
        """
        rows, _ = self._rows(idx, lengths, segments)
        return rows.view(*shape_of("token ids", idx), self.n_embd)

    def _rows(self, idx: Any, lengths: Any, segments: Any) -> tuple[Tensor, _Layout]:
        """Return the output of the last layer for all rows, (rows, n_embd), and where they lie."""
        layout = self._layout(idx, lengths)
        ids = integer_array(idx, self.n_vocab, "token ids")
        positions = self.position_embeddings.weights.value  # (n_positions, n_embd)
        if segments is None:
            positions = positions + self.segment_embeddings(kept_range(0, 1))
        x = self.token_embeddings(ids) + lookup(positions, layout.positions)
        if segments is not None:
            shape, wanted = shape_of("segments", segments), shape_of("token ids", idx)
            if shape != wanted:
                raise ValueError(
                    f"segments must have the shape of the ids, {wanted}, got {shape}; "
                    "pass the segment of each token"
                )
            x = x + self.segment_embeddings(integer_array(segments, self.n_segments, "segments"))
        x = self.dropout(self.ln(x))
        if "cu_seqlens" in layout.masked:
            x = x.view(1, x.size // self.n_embd, self.n_embd)
        for name in self.layer_names:
            x = getattr(self, name)(x, **layout.masked)
        return x.view(x.size // self.n_embd, self.n_embd), layout

    @in_own_precision
    def first_hidden(self, idx: Any, lengths: Any = None, segments: Any = None) -> Tensor:
        """Return the output at the first token of each sequence, (count, n_embd), such as that of [CLS].

        Arguments as for :meth:`forward`.
        """
        rows, layout = self._rows(idx, lengths, segments)
        return lookup(rows, layout.firsts)

    def _head_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the logits, (n_embd, n_vocab), and their bias, (n_vocab,)."""
        return self.token_embeddings.weights.value.permute(1, 0), self.head_bias.value

    def _transformed(self, rows: Tensor) -> Tensor:
        """Return what the embedding table scores, (count, n_embd), for rows of :meth:`hidden`."""
        return self.head_ln(self.head(rows, has_gelu=True))

    def _layout(self, idx: Any, lengths: Any) -> _Layout:
        """Check the shape of the ids and the lengths; return where the sequences lie."""
        shape = shape_of("token ids", idx)
        if len(shape) not in (1, 2) or 0 in shape or (len(shape) == 1 and lengths is None):
            raise ValueError(
                "an encoder reads ids of shape (batch, seq), or (total,) with the lengths of the packed "
                f"sequences, got shape {shape} and {'no ' * (lengths is None)}lengths; pass at least one "
                "token, and lengths for packed sequences"
            )
        seq = shape[-1]
        if lengths is None:
            self._check_positions(seq)
            return _Layout(kept_range(0, seq), kept_range(0, shape[0] * seq, seq), {})
        given = _on_host("lengths", lengths)
        own = computed(lambda: self._checked_lengths(given, shape), given)  # (count,)
        sums = [computed(partial(_bounds, own, shape, keys), own) for keys in (False, True)]
        if len(shape) == 1:
            starts = sums[0]
            positions = computed(
                lambda: packed_positions(np.diff(starts))[1] % self.n_positions, starts
            )
            return _Layout(positions, starts[: len(own)], {"cu_seqlens": sums})
        firsts = kept_range(0, shape[0] * seq, seq)
        if self.is_flash:
            return _Layout(kept_range(0, seq), firsts, {"cu_seqlens": sums})
        shown = computed(lambda: np.arange(seq) < own[:, None], own)  # (batch, seq)
        return _Layout(kept_range(0, seq), firsts, {"key_mask": shown})

    def _checked_lengths(self, lengths: Any, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Return the lengths of the sequences in ids of a shape, or raise a ValueError."""
        packed, seq = len(shape) == 1, shape[-1]
        fits = lengths.ndim == 1 and len(lengths) and lengths.dtype.kind in "iu"
        if fits := fits and lengths.min() >= 1:
            fits = lengths.sum() <= seq if packed else len(lengths) == shape[0]
        if not fits or (not packed and lengths.max() > seq):
            wanted = (
                f"sum to at most {seq}" if packed else f"be {shape[0]} numbers of at most {seq}"
            )
            raise ValueError(
                f"lengths of ids of shape {shape} must be whole numbers of at least 1 and {wanted}, "
                f"got {shown(lengths)}; pass the number of tokens of each sequence"
            )
        self._check_positions(int(lengths.max()) if packed else seq)
        return lengths.astype(np.int64)

    def _check_positions(self, longest: int) -> None:
        """Check that there are positions for a sequence of so many tokens."""
        if longest > self.n_positions:
            raise ValueError(
                f"the encoder has {self.n_positions} positions, got a sequence of {longest} tokens; cut "
                "it, or build the model with a larger n_positions"
            )


class EncoderClassifier(Module):
    """A classifier of sequences, or of pairs of them, on the first token of an encoder.

    The classifier is a linear layer, tanh, dropout, and a linear layer, as in fine-tuning BERT.

    Args:
        encoder: The encoder, pre-trained or not; its parameters are trained as well.
        n_classes: Number of classes.
        p_dropout: Dropout probability before the last layer.

    Source: Devlin et al. (2019), BERT, section 4.1.
    """

    def __init__(self, encoder: EncoderLM, n_classes: int, p_dropout: float = 0.1):
        super().__init__()
        if not isinstance(encoder, EncoderLM):
            raise TypeError(f"encoder must be an EncoderLM, got {type(encoder).__name__}")
        self.encoder, self.precision = encoder, encoder.precision
        self.n_classes = whole("n_classes", n_classes, 1)
        table = encoder.token_embeddings.weights.value
        self.pooler = Linear(encoder.n_embd, encoder.n_embd, True, table.backend, table.dtype)
        self.dropout = Dropout(p_dropout)
        self.head = Linear(encoder.n_embd, n_classes, True, table.backend, table.dtype)

    @in_own_precision
    def forward(self, idx: Any, lengths: Any = None, segments: Any = None) -> Tensor:
        """Return the logits of the classes, (count, n_classes); arguments as for :class:`EncoderLM`."""
        return self.head(self._pooled(idx, lengths, segments))

    @in_own_precision
    def loss(self, idx: Any, targets: Any, lengths: Any = None, segments: Any = None) -> Tensor:
        """Return the mean cross entropy in nats, of shape (1,).

        Args:
            idx: Token ids, as for :class:`EncoderLM`.
            targets: Class of each sequence, (count,), an integer array.
            lengths: As for :class:`EncoderLM`.
            segments: As for :class:`EncoderLM`.
        """
        classes = integer_array(targets, self.n_classes, "targets")
        assert self.head.bias is not None, "the head has a bias"
        pooled = self._pooled(idx, lengths, segments)
        return linear_cross_entropy(pooled, self.head.weights.value, classes, self.head.bias.value)

    def _pooled(self, idx: Any, lengths: Any, segments: Any) -> Tensor:
        """Return the input of the last layer, (count, n_embd)."""
        first = self.encoder.first_hidden(idx, lengths, segments)
        return self.dropout(self.pooler(first).tanh())

    @no_grad()
    def predict(self, idx: Any, lengths: Any = None, segments: Any = None) -> npt.NDArray[np.int64]:
        """Return the most likely class of each sequence, (count,), without dropout."""
        with evaluating(self):
            return self(idx, lengths, segments).to_numpy().argmax(-1)


def _on_host(name: str, array: Any) -> Any:
    """Return a tensor or an array as an array of the host."""
    return array.to_numpy() if is_tensor(array) else as_host_array(name, array)


def unpadded(lengths: Any, *arrays: Any) -> tuple[npt.NDArray[Any], ...]:
    """Return padded arrays without their padding, as packed batches of :class:`EncoderLM` need them.

    Args:
        lengths: Lengths of the sequences, (batch,).
        arrays: Arrays of the host, (batch, seq, …).

    Returns:
        For each array (total, …).
    """
    ends = np.asarray(lengths)[:, None]
    return tuple(array[np.arange(array.shape[1]) < ends] for array in arrays)
