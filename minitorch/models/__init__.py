"""Transformer layers, key/value cache, decoding; whole models are in ``minitorch`` as well."""

import sys
from typing import Any

#: Models that are imported on demand, because the modules of this package are parts of some of them.
MODELS = ("DecoderLM", "EncoderClassifier", "EncoderLM", "SequenceClassifier")


def __getattr__(name: str) -> Any:
    """Return a model of ``minitorch``."""
    if name not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["minitorch"], name)
