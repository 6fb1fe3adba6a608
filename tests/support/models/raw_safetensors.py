"""Safetensors files that no library writes."""

from __future__ import annotations

import json


def raw_safetensors(dtypes: dict[str, str], **metadata: str) -> bytes:
    """Return a file with one element of a dtype, of 8 bits, for each name."""
    header = {
        name: {"dtype": dtype, "shape": [1], "data_offsets": [i, i + 1]}
        for i, (name, dtype) in enumerate(dtypes.items())
    }
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(len(dtypes))
