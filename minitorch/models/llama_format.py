"""The layout of Llama's weights in the format of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..layers.rms_norm import RMSNorm
from .feed_forward import GatedFeedForward
from .rotary import checked_scaling
from .weight_format import ConfigFile, Format, Weight, head_of

#: Names of x · sigmoid(x).
ACTIVATIONS = ("silu", "swish")
#: Sizes by Llama's name, with the name of the argument of DecoderLM.
SIZES = {
    "vocab_size": "n_vocab",
    "hidden_size": "n_embd",
    "intermediate_size": "middle_dim",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
#: Linear layers and norms of a layer by Llama's name, with ours.
LINEARS = {
    **{f"self_attn.{name}_proj": f"attention.{name}_projection" for name in "qkv"},
    "self_attn.o_proj": "attention.out_projection",
    "mlp.gate_proj": "ff.linear_gate",
    "mlp.up_proj": "ff.linear_in",
    "mlp.down_proj": "ff.linear_out",
}
NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}


def _options(config: ConfigFile) -> dict[str, Any]:
    config.check("hidden_act", ACTIVATIONS, ACTIVATIONS[0])
    config.check("sliding_window", [None], None)  # of a Mistral
    sizes = {ours: config.size(theirs) for theirs, ours in SIZES.items()}
    bias = config.flag("attention_bias", False)
    if config.flag("mlp_bias", bias) is not bias:
        raise config.error(
            f"attention_bias is {bias} and mlp_bias {not bias}, supported are equal values"
        )
    # Since its version 5, transformers keeps the base and the scaling together.
    rotary = config.get("rope_parameters", config.get("rope_scaling", {}))
    if not isinstance(rotary, dict):
        raise config.error(f"rope_scaling must be an object, got {rotary!r:.40}")
    if (part := rotary.get("partial_rotary_factor", 1.0)) != 1.0:
        raise config.error(f"partial_rotary_factor is {part!r:.40}, supported is 1.0")
    try:
        scaling = checked_scaling(rotary)
    except (TypeError, ValueError) as error:
        raise config.error(str(error)) from None
    heads = sizes["n_head"]
    head_dim = config.size("head_dim", sizes["n_embd"] // heads)
    groups = config.size("num_key_value_heads", heads)
    if heads % groups:
        raise config.error(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    return {
        **sizes,
        "n_kv_head": groups,
        "head_dim": head_dim,
        "rotary_theta": ConfigFile({**config.values, **rotary}, config.source).number(
            "rope_theta", 10_000.0, least=1.0
        ),
        "rotary_scaling": scaling,
        "norm": "rms",
        "feed_forward": "swiglu",
        "ln_eps": config.number("rms_norm_eps", 1e-6),
        "bias": bias,
        "p_dropout": 0.0,
        "attention_dropout": config.number("attention_dropout", 0.0, below=1.0),
        "tie_weights": config.flag("tie_word_embeddings", False),
        "head_bias": False,
    }


def _shapes(options: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, head_dim = options["n_embd"], options["head_dim"]
    yield "embed_tokens.weight", (options["n_vocab"], width)
    for i in range(options["n_layer"]):
        yield f"layers.{i}.self_attn.q_proj.weight", (options["n_head"] * head_dim, width)
        yield f"layers.{i}.self_attn.k_proj.weight", (options["n_kv_head"] * head_dim, width)
        yield f"layers.{i}.mlp.gate_proj.weight", (options["middle_dim"], width)


def _weights(model: Any) -> dict[str, Weight]:
    found = {"embed_tokens.weight": Weight(("token_embeddings.weights",))}
    for i, layer in enumerate(model.layer_names):
        for theirs, ours in LINEARS.items():
            name, own = f"layers.{i}.{theirs}", f"{layer}.{ours}"
            found[f"{name}.weight"] = Weight((f"{own}.weights",), True)
            if _has_bias(model):
                found[f"{name}.bias"] = Weight((f"{own}.bias",))
        for theirs, ours in NORMS.items():
            found[f"layers.{i}.{theirs}.weight"] = Weight((f"{layer}.{ours}.weights",))
    found["norm.weight"] = Weight(("ln.weights",))
    return {**found, **head_of(model)}


def _has_bias(model: Any) -> bool:
    return getattr(model, model.layer_names[0]).attention.q_projection.bias is not None


def _why_not(model: Any) -> str | None:
    first = getattr(model, model.layer_names[0])
    if type(model.ln) is not RMSNorm or type(first.ff) is not GatedFeedForward:
        return (
            "a model with rotary positions is written as a Llama, which has RMS norms and SwiGLU; build it "
            "with norm='rms' and feed_forward='swiglu'"
        )
    if model.lm_head is not None and model.lm_head.bias is not None:
        return (
            "a Llama has no bias in its head, and this model has lm_head.bias; build it with "
            "tie_weights=True or head_bias=False"
        )
    return None


def _config(model: Any) -> dict[str, Any]:
    first = getattr(model, model.layer_names[0])
    return {
        "vocab_size": model.n_vocab,
        "hidden_size": model.n_embd,
        "intermediate_size": first.ff.linear_in.out_size,
        "num_attention_heads": model.n_head,
        "num_hidden_layers": len(model.layer_names),
        "max_position_embeddings": model.n_positions,
        "num_key_value_heads": first.attention.n_kv_head,
        "head_dim": first.attention.attn_hidden_dim,
        "hidden_act": ACTIVATIONS[0],
        "rms_norm_eps": model.ln.eps,
        "rope_theta": float(model.rotary.theta),
        "rope_scaling": model.rotary.scaling,
        "attention_bias": _has_bias(model),
        "mlp_bias": _has_bias(model),
        "attention_dropout": first.attention.attention_dropout,
    }


LLAMA = Format(
    name="Llama",
    class_name="LlamaForCausalLM",
    model_types=("llama", "mistral"),
    prefix="model.",
    table="embed_tokens.weight",
    buffers=(".rotary_emb.inv_freq",),  # which older files contain
    options=_options,
    shapes=_shapes,
    weights=_weights,
    why_not=_why_not,
    config=_config,
)
