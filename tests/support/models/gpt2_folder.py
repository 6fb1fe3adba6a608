"""A tiny GPT-2 in the format of Hugging Face, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Arrays = dict[str, npt.NDArray[Any]]
#: As in a file of transformers.
CONFIG: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 23, "n_positions": 11, "n_embd": 12, "n_layer": 2, "n_head": 3,
    "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-3, "embd_pdrop": 0.1,
    "resid_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True, "eos_token_id": 7,
}  # fmt: skip


def config_of(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def weights_of(config: dict[str, Any], seed: int = 0) -> Arrays:
    """Return random weights by GPT-2's names, without a prefix, in float32."""
    rng, width = np.random.default_rng(seed), config["n_embd"]
    inner = config["n_inner"] or 4 * width
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config["vocab_size"], width),
        "wpe.weight": (config["n_positions"], width),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    linears = {
        "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner), "mlp.c_proj": (inner, width),
    }  # fmt: skip
    for i in range(config["n_layer"]):
        for name, shape in linears.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
    shapes |= {f"ln_f.{kind}": (width,) for kind in ("weight", "bias")}
    return {name: rng.normal(0.5, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, weights: Arrays | None = None, prefix: str = "transformer.", **changes: Any
) -> Path:
    """Write a folder and return it.

    Args:
        folder: Where, created if necessary.
        weights: By name without a prefix; random ones when None.
        prefix: Of the names in the file, but for the head's.
        changes: Values of config.json that differ from :data:`CONFIG`.
    """
    config = config_of(**changes)
    weights = weights_of(config) if weights is None else weights
    named = {(name if name[:3] == "lm_" else prefix + name): a for name, a in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
