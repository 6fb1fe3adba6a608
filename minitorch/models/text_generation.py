"""What a decoder-only model does beside computing logits: generate text, and exchange its weights."""

from __future__ import annotations

import os  # beyond module 5
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels.common.arguments import whole

from ..backends.operations import operation  # beyond module 5
from ..fast_ops import FastBackend  # beyond module 5
from ..module import Module
from ..modules_basic import lookup
from ..scalars.modes import (
    no_grad,
    without_drawing,  # beyond module 5
)
from ..tensor import Tensor
from ..tensor_ops import TensorBackend
from .evaluation import evaluating
from .kv_cache import KVCache  # beyond module 5
from .pretrained import load_pretrained, read_pretrained, write_pretrained  # beyond module 5
from .sampling import Sampler, choose_tokens, prompt_ids, settings_of

if TYPE_CHECKING:
    from typing_extensions import Self


class TextGeneration(Module):
    """Methods of :class:`minitorch.DecoderLM`, which inherits them."""

    n_vocab: int
    n_positions: int
    layer_names: list[str]
    eos_token_id: int | None
    backend: TensorBackend
    token_embeddings: Any
    hidden: Any
    score: Any

    @classmethod  # beyond module 5
    def from_pretrained(  # beyond module 5
        cls,
        folder: str | os.PathLike[str],
        backend: TensorBackend | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        precision: str | None = None,
        **options: Any,
    ) -> Self:
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

    def save_pretrained(  # beyond module 5
        self, folder: str | os.PathLike[str], tokenizer: Any = None
    ) -> None:
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

    def make_cache(  # beyond module 5
        self, batch: int = 1, capacity: int | None = None, kind: type[KVCache] = KVCache
    ) -> Any:
        """Return an empty cache for this model.

        Args:
            batch: Number of texts.
            capacity: Maximum number of positions; ``n_positions`` when None.
            kind: The class of the cache.
        """
        table = self.token_embeddings.weights.value
        attention = getattr(self, self.layer_names[0]).attention
        return kind(
            len(self.layer_names), batch, attention.n_kv_head,
            self.n_positions if capacity is None else capacity,
            attention.attn_hidden_dim, table.backend, table.dtype,
        )  # fmt: skip

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

        Keys and values are cached, unless within :func:`minitorch.plain`, so that a token costs one step of
        the model and attention to the previous tokens.

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
        yield from continued(self, ids, count, Sampler(temperature, top_k, top_p, seed))

    @no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Return the logits of the token after ``ids``, without dropout, (1, n_vocab)."""
        with evaluating(self):
            hidden = self.hidden(np.array([ids[-self.n_positions :]]))
            return self.last_logits(hidden, np.array([hidden.shape[1] - 1]))

    def last_logits(self, hidden: Tensor, ends: npt.NDArray[np.int64]) -> Tensor:
        """Return the logits at some positions, (count, n_vocab), for (1, seq, n_embd) from ``hidden``."""
        if len(ends) < hidden.shape[1]:
            hidden = lookup(hidden.view(*hidden.shape[1:]), ends[None])  # (1, count, n_embd)
        return self.score(hidden).view(len(ends), self.n_vocab)


@operation  # beyond module 5
def continued(model: TextGeneration, ids: list[int], count: int, sampler: Sampler) -> Iterator[int]:
    """Yield a number of tokens that continue a text, which is read as a whole for each of them."""
    ids = [*ids]
    for _ in range(count):
        token = choose_tokens(model.next_logits(ids), settings_of([sampler])).item()
        ids.append(sampler.accept(token))
        yield ids[-1]
