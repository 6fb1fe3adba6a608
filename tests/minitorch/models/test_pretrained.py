"""Weights of GPT-2 in the format of Hugging Face: read, written back, and refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import minitorch
import minitorch.models
from minitorch import DecoderLM
from minitorch.models.pretrained import read_tokenizer
from minitorch.training.model_files import CheckpointError

from ...support.models.gpt2_folder import config_of, expected_logits, weights_of, write_folder
from ...support.models.pretrained import EVERYWHERE, IDS, assert_learns, logits, refused
from ...support.models.raw_safetensors import raw_safetensors
from ...support.tolerances import assert_close_arrays

# -- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_the_logits_are_those_of_the_definition(backend: Any, tmp_path: Path) -> None:
    config = config_of()
    weights = weights_of(config)
    model = DecoderLM.from_pretrained(write_folder(tmp_path, weights), backend)
    expected = expected_logits(config, weights, IDS)
    assert_close_arrays(logits(model), expected, np.float32, size=np.abs(expected).max())
    assert model.eos_token_id == 7 and not model.training


@given(
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 7),
    layers=st.integers(1, 3),
    inner=st.one_of(st.none(), st.integers(1, 20)),
    tied=st.booleans(),
    prefix=st.sampled_from(["", "transformer."]),
    ids=st.lists(st.integers(0, 22), min_size=1, max_size=11),
)
@settings(max_examples=15)
def test_every_shape_is_read_and_written_back(
    heads: int, head_dim: int, layers: int, inner: int | None, tied: bool, prefix: str, ids: list[int]
) -> None:  # fmt: skip
    shape = {
        "n_embd": heads * head_dim, "n_head": heads, "n_layer": layers, "n_inner": inner,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    config = config_of(**shape)
    weights = weights_of(config)
    with TemporaryDirectory() as folder:
        there, back = Path(folder, "there"), Path(folder, "back")
        model = DecoderLM.from_pretrained(
            write_folder(there, weights, prefix, **shape), dtype=np.float64
        )
        expected = expected_logits(config, weights, np.array(ids))
        assert_close_arrays(
            logits(model, ids), expected, np.float64, size=max(1, np.abs(expected).max())
        )
        model.save_pretrained(back)
        written = load_file(back / "model.safetensors")
        np.testing.assert_array_equal(
            logits(DecoderLM.from_pretrained(back), ids), logits(model, ids)
        )
    assert {name.removeprefix("transformer."): a.shape for name, a in written.items()} == {
        name: a.shape for name, a in weights.items()
    }
    for name, array in written.items():
        np.testing.assert_array_equal(array, weights[name.removeprefix("transformer.")])


def test_the_configuration_is_written_back(tmp_path: Path) -> None:
    changes = {"n_inner": 20, "resid_pdrop": 0.25, "embd_pdrop": 0.25, "attn_pdrop": 0.125}
    model = DecoderLM.from_pretrained(write_folder(tmp_path / "there", **changes))
    model.save_pretrained(tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    expected = config_of(**changes)
    assert {name: written[name] for name in expected} == expected
    assert written["dtype"] == "float32"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_are_rounded_to_the_precision_of_the_model(precision: str, tmp_path: Path) -> None:
    weights = weights_of(config_of())
    model = DecoderLM.from_pretrained(write_folder(tmp_path / "a", weights), precision=precision)
    table = model.token_embeddings.weights.value
    assert str(table.dtype) == precision
    np.testing.assert_array_equal(
        table.to_numpy(), weights["wte.weight"].astype(table.to_numpy().dtype)
    )
    assert model.ln.weights.value.dtype == np.float32
    model.save_pretrained(tmp_path / "b")
    again = DecoderLM.from_pretrained(tmp_path / "b")
    assert again.token_embeddings.weights.value.dtype == table.dtype


def test_masks_and_a_repeated_head_of_older_files_are_ignored(tmp_path: Path) -> None:
    weights = weights_of(config_of())
    model = DecoderLM.from_pretrained(write_folder(tmp_path / "a", weights))
    older = {
        **weights,
        "h.0.attn.bias": np.tri(11, dtype=np.float32)[None, None],
        "h.1.attn.masked_bias": np.array(-1e4, np.float32),
        "lm_head.weight": weights["wte.weight"].copy(),
    }
    same = DecoderLM.from_pretrained(write_folder(tmp_path / "b", older))
    np.testing.assert_array_equal(logits(same), logits(model))


def test_options_of_the_model_go_before_those_of_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    model = DecoderLM.from_pretrained(folder, attention="naive", p_dropout=0.0)
    assert model.dropout.p_dropout == 0.0
    flash = DecoderLM.from_pretrained(folder)
    assert flash.dropout.p_dropout == 0.1
    assert_close_arrays(logits(model), logits(flash), np.float32, size=20.0)


def test_reading_draws_no_random_numbers(tmp_path: Path) -> None:
    folder, drawn = write_folder(tmp_path), []
    for read in (True, False):
        minitorch.manual_seed(5)
        if read:
            DecoderLM.from_pretrained(folder)
        drawn.append(minitorch.DecoderLM(5, 4, 2, 3, n_layer=1).parameters()[0].value.to_numpy())
    np.testing.assert_array_equal(*drawn)


def test_a_model_read_can_learn(tmp_path: Path) -> None:
    model = DecoderLM.from_pretrained(write_folder(tmp_path))
    assert_learns(model)


# -- what is refused -----------------------------------------------------------------------------


def test_a_missing_folder_or_file_names_what_is_expected(tmp_path: Path) -> None:
    refused(tmp_path / "gpt2", "gpt2", "not a folder", "config.json", "nothing is downloaded")
    refused(tmp_path, "config.json and model.safetensors missing", "found nothing")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "model.safetensors missing", "found config.json, notes.txt")


def test_a_pickle_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    # A pickle file that would end the process.
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\n_exit\n(I3\ntR.")
    refused(tmp_path, "pickle", "never read", "save_pretrained")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, ["'bert'", "gpt2 or llama"]),
        ({"model_type": None}, ["None", "gpt2"]),
        ({"activation_function": "relu"}, ["'relu'", "gelu_new"]),
        ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "False"]),
        ({"scale_attn_weights": False}, ["scale_attn_weights", "True"]),
        ({"n_embd": "12"}, ["n_embd", "whole number", "'12'"]),
        ({"n_layer": 0}, ["n_layer", "1 or more", "0"]),
        ({"n_head": 5}, ["n_embd 12", "n_head 5"]),
        ({"n_layer": 3}, ["missing", "h.2."]),
        ({"vocab_size": 10**15}, ["wte.weight", "(23, 12)", "(1000000000000000, 12)"]),
        ({"n_positions": 10**15}, ["wpe.weight", "(11, 12)", "(1000000000000000, 12)"]),
        ({"layer_norm_epsilon": "1e-5"}, ["config.json", "layer_norm_epsilon", "'1e-5'"]),
        ({"resid_pdrop": [0.1]}, ["config.json", "resid_pdrop", "[0.1]"]),
        ({"attn_pdrop": 1}, ["config.json", "attn_pdrop", "below 1"]),
        ({"tie_word_embeddings": "no"}, ["config.json", "tie_word_embeddings", "'no'"]),
        ({"n_layer": 1}, ["12 weights", "not those", "h.1.attn.c_attn.bias"]),
        ({"vocab_size": 24}, ["wte.weight", "(23, 12)", "(24, 12)"]),
        ({"n_inner": 5}, ["h.0.mlp.c_fc.weight", "(12, 48)", "(12, 5)"]),
        ({"tie_word_embeddings": False}, ["missing", "lm_head.weight"]),
    ],
)
def test_another_configuration_is_refused(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    refused(write_folder(tmp_path, weights_of(config_of()), **changes), *words)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", '{"a":' + 10**5 * "["])
def test_a_configuration_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (write_folder(tmp_path) / "config.json").write_text(text, encoding="latin-1")
    refused(tmp_path, "config.json", "not a JSON object")


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    weights = weights_of(config_of())
    whole = {**weights, "ln_f.bias": np.zeros(12, np.int8)}
    refused(write_folder(tmp_path, whole), "ln_f.bias", "int8", "floating-point")
    weights["ln_f.bias"][0] = np.nan
    refused(write_folder(tmp_path, weights), "NaN")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(tmp_path, "model.safetensors", "cannot be read")
    file.write_bytes(raw_safetensors({"wte.weight": "F8_E4M3"}))
    refused(tmp_path, "model.safetensors", "cannot be read", "float8")
    refused(write_folder(tmp_path, {"a.weight": weights["ln_f.bias"]}), "wte.weight", "a.weight")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "lm_head.bias"),
        ({"tie_weights": True, "bias": False}, "bias"),
        ({"tie_weights": True, "attention": "local"}, "approximates"),
    ],
)
def test_a_model_that_is_no_gpt2_is_not_written(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = DecoderLM(5, 4, 2, 3, n_layer=1, **options)
    with pytest.raises(ValueError, match=words):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- tokenizers ----------------------------------------------------------------------------------


def tokenizer_of(count: int) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    vocabulary = {f"w{i}": i for i in range(count)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))


def test_the_tokenizer_is_written_and_read(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(23)
    model = DecoderLM.from_pretrained(write_folder(tmp_path / "a"))
    model.save_pretrained(tmp_path / "b", tokenizer)
    assert read_tokenizer(tmp_path / "b", model.n_vocab).encode("w5").ids == [5]


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tokenizer_of(24).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"token 23.*ends at 22"):
        read_tokenizer(tmp_path, 23)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tokenizer(tmp_path, 23)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        read_tokenizer(tmp_path, 23)
    (tmp_path / "merges.txt").touch()
    with pytest.raises(CheckpointError, match="AutoTokenizer"):
        read_tokenizer(tmp_path, 23)
