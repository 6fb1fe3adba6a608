"""Transformer layers, key/value cache, decoding; the whole models are also those of ``minitorch``."""

import sys
from typing import Any

#: The modules of this package are parts of some of these models, and so cannot import them first.
MODELS = ("DecoderLM", "EncoderClassifier", "EncoderLM", "SequenceClassifier")


def __getattr__(name: str) -> Any:
    """Return a model of ``minitorch``."""
    if name not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["minitorch"], name)
