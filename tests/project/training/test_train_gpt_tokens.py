"""The training script with byte pairs, and from the weights of a folder of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_gpt

from minitorch import DecoderLM
from minitorch.models.pretrained import read_tokenizer

from ...support.models import gpt2_folder, llama_folder
from ...support.scripts import refused

tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")

TEXT = "The cat sat on the mat. Żółć and the rat ran to the cat. " * 60
SHORT = ["--steps", "3", "--batch", "2", "--context", "8", "--sample", "5", "--keep", "1"]
SMALL = [*SHORT, *["--width", "16", "--heads", "2", "--layers", "1"]]
FOLDERS = {"gpt2": gpt2_folder, "llama": llama_folder}


def train(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: Any) -> str:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    train_gpt.main(["--text", str(text), "--out", str(tmp_path), *map(str, options)])
    return capsys.readouterr().out


def folder_with_tokenizer(kind: str, folder: Path, vocabulary: int = 300) -> Path:
    FOLDERS[kind].write_folder(folder, vocab_size=vocabulary)
    level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level(), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_byte_pairs_are_learnt_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = train(capsys, tmp_path, *SMALL, "--tokenizer", "bpe", "--vocab-size", 270)
    assert "nats per token" in out and "\nThe " in out
    assert json.loads((tmp_path / "result.json").read_text())["unit"] == "token"
    model = DecoderLM.from_pretrained(tmp_path / "pretrained")
    tokenizer = read_tokenizer(tmp_path / "pretrained", model.n_vocab)
    assert model.n_vocab == tokenizer.get_vocab_size() == 270
    assert model.eos_token_id == tokenizer.token_to_id("<|endoftext|>")
    ids = tokenizer.encode("Żółć, the cat").ids
    assert tokenizer.decode(ids) == "Żółć, the cat" and len(ids) < 13
    train_gpt.main(
        ["--load", str(tmp_path / "model.safetensors"), "--prompt", "the cat", "--sample", "3"]
    )
    assert capsys.readouterr().out.startswith("the cat")


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_fine_tuned_and_written_back(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with_tokenizer(kind, tmp_path / "there")
    out = train(
        capsys, tmp_path, *SHORT, "--init", folder, "--lr", "1e-9", "--schedule", "constant"
    )
    assert "nats per token" in out
    before, after = (DecoderLM.from_pretrained(x) for x in (folder, tmp_path / "pretrained"))
    ids = np.array([[1, 2, 3]])
    # The rate is so small that the weights are still those of the folder.
    np.testing.assert_allclose(
        after.forward(ids).to_numpy(), before.forward(ids).to_numpy(), atol=1e-3
    )
    assert after.eos_token_id == 7
    tokenizer = read_tokenizer(tmp_path / "pretrained", 300)
    assert tokenizer.to_str() == read_tokenizer(folder, 300).to_str()
    train_gpt.main(
        ["--load", str(tmp_path / "model.safetensors"), "--prompt", "the cat", "--sample", "3"]
    )
    assert "the cat" in capsys.readouterr().out
    assert "going on" in train(capsys, tmp_path, "--resume", tmp_path / "checkpoints")


def test_a_scaling_gives_a_llama_a_longer_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with_tokenizer("llama", tmp_path / "there")
    longer = ["--context", "20", "--rotary-scaling", "linear:2", "--steps", "2", "--sample", "0"]
    train(capsys, tmp_path, *SHORT, "--init", folder, *longer)
    model = DecoderLM.from_pretrained(tmp_path / "pretrained")
    assert model.n_positions == 20 and model.rotary is not None
    assert model.rotary.scaling == {"rope_type": "linear", "factor": 2.0}
    out = train(capsys, tmp_path, *SHORT, "--init", folder, "--window", 3)
    assert "no folder for transformers: a Llama attends to all tokens" in out
    folder = folder_with_tokenizer("gpt2", tmp_path / "other")
    assert "are learned; leave it out" in refused(train_gpt.main, *SHORT, "--init", folder, *longer)
