"""A decoder-only transformer (pre-norm) whose attention is fused or composed, chosen when it is built."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .module import Module
from .modules_basic import Dropout, Embedding, LayerNorm1d, Linear, lookup
from .nn import GELU, naive_attention, softmax_loss
from .tensor import Tensor
from .tensor_ops import SimpleBackend, TensorBackend

ATTENTIONS = ("flash", "naive")

#: Standard deviation of a language model's embeddings at the start.  Measured on the character GPT: with
#: GPT-2's 0.02 it learns later.  A table that also scores the tokens must not start with large scores.
EMBEDDING_STD, TIED_EMBEDDING_STD = 0.3, 0.02


class MultiHeadAttention(Module):
    """Self-attention in several heads.

    Args:
        n_embd: Width of the model, a multiple of n_head.
        n_head: Heads.
        causal: A position sees itself and what stands before it.
        p_dropout: Of the projected output.
        bias: Whether the projections have a bias.
        backend: Of the parameters.
        attention: "flash", the fused kernel, or "naive", composed of tensor operations.
        use_flash_attention: The published flag; True asks for "flash".
        use_fused_kernel: Published; accepted, since softmax is fused wherever the backend has it.
        dtype: Of the parameters; the default dtype when None.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        causal: bool = True,
        p_dropout: float = 0.1,
        bias: bool = True,
        backend: TensorBackend | None = None,
        use_fused_kernel: bool = False,
        use_flash_attention: bool = False,
        *,
        attention: str = "flash",
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        if n_embd % n_head != 0:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got {n_embd} and {n_head}; each head gets an "
                "equal share of the width"
            )
        if attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {ATTENTIONS}, got {attention!r}")
        self.n_embd, self.n_head, self.causal = n_embd, n_head, causal
        self.attn_hidden_dim = n_embd // n_head
        flash = use_flash_attention or attention == "flash"
        self.attend = Tensor.flash_attention if flash else naive_attention
        self.q_projection = Linear(n_embd, n_embd, bias, backend, dtype)
        self.k_projection = Linear(n_embd, n_embd, bias, backend, dtype)
        self.v_projection = Linear(n_embd, n_embd, bias, backend, dtype)
        self.out_projection = Linear(n_embd, n_embd, bias, backend, dtype)
        self.dropout = Dropout(p_dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        """View (batch, seq, n_embd) as (batch, n_head, seq, head_dim)."""
        batch, seq, _ = x.shape
        return x.view(batch, seq, self.n_head, self.attn_hidden_dim).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, n_embd) for (batch, seq, n_embd)."""
        if x.dims != 3 or x.shape[2] != self.n_embd:
            raise ValueError(f"attention needs (batch, seq, {self.n_embd}), got shape {x.shape}")
        q = self.split_heads(self.q_projection(x))  # (batch, n_head, seq, head_dim)
        k = self.split_heads(self.k_projection(x))  # (batch, n_head, seq, head_dim)
        v = self.split_heads(self.v_projection(x))  # (batch, n_head, seq, head_dim)
        out = self.attend(q, k, v, is_causal=self.causal)  # (batch, n_head, seq, head_dim)
        joined = out.permute(0, 2, 1, 3).contiguous().view(*x.shape)  # (batch, seq, n_embd)
        return self.dropout(self.out_projection(joined))


class FeedForward(Module):
    """Two linear layers with GELU between, position by position.

    Args:
        n_embd: Width of the model.
        middle_dim: Width between the layers.
        p_dropout: Of the output.
        bias: Whether the layers have a bias.
        backend: Of the parameters.
        dtype: Of the parameters; the default dtype when None.
    """

    def __init__(
        self,
        n_embd: int,
        middle_dim: int = 256,
        p_dropout: float = 0.1,
        bias: bool = True,
        backend: TensorBackend | None = None,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        self.linear_in = Linear(n_embd, middle_dim, bias, backend, dtype)
        self.linear_out = Linear(middle_dim, n_embd, bias, backend, dtype)
        self.dropout = Dropout(p_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, n_embd) for (…, n_embd)."""
        return self.dropout(self.linear_out(GELU(self.linear_in(x))))


class TransformerLayer(Module):
    """Attention and feed-forward, each behind a layer norm and beside a residual connection.

    Args:
        n_embd: Width of the model.
        n_head: Heads.
        p_dropout: Of both branches.
        ln_eps: Of the layer norms.
        bias: Whether the linear layers have a bias.
        backend: Of the parameters.
        use_fused_kernel: See :class:`MultiHeadAttention`.
        use_flash_attention: See :class:`MultiHeadAttention`.
        attention: See :class:`MultiHeadAttention`.
        middle_dim: Width of the feed-forward.
        dtype: Of the parameters; the default dtype when None.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        p_dropout: float = 0.1,
        ln_eps: float = 1e-5,
        bias: bool = True,
        backend: TensorBackend | None = None,
        use_fused_kernel: bool = False,
        use_flash_attention: bool = False,
        *,
        attention: str = "flash",
        middle_dim: int = 256,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        self.ln_1 = LayerNorm1d(n_embd, ln_eps, backend, dtype)
        self.ln_2 = LayerNorm1d(n_embd, ln_eps, backend, dtype)
        self.attention = MultiHeadAttention(
            n_embd, n_head, True, p_dropout, bias, backend, use_fused_kernel, use_flash_attention,
            attention=attention, dtype=dtype,
        )  # fmt: skip
        self.ff = FeedForward(n_embd, middle_dim, p_dropout, bias, backend, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, n_embd) for (batch, seq, n_embd)."""
        x = x + self.attention(self.ln_1(x))
        return x + self.ff(self.ln_2(x))


class DecoderLM(Module):
    """A language model: embeddings, transformer layers, and a score for each next token.

    Args:
        n_vocab: Tokens.
        n_embd: Width of the model.
        n_head: Heads.
        n_positions: Longest context.
        p_dropout: Everywhere.
        ln_eps: Of the layer norms.
        bias: Whether the linear layers have a bias.
        backend: Of the parameters.
        use_fused_kernel: See :class:`MultiHeadAttention`.
        use_flash_attention: See :class:`MultiHeadAttention`.
        n_layer: Transformer layers, named ``t_layer_1`` and so on.
        attention: See :class:`MultiHeadAttention`.
        middle_dim: Width of the feed-forward.
        tie_weights: Score tokens with the embedding table instead of a layer of its own.
        dtype: Of the parameters; the default dtype when None.
    """

    def __init__(
        self,
        n_vocab: int,
        n_embd: int,
        n_head: int,
        n_positions: int,
        p_dropout: float = 0.1,
        ln_eps: float = 1e-5,
        bias: bool = True,
        backend: TensorBackend | None = None,
        use_fused_kernel: bool = False,
        use_flash_attention: bool = False,
        *,
        n_layer: int = 4,
        attention: str = "flash",
        middle_dim: int = 256,
        tie_weights: bool = False,
        dtype: npt.DTypeLike | None = None,
    ):
        super().__init__()
        backend = backend or SimpleBackend
        self.backend = backend
        self.n_vocab, self.n_embd, self.n_positions = n_vocab, n_embd, n_positions
        std = TIED_EMBEDDING_STD if tie_weights else EMBEDDING_STD
        self.token_embeddings = Embedding(n_vocab, n_embd, backend, dtype, std)
        self.position_embeddings = Embedding(n_positions, n_embd, backend, dtype, std)
        self.layer_names = [f"t_layer_{i + 1}" for i in range(n_layer)]
        for name in self.layer_names:
            layer = TransformerLayer(
                n_embd, n_head, p_dropout, ln_eps, bias, backend, use_fused_kernel,
                use_flash_attention, attention=attention, middle_dim=middle_dim, dtype=dtype,
            )  # fmt: skip
            setattr(self, name, layer)
        self.dropout = Dropout(p_dropout)
        self.ln = LayerNorm1d(n_embd, ln_eps, backend, dtype)
        self.lm_head = None if tie_weights else Linear(n_embd, n_vocab, bias, backend, dtype)

    def forward(self, idx: Any) -> Tensor:
        """Score every token as the next one, at every position.

        Args:
            idx: (batch, seq) token ids, a tensor or an integer array; seq <= n_positions.

        Returns:
            (batch, seq, n_vocab) logits.
        """
        return self.score(self.hidden(idx))

    def hidden(self, idx: Any) -> Tensor:
        """Return what the last layer norm makes of (batch, seq) token ids: (batch, seq, n_embd)."""
        if len(np.shape(idx)) != 2:
            raise ValueError(
                f"a language model needs ids of shape (batch, seq), got {np.shape(idx)}"
            )
        _, seq = np.shape(idx)
        if seq > self.n_positions:
            raise ValueError(
                f"the context holds {self.n_positions} tokens, got {seq}; pass the last ones"
            )
        positions = self.position_embeddings(np.arange(seq))  # (seq, n_embd)
        x = self.dropout(self.token_embeddings(idx) + positions)  # (batch, seq, n_embd)
        for name in self.layer_names:
            x = getattr(self, name)(x)  # (batch, seq, n_embd)
        return self.ln(x)  # (batch, seq, n_embd)

    def score(self, x: Tensor) -> Tensor:
        """Return (batch, seq, n_vocab) logits for what :meth:`hidden` returned."""
        if self.lm_head is not None:
            return self.lm_head(x)  # (batch, seq, n_vocab)
        batch, seq, _ = x.shape
        table = self.token_embeddings.weights.value  # (n_vocab, n_embd)
        logits = x.view(batch * seq, self.n_embd) @ table.permute(1, 0)
        return logits.view(batch, seq, self.n_vocab)

    def loss(self, idx: Any, targets: Any) -> Tensor:
        """Return the mean cross entropy, nats per token, of shape (1,).

        Args:
            idx: (batch, seq) token ids.
            targets: (batch, seq) ids of the tokens that follow, an integer array.
        """
        logits = self.forward(idx)
        rows = logits.view(logits.size // self.n_vocab, self.n_vocab)
        return softmax_loss(rows, np.asarray(targets).reshape(-1)).mean()

    def generate(
        self, prompt: Any, count: int, temperature: float = 1.0, seed: int | None = None
    ) -> list[int]:
        """Continue a text token by token.

        Args:
            prompt: Token ids, one at least.
            count: How many tokens to add.
            temperature: 0 takes the likeliest token; 1 samples from the model; above, more wildly.
            seed: Of the sampling.

        Returns:
            The ids of the prompt and of the continuation.
        """
        if len(prompt) == 0:
            raise ValueError("the prompt must hold at least one token")
        if temperature < 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        rng = np.random.default_rng(seed)
        ids = [int(token) for token in prompt]
        was_training = self.training
        self.eval()
        for _ in range(count):
            context = np.array([ids[-self.n_positions :]])  # (1, seq)
            hidden = self.hidden(context)  # (1, seq, n_embd)
            # Only the last position is scored and read: one row of logits and not seq of them.
            rows = hidden.view(*hidden.shape[1:])  # (seq, n_embd)
            last = lookup(rows, np.array([[len(context[0]) - 1]]))  # (1, 1, n_embd)
            logits = self.score(last).to_numpy()[0, 0].astype(np.float64)  # (n_vocab,)
            ids.append(_choose(logits, temperature, rng))
        if was_training:
            self.train()
        return ids


def _choose(logits: npt.NDArray[np.float64], temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    probs = np.exp(scaled) / np.exp(scaled).sum()
    return int(rng.choice(len(probs), p=probs))
