"""A tiny Llama in the format of Hugging Face, made without transformers, and its frequencies."""

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
