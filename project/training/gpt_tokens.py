"""What the tokens of the GPT stand for: characters, bytes, or byte pairs of the library ``tokenizers``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from data.text import HELD_OUT, Corpus, Tokens, encode

from minitorch.models.pretrained import Pretrained, read_pretrained, read_tokenizer
from minitorch.training.model_files import CheckpointError
from training.gpt_presets import characters_of, reader, spelled

#: The token that ends a text, as GPT-2 writes it; and the fewest tokens: this one and the bytes.
END, LEAST = "<|endoftext|>", 257
Reader = Callable[[Sequence[int]], str]


def tokenizers_library() -> Any:
    """Return the module ``tokenizers``; exit with one line if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        sys.exit("byte pairs need the library tokenizers; pip install tokenizers")
    return tokenizers


def train_byte_pairs(text: str, size: int) -> str:
    """Train a byte-pair tokenizer on the part of a text that is not held out, and return it as JSON.

    Exit with one line if the library is missing.

    Args:
        text: All of it.
        size: Number of tokens at most, at least ``LEAST``; a short text gives fewer.

    Source: Sennrich et al. (2016), Neural machine translation of rare words with subword units; Radford et
    al. (2019), section 2.2, for bytes as its characters.
    """
    library = tokenizers_library()
    level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[: int(len(text) * (1.0 - HELD_OUT))]], trainer)
    return tokenizer.to_str()


def tokenizer_of(config: dict[str, Any]) -> Any:
    """Return the tokenizer in a configuration, or None where tokens are characters.

    Raises:
        ValueError: If it cannot be read, or has tokens that the model lacks; one line.
    """
    if config["tokenizer"] is None:
        return None
    try:
        found = tokenizers_library().Tokenizer.from_str(config["tokenizer"])
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"the tokenizer of the configuration cannot be read ({error})") from None
    largest = max(found.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= config["vocabulary"]:
        raise ValueError(
            f"the tokenizer has a token {largest} and the model's vocabulary ends at "
            f"{config['vocabulary'] - 1}; pass a larger --vocabulary, or a smaller --vocab-size"
        )
    return found


def encoded(text: str, config: dict[str, Any]) -> Tokens:
    """Return the tokens of a text.

    Raises:
        ValueError: If a character is not in the vocabulary, or the tokenizer does not fit.
    """
    return text_encoder(config)(text)


def text_encoder(config: dict[str, Any]) -> Callable[[str], Tokens]:
    """Return the function from a text to its tokens.

    Raises:
        ValueError: If the tokenizer does not fit.
    """
    tokenizer, characters = tokenizer_of(config), config.get("characters", "")
    if tokenizer is None:
        return lambda text: encode(spelled(text, characters), characters)
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def text_reader(config: dict[str, Any]) -> Reader:
    """Return what turns tokens into text, as they come."""
    tokenizer = tokenizer_of(config)
    if tokenizer is None:
        return reader(config["characters"])
    stream = tokenizers_library().decoders.DecodeStream(skip_special_tokens=True)
    known = tokenizer.get_vocab_size()

    def read(ids: Sequence[int]) -> str:
        parts = (stream.step(tokenizer, int(i)) if i < known else "\ufffd" for i in ids)
        return "".join(part or "" for part in parts)

    return read


# -- what a training begins with ---------------------------------------------------------------------


def folder_of(args: argparse.Namespace) -> tuple[Pretrained, dict[str, Any]]:
    """Read the folder of --init; return its contents, and what a configuration keeps of them.

    The options of this script go before the dropout in the folder.  Exit with one line if a file is missing
    or does not fit.
    """
    try:
        found = read_pretrained(args.init)
        tokenizer = read_tokenizer(args.init, found.options["n_vocab"])
    except CheckpointError as error:
        sys.exit(f"--init {error}")
    model = {k: v for k, v in found.options.items() if k not in ("p_dropout", "attention_dropout")}
    if args.rotary_scaling is not None:
        if "rotary_theta" not in model:
            sys.exit(
                f"--rotary-scaling changes rotary positions, and those of the model in {args.init} are "
                "learned; leave it out"
            )
        model["rotary_scaling"] = args.rotary_scaling
        model["n_positions"] = max(args.context, model["n_positions"])
    if args.context > model["n_positions"]:
        sys.exit(
            f"--context {args.context} is longer than the {model['n_positions']} positions of the model in "
            f"{args.init}; take a shorter one, or pass --rotary-scaling to a model with rotary positions"
        )
    args.width, args.heads, args.layers = model["n_embd"], model["n_head"], model["n_layer"]
    args.tie_weights = model["tie_weights"]
    return found, {
        "tokenizer": tokenizer.to_str(), "model": model, "vocabulary": model["n_vocab"],
        "eos_token_id": found.eos_token_id,
    }  # fmt: skip


def tokens_of(args: argparse.Namespace, text: str) -> tuple[Corpus, dict[str, Any]]:
    """Return a text as tokens of characters, and what a configuration keeps of them."""
    characters = None if args.vocabulary is None else characters_of(args.vocabulary)
    if characters is not None:
        text = spelled(text, characters)
    corpus = Corpus.from_text(text, args.context, characters)
    size = args.vocabulary or len(corpus.characters)
    return corpus, {"characters": corpus.characters, "vocabulary": size}


def byte_pairs_of(args: argparse.Namespace, text: str) -> dict[str, Any]:
    """Train the tokenizer of --tokenizer bpe; return what a configuration keeps of it."""
    kept = {"tokenizer": train_byte_pairs(text, args.vocab_size), "vocabulary": sys.maxsize}
    tokenizer = tokenizer_of(kept)
    kept["vocabulary"] = args.vocabulary or tokenizer.get_vocab_size()
    return {**kept, "model": None, "eos_token_id": tokenizer.token_to_id(END)}
