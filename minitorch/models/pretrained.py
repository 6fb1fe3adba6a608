"""Read and write a language model as a folder in Hugging Face format, with the layout of GPT-2 or Llama."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from kernels.runtime.dtypes import is_floating, rounded

from ..module import Module
from ..training.model_files import (
    UNREADABLE,
    Arrays,
    CheckpointError,
    load_parameters,
    parameter_arrays,
    write_file,
)
from .gpt2_format import GPT2
from .llama_format import LLAMA
from .weight_format import HEAD, ConfigFile, Format

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
#: The names of the files of sharded weights.
INDEX = f"{WEIGHTS}.index.json"
FORMATS = (GPT2, LLAMA)


# -- reading -------------------------------------------------------------------------------------


class Pretrained(NamedTuple):
    """The contents of a folder.

    Attributes:
        source: The file of the weights, for errors.
        format: The layout of the weights.
        options: Arguments of :class:`minitorch.DecoderLM`.
        eos_token_id: The token that ends a text, or None.
        weights: Arrays by their names in the format, without its prefix.
        dtype: Dtype of the token embeddings.
    """

    source: Path
    format: Format
    options: dict[str, Any]
    eos_token_id: int | None
    weights: Arrays
    dtype: np.dtype[Any]


def read_pretrained(folder: str | os.PathLike[str]) -> Pretrained:
    """Read the configuration and the weights of a GPT-2 or a Llama.

    Args:
        folder: A folder with config.json and model.safetensors, or shards with their index.

    Raises:
        CheckpointError: If a file is missing or cannot be read, the weights are in a pickle file, or the
            configuration is that of an unsupported architecture.
    """
    folder = Path(folder)
    files = _weight_files(folder)
    config = ConfigFile(_read_object(folder / CONFIG), folder / CONFIG)
    kind = config.values.get("model_type")
    own = next((one for one in FORMATS if kind in one.model_types), None)
    if own is None:
        known = " or ".join(name for one in FORMATS for name in one.model_types)
        raise CheckpointError(
            f"{folder / CONFIG}: model_type is {kind!r:.40}, supported is {known}; use the folder of a "
            f"{' or a '.join(one.name for one in FORMATS)}"
        )
    options = own.options(config)
    weights: Arrays = {}
    for file in files:
        weights |= _read_weights(file, own)
    source = folder / (WEIGHTS if len(files) == 1 else INDEX)
    if own.table not in weights:
        raise CheckpointError(
            f"{source}: {own.table} is missing, found {', '.join(sorted(weights)[:3])}, …; use the folder "
            f"of a {own.class_name}"
        )
    for name, shape in own.shapes(options):  # before a model of these sizes is allocated
        if name not in weights:
            raise CheckpointError(
                f"{source}: weights of a {own.name} are missing, the first is {name}; its {CONFIG} belongs "
                "to another file"
            )
        _check_shape(source, name, weights[name], shape)
    eos = config.values.get("eos_token_id")
    if isinstance(eos, list) and eos:  # any of them ends a text
        eos = eos[0]
    if type(eos) is not int or not 0 <= eos < options["n_vocab"]:
        eos = None
    return Pretrained(source, own, options, eos, weights, weights[own.table].dtype)


def _check_shape(source: Path, name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise CheckpointError(
            f"{source}: {name} has shape {array.shape}, the {CONFIG} beside it needs {shape}; use files of "
            "the same model"
        )


def _read_object(source: Path) -> dict[str, Any]:
    """Return the contents of a JSON file."""
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{source}: not a JSON object that can be read ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{source}: not a JSON object that can be read, got {found!r:.40}")
    return found


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights, after checking that a folder has the files of a model.

    Raises:
        CheckpointError: If a file is missing or in an unsupported form; the message gives the remedy.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not a folder; pass one with {CONFIG}, {WEIGHTS} and {TOKENIZER}, as nothing is "
            "downloaded"
        )
    found = sorted(path.name for path in folder.iterdir())
    missing = [name for name in (CONFIG, WEIGHTS) if name not in found]
    if not missing:
        return [folder / WEIGHTS]
    if missing == [WEIGHTS] and INDEX in found:
        return _shards(folder)
    if missing == [WEIGHTS] and any(name.startswith("pytorch_model") for name in found):
        raise CheckpointError(
            f"{folder}: pytorch_model.bin is a pickle file, which may run code and is never read; convert "
            f"it with transformers: AutoModelForCausalLM.from_pretrained({str(folder)!r})"
            ".save_pretrained(NEW_FOLDER)"
        )
    raise CheckpointError(
        f"{folder}: {' and '.join(missing)} missing; expected {CONFIG} and {WEIGHTS}, found "
        f"{', '.join(found[:8]) or 'nothing'}{', …' if len(found) > 8 else ''}"
    )


def _shards(folder: Path) -> list[Path]:
    """Return the files that the index of sharded weights names."""
    named = _read_object(folder / INDEX).get("weight_map")
    values = list(named.values()) if isinstance(named, dict) else []
    if not values or not all(isinstance(name, str) and Path(name).name == name for name in values):
        raise CheckpointError(
            f"{folder / INDEX}: weight_map must name the file of each weight, in this folder, got "
            f"{named!r:.60}"
        )
    files = sorted({folder / name for name in values})
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{folder}: {len(absent)} of {len(files)} shards missing, the first is {absent[0]}; get all "
            f"files that {INDEX} names"
        )
    return files


def _read_weights(path: Path, own: Format) -> Arrays:
    """Return the arrays of a safetensors file by name, without the prefix and without buffers."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if not name.endswith(own.buffers)]  # noqa: SIM118
            return {name.removeprefix(own.prefix): file.get_tensor(name) for name in names}
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path}: the weights cannot be read ({error}); get the file again, or another one in float32, "
            "float16 or bfloat16"
        ) from None


def load_pretrained(model: Module, found: Pretrained) -> None:
    """Set every parameter of a model from the weights of a folder, converted to the model's dtypes.

    Args:
        model: A :class:`minitorch.DecoderLM` that ``found.options`` describe.
        found: The contents of the folder.

    Raises:
        CheckpointError: If a weight is missing, unknown or not finite, or has the wrong shape.
    """
    source, own, weights = found.source, found.format, dict(found.weights)
    parameters = {name: p.value for name, p in model.named_parameters()}
    needed = own.weights(model)
    if HEAD not in needed:
        weights.pop(HEAD, None)  # some files repeat the table of embeddings
    if missing := sorted(needed.keys() - weights.keys()):
        raise CheckpointError(
            f"{source}: {len(missing)} weights of a {own.name} are missing, the first is {missing[0]}; its "
            f"{CONFIG} belongs to another file"
        )
    if unknown := sorted(weights.keys() - needed.keys()):
        raise CheckpointError(
            f"{source}: {len(unknown)} weights are not those of a {own.name} of the {CONFIG} beside it, "
            f"the first is {unknown[0]}; use the folder of a {own.class_name}"
        )
    arrays: Arrays = {}
    for theirs, (ours, transposed) in needed.items():
        array = weights.pop(theirs)
        shapes = [parameters[name].shape for name in ours]
        shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        shape = shape[::-1] if transposed else shape
        _check_shape(source, theirs, array, shape)
        if not is_floating(array.dtype):
            raise CheckpointError(
                f"{source}: {theirs} is {array.dtype}, expected floating-point weights; use a file that "
                "is not quantised"
            )
        array = array.T if transposed else array
        for name, part in zip(ours, np.split(array, len(ours), axis=-1), strict=True):
            arrays[name] = np.asarray(rounded(part, parameters[name].dtype), order="C")
    load_parameters(model, arrays, str(source))


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
        remedy = f"copy {TOKENIZER} from where the weights come from"
        if path.with_name("merges.txt").is_file():
            remedy = (
                f"make it of merges.txt with transformers: AutoTokenizer.from_pretrained({str(folder)!r})"
                f".save_pretrained({str(folder)!r})"
            )
        raise CheckpointError(f"{path}: the tokenizer is missing; {remedy}")
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
    """Write a :class:`minitorch.DecoderLM` as the folder of a model; see its ``save_pretrained``."""
    folder = Path(folder)
    own = GPT2 if model.rotary is None else LLAMA
    reason = own.why_not(model)
    attention = getattr(model, model.layer_names[0]).attention
    if attention.window is not None or attention.has_sinks:
        reason = (
            f"a {own.name} attends to all tokens before and has no sinks; build the model without window "
            "and sinks, or save it with minitorch.training.model_files"
        )
    if not attention.is_exact:
        reason = (
            f"a {own.name} has exact attention, and this model approximates it; build it with "
            "attention='flash'"
        )
    if reason is not None:
        raise ValueError(reason)
    arrays = parameter_arrays(model)
    files: Arrays = {}
    for theirs, (ours, transposed) in own.weights(model).items():
        array = np.concatenate([arrays.pop(name) for name in ours], axis=-1)
        array = np.asarray(array.T if transposed else array, order="C")
        files[theirs if theirs == HEAD else own.prefix + theirs] = array
    config = {
        "architectures": [own.class_name],
        "model_type": own.model_types[0],
        **own.config(model),
        "tie_word_embeddings": model.lm_head is None,
        "eos_token_id": model.eos_token_id,
        "dtype": str(files[own.prefix + own.table].dtype),
    }
    # "pt": the layout of PyTorch, without which transformers refuses the file.
    write_file(folder / WEIGHTS, save(files, metadata={"format": "pt"}))
    write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    if tokenizer is not None:
        write_file(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
