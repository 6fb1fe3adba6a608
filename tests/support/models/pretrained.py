"""What the tests of every format of pre-trained weights do with a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minitorch import DecoderLM
from minitorch.training.model_files import CheckpointError

IDS = np.array([3, 0, 22, 7, 7, 19, 1])


def logits(model: DecoderLM, ids: Any = IDS) -> Any:
    return model.forward(np.array([ids])).to_numpy()[0]


def refused(folder: Path, *words: str) -> None:
    """Assert that a folder is refused in one line with these words."""
    with pytest.raises(CheckpointError) as error:
        DecoderLM.from_pretrained(folder)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
