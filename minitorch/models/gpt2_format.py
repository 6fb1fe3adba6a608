"""The layout of GPT-2's weights in the format of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .weight_format import ConfigFile, Format, Weight, head_of

#: Names of GELU in its tanh form.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
#: Settings that change the computation, with their only supported value, which is also the default.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
#: Sizes by GPT-2's name, with the name of the argument of DecoderLM.
SIZES = {
    "vocab_size": "n_vocab",
    "n_embd": "n_embd",
    "n_head": "n_head",
    "n_positions": "n_positions",
    "n_layer": "n_layer",
}
#: Modules of a model and of a layer by GPT-2's name, with ours.  ``c_attn`` joins three of ours.
OUTER: dict[str, tuple[str, ...]] = {
    "wte": ("token_embeddings",),
    "wpe": ("position_embeddings",),
    "ln_f": ("ln",),
}
INNER = {
    "ln_1": ("ln_1",),
    "attn.c_attn": tuple(f"attention.{name}_projection" for name in "qkv"),
    "attn.c_proj": ("attention.out_projection",),
    "ln_2": ("ln_2",),
    "mlp.c_fc": ("ff.linear_in",),
    "mlp.c_proj": ("ff.linear_out",),
}


def _options(config: ConfigFile) -> dict[str, Any]:
    config.check("activation_function", ACTIVATIONS, ACTIVATIONS[0])
    for name, needed in FIXED.items():
        config.check(name, [needed], needed)
    sizes = {ours: config.size(theirs) for theirs, ours in SIZES.items()}
    width = sizes["n_embd"]
    if width % sizes["n_head"]:
        raise config.error(f"n_embd {width} is not a multiple of n_head {sizes['n_head']}")
    return {
        **sizes,
        "middle_dim": config.size("n_inner", 4 * width),
        "ln_eps": config.number("layer_norm_epsilon", 1e-5),
        "p_dropout": config.number("resid_pdrop", 0.1, below=1.0),
        "attention_dropout": config.number("attn_pdrop", 0.1, below=1.0),
        "tie_weights": config.flag("tie_word_embeddings", True),
        "head_bias": False,
    }


def _shapes(options: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = options["n_embd"]
    yield "wte.weight", (options["n_vocab"], width)
    yield "wpe.weight", (options["n_positions"], width)
    for i in range(options["n_layer"]):
        yield f"h.{i}.mlp.c_fc.weight", (width, options["middle_dim"])


def _weights(model: Any) -> dict[str, Weight]:
    modules = dict(OUTER)
    for i, layer in enumerate(model.layer_names):
        for theirs, ours in INNER.items():
            modules[f"h.{i}.{theirs}"] = tuple(f"{layer}.{name}" for name in ours)
    found = {
        f"{theirs}.{kind}": Weight(tuple(f"{name}.{own}" for name in ours))
        for theirs, ours in modules.items()
        for kind, own in (("weight", "weights"), ("bias", "bias"))
        if kind == "weight" or theirs not in ("wte", "wpe")
    }
    return {**found, **head_of(model)}


def _why_not(model: Any) -> str | None:
    used = {name for weight in _weights(model).values() for name in weight.ours}
    if odd := sorted(used ^ {name for name, _ in model.named_parameters()}):
        return (
            "a GPT-2 has layer norms, GELU, and biases in all layers and none in its head, and this model "
            f"differs in {odd[0]}; build it with bias=True, and with tie_weights=True or head_bias=False"
        )
    attention = getattr(model, model.layer_names[0]).attention
    width = attention.n_head * attention.attn_hidden_dim
    if attention.n_kv_head != attention.n_head or width != model.n_embd:
        return (
            f"a GPT-2 has heads of n_embd / n_head, and as many of keys as of queries; this model has "
            f"{attention.n_head} of size {attention.attn_hidden_dim} and {attention.n_kv_head} of keys for "
            f"n_embd {model.n_embd}; build it without head_dim and n_kv_head"
        )
    return None


def _config(model: Any) -> dict[str, Any]:
    first = getattr(model, model.layer_names[0])
    return {
        **{theirs: getattr(model, ours) for theirs, ours in SIZES.items() if theirs != "n_layer"},
        "n_layer": len(model.layer_names),
        "n_inner": first.ff.linear_in.out_size,
        "activation_function": ACTIVATIONS[0],
        "layer_norm_epsilon": model.ln.eps,
        "embd_pdrop": model.dropout.p_dropout,
        "resid_pdrop": first.ff.dropout.p_dropout,
        "attn_pdrop": first.attention.attention_dropout,
        "bos_token_id": model.eos_token_id,
        **FIXED,
    }


GPT2 = Format(
    name="GPT-2",
    class_name="GPT2LMHeadModel",
    model_types=("gpt2",),
    prefix="transformer.",
    table="wte.weight",
    # Masks of attention, which older files contain.
    buffers=(".attn.bias", ".attn.masked_bias"),
    options=_options,
    shapes=_shapes,
    weights=_weights,
    why_not=_why_not,
    config=_config,
)
