"""A decoder-only transformer language model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import flag, shape_of, whole

from .autodiff import is_recording, no_grad, without_drawing
from .backends.matmul_precision import in_own_precision
from .backends.operations import operation
from .fast_ops import FastBackend
from .layers.linear_cross_entropy import linear_cross_entropy
from .models.config import Config, configured
from .models.evaluation import evaluating
from .models.feed_forward import FeedForward as FeedForward
from .models.feed_forward import GatedFeedForward as GatedFeedForward
from .models.kv_cache import KVCache, LayerCache, check_cache
from .models.positions import kept_range
from .models.pretrained import load_pretrained, read_pretrained, write_pretrained
from .models.rotary import Rotary
from .models.sampling import make_sampler, prompt_ids
from .models.transformer_layers import MultiHeadAttention as MultiHeadAttention
from .models.transformer_layers import TransformerLayer as TransformerLayer
from .module import Module
from .modules_basic import Dropout, Embedding, Linear, lookup
from .tensor import Tensor
from .tensor_ops import TensorBackend
from .training.recompute import checkpoint

#: Standard deviation of a language model's initial embeddings.  The character GPT learns later with GPT-2's
#: 0.02.  A table that also scores the tokens must not start with large scores.
EMBEDDING_STD, TIED_EMBEDDING_STD = 0.3, 0.02


class DecoderLM(Module):
    """A decoder-only language model: embeddings, transformer layers, and logits of the next token.

    Without options, it has the structure of GPT-2. For the structure of Llama, pass
    ``rotary_theta``, ``norm="rms"``, ``feed_forward="swiglu"``, ``bias=False`` and often
    ``n_kv_head``. Further options are those of :class:`minitorch.Config`.

    Args:
        tie_weights: Compute the logits with the embedding table instead of a separate layer.
        head_bias: Whether the separate layer has a bias, if the other linear layers have one.
        rotary_theta: Base of the frequencies of rotary positions, such as 10,000; None for learned position
            embeddings.
        rotary_scaling: Change of these frequencies for long contexts; see
            :class:`minitorch.Rotary`.

    Attributes:
        precision: The policy, or None.
        rotary: The rotary positions of all layers, or None.
        places: If the model reads only a part of each sequence, a function from the number of tokens to
            their positions in the whole sequence; None if the tokens start at position 0.
        eos_token_id: The token that ends a text, or None; :meth:`from_pretrained` sets it.

    Raises:
        ValueError: For a scaling without rotary positions, and as for the Config.
    """

    @configured(
        "n_vocab n_embd n_head n_positions",
        "p_dropout ln_eps bias backend use_fused_kernel use_flash_attention",
        "n_layer attention attention_dropout attention_options middle_dim n_kv_head head_dim window sinks "
        "norm feed_forward dtype precision recompute",
    )
    def __init__(
        self, config: Config, tie_weights: bool = False, head_bias: bool = True,
        rotary_theta: float | None = None, rotary_scaling: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__()
        c = config
        self.precision, self.recompute, self.backend = c.policy, c.recompute, c.backend
        self.n_vocab, self.n_embd, self.n_positions = c.n_vocab, c.n_embd, c.n_positions
        self.n_head, self.window = c.n_head, c.window
        std = TIED_EMBEDDING_STD if flag("tie_weights", tie_weights) else EMBEDDING_STD
        self.token_embeddings = Embedding(c.n_vocab, c.n_embd, c.backend, c.dtype, std)
        self.position_embeddings: Any = None  # an Embedding, unless positions are rotary
        self.rotary = c.rotary
        if rotary_theta is not None:
            self.rotary = Rotary(c.head_size, c.n_positions, rotary_theta, rotary_scaling)
            c = replace(c, rotary=self.rotary)
        elif rotary_scaling is not None:
            raise ValueError(
                "rotary_scaling needs rotary positions; pass rotary_theta as well, such as 10000.0"
            )
        elif c.rotary is None:
            self.position_embeddings = Embedding(c.n_positions, c.n_embd, c.backend, c.dtype, std)
        self.layer_names = [f"t_layer_{i + 1}" for i in range(c.n_layer)]
        for name in self.layer_names:
            setattr(self, name, TransformerLayer(c))
        self.dropout = Dropout(c.p_dropout)
        self.ln = c.make_norm()
        self.lm_head = None
        if not tie_weights:
            has_bias = c.bias and flag("head_bias", head_bias)
            self.lm_head = Linear(c.n_embd, c.n_vocab, has_bias, c.backend, c.dtype)
        self.eos_token_id: int | None = None
        self.places: Callable[[int], Any] | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        backend: TensorBackend | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        precision: str | None = None,
        **options: Any,
    ) -> DecoderLM:
        """Read a GPT-2 or Llama model from a local folder in Hugging Face format, in evaluation mode.

        Args:
            folder: A folder with config.json and model.safetensors, or shards with their index.
            backend: Backend of the parameters; ``FastBackend`` when None.
            dtype: Dtype of the parameters; that of the stored embeddings when None.
            precision: See the class; instead of a dtype.
            options: Further arguments of the class, such as ``attention="naive"``, or ``p_dropout=0.0``,
                whose default is then the ``resid_pdrop`` of a GPT-2 configuration.

        Raises:
            CheckpointError: If a file is missing, or its format or the architecture is not supported.
            ValueError: If an option does not fit.
        """
        found = read_pretrained(folder)
        if dtype is None and precision is None:
            dtype = found.dtype
        backend = backend or FastBackend
        chosen = {**found.options, "backend": backend, "dtype": dtype, "precision": precision}
        with without_drawing():
            model = cls(**{**chosen, **options})
        load_pretrained(model, found)
        model.eos_token_id = found.eos_token_id
        model.eval()
        return model

    def save_pretrained(self, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write the model in Hugging Face format, which ``transformers`` can load.

        A model with rotary positions is written as a Llama, any other model as a GPT-2.

        Args:
            folder: The folder, which is created if necessary; config.json and model.safetensors in it are
                replaced.
            tokenizer: A ``tokenizers.Tokenizer`` to write as tokenizer.json, or None.

        Raises:
            ValueError: If the model has the structure of neither; the message names the difference.
        """
        write_pretrained(folder, self, tokenizer)

    def forward(self, idx: Any, cache: KVCache | None = None) -> Tensor:
        """Return the logits of the next token at every position.

        Args:
            idx: (batch, seq) token ids, a tensor or an integer array; seq <= n_positions.
            cache: Keys and values of the tokens before ``idx``; see :meth:`hidden`.

        Returns:
            (batch, seq, n_vocab) logits; a constant if there is a cache.
        """
        if cache is None:
            return self.score(self.hidden(idx))
        with no_grad():
            return self.score(self.hidden(idx, cache))

    def make_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache:
        """Return an empty cache for this model.

        Args:
            batch: Number of texts.
            capacity: Maximum number of positions; ``n_positions`` when None.
        """
        table = self.token_embeddings.weights.value
        attention = getattr(self, self.layer_names[0]).attention
        return KVCache(
            len(self.layer_names), batch, attention.n_kv_head,
            self.n_positions if capacity is None else capacity,
            attention.attn_hidden_dim, table.backend, table.dtype,
        )  # fmt: skip

    @in_own_precision
    def hidden(self, idx: Any, cache: KVCache | None = None) -> Tensor:
        """Return the output of the last norm, (batch, seq, n_embd), for (batch, seq) token ids.

        Args:
            idx: Token ids, (batch, seq), a tensor or an integer array.
            cache: Keys and values of the tokens before ``idx``, from :meth:`make_cache`. Those of
                ``idx`` are appended, and the result is a constant.

        Raises:
            ValueError: If the ids do not have two dimensions, or exceed the context or the cache.
        """
        check_cache(cache, KVCache)
        if cache is not None and is_recording():
            with no_grad():
                return self.hidden(idx, cache)
        shape = shape_of("token ids", idx)
        if len(shape) != 2:
            raise ValueError(
                f"a language model needs ids of shape (batch, seq), got {shape}; pass one text as "
                "numpy.array([ids])"
            )
        batch, seq = shape
        if batch * seq == 0:
            raise ValueError(f"a language model needs at least one token, got ids of shape {shape}")
        start = 0 if cache is None else cache.length
        if start + seq > self.n_positions:
            before = f" after the {start} in the cache" if start else ""
            raise ValueError(
                f"the context holds {self.n_positions} tokens, got {seq}{before}; pass the last ones"
            )
        layers = self._layer_caches(cache)
        x = self.token_embeddings(idx)  # (batch, seq, n_embd)
        if self.position_embeddings is not None:
            places = self._places(start, seq, layers[0])
            positions = self.position_embeddings(places)  # (seq, n_embd)
            x = x + positions
        x = self.dropout(x)
        if cache is None:
            call = checkpoint if self.recompute else lambda fn, *inputs: fn(*inputs)
            return self.through_layers(x, call)
        for name, layer_cache in zip(self.layer_names, layers, strict=True):
            x = getattr(self, name)(x, layer_cache)  # (batch, seq, n_embd)
        return self.ln(x)  # (batch, seq, n_embd)

    def _places(self, start: int, seq: int, cache: LayerCache | None) -> Any:
        """Return the positions of tokens, of which there are ``start`` in the cache, (seq,)."""
        if self.places is not None:
            return self.places(seq)
        if cache is None and self.backend.cuda:
            return kept_range(0, seq)
        if cache is not None and cache.spot is not None:
            return cache.spot.places
        return np.arange(start, start + seq)

    @operation
    def through_layers(self, x: Tensor, call: Callable[..., Any]) -> Tensor:
        """Apply the layers and the last norm to (batch, seq, n_embd); ``call(layer, x)`` calls a layer."""
        for name in self.layer_names:
            x = call(getattr(self, name), x)  # (batch, seq, n_embd)
        return self.ln(x)

    def _layer_caches(self, cache: KVCache | None) -> list[LayerCache] | list[None]:
        if cache is None:
            return [None] * len(self.layer_names)
        if len(cache.layers) != len(self.layer_names):
            raise ValueError(
                f"the cache is for {len(cache.layers)} layers, the model has {len(self.layer_names)}; "
                "make it with make_cache of this model"
            )
        cache.truncate(cache.length)  # a step that failed halfway filled only some layers
        return cache.layers

    @in_own_precision
    def score(self, x: Tensor) -> Tensor:
        """Return the logits, (batch, seq, n_vocab), for a result of :meth:`hidden`."""
        if self.lm_head is not None:
            return self.lm_head(x)  # (batch, seq, n_vocab)
        batch, seq, _ = x.shape
        logits = x.view(batch * seq, self.n_embd) @ self.head_weights()[0]
        return logits.view(batch, seq, self.n_vocab)

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the logits, (n_embd, n_vocab), and their bias, (n_vocab,) or None."""
        head = self.lm_head
        if head is None:
            return self.token_embeddings.weights.value.permute(1, 0), None
        return head.weights.value, None if head.bias is None else head.bias.value

    @in_own_precision
    def loss(self, idx: Any, targets: Any) -> Tensor:
        """Return the mean cross entropy in nats per token, of shape (1,).

        Args:
            idx: (batch, seq) token ids.
            targets: (batch, seq) ids of the tokens that follow, an integer array.
        """
        # TASK 5.10: Hidden states as (batch · seq, n_embd); linear_cross_entropy scores and judges them.
        hidden = self.hidden(idx)
        rows = hidden.view(hidden.size // self.n_embd, self.n_embd)
        weights, bias = self.head_weights()
        return linear_cross_entropy(rows, weights, np.asarray(targets).reshape(-1), bias)
        # END TASK 5.10

    def generate(
        self, prompt: Any, count: int, temperature: float = 1.0, seed: int | None = None,
        *, top_k: int | None = None, top_p: float = 1.0,
    ) -> list[int]:  # fmt: skip
        """Return the ids of a prompt and its continuation; arguments as for :meth:`continuation`."""
        added = self.continuation(prompt, count, temperature, seed, top_k=top_k, top_p=top_p)
        return [*prompt_ids(prompt, self.n_vocab), *added]

    def continuation(
        self, prompt: Any, count: int, temperature: float = 1.0, seed: int | None = None,
        *, top_k: int | None = None, top_p: float = 1.0,
    ) -> Iterator[int]:  # fmt: skip
        """Yield the tokens that continue a text, each as soon as it is chosen.

        Keys and values are cached, so that a token costs one step of the model and attention to the
        previous tokens.

        A text longer than ``n_positions`` is continued from its last ``n_positions`` tokens.  Each new
        token then shifts their positions, which changes all keys and values, and costs a pass over the
        whole context.

        Args:
            prompt: Token ids, at least one.
            count: Number of tokens to add.
            temperature: Divisor of the logits before sampling; 0 takes the most likely token.
            seed: Seed of the sampling; None draws a random one.
            top_k: Sample among this many of the most likely tokens; None for all.
            top_p: Sample among the fewest most likely tokens whose probabilities sum to at least this.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If the prompt is empty or has an unknown token, or the count, the temperature or the
                seed is negative, top_k below 1, or top_p not in (0, 1].
        """
        ids = prompt_ids(prompt, self.n_vocab)
        if whole("count", count) < 0:
            raise ValueError(f"count must be the number of tokens to add, 0 or more; got {count}")
        choose = make_sampler(temperature, top_k, top_p, seed)
        capacity = min(len(ids) + count, self.n_positions)
        with self.backend.ops["decoding"](self, capacity) as next_logits:
            for _ in range(count):
                ids.append(choose(next_logits(ids)))
                yield ids[-1]

    @no_grad()
    def next_logits(self, ids: list[int], cache: KVCache) -> npt.NDArray[np.float64]:
        """Return the logits of the token after ``ids``, without dropout, (n_vocab,).

        Args:
            ids: All tokens so far.
            cache: Keys and values of the first of them; those of the others are appended.
        """
        with evaluating(self):
            if len(ids) <= self.n_positions:
                hidden = self.hidden(np.array([ids[cache.length :]]), cache)  # (1, new, n_embd)
            else:
                hidden = self.hidden(np.array([ids[-self.n_positions :]]))  # (1, seq, n_embd)
            # Compute and read the logits of the last position only.
            rows = hidden.view(*hidden.shape[1:])  # (new or seq, n_embd)
            last = lookup(rows, np.array([[rows.shape[0] - 1]]))  # (1, 1, n_embd)
            return self.score(last).to_numpy()[0, 0].astype(np.float64)


@operation
@contextmanager
def decoding(model: DecoderLM, capacity: int) -> Iterator[Callable[[list[int]], Any]]:
    """Provide a function that returns the logits of the token after a text, which grows from call to call.

    Args:
        model: The model.
        capacity: Maximum length of the text whose keys and values are cached.
    """
    yield partial(model.next_logits, cache=model.make_cache(capacity=capacity))
