"""Read and write a language model as a folder of Hugging Face, in the layout of GPT-2."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kernels.runtime.dtypes import is_floating, rounded

from ..module import Module
from ..training.model_files import (
    Arrays,
    CheckpointError,
    load_parameters,
    parameter_arrays,
    write_file,
)

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
#: Values of ``model_type`` in config.json that can be read.
MODEL_TYPES = ("gpt2",)
#: Names of GELU in its tanh form.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
#: Settings that change what the model computes: the only supported value, which is also the default.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
#: Sizes: GPT-2's name and that of the argument of DecoderLM.
SIZES = {
    "vocab_size": "n_vocab",
    "n_embd": "n_embd",
    "n_head": "n_head",
    "n_positions": "n_positions",
    "n_layer": "n_layer",
}
#: Modules of a model and of a layer: GPT-2's name and ours.  ``c_attn`` holds three of ours, side by side.
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
PREFIX, HEAD = "transformer.", "lm_head.weight"
#: Masks of attention, which older files contain.
BUFFERS = (".attn.bias", ".attn.masked_bias")


# -- reading -------------------------------------------------------------------------------------


class Pretrained(NamedTuple):
    """The contents of a folder.

    Attributes:
        source: The file of the weights, for errors.
        options: Arguments of :class:`minitorch.DecoderLM`.
        eos_token_id: The token that ends a text, or None.
        weights: Arrays by GPT-2's names, without their prefix.
        dtype: Dtype of the token embeddings.
    """

    source: Path
    options: dict[str, Any]
    eos_token_id: int | None
    weights: Arrays
    dtype: np.dtype[Any]


def read_pretrained(folder: str | os.PathLike[str]) -> Pretrained:
    """Read the configuration and the weights of a GPT-2.

    Args:
        folder: A folder with config.json and model.safetensors.

    Raises:
        CheckpointError: If a file is missing or cannot be read, the weights are in shards or in a pickle
            file, or the configuration is that of another architecture.
    """
    folder = Path(folder)
    _check_files(folder)
    options, eos_token_id = _read_config(folder / CONFIG)
    weights = _read_weights(folder / WEIGHTS)
    if "wte.weight" not in weights:
        raise CheckpointError(
            f"{folder / WEIGHTS}: wte.weight is missing, found {', '.join(sorted(weights)[:3])}, …; use "
            "the folder of a GPT2LMHeadModel"
        )
    dtype = weights["wte.weight"].dtype
    return Pretrained(folder / WEIGHTS, options, eos_token_id, weights, dtype)


def _read_config(source: Path) -> tuple[dict[str, Any], int | None]:
    """Return the arguments of DecoderLM, and the token that ends a text or None."""
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source}: not a JSON object that can be read ({error})") from None
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"{source}: model_type is {kind!r:.40}, supported is {' or '.join(MODEL_TYPES)}; use the "
            "folder of a GPT-2"
        )
    activation = config.get("activation_function", ACTIVATIONS[0])
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{source}: activation_function is {activation!r:.40}, supported is "
            f"{' or '.join(ACTIVATIONS)}"
        )
    for name, needed in FIXED.items():
        if config.get(name, needed) is not needed:
            raise CheckpointError(
                f"{source}: {name} is {config[name]!r:.40}, supported is {needed}"
            )
    sizes = {ours: _size(config, theirs, source) for theirs, ours in SIZES.items()}
    width = sizes["n_embd"]
    if width % sizes["n_head"]:
        raise CheckpointError(
            f"{source}: n_embd {width} is not a multiple of n_head {sizes['n_head']}"
        )
    inner = 4 * width if config.get("n_inner") is None else _size(config, "n_inner", source)
    eos = config.get("eos_token_id")
    return {
        **sizes,
        "middle_dim": inner,
        "ln_eps": config.get("layer_norm_epsilon", 1e-5),
        "p_dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "tie_weights": config.get("tie_word_embeddings", True),
        "head_bias": False,
    }, eos if type(eos) is int and 0 <= eos < sizes["n_vocab"] else None


def _size(config: dict[str, Any], name: str, source: Path) -> int:
    size = config.get(name)
    if type(size) is not int or size < 1:
        raise CheckpointError(
            f"{source}: {name} must be a whole number, 1 or more; got {size!r:.40}"
        )
    return size


def _check_files(folder: Path) -> None:
    """Check that a folder has the files of a model.

    Raises:
        CheckpointError: If it lacks one, or has it in a form that is not read; with the remedy.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not a folder; pass one with {CONFIG}, {WEIGHTS} and {TOKENIZER}, as nothing is "
            "downloaded"
        )
    found = sorted(path.name for path in folder.iterdir())
    missing = [name for name in (CONFIG, WEIGHTS) if name not in found]
    if not missing:
        return
    # transformers reads both forms and writes one file again.
    convert = (
        "write one file with transformers: AutoModelForCausalLM.from_pretrained("
        f"{str(folder)!r}).save_pretrained(NEW_FOLDER, max_shard_size='100GB')"
    )
    if missing == [WEIGHTS] and f"{WEIGHTS}.index.json" in found:
        raise CheckpointError(f"{folder}: the weights are sharded, expected {WEIGHTS}; {convert}")
    if missing == [WEIGHTS] and "pytorch_model.bin" in found:
        raise CheckpointError(
            f"{folder}: pytorch_model.bin is a pickle file, which may run code and is never read; "
            f"{convert}"
        )
    raise CheckpointError(
        f"{folder}: {' and '.join(missing)} missing; expected {CONFIG} and {WEIGHTS}, found "
        f"{', '.join(found[:8]) or 'nothing'}{', …' if len(found) > 8 else ''}"
    )


def _read_weights(path: Path) -> Arrays:
    """Return the arrays of a safetensors file by name, without the prefix and without masks."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if not name.endswith(BUFFERS)]  # noqa: SIM118
            return {name.removeprefix(PREFIX): file.get_tensor(name) for name in names}
    # TypeError: a dtype that NumPy does not have, such as float8.
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the weights cannot be read ({error})") from None


def load_pretrained(model: Module, found: Pretrained) -> None:
    """Set every parameter of a model from the weights of a folder, converted to the model's dtypes.

    Args:
        model: A :class:`minitorch.DecoderLM` that ``found.options`` describe.
        found: The contents of the folder.

    Raises:
        CheckpointError: If a weight is missing, unknown, of another shape, or not finite.
    """
    source, weights = found.source, dict(found.weights)
    parameters = {name: p.value for name, p in model.named_parameters()}
    names = _names(model)
    if HEAD not in names:
        weights.pop(HEAD, None)  # some files repeat the table of embeddings
    if missing := sorted(names.keys() - weights.keys()):
        raise CheckpointError(
            f"{source}: {len(missing)} weights of a GPT-2 are missing, the first is {missing[0]}; its "
            f"{CONFIG} belongs to another file"
        )
    if unknown := sorted(weights.keys() - names.keys()):
        raise CheckpointError(
            f"{source}: {len(unknown)} weights are not those of a GPT-2 of the {CONFIG} beside it, the "
            f"first is {unknown[0]}; use the folder of a GPT2LMHeadModel"
        )
    arrays: Arrays = {}
    for theirs, ours in names.items():
        array = weights.pop(theirs)
        shapes = [parameters[name].shape for name in ours]
        shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        shape = shape[::-1] if theirs == HEAD else shape
        if array.shape != shape:
            raise CheckpointError(
                f"{source}: {theirs} has shape {array.shape}, the {CONFIG} beside it needs {shape}; "
                "use files of the same model"
            )
        if not is_floating(array.dtype):
            raise CheckpointError(
                f"{source}: {theirs} is {array.dtype}, expected floating-point weights; use a file that "
                "is not quantised"
            )
        array = array.T if theirs == HEAD else array
        for name, part in zip(ours, np.split(array, len(ours), axis=-1), strict=True):
            arrays[name] = np.asarray(rounded(part, parameters[name].dtype), order="C")
    load_parameters(model, arrays, str(source))


def _names(model: Any) -> dict[str, tuple[str, ...]]:
    """Return GPT-2's name of each weight, and the names of the parameters that it holds side by side."""
    modules = dict(OUTER)
    for i, layer in enumerate(model.layer_names):
        for theirs, ours in INNER.items():
            modules[f"h.{i}.{theirs}"] = tuple(f"{layer}.{name}" for name in ours)
    found = {
        f"{theirs}.{kind}": tuple(f"{name}.{own}" for name in ours)
        for theirs, ours in modules.items()
        for kind, own in (("weight", "weights"), ("bias", "bias"))
        if kind == "weight" or theirs not in ("wte", "wpe")
    }
    return found if model.lm_head is None else {**found, HEAD: ("lm_head.weights",)}


def read_tokenizer(folder: str | os.PathLike[str], n_vocab: int) -> Any:
    """Read the tokenizer of a model, a ``tokenizers.Tokenizer``.

    Args:
        folder: A folder with tokenizer.json.
        n_vocab: Number of tokens of the model.

    Raises:
        CheckpointError: If the library ``tokenizers`` or the file is missing, the file cannot be read, or
            it has tokens that the model lacks.
    """
    path = Path(folder) / TOKENIZER
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CheckpointError(
            f"{path}: reading it needs the library tokenizers; pip install tokenizers"
        ) from None
    if not path.is_file():
        old = "" if not path.with_name("merges.txt").is_file() else (
            f"; transformers makes it of merges.txt: AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})"
        )  # fmt: skip
        raise CheckpointError(f"{path}: the tokenizer is missing; expected {TOKENIZER}{old}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path}: the tokenizer cannot be read ({error})") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= n_vocab:
        raise CheckpointError(
            f"{path}: the tokenizer has a token {largest}, and the model's vocabulary ends at "
            f"{n_vocab - 1}; use the tokenizer of this model"
        )
    return tokenizer


# -- writing -------------------------------------------------------------------------------------


def write_pretrained(folder: str | os.PathLike[str], model: Any, tokenizer: Any = None) -> None:
    """Write a :class:`minitorch.DecoderLM` as the folder of a GPT-2; see its ``save_pretrained``."""
    folder = Path(folder)
    first = getattr(model, model.layer_names[0])
    arrays = parameter_arrays(model)
    names = _names(model)
    used = {name for ours in names.values() for name in ours}
    if odd := sorted(used ^ arrays.keys()):
        raise ValueError(
            f"a GPT-2 has biases in all layers and none in its head, and this model differs in {odd[0]}; "
            "build it with bias=True, and with tie_weights=True or head_bias=False"
        )
    if not first.attention.is_exact:
        raise ValueError(
            "a GPT-2 has exact attention, and this model approximates it; build it with attention='flash'"
        )
    files: Arrays = {}
    for theirs, ours in names.items():
        array = np.concatenate([arrays.pop(name) for name in ours], axis=-1)
        array = np.asarray(array.T if theirs == HEAD else array, order="C")
        files[theirs if theirs == HEAD else PREFIX + theirs] = array
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": MODEL_TYPES[0],
        **{theirs: getattr(model, ours) for theirs, ours in SIZES.items() if theirs != "n_layer"},
        "n_layer": len(model.layer_names),
        "n_inner": first.ff.linear_in.out_size,
        "activation_function": ACTIVATIONS[0],
        "layer_norm_epsilon": model.ln.eps,
        "embd_pdrop": model.dropout.p_dropout,
        "resid_pdrop": first.ff.dropout.p_dropout,
        "attn_pdrop": first.attention.attention_dropout,
        "tie_word_embeddings": model.lm_head is None,
        "bos_token_id": model.eos_token_id,
        "eos_token_id": model.eos_token_id,
        "dtype": str(files[f"{PREFIX}wte.weight"].dtype),
        **FIXED,
    }
    # "pt": the layout of PyTorch, without which transformers refuses the file.
    write_file(folder / WEIGHTS, save(files, metadata={"format": "pt"}))
    write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    if tokenizer is not None:
        write_file(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
