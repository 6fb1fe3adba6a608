"""Sizes of models that are measured often, texts as bytes, and how much of a device a training uses."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import minitorch
from kernels.runtime.targets import device_name
from kernels.traffic.formulas import training_flops

#: Options of the training script, by preset.  The last is GPT-2 (Radford et al., 2019, Table 2), with a
#: vocabulary that is a multiple of 128, for the sake of products in tiles.
PRESETS: dict[str, dict[str, Any]] = {
    "toy": {"layers": 2, "width": 128, "heads": 4, "context": 128, "vocabulary": 96, "batch": 16},
    "char": {
        "layers": 6, "width": 384, "heads": 6, "context": 256, "vocabulary": 256, "batch": 64,
        "lr": 1e-3, "clip": 1.0,
    },
    "gpt2-small": {
        "layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50_304, "batch": 16,
        "lr": 6e-4, "clip": 1.0, "tie_weights": True,
    },
}  # fmt: skip

# -- bytes ---------------------------------------------------------------------------------------------

#: Each byte as one character, and the characters of a smaller vocabulary: line break and printable ASCII.
BYTES = bytes(range(256)).decode("latin-1")
ASCII = "\n" + BYTES[32:127]


def characters_of(vocabulary: int) -> str:
    """Return what the first tokens of a vocabulary stand for; tokens beyond stay unused.

    Raises:
        ValueError: If it has no room for bytes, and is not that of ASCII.
    """
    if vocabulary < len(BYTES) and vocabulary != len(ASCII):
        raise ValueError(
            f"--vocabulary must be {len(ASCII)}, for line break and printable ASCII, or {len(BYTES)} and "
            f"more, for bytes; got {vocabulary}"
        )
    return ASCII if vocabulary == len(ASCII) else BYTES


def spelled(text: str, characters: str) -> str:
    """Return a text in the characters of a vocabulary: bytes of UTF-8, or ASCII with ``?`` for the rest."""
    if characters == BYTES:
        return text.encode("utf-8", "surrogatepass").decode("latin-1")
    if characters == ASCII:
        return "".join(c if c in ASCII else "?" for c in text)
    return text


def reader(characters: str) -> Callable[[Sequence[int]], str]:
    """Return what turns tokens into text, as they come: of a letter of several bytes the last one shows it.

    Tokens beyond the characters, which no text has, and bytes that are no UTF-8 are shown as U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace") if characters == BYTES else None

    def read(ids: Sequence[int]) -> str:
        if decoder is None:
            return "".join(characters[i] if i < len(characters) else "\ufffd" for i in ids)
        parts = (decoder.decode(bytes([i])) if i < 256 else "\ufffd" for i in ids)
        return "".join(parts)

    return read


# -- how much of a device is used ------------------------------------------------------------------------

#: TFLOP/s of devices, by what products are computed in, without sparsity.  Source: NVIDIA's data sheets of
#: the A100, H100 (SXM) and H200.
PEAKS = {
    "A100": {"float32": 19.5, "tf32": 156.0, "bfloat16": 312.0},
    "H100": {"float32": 67.0, "tf32": 494.7, "bfloat16": 989.4},
    "H200": {"float32": 67.0, "tf32": 494.7, "bfloat16": 989.4},
}


def peak_tflops(backend: str, precision: str) -> float | None:
    """Return what the device could do at most, TFLOP/s by its data sheet; None where it is not known."""
    if backend != "cuda":
        return None
    found = [peaks for name, peaks in PEAKS.items() if name in device_name()]
    return found[0][precision] if found else None


def flops_per_token(model: minitorch.DecoderLM, context: int) -> float:
    """Return the operations that training with one token takes by the book."""
    ff = getattr(model, model.layer_names[0]).ff
    # A gated network has three products where the book has two.
    middle = ff.linear_in.out_size * (2 if ff.linear_gate is None else 3) // 2
    return (
        training_flops(
            context,
            len(model.layer_names),
            model.n_embd,
            middle,
            model.n_vocab,
            model.window,
        )
        / context
    )


def utilisation(tokens_per_second: float, flops: float, peak: float | None) -> float | None:
    """Return the share of a device's peak that a training's operations by the book amount to.

    Args:
        tokens_per_second: How fast it is.
        flops: Operations a token, of :func:`flops_per_token`.
        peak: TFLOP/s; None for a device that is not known.

    Source: Chowdhery et al. (2022), PaLM, appendix B: model FLOPs utilisation.
    """
    return None if peak is None else tokens_per_second * flops / (1e12 * peak)
