"""transformers and DecoderLM compute the same logits from the same folder, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers"
)

from minitorch import CudaBackend, DecoderLM, FastBackend  # noqa: E402
from minitorch.models.pretrained import read_tokenizer  # noqa: E402
from minitorch.training.model_files import CheckpointError  # noqa: E402

from ...support.models import gpt2_folder  # noqa: E402
from ...support.models.llama_folder import LLAMA3  # noqa: E402

#: Of logits in float32.
CLOSE = 1e-4
BACKENDS = ["fast", pytest.param("cuda", marks=[pytest.mark.cuda])]


def model_of(**changes: Any) -> Any:
    """Return a tiny random GPT-2 whose biases and norms are random, too."""
    torch.manual_seed(0)
    options = {
        "vocab_size": 61, "n_positions": 19, "n_embd": 24, "n_layer": 2, "n_head": 3, "bos_token_id": 0,
        "eos_token_id": 0, "initializer_range": 0.3, **changes,
    }  # fmt: skip
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def llama_of(kind: str = "Llama", **changes: Any) -> Any:
    """Return a tiny random Llama, or another model of its shape, whose norms are random, too."""
    torch.manual_seed(0)
    options = {
        "vocab_size": 61, "max_position_embeddings": 19, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0,
        "eos_token_id": 0, "initializer_range": 0.3, **changes,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def ids_of(model: Any, seq: int = 13) -> Any:
    return np.random.default_rng(1).integers(0, model.config.vocab_size, (2, seq))


def logits_of(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_inner": 40},
        {"layer_norm_epsilon": 1e-2},
        {"tie_word_embeddings": False},
        {"n_head": 1, "n_layer": 3},
        {"activation_function": "gelu_pytorch_tanh"},
    ],
)
def test_logits_are_equal_both_ways(changes: dict[str, Any], backend: str, tmp_path: Path) -> None:
    check_both_ways(model_of(**changes), "GPT2LMHeadModel", backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "num_hidden_layers": 3},
        {"num_key_value_heads": 1, "head_dim": 10},
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 1e-2, "rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {**LLAMA3}, "rope_theta": 500.0, "head_dim": 16},
        {"kind": "Mistral", "sliding_window": None, "head_dim": 6},
    ],
)
def test_logits_of_a_llama_are_equal_both_ways(
    changes: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    check_both_ways(llama_of(**changes), "LlamaForCausalLM", backend, tmp_path)


def check_both_ways(model: Any, written_as: str, backend: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "theirs")
    ids = ids_of(model)
    where = {"fast": FastBackend, "cuda": CudaBackend}[backend]
    ours = DecoderLM.from_pretrained(tmp_path / "theirs", where)
    expected = logits_of(model, ids)
    np.testing.assert_allclose(ours.forward(ids).to_numpy(), expected, atol=CLOSE)
    ours.save_pretrained(tmp_path / "ours")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(back).__name__ == written_as
    np.testing.assert_allclose(logits_of(back.eval(), ids), expected, atol=CLOSE)


def test_the_inner_model_alone_is_read(tmp_path: Path) -> None:
    model = model_of()
    model.transformer.save_pretrained(tmp_path)  # a GPT2Model, without the prefix of names
    ids = ids_of(model)
    ours = DecoderLM.from_pretrained(tmp_path)
    np.testing.assert_allclose(ours.forward(ids).to_numpy(), logits_of(model, ids), atol=CLOSE)


@pytest.mark.parametrize("make", [model_of, llama_of])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_are_equal_both_ways(make: Any, dtype: str, tmp_path: Path) -> None:
    model = make().to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs")
    ours = DecoderLM.from_pretrained(tmp_path / "theirs")
    assert str(ours.token_embeddings.weights.value.dtype) == dtype
    ours.save_pretrained(tmp_path / "ours")
    back = type(model).from_pretrained(tmp_path / "ours", dtype="auto")
    for (name, a), (_, b) in zip(
        model.named_parameters(), back.named_parameters(), strict=True
    ):  # fmt: skip
        assert a.dtype == b.dtype and torch.equal(a, b), name
    wide = DecoderLM.from_pretrained(tmp_path / "theirs", dtype=np.float32)
    # Not model.float(): the frequencies of its rotary positions were rounded to 16 bits, too.
    theirs = type(model).from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    ids = ids_of(model)
    np.testing.assert_allclose(wide.forward(ids).to_numpy(), logits_of(theirs, ids), atol=CLOSE)


def test_a_tokenizer_that_is_written_is_one_of_transformers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}
    vocabulary["he"] = 257
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("h", "e")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    model_of(vocab_size=258).save_pretrained(tmp_path / "a")
    ours = DecoderLM.from_pretrained(tmp_path / "a")
    ours.save_pretrained(tmp_path / "b", tokenizer)
    text = "the ß of he"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert theirs(text)["input_ids"] == read_tokenizer(tmp_path / "b", 258).encode(text).ids


def tokenizer_of(count: int) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    vocabulary = {f"w{i}": i for i in range(count)}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))


def test_the_tokenizer_is_written_and_read(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(23)
    model = DecoderLM.from_pretrained(gpt2_folder.write_folder(tmp_path / "a"))
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
