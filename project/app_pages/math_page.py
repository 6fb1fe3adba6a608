"""Module 0: the functions of numbers, drawn, and functions of functions on a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import streamlit as st

from app_pages.pictures import show_panels
from app_pages.widgets import choose, own, refuse
from minitorch import operators
from minitorch.module import Module, Parameter

ONE: dict[str, Callable[[float], float]] = {
    name: getattr(operators, name) for name in ("neg", "sigmoid", "relu", "exp", "log", "inv", "id")
}
TWO: dict[str, Callable[[float, float], float]] = {
    name: getattr(operators, name) for name in ("add", "mul", "max", "lt", "eq", "is_close")
}
#: Where they are defined for positive numbers only, or not at 0.
POSITIVE = {"log", "inv"}


class Layer(Module):
    """As many weights and biases as it has outputs."""

    def __init__(self, width: int):
        super().__init__()
        for i in range(width):
            self.add_parameter(f"weight_{i}", 1.0)
            self.add_parameter(f"bias_{i}", 0.0)


class Network(Module):
    """A tree of two layers and a parameter of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = Parameter(1.0)
        self.layer1, self.layer2 = Layer(width), Layer(1)


def page(hide_source: bool = False) -> None:
    """Show the page."""
    name = choose("function", [*ONE, *TWO], "function", 1)
    low = 0.1 if name in POSITIVE else -5.0
    x = st.slider("x", low, 5.0, 1.0, 0.1, key=own("x"))
    if name in TWO:
        y = st.slider("y", -5.0, 5.0, 2.0, 0.1, key=own("y"))
        function: Callable[[float], float] = lambda x: TWO[name](x, y)  # noqa: E731
    else:
        function = ONE[name]
    value = float(function(x))
    st.metric(f"{name} at x = {x:g}", f"{value:.4g}")

    def curve(axes: Any) -> None:
        xs = np.linspace(low, 5.0, 201)
        axes.plot(xs, [float(function(each)) for each in xs.tolist()], label=name)
        axes.plot(x, value, "ko", label=f"x = {x:g}")
        axes.set(xlabel="x, float64", ylabel=f"{name}, float64")
        axes.legend()
        axes.grid(alpha=0.3)

    show_panels(curve, where=st.columns(2)[0])
    st.header("Functions of functions")
    text = st.text_input("a list of numbers", "1, 2, 3, 4", key=own("numbers"))
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        refuse(f"numbers with commas between them are needed, as in 1, 2, 3; got {text!r}")
        return
    one = ONE[choose("map", ONE, "map")]
    safe = [number for number in numbers if one not in (operators.log, operators.inv) or number > 0]
    try:
        results = {
            "map(function)(list)": operators.map(one)(safe),
            "negList(list)": operators.negList(numbers),
            "addLists(list, list)": operators.addLists(numbers, numbers),
            "sum(list)": operators.sum(numbers),
            "prod(list)": operators.prod(numbers),
        }
    except OverflowError:
        refuse(f"a result is too large for a floating-point number; got the list {text}")
        return
    st.dataframe([{"": key, "result": str(result)} for key, result in results.items()])
    st.header("A tree of modules")
    width = st.slider("outputs of the first layer", 1, 6, 2, key=own("width"))
    network = Network(width)
    rows = [{"parameter": key, "value": str(p.value)} for key, p in network.named_parameters()]
    st.metric("parameters", len(rows))
    st.dataframe(rows)
