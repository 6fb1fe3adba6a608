"""Attention for the models of Hugging Face's transformers, by the name ``"minitorch"``."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from kernels.interop.torch.operator import flash_attention, flash_attention_varlen

#: The name to pass as ``attn_implementation``, and an older one, which models with a list of compatible
#: flash implementations, such as GPT-OSS, refuse because it contains "flash".
NAME, OLD_NAME = "minitorch", "minitorch_flash"
#: The name that a model gets instead if its code reads or extends the mask as its own attention does.
ADDITIVE = "minitorch_additive"


def register_with_transformers() -> None:
    """Register attention with transformers, for ``attn_implementation="minitorch"``.

    ::

        register_with_transformers()
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="minitorch")

    The name ``"minitorch_flash"`` is an alias that not every model accepts.

    Masks are those of ``sdpa``: none for a causal model without padding, else a boolean one.  A model
    that supports ``eager`` attention alone gets the additive masks of that.  Groups of heads read shared
    keys and values without a copy.  Key/value caches, sliding windows, soft caps, attention sinks and
    dropout work as in the model's own attention, and so does ``generate_batch``.  A model that does not
    use the attention interface is refused when it is made.

    Raises:
        ImportError: If transformers is not installed, or is older than 4.57.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import eager_mask, sdpa_mask

        choose = PreTrainedModel.get_correct_attn_implementation
    except (AttributeError, ImportError) as error:
        raise ImportError(
            f"transformers 4.57 or newer is needed ({error}); run pip install -U transformers"
        ) from error
    _need_no_package()
    _serve_generate_batch()
    for name in (NAME, OLD_NAME):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)
    AttentionInterface.register(ADDITIVE, _attention_of_the_mask)
    AttentionMaskInterface.register(ADDITIVE, eager_mask)
    if hasattr(choose, "chooses_for"):
        return

    @wraps(choose)
    def choose_checked(self: Any, requested: str | None, *args: Any, **options: Any) -> str:
        if requested in (NAME, OLD_NAME):
            _check_model(type(self))
            if not (
                self._supports_sdpa
                or (self._supports_flash_attn and self._supports_attention_backend)
            ):
                requested = ADDITIVE
        return choose(self, requested, *args, **options)

    choose_checked.chooses_for = NAME  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = choose_checked  # type: ignore[method-assign]


def _check_model(model: type) -> None:
    """Check that a class of models computes attention through the interface, in all its bases' files.

    If not, our boolean masks would be added to its own scores, and a ValueError is raised.
    """
    for base in model.__mro__:
        if hasattr(base, "get_correct_attn_implementation") and (why := _why_not(base.__module__)):
            raise ValueError(
                f"attn_implementation={NAME!r} is not possible for {model.__name__}, which {why}; load it "
                'with attn_implementation="eager", or if it is a part of a larger model, name the '
                f'implementation of each part: {{"text_config": {NAME!r}, "vision_config": "eager"}}'
            )


@cache
def _why_not(name: str) -> str | None:
    """Return why the models of a module cannot use our attention, or None if they can."""
    module = sys.modules.get(name)
    try:
        code = inspect.getsource(module)  # type: ignore[arg-type]
    except (OSError, TypeError):  # of a notebook, for example
        return None
    has_layers = re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE)
    own_table = re.search(r"\b(?!ALL_)\w+\[(self\.)?config\._attn_implementation\]", code)
    if own_table or (has_layers and "ALL_ATTENTION_FUNCTIONS" not in code):
        return "does not use the attention interface of transformers"
    eager = getattr(module, "eager_attention_forward", None)
    known = {*inspect.signature(attention).parameters, "kwargs"}
    unknown = [] if eager is None else sorted({*inspect.signature(eager).parameters} - known)
    return f"passes {', '.join(unknown)} to its attention" if unknown else None


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


def _serve_generate_batch() -> None:
    """Let continuous batching keep our attention, which it knows neither as flash nor as a paged one.

    It then gathers the keys of each request from its pages, and passes cumulative lengths.
    """
    try:
        from transformers.generation.continuous_batching.continuous_api import (
            ContinuousBatchingManager as Manager,
        )

        switch = Manager.switch_to_cb_friendly_attn
    except (AttributeError, ImportError):  # of other versions
        return
    if hasattr(switch, "keeps"):
        return

    @wraps(switch)
    def switch_others(self: Any, model: Any, *args: Any, **options: Any) -> None:
        if model.config._attn_implementation not in (NAME, OLD_NAME):
            switch(self, model, *args, **options)

    switch_others.keeps = NAME  # type: ignore[attr-defined]
    Manager.switch_to_cb_friendly_attn = switch_others  # type: ignore[method-assign]


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
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a layer of a model, as the attention interface of transformers asks for it.

    ``is_causal`` of the layer is used where the argument is None; it counts where there is no mask
    and more than one query.  ``s_aux``, (heads,), and ``sinks``, (batch, heads, seq_q, 1), are logits
    in the softmax's denominator, and ``position_bias`` is added to the scores. The cumulative
    lengths, (count + 1,), are of sequences that are packed into a batch of one.  A row attends to
    keys of its own sequence, and where there is no mask, the diagonal of a causal model ends at the
    last row and the last key of the sequence, and the layer's ``sliding_window`` counts.

    Returns:
        (batch, seq_q, heads, value_dim), and None in the place of the probabilities.

    Raises:
        ValueError: If the batch of packed sequences is not 1, or the lengths do not add up.
    """
    if others.get("output_attentions"):
        warnings.warn(
            f"attn_implementation={NAME!r} never holds the probabilities that output_attentions=True asks "
            'for, and returns None for them; load the model with attn_implementation="eager"',
            stacklevel=2,
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(attention_mask is None and causal)
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
        "scale": scaling,
        "enable_gqa": key.shape[1] != query.shape[1],
        "softcap": softcap or 0.0,
        "sink": s_aux,
        "return_lse": True,
    }
    if cu_seq_lens_q is None:
        # A cache with unused places is longer than the first queries: the diagonal begins at the top left.
        options["is_causal"] = causal and query.shape[2] > 1
        out, lse = flash_attention(query, key, value, attention_mask, **options)
    else:
        options["is_causal"] = causal
        if causal and sliding_window is not None:
            options["window_size"] = sliding_window - 1, 0
        ends = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        out, lse = _packed(query, key, value, attention_mask, ends, options)
    if sinks is not None:
        out = out * torch.sigmoid(lse.unsqueeze(-1) - sinks).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ends: tuple[Tensor, Tensor],
    options: Any,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of packed sequences, a batch of one; see :func:`attention`.

    ``ends`` are the cumulative lengths of the rows and of the keys.
    """
    places = [x.tolist() for x in ends]
    if query.shape[0] != 1 or [p[-1] for p in places] != [query.shape[2], key.shape[2]]:
        raise ValueError(
            f"cu_seq_lens that end at {places[0][-1]} and {places[1][-1]} need a batch of one with as many "
            f"queries and keys, got a batch of {query.shape[0]} with {query.shape[2]} and {key.shape[2]}; "
            "concatenate the sequences of the batch"
        )
    # The diagonal ends at the last row and key of a sequence: it begins at the first if they are as many.
    if mask is None and (places[0] == places[1] or not options["is_causal"]):
        own = (x[0].transpose(0, 1) for x in (query, key, value))
        out, lse = flash_attention_varlen(*own, *places, **options)
        return out.transpose(0, 1)[None], lse[None]
    found = []
    for row, row_end, col, col_end in zip(
        places[0], places[0][1:], places[1], places[1][1:], strict=False
    ):
        if row == row_end:
            continue
        q, k, v = query[:, :, row:row_end], key[:, :, col:col_end], value[:, :, col:col_end]
        if col == col_end:  # rows without a key
            out = q.new_zeros(*q.shape[:-1], v.shape[-1])
            found.append((out, out.new_full(q.shape[:-1], -float("inf"), dtype=torch.float32)))
            continue
        own = None
        if mask is not None:
            own = (mask if mask.shape[-2] == 1 else mask[..., row:row_end, :])[..., col:col_end]
        offset = (col_end - col) - (row_end - row) if options["is_causal"] else 0
        found.append(flash_attention(q, k, v, own, causal_offset=offset, **options))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _attention_of_the_mask(*args: Any, **options: Any) -> tuple[Tensor, None]:
    """Do what :func:`attention` does, where a causal model gives its mask in every call."""
    return attention(*args, **{**options, "is_causal": False})
