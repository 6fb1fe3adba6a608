"""Masked paragraphs and classified texts: the share of each kind of mask, and what a seed decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.encoder_text import (
    MaskedText,
    first_id,
    mask_id,
    mask_tokens,
    packed,
    pieces_of,
    read_classified,
)  # fmt: skip
from hypothesis import given
from hypothesis import strategies as st

WORDS = 50


def encode(text: str) -> Any:
    return np.array([ord(c) % WORDS for c in text], np.int64)


def text_of(paragraphs: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return "\n\n".join(
        "".join(rng.choice([*"abcdef "], rng.integers(3, 60))) for _ in range(paragraphs)
    )


def padded_ids(rng: np.random.Generator, lengths: list[int]) -> Any:
    ids = rng.integers(0, WORDS, (len(lengths), max(lengths)))
    ids[:, 0] = first_id(WORDS)
    return ids


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 999)
)
def test_what_is_predicted_is_known_and_nothing_else_changes(
    lengths: list[int], count: int, seed: int
) -> None:
    ids = padded_ids(np.random.default_rng(seed), lengths)
    hidden, targets = mask_tokens(np.random.default_rng(seed), ids, np.array(lengths), count, WORDS)
    predicted = targets != -100
    assert predicted.sum() == min(count, sum(lengths) - len(lengths))
    assert (targets[predicted] == ids[predicted]).all()
    assert (hidden[~predicted] == ids[~predicted]).all()
    inside = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
    assert inside[predicted].all() and not predicted[:, 0].any()
    assert ((hidden < WORDS) | (hidden == mask_id(WORDS)))[:, 1:].all()
    again = mask_tokens(np.random.default_rng(seed), ids, np.array(lengths), count, WORDS)
    assert np.array_equal(again, (hidden, targets))


def test_eighty_percent_are_masks_and_ten_are_kept() -> None:
    rng = np.random.default_rng(0)
    ids = padded_ids(rng, [500] * 8)
    hidden, targets = mask_tokens(rng, ids, np.full(8, 500), 3000, WORDS)
    predicted = targets != -100
    assert (hidden[predicted] == mask_id(WORDS)).mean() == pytest.approx(0.8, abs=0.05)
    assert (hidden[predicted] == ids[predicted]).mean() == pytest.approx(0.1, abs=0.03)


def test_paragraphs_are_cut_and_short_ones_left_out() -> None:
    pieces = pieces_of("abcdefghij\nkl\n\nshort\n \n" + "x" * 35, encode, 12)
    found = [
        pieces.ids[start : start + n].tolist()
        for start, n in zip(pieces.starts, pieces.lengths, strict=True)
    ]
    parts = ["abcdefghij\nk", "x" * 12, "x" * 12, "x" * 11]
    assert found == [encode(part).tolist() for part in parts]


def test_batches_have_constant_shapes_and_depend_on_the_generator_alone() -> None:
    text = text_of(200)
    corpus = MaskedText(text, encode, WORDS, 40, 4, parts=2)
    for seed in range(5):
        ids, targets, lengths = corpus.batch(np.random.default_rng((0, seed)), 8, 40)
        assert ids.shape == targets.shape == (8, 40)
        assert (np.split(targets != -100, 2)[1].sum(), (targets != -100).sum()) == (
            corpus.count, 2 * corpus.count,
        )  # fmt: skip
        assert (ids[:, 0] == first_id(WORDS)).all() and lengths.max() <= 40
        again = MaskedText(text, encode, WORDS, 40, 4, parts=2).batch(
            np.random.default_rng((0, seed)), 8, 40
        )
        assert all(map(np.array_equal, again, (ids, targets, lengths)))
    held_out = corpus.held_out_windows(40)
    assert ((held_out[1] != -100).sum(1) >= 1).all()
    assert all(map(np.array_equal, held_out, corpus.held_out_windows(40)))
    assert corpus.digest != MaskedText(text_of(200, 1), encode, WORDS, 40, 4).digest


@given(
    st.lists(st.integers(1, 30), min_size=6, max_size=6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 4]),
)
def test_packed_parts_have_all_tokens_and_a_total_that_recurs(
    lengths: list[int], parts: int, totals: int | None
) -> None:
    ids, own = padded_ids(np.random.default_rng(0), [*lengths, 30])[:6], np.array(lengths)
    found, targets, same = packed(ids, ids + 1, own, parts, totals)
    assert same is own and packed(ids, own, own, parts, totals)[1] is own  # classes
    tokens = own.reshape(parts, -1).sum(1)
    total = len(found) // parts
    if totals is None:
        assert total == tokens.max()
    else:
        step = -(-180 // (parts * totals))
        assert total % step == 0 and tokens.max() <= total <= totals * step
    for part in range(parts):
        rows = range(6 // parts * part, 6 // parts * (part + 1))
        joined = np.concatenate([ids[row, : lengths[row]] for row in rows])
        place = slice(total * part, total * part + tokens[part])
        assert np.array_equal(found[place], joined) and np.array_equal(targets[place], joined + 1)
        rest = slice(place.stop, total * (part + 1))
        assert not found[rest].any() and (targets[rest] == -100).all()


def test_folders_are_classes_and_what_is_missing_is_said(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text(f"it is {name}")
    texts, classes, names = read_classified(str(tmp_path))
    assert (texts, classes.tolist(), names) == (
        ["it is bad", "it is good"], [0, 1], ["bad", "good"],
    )  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"the class empty has no \.txt file"):
        read_classified(str(tmp_path))
    (tmp_path / "empty" / "1.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit, match=r"1\.txt: cannot be read as UTF-8"):
        read_classified(str(tmp_path))
    with pytest.raises(SystemExit, match="has 0 folders; make one for each class"):
        read_classified(str(tmp_path / "good"))
    one = tmp_path / "one.tsv"
    one.write_text("fine\t1\nalso fine\t1\n")
    with pytest.raises(SystemExit, match="one class; at least two"):
        read_classified(str(one))
    assert set(read_classified(None)[1]) == {0, 1}
