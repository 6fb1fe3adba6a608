"""Language models and their tokens: from a configuration, a run, or a folder of Hugging Face."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from data.text import PROMPT

import minitorch
from minitorch.models.pretrained import CONFIG, WEIGHTS, read_tokenizer
from minitorch.training.model_files import CheckpointError, load_parameters, read_checkpoint
from training.gpt_options import check_config, with_defaults
from training.loop_options import BACKENDS


def build(config: dict[str, Any], backend: str, recompute: bool = False) -> minitorch.DecoderLM:
    """Build the model that a configuration describes.

    Args:
        config: See :data:`gpt_options.CONFIG`; what older ones lack is added.
        backend: One of :data:`BACKENDS`.
        recompute: See :class:`minitorch.DecoderLM`.

    Raises:
        ValueError: If it describes none.
    """
    config = with_defaults(config)
    check_config(config)
    shape = config["model"] or {
        "n_vocab": config["vocabulary"],
        "n_embd": config["width"],
        "n_head": config["heads"],
        "n_positions": config["context"],
        "n_layer": config["layers"],
        "middle_dim": 4 * config["width"],
        "tie_weights": config["tie_weights"],
        "head_bias": config["tokenizer"] is None,  # a GPT-2 has none
        "rotary_theta": config["rotary_theta"],
        "rotary_scaling": config["rotary_scaling"],
    }
    try:
        model = minitorch.DecoderLM(
            **shape,
            p_dropout=config["dropout"],
            attention=config["attention"],
            window=config["window"],
            sinks=config["sinks"],
            backend=BACKENDS[backend],
            precision=config["precision"],
            recompute=recompute,
        )
    except TypeError as error:
        raise ValueError(f"the configuration describes no model ({error})") from None
    model.eos_token_id = config.get("eos_token_id")
    return model


def load_run(
    path: str, backend: str, attention: str | None = None
) -> tuple[minitorch.DecoderLM, dict[str, Any]]:
    """Return a model and its configuration; exit with one line if they cannot be read.

    Args:
        path: A checkpoint, the folder of a run of ``train_gpt.py``, or one in the format of Hugging Face.
        backend: One of :data:`BACKENDS`.
        attention: "flash" or "naive", instead of what the model was trained with.
    """
    source = Path(path)
    try:
        if (source / CONFIG).is_file():
            return _of_folder(source, backend, attention)
        return _of_checkpoint(
            str(source / WEIGHTS if source.is_dir() else source), backend, attention
        )
    except CheckpointError as error:
        sys.exit(str(error))
    except (TypeError, ValueError) as error:
        sys.exit(f"{path}: {error}")


def _of_folder(
    folder: Path, backend: str, attention: str | None
) -> tuple[minitorch.DecoderLM, dict[str, Any]]:
    options = {} if attention is None else {"attention": attention}
    model = minitorch.DecoderLM.from_pretrained(folder, BACKENDS[backend], **options)
    tokenizer = read_tokenizer(folder, model.n_vocab)
    own = {"characters": "", "tokenizer": tokenizer.to_str(), "vocabulary": model.n_vocab}
    return model, with_defaults({"prompt": PROMPT, "context": model.n_positions, **own})


def _of_checkpoint(
    path: str, backend: str, attention: str | None
) -> tuple[minitorch.DecoderLM, dict[str, Any]]:
    arrays, config = read_checkpoint(path)
    config = with_defaults({"prompt": PROMPT, **config})  # which older checkpoints lack
    check_config(config)
    width = config["width"]
    places = config["context"] if config["rotary_theta"] is None else 0
    least = 12 * config["layers"] * width**2 + (config["vocabulary"] + places) * width
    weights = sum(array.size for array in arrays.values())
    if config["model"] is None and least > weights:  # before memory is taken for it
        raise ValueError("its configuration describes a larger model than its weights")
    config["attention"] = attention or config["attention"]  # both have the same weights
    model = build(config, backend)
    load_parameters(model, arrays, path)
    return model, config
