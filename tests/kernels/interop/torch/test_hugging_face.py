"""Models of Hugging Face compute the same with our attention as with PyTorch's."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers"
)

from kernels.interop.torch import register_with_transformers  # noqa: E402
from kernels.interop.torch.hugging_face import attention  # noqa: E402

from ....support.models import architectures  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]


@cache
def model_of(name: str, attention: str, device: str) -> Any:
    """Return a small random model of a kind, in float32, with the same weights for every attention."""
    register_with_transformers()
    model = architectures.model_of(name).to(device)
    model.set_attn_implementation(attention)
    return model


def logits_and_gradients(name: str, attention: str, device: str, padded: str | None) -> list[Any]:
    model = model_of(name, attention, device)
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(architectures.VOCABULARY, (3, 13), generator=generator).to(device)
    mask = torch.ones_like(ids)
    if padded == "right":
        mask[1, 9:] = mask[2, 4:] = 0
    elif padded == "left":
        mask[1, :4] = mask[2, :9] = 0
    given = {} if padded is None else {"attention_mask": mask}
    logits = model(ids, **given).logits
    weights = torch.randn(logits.shape, generator=generator).to(device)
    (logits * weights * mask[..., None]).sum().backward()
    return [logits[mask.bool()], *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [None, "right", "left"])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt_oss"])
def test_logits_and_gradients_are_those_of_the_model(
    name: str, padded: str | None, device: str
) -> None:
    actual = logits_and_gradients(name, "minitorch", device, padded)
    own = "eager" if name == "gpt_oss" else "sdpa"  # PyTorch has no sinks
    expected = logits_and_gradients(name, own, device, padded)
    assert len(actual) == len(expected) > 10
    largest = max(x.abs().max().item() for x in expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6 * largest, rtol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generated_tokens_are_those_of_sdpa(cache: str | None, device: str) -> None:
    ids = torch.randint(
        architectures.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(2)
    )
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    own = {} if cache is None else {"cache_implementation": cache}
    found = [
        model_of("llama", attention, device)
        .generate(
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=9, do_sample=False,
            use_cache=cache is not None, pad_token_id=0, **own,
        )
        for attention in ("minitorch", "sdpa")
    ]  # fmt: skip
    assert found[0].shape == (2, 16)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_generate_batch_writes_what_generate_writes(name: str) -> None:
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this version of transformers has no such continuous batching")
    generator = torch.Generator().manual_seed(4)
    prompts = [
        torch.randint(architectures.VOCABULARY, (n,), generator=generator).tolist()
        for n in (3, 17, 1)
    ]
    model = model_of(name, "minitorch", "cpu")
    greedy = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    greedy.eos_token_id = -1
    small = transformers.ContinuousBatchingConfig(
        num_blocks=16, block_size=32, max_batch_tokens=16, default_compile_level=0
    )
    found = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=small, progress_bar=False
    )
    texts = [found[key].generated_tokens for key in sorted(found, key=lambda k: int(k[4:]))]
    own = model_of(name, "eager", "cpu")
    for prompt, text in zip(prompts, texts, strict=True):
        expected = own.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert text == expected[0, len(prompt) :].tolist()


def test_a_model_compiles_without_a_graph_break() -> None:
    model = model_of("llama", "minitorch", "cpu")
    ids = torch.arange(11)[None] % architectures.VOCABULARY
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        explained = torch._dynamo.explain(model)(ids, use_cache=False)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
    assert explained.graph_break_count == 0


def test_the_older_name_is_an_alias() -> None:
    actual, expected = (
        logits_and_gradients("llama", attention, "cpu", "left")
        for attention in ("minitorch_flash", "minitorch")
    )
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def packed_and_alone(mask: Any, ends: list[list[int]], **options: Any) -> tuple[Any, Any]:
    """Return attention of packed sequences, and that of each alone with its part of the mask."""
    query, key, value = (
        torch.randn(1, h, e[-1], 4) for h, e in zip((4, 2, 2), (*ends, ends[1]), strict=True)
    )
    module, lengths = torch.nn.Module(), [torch.tensor(e, dtype=torch.int32) for e in ends]
    packed, _ = attention(
        module,
        query,
        key,
        value,
        mask,
        cu_seq_lens_q=lengths[0],
        cu_seq_lens_k=lengths[1],
        **options,
    )
    alone = []
    for row, row_end, col, col_end in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        scores = query[:, :, row:row_end] @ key[:, :, col:col_end].repeat_interleave(2, 1).mT / 2.0
        seen = torch.ones(row_end - row, col_end - col, dtype=torch.bool)
        if mask is not None:
            seen = mask[0, 0, row:row_end, col:col_end]
        elif options.get("is_causal"):
            seen = seen.tril(seen.shape[1] - seen.shape[0])
        weights = scores.masked_fill(~seen, -float("inf")).softmax(-1).nan_to_num(0.0)
        alone.append(weights @ value[:, :, col:col_end].repeat_interleave(2, 1))
    return packed, torch.cat(alone, 2).transpose(1, 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "ends",
    [
        [[0, 4, 9], [0, 4, 9]],
        [[0, 4, 4, 9, 9], [0, 4, 4, 9, 9]],  # of length zero
        [[0, 2, 3, 6], [0, 5, 8, 12]],  # of different lengths, as with a cache
        [[0, 3, 4, 4], [0, 3, 3, 5]],  # queries without keys, and keys without queries
        [[0, 4, 6], [0, 2, 7]],  # rows above the diagonal
    ],
    ids=str,
)
def test_packed_sequences_attend_within_themselves(
    ends: list[list[int]], causal: bool, masked: bool
) -> None:
    mask = torch.rand(1, 1, ends[0][-1], ends[1][-1]) < 0.6 if masked else None
    packed, alone = packed_and_alone(mask, ends, is_causal=causal)
    torch.testing.assert_close(packed, alone)


def test_lengths_that_do_not_add_up_are_refused() -> None:
    x, bounds = torch.randn(2, 2, 6, 4), torch.tensor([0, 2, 6])
    for tensors in ([x] * 3, [x[:1, :, :5]] * 3):
        with pytest.raises(ValueError, match=r"end at 6 and 6 need a batch of one.*got a batch of"):
            attention(torch.nn.Module(), *tensors, None, cu_seq_lens_q=bounds)


def test_packed_documents_do_not_see_one_another_in_layers_with_a_window() -> None:
    ids = torch.randint(
        architectures.VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(3)
    )
    ends = torch.tensor([0, 6, 13], dtype=torch.int32)
    places = torch.cat([torch.arange(6), torch.arange(7)])[None]
    model = model_of("gpt_oss", "minitorch", "cpu")
    with torch.no_grad():
        packed = model(
            ids, position_ids=places, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7,
            max_length_k=7, attention_mask=torch.ones_like(ids),
        ).logits  # fmt: skip
        alone = torch.cat([model(ids[:, :6]).logits, model(ids[:, 6:]).logits], 1)
    torch.testing.assert_close(packed, alone)


def test_a_sink_of_each_row_takes_its_share() -> None:
    query, key, value = (torch.randn(2, 3, 6, 4) for _ in range(3))
    sinks = torch.randn(2, 3, 6, 1, requires_grad=True)
    scores = torch.cat([query @ key.mT / 2.0, sinks], -1)
    expected = (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2)
    out, _ = attention(torch.nn.Module(), query, key, value, None, is_causal=False, sinks=sinks)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, sinks, weights)[0] for x in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["Bloom", "Falcon"])
def test_a_model_without_the_attention_interface_is_refused_by_name(name: str) -> None:
    register_with_transformers()
    config = getattr(transformers, f"{name}Config")()
    config._attn_implementation = "minitorch"
    with torch.device("meta"), pytest.raises(ValueError) as error:
        getattr(transformers, f"{name}Model")(config)
    assert f"not possible for {name}Model" in str(error.value)
    assert "does not use the attention interface" in str(error.value)
    assert 'load it with attn_implementation="eager"' in str(error.value)


def test_an_argument_of_the_models_own_attention_that_ours_does_not_know_is_refused() -> None:
    from transformers.models.llama import modeling_llama

    from kernels.interop.torch import hugging_face

    def eager(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, new_kind: Any
    ) -> None:
        raise AssertionError

    register_with_transformers()
    config = transformers.LlamaConfig(attn_implementation="minitorch", num_hidden_layers=1)
    hugging_face._why_not.cache_clear()
    try:
        with (
            patch.object(modeling_llama, "eager_attention_forward", eager),
            torch.device("meta"),
            pytest.raises(ValueError, match="LlamaModel, which passes new_kind to its attention"),
        ):
            transformers.LlamaModel(config)
    finally:
        hugging_face._why_not.cache_clear()


def test_a_bias_adds_to_the_scores_beside_a_mask() -> None:
    query, key, value = (torch.randn(2, 3, 6, 4) for _ in range(3))
    bias, seen = torch.randn(1, 3, 6, 6), torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    hidden = torch.zeros(6, 6).masked_fill(~seen[0, 0], -float("inf"))[None, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(query, key, value, bias + hidden).transpose(1, 2)
    for mask in (seen, hidden):
        out, _ = attention(torch.nn.Module(), query, key, value, mask, position_bias=bias)
        torch.testing.assert_close(out, expected)


def test_probabilities_that_are_asked_for_are_missing_with_a_warning() -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.warns(UserWarning, match='output_attentions=True.*"eager"'):
        _, probabilities = attention(torch.nn.Module(), x, x, x, None, output_attentions=True)
    assert probabilities is None
