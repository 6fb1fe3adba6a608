"""Every model of the registry of transformers, tiny and random, with our attention and its own.

``python project/measure.py architectures`` tries them all.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kernels.interop.torch import hugging_face, register_with_transformers

#: The names of all architectures.
KINDS: list[str] = sorted(CONFIG_MAPPING.keys())
BATCH, LENGTH, VOCABULARY, MOST_PARAMETERS = 2, 10, 96, 48_000_000
#: What a number of a configuration becomes, by its name; the first row that matches counts.
COUNTS = [
    (r"vocab_size|^n_tokens$|^num_embeddings$|^n_words$|_vocab$", VOCABULARY),
    (r"feat_extract_layers|conv_kernel", 99),
    (r"(num|n)_?(hidden_)?layers?$|^depth$|_layers$|layers_per_stack$|^num_blocks$", 2),
    (r"experts_per_tok|top_?k_experts|moe_top_?k|^top_?k$|num_selected_experts|^moe_k$", 2),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"num_.*experts?$|n_.*experts?$|num_shared", 4),
]  # fmt: skip
LENGTHS = [
    (r"max_.*position|n_positions|n_ctx|max_seq_len|max_target_length|max_.*length", 64),
    (r"sliding_window|attention_window|local_attention|attention_chunk_size", 4),
    (r"context_size$", 16),
    (r"image_size$|img_size$|input_size$", 32),
    (r"patch_size$", 8),
]
WIDTHS = [
    (r"key_value_heads|kv_heads|query_groups|multi_query_group_num|kv_n_heads", 2),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_ssm", 64),
    (r"heads?$", 4),
    (r"head_dim|^d_kv$|head_size|kv_channels|d_head|key_value_proj_dim|^rotary_dim$", 8),
    (r"lora_rank", 16),
    (r"hidden_size|d_model$|embed_dim$|n_embd$|^dim$|projection_dim$|embedding_size$"
     r"|emb_dim$|hidden_dim$|output_dim|^width$|output_size|conv_dim$|embedding_dim$"
     r"|codevector_dim|codebook_dim", 32),
    (r"intermediate|ffn|inner_dim|d_inner|d_ff|n_inner|mlp_dim", 48),
]  # fmt: skip
#: What is tried in this order, because some numbers of a configuration follow from others.
SIZES = (COUNTS + WIDTHS + LENGTHS, COUNTS + LENGTHS, COUNTS)
#: Entries of a configuration that follow from the others.
OWN = {
    "architectures", "dtype", "id2label", "label2id", "out_features", "out_indices", "stage_names",
    "transformers_version",
}  # fmt: skip
#: What stands for None.
GIVEN = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "prediction_length": 8,
    "layer_types": ["full_attention", "full_attention"],
    "n_routed_experts": 4,
    "default_language": "en_XX",
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "num_experts_per_tok": 2,
    "attn_layer_indices": [1],
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def shrink(values: dict[str, Any], sections: bool, sizes: Any = SIZES[0]) -> dict[str, Any]:
    """Return the values of a configuration of a few small layers, one of each kind.

    Args:
        values: All values of the configuration, also those of its parts.
        sections: Whether the model divides its rotary embedding into three sections.
        sizes: The rows that say what a number becomes.
    """
    layers = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), 0)
    listed = {n: v for n, v in values.items() if isinstance(v, list) and len(v) == layers > 2}
    first: dict[str, int] = {}
    for number in range(layers if listed else 0):
        first.setdefault(repr([v[number] for v in listed.values()]), number)
    chosen = sorted(first.values())[:4]
    chosen = chosen * 2 if len(chosen) == 1 else chosen
    small: dict[str, Any] = {}
    token = VOCABULARY
    for name, value in values.items():
        if name in OWN:
            continue
        if name in GIVEN and value is None:
            small[name] = GIVEN[name]
            continue
        if name == "per_layer_config":
            layered = {int(n): v for n, v in (value or {}).items() if int(n) in chosen}
            small[name] = {
                chosen.index(n): shrink(v, sections, sizes) for n, v in layered.items()
            } or None
        elif isinstance(value, dict) and "rope" in name:
            part = values.get("partial_rotary_factor") or value.get("partial_rotary_factor") or 1.0
            pairs = int(8 * part) // 2
            own = (
                {"mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}
                if sections
                else {}
            )
            kinds = {n: {**v, **own} for n, v in value.items() if isinstance(v, dict)}
            small[name] = {**value, **kinds} if kinds or not value else {**value, **own}
        elif isinstance(value, dict):
            named = all(isinstance(n, str) for n in value)
            small[name] = shrink(value, sections, sizes) if named else value
        elif name in listed:
            small[name] = [value[i] for i in chosen]
        elif name in ("conv_dim", "image_size") and isinstance(value, (list, tuple)):
            small[name] = [32] * len(value)
        elif re.search(r"token_(id|index)$|_token$", name) and isinstance(value, int):
            token -= 1
            small[name] = value if value < 8 else token
        elif isinstance(value, int) and not isinstance(value, bool):
            found = (size for pattern, size in sizes if re.search(pattern, name))
            small[name] = min(value, next(found, value))
        else:
            small[name] = value
    heads = next((n for n in ("num_attention_heads", "n_head", "num_heads") if values.get(n)), None)
    if heads and values.get("num_key_value_heads") == values[heads]:
        small["num_key_value_heads"] = small[heads]
    small.update({name: len(chosen) for name in LAYERS if chosen and name in small})
    return small


class Untested(Exception):
    """Why an architecture cannot be tried."""


def module_of(kind: str) -> Any:
    """Return the module of an architecture's models, if it has one."""
    name = CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Untested("has no model") from None


def model_of(kind: str, sizes: Any = SIZES[0]) -> Any:
    """Return a tiny random model of a kind, whose attention is ours.

    Raises:
        ValueError: If ours refuses it.
        Untested: If there is none.
    """
    config_class, module = CONFIG_MAPPING[kind], module_of(kind)
    values = config_class().to_dict()
    values.pop("model_type", None)
    heads = ["CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING"]
    if "text_config" in values:
        heads.insert(0, heads.pop(3))
    names = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in heads] + ["MODEL_MAPPING_NAMES"]
    found = [getattr(modeling_auto, name).get(kind) for name in names]
    found = [name if isinstance(name, str) else name[0] for name in found if name]
    named = [getattr(module, name) for name in found if hasattr(module, name)]
    # A part of other models is in no list: its class has its configuration.
    own = [c for c in vars(module).values() if getattr(c, "config_class", None) is config_class]
    cls = next((c for c in named + own if "forward" in vars(c)), None)
    if cls is None:
        raise Untested("is a part of another model")
    sections = "mrope_section" in inspect.getsource(module)
    config = config_class(**shrink(values, sections, sizes))
    config._attn_implementation = hugging_face.NAME
    with torch.device("meta"):
        if sum(p.numel() for p in cls(config).parameters()) > MOST_PARAMETERS:
            raise Untested("is not small in a small configuration")
    std = 0.2 if sizes is SIZES[0] else 0.03  # the sums of wide layers are longer
    torch.manual_seed(0)
    model = cls(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Return inputs that a model may take, by the names of its arguments; the likeliest first."""
    generator = torch.Generator().manual_seed(1)
    names = inspect.signature(model.forward).parameters
    parts = [
        model.config,
        *(getattr(model.config, n, None) for n in ("vision_config", "audio_config")),
    ]

    def first(default: Any, *wanted: str) -> Any:
        found = (getattr(part, name, None) for part in parts for name in wanted)
        return next((value for value in found if value), default)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    def tokens() -> Any:
        return torch.randint(8, 60, (BATCH, LENGTH), generator=generator)

    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    text = {"input_ids": tokens(), "attention_mask": mask, "decoder_input_ids": tokens()}
    text["mm_token_type_ids"] = torch.zeros_like(mask)
    size = first(32, "image_size")
    size = size if isinstance(size, int) else max(size.values() if isinstance(size, dict) else size)
    channels, patch = first(3, "num_channels", "in_channels"), first(8, "patch_size")
    image = {"pixel_values": random(BATCH, channels, size, size)}
    bins = first(
        80, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim"
    )
    length = 2 * first(32, "max_source_positions")
    sound, frames = (
        {
            "input_features": random(BATCH, *shape),
            "input_features_mask": torch.ones(BATCH, size).bool(),
        }
        for shape, size in (((bins, length), length), ((32, bins), 32))
    )
    grid = torch.tensor([[1, 4, 4]])
    grids: dict[str, Any] = {
        "grid_thw": grid,
        "image_grid_thw": grid,
        "merge_sizes": torch.tensor([1]),
    }
    patches, squares = {**grids}, {**grids}
    padded = {"spatial_shapes": grid[0, 1:].expand(BATCH, 2)}
    if isinstance(patch, int):
        numbers = channels * first(1, "temporal_patch_size") * patch**2
        patches["hidden_states"] = patches["pixel_values"] = random(16, numbers)
        squares["pixel_values"] = random(16, channels, patch, patch)
        padded["pixel_values"] = random(BATCH, 16, channels * patch**2)
    padded["pixel_attention_mask"] = torch.ones(BATCH, 16, dtype=torch.long)
    padded["pixel_position_ids"] = torch.cartesian_prod(*[torch.arange(4)] * 2).expand(BATCH, 16, 2)
    boxes = {"bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)}
    frame = random(1, first(8, "num_frames", "frames_per_clip"), channels, size, size)
    video = {"pixel_values": frame, "pixel_values_videos": frame}
    spoken, mono = ({"input_values": random(BATCH, *shape)} for shape in ((4000,), (1, 4000)))
    spectrum = {"input_values": random(BATCH, first(64, "max_length"), bins)}
    times = first(32, "context_length")
    rows = random(BATCH, LENGTH, first(32, "hidden_size", "d_model"))
    series = {"past_values": random(BATCH, times, first(1, "num_input_channels", "input_size"))}
    line = {"past_values": random(BATCH, times), "freq": torch.zeros(BATCH, dtype=torch.long)}
    embedded = {"inputs_embeds": rows, "query_embeds": rows, "encoder_hidden_states": rows}
    played = {
        "states": random(BATCH, LENGTH, first(17, "state_dim")),
        "actions": random(BATCH, LENGTH, first(4, "act_dim")),
        "rewards": random(BATCH, LENGTH, 1), "returns_to_go": random(BATCH, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).expand(BATCH, LENGTH), "attention_mask": mask,
    }  # fmt: skip
    asked = {**text, **image, "qformer_input_ids": text["input_ids"]}
    attempts: list[dict[str, Any]] = [
        text, text | image, text | boxes, text | sound, text | frames, image, patches, sound, frames,
        spoken, video, text | spoken, text | image | boxes, squares, padded, text | padded, mono, spectrum,
        series, line, asked, text | video, embedded, played,
    ]  # fmt: skip
    of_text = set() if "input_ids" in names else set(text) - {"decoder_input_ids"}
    own = [
        {n: x for n, x in given.items() if n in names and n not in of_text} for given in attempts
    ]
    switch = {"use_cache": False} if "use_cache" in names else {}
    main = model.main_input_name
    return [{**given, **switch} for given in own if given and (main in given or main not in names)]


def tensors_of(output: Any) -> list[Any]:
    """Return the floating tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output
    return (
        [x for part in parts for x in tensors_of(part)]
        if isinstance(output, (dict, list, tuple))
        else []
    )


def results(model: Any, given: dict[str, Any]) -> list[Any]:
    """Return the outputs of a model, without those of padding, and the gradients of its parameters."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # of masks that some models draw
    mask, generator = given.get("attention_mask"), torch.Generator().manual_seed(2)
    found, total = [], torch.zeros(())
    for x in tensors_of(model(**given)):
        if mask is not None and x.shape[:2] == mask.shape:
            x = x * mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
        found.append(x.detach())
        if x.requires_grad:
            total = (
                total
                + (
                    torch.where(x.isfinite(), x, 0) * torch.randn(x.shape, generator=generator)
                ).sum()
            )
    total.backward()
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def ways(model: Any, given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield other ways to call a model: a name, what it is given, and the same in another form.

    A model with a way has the same results of both forms.  Some read what stands in the padding, or have no
    packed sequences.
    """
    if (mask := given.get("attention_mask")) is None or "input_ids" not in given:
        return
    left, ids = {**given, "attention_mask": mask.flip(1)}, given["input_ids"]
    yield "padded left", {**left, "input_ids": ids.masked_fill(mask.flip(1) == 0, 1)}, left
    names = inspect.signature(model.forward).parameters
    if model.can_generate() and {"position_ids", "kwargs"} <= {*names}:
        alone = {name: x for name, x in given.items() if name in ("input_ids", "use_cache")}
        ends = torch.tensor([0, LENGTH, 2 * LENGTH]).int()
        packed = {"input_ids": ids.view(1, -1), "position_ids": torch.arange(LENGTH).repeat(1, 2)}
        packed |= {f"cu_seq_lens_{x}": ends for x in "qk"}
        yield "packed", alone, {**alone, **packed, "max_length_q": LENGTH, "max_length_k": LENGTH}


def generated(model: Any, given: dict[str, Any]) -> list[Any]:
    """Return the tokens that a model writes, of which a part of the texts is padded left."""
    own = {n: x for n, x in given.items() if n not in ("decoder_input_ids", "use_cache")}
    own["attention_mask"] = given["attention_mask"].flip(1)
    torch.manual_seed(3)
    start = {"decoder_start_token_id": 0} if model.config.is_encoder_decoder else {}
    return [model.generate(**own, **start, max_new_tokens=4, min_new_tokens=4, do_sample=False)]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    """Check that results agree; those of packed texts have another shape."""
    assert len(actual) == len(expected), "not every parameter has a gradient"
    top = max(x.abs().max().item() for x in expected if x.numel())
    for one, other in zip(actual, expected, strict=True):
        scale = max(other.abs().max().item() if other.numel() else 0.0, 1e-2 * top)
        torch.testing.assert_close(
            one.reshape(other.shape), other, atol=1e-4 * scale, rtol=1e-3, equal_nan=True
        )


def own_results(kind: str, sizes: Any) -> tuple[Any, dict[str, tuple[Any, list[Any], bool]]]:
    """Return a model, and by the name of a way what it computes with its own attention.

    The last are the function of the model that computes it, its results, and whether ours must have them.
    """
    try:
        model = model_of(kind, sizes)
    except (Untested, ValueError) as error:
        if isinstance(error, Untested) or hugging_face.NAME in str(error):
            raise
        raise Untested("has no valid small configuration") from error
    except ImportError:
        raise Untested("needs another package") from None
    except Exception as error:
        raise Untested("has no valid small configuration") from error
    model.set_attn_implementation("eager")
    reason: Exception | None = None
    for given in inputs_of(model):
        try:
            expected = results(model, given)
            if not any(x.isnan().any() for x in expected):
                break
        except Exception as error:
            reason = reason or error
    else:
        raise Untested("needs other inputs") from reason
    first = "padded right" if "attention_mask" in given else ""
    found = {first: (lambda model: results(model, given), expected, True)}
    with suppress(Exception):  # its own attention does not have a way
        for name, other, inputs in ways(model, given):
            expected, must = results(model, other), True
            try:
                assert_same(results(model, inputs), expected)
            except Exception:
                must = False
            found[name] = (lambda model, last=inputs: results(model, last), expected, must)
        if model.can_generate() and first:
            found["generate"] = (
                lambda model: generated(model, given),
                generated(model, given),
                True,
            )
    return model, found


def _has_way(model: Any, name: str, compute: Any, expected: list[Any], must: bool) -> bool:
    """Tell whether our attention has the results of a model's own, which it must have."""
    found: list[Any] = []
    try:
        found = compute(model)
        assert_same(found, expected)
    except Exception as error:
        if not must:
            return False
        model.set_attn_implementation("sdpa")
        others = compute(model)
        for wanted, why, agrees in (
            (found, "differs from eager attention, as sdpa does", True),
            (expected, "rounds so much that sdpa differs from eager attention, too", False),
        ):
            try:
                assert_same(others, wanted)
            except AssertionError:
                same = False
            else:
                same = True
            if same == agrees:
                raise Untested(why) from None
        raise AssertionError(f"{name}: {error}") from error
    return True


def check(kind: str) -> str:
    """Try an architecture with our attention and with its own, forward and backward.

    Returns:
        In which ways.

    Raises:
        Untested: If it cannot be tried.
        ValueError: If our attention refuses it.
        AssertionError: If the results differ.
    """
    register_with_transformers()
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return attend(*args, **options)

    attend = hugging_face.flash_attention
    with patch.object(hugging_face, "flash_attention", counted):
        why_not: Untested | None = None
        for sizes in SIZES:
            try:
                model, found = own_results(kind, sizes)
                break
            except Untested as error:
                why_not = why_not or error
        else:
            code = inspect.getsource(module_of(kind))
            if not re.search("ALL_ATTENTION_FUNCTIONS|AutoModel|class .*Attention", code):
                raise Untested("has no attention")
            raise why_not or Untested
        if calls:
            raise Untested("cannot change its attention")
        model.set_attn_implementation(hugging_face.NAME)
        same = [name for name, way in found.items() if _has_way(model, name, *way)]
        if not calls:
            raise Untested("has no attention")
    return ", ".join(filter(None, same))


def tried(kind: str) -> str:
    """Return "tested" and the ways, "refused", or why an architecture is not tested."""
    try:
        return ": ".join(filter(None, ["tested", check(kind)]))
    except Untested as error:
        return str(error)
    except ValueError as error:
        return "refused" if "attention interface" in str(error) else f"FAILS: {error}"
    except Exception as error:
        return f"FAILS: {type(error).__name__} {str(error)[:200]!r}"
