"""A tiny Llama in the format of Hugging Face, made without transformers, and what it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Arrays = dict[str, npt.NDArray[Any]]
#: As in a file of transformers before its version 5.
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 23, "max_position_embeddings": 11, "hidden_size": 12,
    "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "hidden_act": "silu", "rms_norm_eps": 1e-3, "rope_theta": 500.0, "rope_scaling": None,
    "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "eos_token_id": 7,
}  # fmt: skip
#: With so small a model every frequency is of another kind: kept, stretched, or between.
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.5,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def config_of(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def weights_of(config: dict[str, Any], seed: int = 0) -> Arrays:
    """Return random weights by Llama's names, in float32."""
    rng, width, inner = (
        np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"],
    )  # fmt: skip
    q, kv = (
        config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value")
    )
    names = ["model.embed_tokens"] + ([] if config["tie_word_embeddings"] else ["lm_head"])
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (config["vocab_size"], width) for name in names
    }
    linears = {
        "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        for name, shape in linears.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if config["attention_bias"]:
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    return {name: rng.normal(0.3, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, weights: Arrays | None = None, **changes: Any) -> Path:
    """Write a folder, with random weights when None, and return it."""
    config = config_of(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights_of(config) if weights is None else weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def frequencies_of(config: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Return the angle of one position, (head_dim / 2,), frequency by frequency."""
    scaling, dim = config["rope_scaling"] or {}, config["head_dim"]
    found = []
    for i in range(0, dim, 2):
        plain = config["rope_theta"] ** (-i / dim)
        if scaling.get("rope_type") == "linear":
            plain /= scaling["factor"]
        elif scaling.get("rope_type") == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            waves = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
            kept = 0 if waves < low else 1 if waves > high else (waves - low) / (high - low)
            plain = kept * plain + (1 - kept) * plain / scaling["factor"]
        found.append(plain)
    return np.array(found)


def expected_logits(
    config: dict[str, Any], weights: Arrays, ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the logits of a Llama by its definition, in float64, with complex numbers for the rotation.

    Args:
        config: Its configuration.
        weights: By name.
        ids: (seq,) token ids.

    Source: Touvron et al. (2023), Llama, section 2.2, and the papers that it names.
    """
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    seq, heads, groups = len(ids), config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["head_dim"]
    turns = np.exp(1j * np.arange(seq)[:, None] * frequencies_of(config))  # (seq, head_dim / 2)

    def norm(x: Any, name: str) -> Any:
        square = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(square + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def split(x: Any, count: int) -> Any:
        return x.reshape(seq, count, dim).swapaxes(0, 1)  # (count, seq, head_dim)

    def turned(x: Any) -> Any:
        z = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turns
        return np.concatenate([z.real, z.imag], -1)

    def attention(x: Any, layer: str) -> Any:
        q = turned(split(linear(x, f"{layer}.q_proj"), heads))
        k = turned(split(linear(x, f"{layer}.k_proj"), groups)).repeat(heads // groups, 0)
        v = split(linear(x, f"{layer}.v_proj"), groups).repeat(heads // groups, 0)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(dim)  # (heads, seq, seq)
        scores[:, ~np.tri(seq, dtype=bool)] = -np.inf
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        out = probs / probs.sum(-1, keepdims=True) @ v  # (heads, seq, head_dim)
        return linear(out.swapaxes(0, 1).reshape(seq, heads * dim), f"{layer}.o_proj")

    x = w["model.embed_tokens.weight"][ids]  # (seq, hidden_size)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        x = x + attention(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
        inner = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(inner, f"{layer}.mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * linear(inner, f"{layer}.mlp.up_proj")
        x = x + linear(inner, f"{layer}.mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T
