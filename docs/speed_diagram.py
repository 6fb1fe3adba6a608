"""The speed of attention beside PyTorch's, drawn from the record of the comparison."""

from __future__ import annotations

import json
from pathlib import Path

from kernels.common.picture import INK, PALE, Picture

RECORD = Path(__file__).resolve().parent / "results" / "nvidia-h200" / "against_torch.json"
#: What the record calls each, its words, and its colour.
CURVES = (
    ("flash3_wgmma", "this library (flash3_wgmma)", "#c2410c"),
    ("CUDNN", "PyTorch: cuDNN", "#1d4ed8"),
    ("FLASH", "PyTorch: FlashAttention-2", "#6b7280"),
)
TOP, HIGH, WIDE, MOST = 52, 170, 270, 700


def attention_speed() -> Picture:
    """Draw TFLOP/s over the sequence length, forward and backward, causal bfloat16 attention."""
    p = Picture(700, 300, "Attention on an NVIDIA H200: TFLOP/s over the sequence length")
    p.text(350, 20, "Causal attention on one NVIDIA H200, bfloat16, head_dim 128: TFLOP/s", 15)
    wanted = {"group": "dense", "case": "causal", "dtype": "bfloat16", "head_dim": 128}
    rows = [r for r in json.loads(RECORD.read_text())["rows"] if wanted.items() <= r.items()]
    step = WIDE / (len(rows) - 1)
    for left, part in ((60, "forward"), (400, "backward")):
        p.text(left + WIDE / 2, TOP - 8, part)
        for level in range(0, MOST + 1, 100):
            y = TOP + HIGH * (1 - level / MOST)
            p.path([(left, y), (left + WIDE, y)], PALE, 1)
            p.text(left - 8, y + 4, str(level), 11, "end")
        for i, row in enumerate(rows):
            p.text(left + i * step, TOP + HIGH + 18, f"{row['length']:,}", 11)
        for name, _, colour in CURVES:
            heights = [TOP + HIGH * (1 - row[part][name]["tflops"] / MOST) for row in rows]
            p.path([(left + i * step, round(y, 1)) for i, y in enumerate(heights)], colour, 2.5)
    p.path([(60, TOP + HIGH), (60 + WIDE, TOP + HIGH)], INK, 1)
    p.path([(400, TOP + HIGH), (400 + WIDE, TOP + HIGH)], INK, 1)
    p.text(350, TOP + HIGH + 38, "sequence length (16,384 tokens in all)", 12)
    for i, (_, words, colour) in enumerate(CURVES):
        p.path([(60 + 215 * i, 284), (88 + 215 * i, 284)], colour, 2.5)
        p.text(96 + 215 * i, 288, words, 12, "start")
    return p


PICTURES = {"attention-speed": attention_speed}
