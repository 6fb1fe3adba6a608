"""Weights of Llama's shape in the format of Hugging Face: read, written back, and refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from minitorch import DecoderLM

from ...support.models.llama_folder import (
    LLAMA3,
    config_of,
    expected_logits,
    weights_of,
    write_folder,
)
from ...support.models.pretrained import EVERYWHERE, IDS, assert_learns, logits, refused
from ...support.tolerances import assert_close_arrays

LINEAR = {"rope_type": "linear", "factor": 2.0}


# -- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_the_logits_are_those_of_the_definition(backend: Any, tmp_path: Path) -> None:
    config = config_of(rope_scaling=LLAMA3)
    weights = weights_of(config)
    folder = write_folder(tmp_path, weights, rope_scaling=LLAMA3)
    model = DecoderLM.from_pretrained(folder, backend)
    expected = expected_logits(config, weights, IDS)
    assert_close_arrays(logits(model), expected, np.float32, size=np.abs(expected).max())
    assert model.eos_token_id == 7 and not model.training


@given(
    groups=st.integers(1, 3),
    heads_of_group=st.integers(1, 3),
    half=st.integers(1, 4),
    width=st.integers(1, 13),
    bias=st.booleans(),
    tied=st.booleans(),
    scaling=st.sampled_from([None, LINEAR, LLAMA3]),
    ids=st.lists(st.integers(0, 22), min_size=1, max_size=11),
)
@settings(max_examples=15)
def test_every_shape_is_read_and_written_back(
    groups: int, heads_of_group: int, half: int, width: int, bias: bool, tied: bool, scaling: Any,
    ids: list[int],
) -> None:  # fmt: skip
    shape = {
        "hidden_size": width, "num_attention_heads": groups * heads_of_group,
        "num_key_value_heads": groups, "head_dim": 2 * half, "attention_bias": bias, "mlp_bias": bias,
        "tie_word_embeddings": tied, "rope_scaling": scaling,
    }  # fmt: skip
    config = config_of(**shape)
    weights = weights_of(config)
    with TemporaryDirectory() as folder:
        there, back = Path(folder, "there"), Path(folder, "back")
        model = DecoderLM.from_pretrained(write_folder(there, weights, **shape), dtype=np.float64)
        expected = expected_logits(config, weights, np.array(ids))
        assert_close_arrays(
            logits(model, ids), expected, np.float64, size=max(1, np.abs(expected).max())
        )
        model.save_pretrained(back)
        written = load_file(back / "model.safetensors")
        described = json.loads((back / "config.json").read_text())
        np.testing.assert_array_equal(
            logits(DecoderLM.from_pretrained(back), ids), logits(model, ids)
        )
    assert {name: described[name] for name in config} == config
    assert written.keys() == weights.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, weights[name])


def test_the_scaling_of_newer_files_is_read(tmp_path: Path) -> None:
    older = write_folder(tmp_path / "a", rope_scaling=LLAMA3)
    newer = write_folder(
        tmp_path / "b", rope_theta=None, rope_parameters={"rope_theta": 500.0, **LLAMA3}
    )
    np.testing.assert_array_equal(*(logits(DecoderLM.from_pretrained(x)) for x in (older, newer)))


def test_values_that_a_file_may_lack_have_their_defaults(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None, "rope_theta": None}
    weights = weights_of(config_of(num_key_value_heads=4, head_dim=3))
    with pytest.raises(ValueError, match="even"):
        DecoderLM.from_pretrained(write_folder(tmp_path / "a", weights, **changes))
    changes["num_attention_heads"] = 2
    weights = weights_of(config_of(num_attention_heads=2, num_key_value_heads=2, head_dim=6))
    model = DecoderLM.from_pretrained(write_folder(tmp_path / "b", weights, **changes))
    assert model.rotary is not None and model.rotary.theta == 10_000.0


def test_a_list_of_end_tokens_gives_the_first(tmp_path: Path) -> None:
    assert DecoderLM.from_pretrained(write_folder(tmp_path, eos_token_id=[5, 6])).eos_token_id == 5


def test_shards_are_read(tmp_path: Path) -> None:
    weights = weights_of(config_of())
    whole = DecoderLM.from_pretrained(write_folder(tmp_path / "a", weights))
    folder, places = write_folder(tmp_path / "b", weights), {}
    (folder / "model.safetensors").unlink()
    for i, names in enumerate(np.array_split(sorted(weights), 3)):
        save_file({name: weights[name] for name in names}, folder / f"part-{i}.safetensors")
        places |= {str(name): f"part-{i}.safetensors" for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    np.testing.assert_array_equal(logits(DecoderLM.from_pretrained(folder)), logits(whole))
    (folder / "part-1.safetensors").unlink()
    refused(folder, "1 of 3 shards", "part-1.safetensors", "get all files")
    for wrong in ({}, {"weight_map": {"a": "../b"}}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(wrong))
        refused(folder, "weight_map", "in this folder")


def test_a_model_read_can_learn_and_continue(tmp_path: Path) -> None:
    model = DecoderLM.from_pretrained(write_folder(tmp_path))
    assert_learns(model)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, ["'qwen2'", "gpt2 or llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["'yarn'", "linear or llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["'linear'", "needs factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor", "positive"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor", "number"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"model_type": "mistral", "sliding_window": 8}, ["sliding_window", "8"]),
        ({"mlp_bias": True}, ["attention_bias", "mlp_bias"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 0}, ["head_dim", "1 or more"]),
        ({"num_hidden_layers": 3}, ["Llama", "missing", "layers.2"]),
        (
            {"intermediate_size": 10**15},
            ["mlp.gate_proj.weight", "(20, 12)", "(1000000000000000, 12)"],
        ),
        ({"rope_theta": "10000"}, ["config.json", "rope_theta", "'10000'"]),
        ({"num_hidden_layers": 1}, ["9 weights", "not those", "layers.1"]),
        ({"head_dim": 4}, ["self_attn.q_proj.weight", "(24, 12)", "(16, 12)"]),
        ({"attention_bias": True, "mlp_bias": True}, ["missing", "bias"]),
    ],
)
def test_another_configuration_is_refused(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    refused(write_folder(tmp_path, weights_of(config_of()), **changes), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "layer"}, "RMS norms"),
        ({"feed_forward": "gelu"}, "SwiGLU"),
        ({"bias": True}, "lm_head.bias"),
        ({"rotary_theta": None}, "a GPT-2 has"),
        ({"attention": "local", "n_kv_head": 2}, "approximates"),
    ],
)
def test_a_model_of_neither_shape_is_not_written(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    llama: dict[str, Any] = {
        "rotary_theta": 1e4, "norm": "rms", "feed_forward": "swiglu", "bias": False,
    }  # fmt: skip
    model = DecoderLM(5, 4, 2, 3, n_layer=1, **{**llama, **options})
    with pytest.raises(ValueError, match=words):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
