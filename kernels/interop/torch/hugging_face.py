"""Attention for the models of Hugging Face's transformers, by the name ``"minitorch"``."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from kernels.interop.torch.operator import flash_attention

#: The name to pass as ``attn_implementation``, and an older one, which models with a list of compatible
#: flash implementations, such as GPT-OSS, refuse because it contains "flash".
NAME, OLD_NAME = "minitorch", "minitorch_flash"


def register_with_transformers() -> None:
    """Register attention with transformers, for ``attn_implementation="minitorch"``.

    ::

        register_with_transformers()
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="minitorch")

    The name ``"minitorch_flash"`` is an alias that not every model accepts.

    Masks are those of ``sdpa``: none for a causal model without padding, else a boolean one.  Groups of
    heads read shared keys and values without a copy.  Key/value caches, sliding windows, soft caps,
    attention sinks and dropout work as in the model's own attention.

    Raises:
        ImportError: If transformers is not installed, or has no attention interface (before 4.53).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"transformers with an attention interface is needed ({error}); run pip install -U transformers"
        ) from error
    _need_no_package()
    for name in (NAME, OLD_NAME):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)


def _need_no_package() -> None:
    """Keep transformers from loading a package for our older name.

    Some versions take every name that contains "flash" for the package flash_attn or a kernel of the hub,
    and load its functions when a model is made.  An attention of the interface needs none of them.
    """
    from transformers import modeling_flash_attention_utils as theirs

    load = getattr(theirs, "_lazy_imports", None)
    if load is None or hasattr(load, "loads_none_for"):
        return

    @wraps(load)
    def lazy_imports(implementation: str | None, *args: Any, **options: Any) -> Any:
        if implementation == OLD_NAME:
            return None, None, None, theirs._pad_input, theirs._unpad_input
        return load(implementation, *args, **options)

    lazy_imports.loads_none_for = OLD_NAME  # type: ignore[attr-defined]
    theirs._lazy_imports = lazy_imports  # type: ignore[attr-defined]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a layer of a model, as the attention interface of transformers asks for it.

    Args:
        module: The layer; ``is_causal`` of it is used where the argument is None.
        query: (batch, heads, seq_q, head_dim).
        key: (batch, key heads, seq_k, head_dim).
        value: (batch, key heads, seq_k, value_dim).
        attention_mask: Of :func:`register_with_transformers`, (batch, 1 or heads, seq_q, seq_k), or None.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the scores.
        is_causal: Whether the model is causal; it counts where there is no mask and more than one query.
        softcap: Bound of the scores.
        s_aux: (heads,), one logit per head in the softmax's denominator.
        position_bias: Added to the scores, (batch or 1, heads, seq_q, seq_k).
        cu_seq_lens_q: Cumulative lengths, (count + 1,), of sequences that are packed into a batch of one,
            where there is no mask.
        cu_seq_lens_k: The same of the keys.

    Returns:
        (batch, seq_q, heads, value_dim), and None in the place of the probabilities.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A cache with unused places is longer than the first queries: the diagonal begins at the top left.
    causal = query.shape[2] > 1 and attention_mask is None and causal
    if position_bias is not None:
        if attention_mask is None:
            attention_mask = position_bias
        elif attention_mask.is_floating_point():
            attention_mask = attention_mask + position_bias
        else:
            attention_mask = position_bias.masked_fill(~attention_mask, -float("inf"))
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(query.dtype)
    options: Any = {
        "dropout_p": dropout,
        "is_causal": bool(causal),
        "scale": scaling,
        "enable_gqa": key.shape[1] != query.shape[1],
        "softcap": softcap or 0.0,
        "sink": s_aux,
    }
    if cu_seq_lens_q is None or attention_mask is not None:
        out = flash_attention(query, key, value, attention_mask, **options)
    else:
        of_keys = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        lengths = [x.diff().tolist() for x in (cu_seq_lens_q, of_keys, of_keys)]
        parts = [x.split(n, 2) for x, n in zip((query, key, value), lengths, strict=True)]
        sequences = [flash_attention(*part, **options) for part in zip(*parts, strict=True)]
        out = torch.cat(sequences, 2)
    return out.transpose(1, 2).contiguous(), None
