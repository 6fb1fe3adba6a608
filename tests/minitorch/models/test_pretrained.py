"""Weights of GPT-2 and Llama in the format of Hugging Face: read, written back, and refused in words.

``test_pretrained_transformers.py`` compares the logits of what is read with those of transformers.
"""

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

import minitorch
import minitorch.models
from minitorch import DecoderLM

from ...support.models import gpt2_folder as gpt2
from ...support.models import llama_folder as llama
from ...support.models.llama_folder import LLAMA3
from ...support.models.pretrained import logits, refused
from ...support.models.raw_safetensors import raw_safetensors

of_each_kind = pytest.mark.parametrize("kind", [gpt2, llama], ids=["gpt2", "llama"])
LINEAR = {"rope_type": "linear", "factor": 2.0}


# -- what is read --------------------------------------------------------------------------------


@st.composite
def shapes_of_gpt2(draw: st.DrawFn) -> dict[str, Any]:
    heads, rate = draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.25]))
    return {
        "n_embd": heads * draw(st.integers(1, 7)), "n_head": heads, "n_layer": draw(st.integers(1, 3)),
        "n_inner": draw(st.none() | st.integers(1, 20)), "tie_word_embeddings": draw(st.booleans()),
        "resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": draw(st.sampled_from([0.0, 0.125])),
    }  # fmt: skip


@st.composite
def shapes_of_llama(draw: st.DrawFn) -> dict[str, Any]:
    groups, bias = draw(st.integers(1, 3)), draw(st.booleans())
    return {
        "hidden_size": draw(st.integers(1, 13)), "num_key_value_heads": groups,
        "num_attention_heads": groups * draw(st.integers(1, 3)), "head_dim": 2 * draw(st.integers(1, 4)),
        "attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": draw(st.booleans()),
        "rope_scaling": draw(st.sampled_from([None, LINEAR, LLAMA3])),
    }  # fmt: skip


@of_each_kind
@given(data=st.data(), ids=st.lists(st.integers(0, 22), min_size=1, max_size=11))
@settings(max_examples=15)
def test_every_shape_is_read_and_written_back(kind: Any, data: Any, ids: list[int]) -> None:
    shape = data.draw(shapes_of_gpt2() if kind is gpt2 else shapes_of_llama())
    prefix = data.draw(st.sampled_from(["", "transformer."])) if kind is gpt2 else ""
    config = kind.config_of(**shape)
    weights = kind.weights_of(config)
    with TemporaryDirectory() as folder:
        there, back = Path(folder, "there"), Path(folder, "back")
        given = {**shape, **({"prefix": prefix} if prefix else {})}
        model = DecoderLM.from_pretrained(
            kind.write_folder(there, weights, **given), dtype=np.float64
        )
        assert model.eos_token_id == 7 and not model.training
        model.save_pretrained(back)
        written = load_file(back / "model.safetensors")
        described = json.loads((back / "config.json").read_text())
        again = logits(DecoderLM.from_pretrained(back), ids)
        np.testing.assert_array_equal(again, logits(model, ids))
    wanted = (
        {**config, "n_inner": config["n_inner"] or 4 * config["n_embd"]} if kind is gpt2 else config
    )
    assert {name: described[name] for name in config} == wanted
    written = {name.removeprefix("transformer."): array for name, array in written.items()}
    assert written.keys() == weights.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, weights[name])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_are_rounded_to_the_precision_of_the_model(precision: str, tmp_path: Path) -> None:
    weights = gpt2.weights_of(gpt2.config_of())
    folder = gpt2.write_folder(tmp_path / "a", weights)
    model = DecoderLM.from_pretrained(folder, precision=precision)
    table = model.token_embeddings.weights.value
    assert str(table.dtype) == precision and model.ln.weights.value.dtype == np.float32
    wanted = weights["wte.weight"].astype(table.to_numpy().dtype)
    np.testing.assert_array_equal(table.to_numpy(), wanted)
    model.save_pretrained(tmp_path / "b")
    again = DecoderLM.from_pretrained(tmp_path / "b")
    assert again.token_embeddings.weights.value.dtype == table.dtype


def test_masks_and_a_repeated_head_of_older_files_are_ignored(tmp_path: Path) -> None:
    weights = gpt2.weights_of(gpt2.config_of())
    model = DecoderLM.from_pretrained(gpt2.write_folder(tmp_path / "a", weights))
    older = {
        **weights,
        "h.0.attn.bias": np.tri(11, dtype=np.float32)[None, None],
        "h.1.attn.masked_bias": np.array(-1e4, np.float32),
        "lm_head.weight": weights["wte.weight"].copy(),
    }
    same = DecoderLM.from_pretrained(gpt2.write_folder(tmp_path / "b", older))
    np.testing.assert_array_equal(logits(same), logits(model))


def test_reading_draws_no_random_numbers(tmp_path: Path) -> None:
    folder, drawn = gpt2.write_folder(tmp_path), []
    for read in (True, False):
        minitorch.manual_seed(5)
        if read:
            DecoderLM.from_pretrained(folder)
        drawn.append(minitorch.DecoderLM(5, 4, 2, 3, n_layer=1).parameters()[0].value.to_numpy())
    np.testing.assert_array_equal(*drawn)


def test_the_scaling_of_newer_files_is_read(tmp_path: Path) -> None:
    older = llama.write_folder(tmp_path / "a", rope_scaling=LLAMA3)
    rope = {"rope_theta": 500.0, **LLAMA3}
    newer = llama.write_folder(tmp_path / "b", rope_theta=None, rope_parameters=rope)
    np.testing.assert_array_equal(*(logits(DecoderLM.from_pretrained(x)) for x in (older, newer)))


def test_values_that_a_file_may_lack_have_their_defaults(tmp_path: Path) -> None:
    lacking: dict[str, Any] = dict.fromkeys(("num_key_value_heads", "head_dim", "rope_theta"))
    config = llama.config_of(num_attention_heads=2, num_key_value_heads=2, head_dim=6)
    changes = {**lacking, "num_attention_heads": 2, "eos_token_id": [5, 6]}
    folder = llama.write_folder(tmp_path, llama.weights_of(config), **changes)
    model = DecoderLM.from_pretrained(folder)
    assert model.rotary is not None and model.rotary.theta == 10_000.0
    assert model.eos_token_id == 5  # the first of a list


def test_shards_are_read(tmp_path: Path) -> None:
    weights = llama.weights_of(llama.config_of())
    whole = DecoderLM.from_pretrained(llama.write_folder(tmp_path / "a", weights))
    folder, places = llama.write_folder(tmp_path / "b", weights), {}
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


# -- what is refused -----------------------------------------------------------------------------


def test_a_missing_folder_or_file_names_what_is_expected(tmp_path: Path) -> None:
    refused(tmp_path / "gpt2", "gpt2", "not a folder", "config.json", "nothing is downloaded")
    refused(tmp_path, "config.json and model.safetensors missing", "found nothing")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "model.safetensors missing", "found config.json")
    # A pickle file that would end the process.
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\n_exit\n(I3\ntR.")
    refused(tmp_path, "pickle", "never read", "save_pretrained")


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (gpt2, {"model_type": "bert"}, ["'bert'", "gpt2 or llama"]),
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (gpt2, {"n_embd": "12"}, ["n_embd", "whole number", "'12'"]),
        (gpt2, {"n_head": 5}, ["n_embd 12", "n_head 5"]),
        (gpt2, {"vocab_size": 10**15}, ["wte.weight", "(23, 12)", "(1000000000000000, 12)"]),
        (gpt2, {"attn_pdrop": 1}, ["config.json", "attn_pdrop", "below 1"]),
        (gpt2, {"n_layer": 1}, ["12 weights", "not those", "h.1.attn.c_attn.bias"]),
        (llama, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        (llama, {"rope_scaling": YARN}, ["'yarn'", "linear or llama3"]),
        (llama, {"rope_scaling": {**LINEAR, "factor": 0}}, ["factor", "positive"]),
        (llama, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        (llama, {"model_type": "mistral", "sliding_window": 8}, ["sliding_window", "8"]),
        (llama, {"mlp_bias": True}, ["attention_bias", "mlp_bias"]),
        (llama, {"attention_bias": True, "mlp_bias": True}, ["missing", "bias"]),
    ],
)
def test_another_configuration_is_refused(
    kind: Any, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    refused(kind.write_folder(tmp_path, kind.weights_of(kind.config_of()), **changes), *words)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "\xff", '{"a":' + 10**5 * "["],
    ids=["empty", "list", "cut", "latin", "deep"],
)
def test_a_configuration_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (gpt2.write_folder(tmp_path) / "config.json").write_text(text, encoding="latin-1")
    refused(tmp_path, "config.json", "not a JSON object")


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    weights = gpt2.weights_of(gpt2.config_of())
    whole = {**weights, "ln_f.bias": np.zeros(12, np.int8)}
    refused(gpt2.write_folder(tmp_path, whole), "ln_f.bias", "int8", "floating-point")
    weights["ln_f.bias"][0] = np.nan
    refused(gpt2.write_folder(tmp_path, weights), "NaN")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(tmp_path, "model.safetensors", "cannot be read")
    file.write_bytes(raw_safetensors({"wte.weight": "F8_E4M3"}))
    refused(tmp_path, "model.safetensors", "cannot be read", "float8")
    one = {"a.weight": weights["ln_f.bias"]}
    refused(gpt2.write_folder(tmp_path, one), "wte.weight", "a.weight")


OF_LLAMA: dict[str, Any] = {
    "rotary_theta": 1e4, "norm": "rms", "feed_forward": "swiglu", "bias": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "lm_head.bias"),
        ({"tie_weights": True, "attention": "local"}, "approximates"),
        ({**OF_LLAMA, "feed_forward": "gelu"}, "SwiGLU"),
        ({"tie_weights": True, "window": 2}, "without window and sinks"),
    ],
)
def test_a_model_of_neither_kind_is_not_written(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = DecoderLM(5, 4, 2, 3, n_layer=1, **options)
    with pytest.raises(ValueError, match=words):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
