"""The script that continues a text with the weights of a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import generate
import pytest

from minitorch import DecoderLM

from ..support.models.gpt2_folder import write_folder

SPEED = re.compile(
    r"(\d+) tokens of the prompt and the first new one in [\d.]+ s(, then [\d.,]+ tokens/s)?"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose tokens are the bytes of UTF-8, and an end token that no text has."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    folder = write_folder(
        tmp_path_factory.mktemp("gpt2"), vocab_size=257, n_positions=40, eos_token_id=256
    )
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)} | {"<|endoftext|>": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def written(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[str, str]:
    """Run the script; return the text and the last line."""
    capsys.readouterr()
    generate.main([str(arg) for arg in args])
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n\n")
    return text, last


def test_the_text_is_the_prompt_and_its_continuation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", 20, "--top-k", 9, "--top-p", 0.9, "--seed", 3]
    text, last = written(capsys, folder, "--prompt", "Straße", *options)
    found = SPEED.fullmatch(last)
    assert found and found[1] == "7"
    assert text.startswith("Straße")
    assert written(capsys, folder, "--prompt", "Straße", *options)[0] == text


def test_letters_of_several_tokens_are_whole(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = generate.read_tokenizer(folder, 257).encode("é ß!").ids
    monkeypatch.setattr(DecoderLM, "continuation", lambda *args, **kwargs: iter([*ids, 256, 1]))
    text, _ = written(capsys, folder, "--prompt", "a ")
    assert text == "a é ß!"  # and nothing after the end token
