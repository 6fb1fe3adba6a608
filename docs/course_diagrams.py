"""The diagrams of modules 0 to 2: functions of numbers, derivatives, tensors."""

from __future__ import annotations

import math

import numpy as np

from kernels.common.picture import AMBER, BLUE, GREEN, INK, PALE, RED, Picture
from minitorch import operators


def _row(p: Picture, x: float, y: float, values: list[str], fill: str) -> None:
    """Draw a list of values as cells of 36 by 30."""
    for i, value in enumerate(values):
        p.box(x + 36 * i, y, 36, 30, value, fill)


def map_zip_reduce() -> Picture:
    """Draw what map, zipWith and reduce make of lists."""
    p = Picture(480, 250, "map, zipWith and reduce on lists of three numbers")
    p.text(15, 35, "map(neg)", 13, "start")
    _row(p, 130, 15, ["1", "2", "3"], BLUE)
    p.arrow(245, 30, 320, 30)
    _row(p, 325, 15, ["−1", "−2", "−3"], GREEN)
    p.text(15, 105, "zipWith(add)", 13, "start")
    _row(p, 130, 70, ["1", "2", "3"], BLUE)
    _row(p, 130, 105, ["10", "20", "30"], BLUE)
    p.arrow(245, 102, 320, 102)
    _row(p, 325, 87, ["11", "22", "33"], GREEN)
    p.text(15, 190, "reduce(add, 0)", 13, "start")
    _row(p, 190, 150, ["1", "2", "3"], BLUE)
    for i, value in enumerate(("0", "1", "3", "6")):
        p.box(130 + 78 * i, 205, 36, 30, value, AMBER if i < 3 else GREEN)
        if i:
            p.arrow(166 + 78 * (i - 1), 220, 129 + 78 * i, 220)
            p.arrow(172 + 36 * i, 181, 126 + 78 * i, 204, dashed=True)
    return p


def sigmoid_forms() -> Picture:
    """Draw the sigmoid, and which of its two forms is safe on which side."""
    p = Picture(480, 230, "The sigmoid: one safe form on each side of 0")
    left, top, wide, high = 40, 20, 400, 140

    def place(x: float) -> tuple[float, float]:
        return left + wide * (x + 6) / 12, top + high * (1 - operators.sigmoid(x))

    for level, name in ((0.0, "0"), (1.0, "1")):
        y = top + high * (1 - level)
        p.path([(left, y), (left + wide, y)], PALE, 1)
        p.text(left - 8, y + 5, name, 12, "end")
    p.path([(left + wide / 2, top), (left + wide / 2, top + high)], PALE, 1)
    p.path([place(x) for x in np.linspace(-6, 0, 61).tolist()], "#1b6ca8", 3)
    p.path([place(x) for x in np.linspace(0, 6, 61).tolist()], "#2e8b57", 3)
    p.text(left + wide / 2, top + high + 18, "x = 0", 12)
    p.box(left, 185, 190, 34, "eˣ / (1 + eˣ) for x < 0", BLUE)
    p.box(left + 210, 185, 190, 34, "1 / (1 + e⁻ˣ) for x ≥ 0", GREEN)
    return p


def shrinking() -> Picture:
    """Draw how a property test finds a failing input and then a simpler one."""
    p = Picture(
        480, 190, "A property test draws inputs until one fails, then looks for a simpler one"
    )
    p.text(15, 28, "property: x · x ≥ x", 14, "start")
    p.text(15, 70, "draw", 13, "start")
    drawn = (("−81.25", True), ("14.0", True), ("1.0", True), ("0.3716", False))
    shrunk = (("0.375", False), ("0.5", False), ("1.0", True))
    for y, row in ((50, drawn), (115, shrunk)):
        for i, (value, holds) in enumerate(row):
            p.box(
                85 + 95 * i, y, 80, 32, f"{value} {'✓' if holds else '✗'}", GREEN if holds else RED
            )
            if i:
                p.arrow(70 + 95 * i, y + 16, 84 + 95 * i, y + 16)
    p.text(15, 135, "shrink", 13, "start")
    p.arrow(410, 83, 125, 114, dashed=True)
    p.text(85, 175, "reported: 0.5, the simplest input that fails", 13, "start")
    return p


def central_difference() -> Picture:
    """Draw the secant through x - h and x + h beside the tangent and the one-sided secant."""
    p = Picture(480, 270, "The central difference is closer to the tangent than the one-sided one")
    left, top, wide, high, h = 40, 15, 400, 200, 0.8

    def place(x: float, y: float) -> tuple[float, float]:
        return left + wide * (x + 1.6) / 3.2, top + high * (1 - y / 5.0)

    for x, name in ((-h, "x − h"), (0.0, "x"), (h, "x + h")):
        px, py = place(x, math.exp(x))
        p.path([(px, py), (px, top + high)], PALE, 1)
        p.text(px, top + high + 16, name, 12)
    p.path([place(x, math.exp(x)) for x in np.linspace(-1.6, 1.6, 81).tolist()], INK, 2.5)
    slopes = {
        "#2e8b57": (0.0, 1.0),
        "#1b6ca8": (-h, (math.exp(h) - math.exp(-h)) / (2 * h)),
        "#c0392b": (0.0, (math.exp(h) - 1.0) / h),
    }
    for colour, (at, slope) in slopes.items():
        ends = (-0.95 if at else -0.6, 1.5)
        p.path([place(x, math.exp(at) + slope * (x - at)) for x in ends], colour, 2)
    for x in (-h, 0.0, h):
        px, py = place(x, math.exp(x))
        p.area(px - 4, py - 4, 8, 8, INK)
    for i, (name, colour) in enumerate(
        (("tangent", "#2e8b57"), ("central", "#1b6ca8"), ("one-sided", "#c0392b"))
    ):
        p.path([(left + 135 * i, 255), (left + 30 + 135 * i, 255)], colour, 3)
        p.text(left + 36 + 135 * i, 260, name, 13, "start")
    return p


def history() -> Picture:
    """Draw what the result of an operation on Scalars keeps."""
    p = Picture(
        480, 210, "f = a · y keeps the function, its inputs and the values saved for backward"
    )
    p.box(15, 20, 100, 60, "", GREEN)
    p.text(65, 45, "a: Scalar", 13)
    p.text(65, 66, "data = 5", 12)
    p.box(15, 130, 100, 60, "", GREEN)
    p.text(65, 155, "y: Scalar", 13)
    p.text(65, 176, "data = 3", 12)
    p.box(165, 20, 300, 170, "", BLUE)
    p.text(315, 45, "f: Scalar", 13)
    p.text(185, 68, "data = 15", 13, "start")
    p.box(185, 80, 265, 98, "", AMBER)
    for i, line in enumerate(
        ("history", "last_fn = Mul", "inputs = (a, y)", "ctx.saved_values = (5, 3)")
    ):
        p.text(197 + 12 * (i > 0), 100 + 22 * i, line, 13, "start")
    p.arrow(185, 120, 117, 60, dashed=True)
    p.arrow(185, 140, 117, 156, dashed=True)
    return p


def topological_order() -> Picture:
    """Draw a diamond, and the order in which backpropagation visits it."""
    p = Picture(480, 235, "Backpropagation visits a variable after all variables that use it")
    places = {
        "x": (20, 70, GREEN),
        "a": (150, 20, BLUE),
        "b": (150, 120, BLUE),
        "f": (290, 70, BLUE),
    }
    names = {"x": "x = 3", "a": "a = x + 1", "b": "b = 2 x", "f": "f = a · b"}
    for start, end in (("x", "a"), ("x", "b"), ("a", "f"), ("b", "f")):
        (x1, y1, _), (x2, y2, _) = places[start], places[end]
        p.arrow(x1 + 90, y1 + 18, x2, y2 + 18)
    for number, name in enumerate(("f", "a", "b", "x"), 1):
        x, y, fill = places[name]
        p.box(x, y, 90, 36, names[name], fill)
        p.text(x + 45, y + 53, f"visit {number}", 12)
    p.text(15, 200, "f, a, b, x: at visit 4 both shares have reached x.", 13, "start")
    p.text(15, 222, "f, a, x, b: x would be visited with one share of two.", 13, "start")
    return p


def reduce_dimension() -> Picture:
    """Draw the sums of a matrix along each of its dimensions."""
    p = Picture(480, 200, "A reduction folds one dimension, which keeps size 1")
    number = lambda r, c: str(3 * r + c + 1)  # noqa: E731
    p.grid(30, 45, 2, 3, 36, number, lambda r, c: (BLUE, GREEN)[r])
    p.arrow(145, 80, 185, 80)
    p.grid(190, 45, 2, 1, 36, lambda r, c: ("6", "15")[r], lambda r, c: (BLUE, GREEN)[r])
    p.text(84, 30, "(2, 3)", 13)
    p.text(208, 30, "sum(1): (2, 1)", 13)
    p.grid(300, 45, 2, 3, 36, number, lambda r, c: (BLUE, GREEN, AMBER)[c])
    p.arrow(354, 120, 354, 145)
    p.grid(
        300, 150, 1, 3, 36, lambda r, c: ("5", "7", "9")[c], lambda r, c: (BLUE, GREEN, AMBER)[c]
    )
    p.text(354, 30, "(2, 3)", 13)
    p.text(290, 173, "sum(0): (1, 3)", 13, "end")
    return p


def broadcast_gradient() -> Picture:
    """Draw a product with broadcasting, and the sum that is the gradient of its small operand."""
    p = Picture(480, 245, "An operand that was broadcast is read many times; its gradient is a sum")
    p.text(15, 62, "forward", 13, "start")
    p.grid(90, 22, 2, 1, 36, lambda r, c: ("x₁", "x₂")[r], lambda r, c: BLUE)
    p.text(147, 64, "·", 18)
    p.grid(165, 40, 1, 3, 36, lambda r, c: ("10", "20", "30")[c], lambda r, c: GREEN)
    p.text(290, 64, "=", 18)
    p.grid(308, 22, 2, 3, 52, lambda r, c: f"{10 * (c + 1)} {('x₁', 'x₂')[r]}", lambda r, c: PALE)
    p.text(15, 180, "backward", 13, "start")
    p.grid(90, 150, 2, 1, 44, lambda r, c: "60", lambda r, c: BLUE)
    p.text(112, 145, "dx", 12)
    p.text(198, 186, "sum of each row", 13)
    p.arrow(260, 194, 137, 194)
    p.grid(265, 150, 2, 3, 44, lambda r, c: ("10", "20", "30")[c], lambda r, c: PALE)
    p.text(331, 145, "1 · y", 12)
    return p


PICTURES = {
    "map-zip-reduce": map_zip_reduce,
    "sigmoid-forms": sigmoid_forms,
    "shrinking": shrinking,
    "central-difference": central_difference,
    "history": history,
    "topological-order": topological_order,
    "reduce-dimension": reduce_dimension,
    "broadcast-gradient": broadcast_gradient,
}
