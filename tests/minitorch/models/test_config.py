"""The options of transformers: a Config in place of the options of a module."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import minitorch
from minitorch import Config

MODULES = {
    minitorch.FeedForward: {},
    minitorch.MultiHeadAttention: {"n_head": 2},
    minitorch.TransformerLayer: {"n_head": 2, "norm": "rms"},
    minitorch.DecoderLM: {"n_head": 2, "n_vocab": 5, "n_positions": 3, "precision": "bfloat16"},
}


@pytest.mark.parametrize("module", MODULES)
def test_a_config_is_worth_the_options_in_it(module: Any) -> None:
    options: dict[str, Any] = {"n_embd": 8, "p_dropout": 0.5, "bias": False, **MODULES[module]}
    made = []
    for arguments in (
        {"config": Config(**options)},
        {"config": replace(Config(**options))},
        options,
    ):
        minitorch.manual_seed(0)
        parameters = module(**arguments).named_parameters()
        made.append({name: p.value.to_numpy().tobytes() for name, p in parameters})
    assert made[0] == made[1] == made[2]


def test_an_encoder_is_bidirectional_whatever_its_config_says() -> None:
    model = minitorch.EncoderLM(Config(8, 2, n_vocab=5, n_positions=4))
    model.eval()
    first, other = (model.hidden(np.array([[1, 2, last]])).to_numpy()[0, 0] for last in (3, 4))
    assert (first != other).any()
