"""The page of architectures: every model of transformers, tiny and random, with our attention and its own.

    python -m tests.support.models.architectures [llama …]  tries architectures and prints the results
    python -m tests.support.models.architectures --write    writes them to docs/guides/architectures.md, too

The architectures are those of the registry of transformers.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from kernels.interop.torch import hugging_face, register_with_transformers

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "architectures.md"
BEGIN = "<!-- python -m tests.support.models.architectures --write -->"
END = "<!-- end of the lists -->"
BATCH, LENGTH, VOCABULARY, MOST_PARAMETERS = 2, 10, 96, 4_000_000
#: What a number of a configuration becomes, by its name; the first row that matches counts.
SIZES = [
    (r"vocab_size|^n_tokens$|^num_embeddings$|^n_words$|_vocab$", VOCABULARY),
    (r"feat_extract_layers|conv_kernel", 99),
    (r"(num|n)_?(hidden_)?layers?$|^depth$|_layers$|layers_per_stack$|^num_blocks$", 2),
    (r"experts_per_tok|top_?k_experts|moe_top_?k|^top_?k$|num_selected_experts|^moe_k$", 2),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"num_.*experts?$|n_.*experts?$|num_shared", 4),
    (r"key_value_heads|kv_heads|query_groups|multi_query_group_num|kv_n_heads", 2),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_ssm", 64),
    (r"heads?$", 4),
    (r"head_dim|^d_kv$|head_size|kv_channels|d_head|key_value_proj_dim|^rotary_dim$", 8),
    (r"lora_rank", 16),
    (r"max_.*position|n_positions|n_ctx|max_seq_len|max_target_length|max_.*length", 64),
    (r"sliding_window|attention_window|local_attention|attention_chunk_size", 4),
    (r"context_size$", 16),
    (r"image_size$|img_size$|input_size$", 32),
    (r"patch_size$", 8),
    (r"hidden_size|d_model$|embed_dim$|n_embd$|^dim$|projection_dim$|embedding_size$"
     r"|emb_dim$|hidden_dim$|output_dim|^width$|output_size|conv_dim$|embedding_dim$"
     r"|codevector_dim|codebook_dim", 32),
    (r"intermediate|ffn|inner_dim|d_inner|d_ff|n_inner|mlp_dim", 48),
]  # fmt: skip
#: Entries of a configuration that follow from the others.
OWN = {
    "architectures", "dtype", "id2label", "label2id", "out_features", "out_indices", "stage_names",
    "transformers_version",
}  # fmt: skip
#: What stands for None.
GIVEN = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "num_experts_per_tok": 2,
    "attn_layer_indices": [1],
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def _small(name: str, value: int) -> int:
    return min(value, next((size for pattern, size in SIZES if re.search(pattern, name)), value))


def shrink(values: dict[str, Any], sections: bool) -> dict[str, Any]:
    """Return the values of a configuration of a few small layers, one of each kind.

    Args:
        values: All values of the configuration, also those of its parts.
        sections: Whether the model divides its rotary embedding into three sections.
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
            small[name] = {chosen.index(n): shrink(v, sections) for n, v in layered.items()} or None
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
            small[name] = shrink(value, sections) if named else value
        elif name in listed:
            small[name] = [value[i] for i in chosen]
        elif name in ("conv_dim", "image_size") and isinstance(value, (list, tuple)):
            small[name] = [32] * len(value)
        elif re.search(r"token_(id|index)$|_token$", name) and isinstance(value, int):
            token -= 1
            small[name] = value if value < 8 else token
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _small(name, value)
        else:
            small[name] = value
    heads = next((n for n in ("num_attention_heads", "n_head", "num_heads") if values.get(n)), None)
    if heads and values.get("num_key_value_heads") == values[heads]:
        small["num_key_value_heads"] = small[heads]
    small.update({name: len(chosen) for name in LAYERS if chosen and name in small})
    return small


class Untested(Exception):
    """Why an architecture cannot be tried."""


def model_of(kind: str) -> Any:
    """Return a tiny random model of a kind, whose attention is ours.

    Raises:
        ValueError: If ours refuses it.
        Untested: If there is none.
    """
    config_class = CONFIG_MAPPING[kind]
    name = config_class.__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        raise Untested("has no model") from None
    values = config_class().to_dict()
    values.pop("model_type", None)
    heads = ["CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING"]
    if "text_config" in values:
        heads.insert(0, heads.pop(3))
    names = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in heads] + ["MODEL_MAPPING_NAMES"]
    found = [getattr(modeling_auto, name).get(kind) for name in names]
    found = [name if isinstance(name, str) else name[0] for name in found if name]
    cls = next((getattr(module, name) for name in found if hasattr(module, name)), None)
    if cls is None:
        raise Untested("is a part of another model")
    sections = "mrope_section" in inspect.getsource(module)
    config = config_class(**shrink(values, sections))
    config._attn_implementation = hugging_face.NAME
    with torch.device("meta"):
        if sum(p.numel() for p in cls(config).parameters()) > MOST_PARAMETERS:
            raise Untested("is not small in a small configuration")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
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
    patches: Any = {"grid_thw": torch.tensor([[1, 4, 4]])}
    if isinstance(patch, int):
        numbers = channels * first(1, "temporal_patch_size") * patch**2
        patches["hidden_states"] = patches["pixel_values"] = random(16, numbers)
    boxes = {"bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)}
    video = {"pixel_values": random(1, first(8, "num_frames"), channels, size, size)}
    spoken = {"input_values": random(BATCH, 4000)}
    attempts = [text, {**text, **image}, {**text, **boxes}, {**text, **sound}, {**text, **frames}]
    attempts += [
        image,
        patches,
        sound,
        frames,
        spoken,
        video,
        {**text, **spoken},
        {**text, **image, **boxes},
    ]
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


def check(kind: str) -> None:
    """Try an architecture with our attention and with its own, forward and backward.

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
        try:
            model = model_of(kind)
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
                reason = error
        else:
            raise Untested("needs other inputs") from reason
        if calls:
            raise Untested("cannot change its attention")
        model.set_attn_implementation(hugging_face.NAME)
        actual = results(model, given)
        if not calls:
            raise Untested("has no attention")
    assert len(actual) == len(expected), "not every parameter has a gradient"
    top = max(x.abs().max().item() for x in expected if x.numel())
    for one, other in zip(actual, expected, strict=True):
        scale = max(other.abs().max().item() if other.numel() else 0.0, 1e-2 * top)
        torch.testing.assert_close(one, other, atol=1e-4 * scale, rtol=1e-3)


def tried(kind: str) -> str:
    """Return "tested", "refused", or why an architecture is not tested."""
    try:
        check(kind)
    except Untested as error:
        return str(error)
    except ValueError as error:
        return "refused" if "attention interface" in str(error) else f"FAILS: {error}"
    except Exception as error:
        return f"FAILS: {type(error).__name__} {str(error)[:200]!r}"
    return "tested"


@cache
def on_page() -> dict[str, str]:
    """Return the architectures of the page: name → "tested", "refused", or why not tested."""
    found = {}
    for line in PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines():
        if match := re.match(r"\| (.+?) \| \d+ \| (.+) \|$", line):
            found.update(dict.fromkeys(re.findall(r"`(.+?)`", match[2]), match[1]))
    return found


def page(found: dict[str, str]) -> str:
    """Return the lists of the page."""
    order = sorted(set(found.values()), key=lambda why: (why != "tested", why != "refused", why))
    lines = [
        f"Made with transformers {transformers.__version__}.",
        "",
        "| result | count | architectures |",
        "|---|--:|---|",
    ]
    for why in order:
        names = sorted(name for name, result in found.items() if result == why)
        lines.append(f"| {why} | {len(names)} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    transformers.logging.set_verbosity_error()
    write = "--write" in sys.argv
    named = [name for name in sys.argv[1:] if name != "--write"]
    kinds = named or sorted(CONFIG_MAPPING_NAMES)
    found = on_page().copy() if named else {}
    for kind in kinds:
        found[kind] = tried(kind)
        print(f"{kind:32} {found[kind]}", flush=True)
    if write:
        before, after = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{page(found)}{END}{after}")


if __name__ == "__main__":
    main()
