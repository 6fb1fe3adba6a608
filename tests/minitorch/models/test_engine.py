"""The engine: each of many requests is written as if it were alone, and every page comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minitorch
from minitorch import DecoderLM, Engine, FastBackend

STRUCTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "rotary_theta": 100.0, "norm": "rms", "feed_forward": "swiglu", "n_kv_head": 1, "bias": False,
    },
    "window and sinks": {"window": 5, "sinks": True, "rotary_theta": 100.0},
    "naive": {"attention": "naive"},
}  # fmt: skip
REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 12), min_size=1, max_size=40),
        "count": st.integers(1, 12),
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "seed": st.integers(0, 9),
        "top_k": st.sampled_from([None, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
    }
)


def model_of(**options: Any) -> DecoderLM:
    minitorch.manual_seed(1)
    own = {"n_layer": 2, "middle_dim": 16, "backend": FastBackend, "dtype": np.float64, **options}
    model = DecoderLM(13, 12, 2, 64, 0.0, **own)
    for name, p in model.named_parameters():
        if name.endswith(".sink"):  # they begin as zeros
            p.update(minitorch.tensor([2.0, -1.0], FastBackend, dtype=p.value.dtype))
    return model


def ended(engine: Engine) -> None:
    """Step until nothing is left, and check that every page has come back."""
    while engine.running or engine.waiting:
        engine.step()
        pages = sum(len(r.pages) for r in engine.running) + engine.free_pages
        assert pages == engine.pages
    assert engine.free_pages == engine.pages


@pytest.mark.parametrize("structure", STRUCTURES)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=9),
    batch=st.integers(1, 5),
    chunk=st.integers(1, 30),
    pages=st.integers(4, 12),
)
@settings(max_examples=8)
def test_each_of_many_requests_is_written_as_if_it_were_alone(
    structure: str, requests: list[dict[str, Any]], batch: int, chunk: int, pages: int
) -> None:
    model = model_of(**STRUCTURES[structure])
    engine = Engine(model, pages=pages, batch=batch, chunk=chunk)
    found = [engine.submit(**request) for request in requests]
    ended(engine)
    for own, request in zip(found, requests, strict=True):
        assert [*own.prompt, *own.tokens] == model.generate(**request)
        assert own.ended == "length"


def test_tokens_come_one_by_one_while_others_go_on() -> None:
    engine = Engine(model_of(), pages=4)
    first, second = (engine.submit([n], 4, seed=n) for n in (1, 2))
    stream = engine.tokens(first)
    assert [next(stream)] == first.tokens and len(second.tokens) == 1
    assert [*stream] == first.tokens[1:] and len(second.tokens) == 4


def test_a_text_ends_with_its_stop_token() -> None:
    model = model_of()
    whole = model.generate([1, 2], 12, seed=3)[2:]
    engine = Engine(model)
    request = engine.submit([1, 2], 12, seed=3, stops=[whole[5]])
    assert [*engine.tokens(request)] == whole[: whole.index(whole[5]) + 1]
    assert request.ended == "stop" and engine.free_pages == engine.pages


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_that_is_cancelled_gives_its_pages_to_those_that_wait(steps: int) -> None:
    model = model_of()
    engine = Engine(model, pages=2, batch=2)
    first, second = engine.submit([1] * 20, 9), engine.submit([2, 3], 5, seed=4)
    for _ in range(steps):
        engine.step()
    assert not second.tokens  # the first has both pages
    engine.cancel(first)
    engine.cancel(first)
    ended(engine)
    assert first.ended == "cancelled" and second.ended == "length"
    assert second.tokens == model.generate([2, 3], 5, seed=4)[2:]


def test_an_iteration_that_is_left_early_cancels_its_request() -> None:
    engine = Engine(model_of())
    stream = engine.tokens(engine.submit([1], 9))
    next(stream)
    stream.close()
    assert engine.free_pages == engine.pages and not engine.running


def test_a_text_whose_logits_are_no_numbers_does_not_end_the_others() -> None:
    model = model_of()
    model.token_embeddings.weights.value.to_numpy()[7] = np.nan
    engine = Engine(model, pages=2)
    broken, good = engine.submit([7], 3), engine.submit([1], 3, 0.0)
    later = engine.submit([2], 20, 0.0)  # in both pages, which hold what is no number
    ended(engine)
    assert broken.ended == "error" and good.ended == later.ended == "length"
    assert later.tokens == model.generate([2], 20, 0.0)[1:]
    with pytest.raises(ValueError, match="NaN"):
        list(engine.tokens(broken))


def test_a_model_that_fails_leaves_every_request_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    engine = Engine(model, chunk=3)
    request = engine.submit([1, 2, 3, 4, 5], 4, seed=2)
    for name in ("t_layer_1", "t_layer_2"):
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(getattr(model, name), "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
    ended(engine)
    assert request.tokens == model.generate([1, 2, 3, 4, 5], 4, seed=2)[5:]


def test_a_request_that_can_never_fit_is_refused_in_words() -> None:
    engine = Engine(model_of(), pages=2)
    assert engine.submit([1] * 30, 3)
    with pytest.raises(
        ValueError, match=r"30 tokens of the prompt and 4 new ones are 34.*holds 33"
    ):
        engine.submit([1] * 30, 4)
    with pytest.raises(ValueError, match="the model reads 64"):
        Engine(model_of()).submit([1] * 60, 5)
    assert len(engine.waiting) == 1


def test_with_batch_invariance_the_chunks_of_a_prompt_do_not_change_a_bit_of_attention() -> None:
    model = model_of(dtype=np.float32)
    texts = []
    for chunk in (1, 5, 40):
        engine = Engine(model, chunk=chunk, batch_invariant=True)
        request = engine.submit(list(range(13)) * 2, 8, seed=1)
        engine.submit([chunk % 13], 3)
        ended(engine)
        texts.append(request.tokens)
    assert texts[0] == texts[1] == texts[2]
