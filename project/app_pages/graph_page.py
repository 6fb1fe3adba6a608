"""Modules 1 and 2: an expression as a graph, from its history, and the derivatives that flow back."""

from __future__ import annotations

import ast
from typing import Any

import streamlit as st

import minitorch
from app_pages.widgets import choose
from minitorch import Scalar

#: What an expression may call.
METHODS = ("exp", "log", "relu", "sigmoid", "sum", "mean")
EXAMPLES = (
    "x * y + y",
    "(x * x + y).sigmoid() * z",
    "(x + y) * y",
    "(x * y).exp() - z.relu()",
    "-(x.sigmoid().log())",
)
NAMES = ("x", "y", "z")
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Attribute, ast.Name, ast.Constant, ast.Load,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub,
)  # fmt: skip


def evaluate(text: str, variables: dict[str, Any]) -> Any:
    """Return the value of an expression of + - * /, the variables and METHODS.

    Raises:
        ValueError: If it has anything else, or is no expression.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None
    for node in ast.walk(tree):
        part = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        if not isinstance(node, _NODES):
            raise ValueError(f"{part} is not known here; + - * / and {', '.join(METHODS)} are")
        if isinstance(node, ast.Attribute) and node.attr not in METHODS:
            raise ValueError(f".{node.attr} is not known here; {', '.join(METHODS)} are")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            raise ValueError(f"{part}: functions are methods here, as in x.exp()")
        if isinstance(node, ast.Name) and node.id not in variables:
            raise ValueError(f"{node.id} is not known here; {', '.join(variables)} are")
        if isinstance(node, ast.Constant) and not isinstance(node.value, (int, float)):
            raise ValueError(f"{part} is no number")
    code = compile(tree, "expression", "eval")
    return eval(code, {"__builtins__": {}}, variables)


def _content(variable: Any) -> str:
    """Return what stands in a node: a scalar's number, a tensor's shape."""
    if isinstance(variable, Scalar):
        return f"{variable.data:.4g}"
    return str(tuple(variable.shape))


def flowing(result: Any, one: Any) -> list[tuple[Any, Any]]:
    """Return each variable with the derivative that has reached it, in the order of backpropagation."""
    derivatives = {result.unique_id: one}
    order = []
    for variable in minitorch.topological_sort(result):
        derivative = derivatives[variable.unique_id]
        order.append((variable, derivative))
        if not variable.is_leaf():
            for parent, share in variable.chain_rule(derivative):
                if not parent.is_constant():
                    known = derivatives.get(parent.unique_id)
                    derivatives[parent.unique_id] = share if known is None else known + share
    return order


def as_dot(result: Any, order: list[tuple[Any, Any]], done: int) -> str:
    """Return the graph in the DOT language.

    Args:
        result: The last variable.
        order: Of :func:`flowing`.
        done: How many of them backpropagation has visited; these show their derivative.
    """
    reached = {variable.unique_id: derivative for variable, derivative in order[:done]}
    lines = ["digraph {", 'rankdir="LR"; node [shape=box, style=filled, fontname="sans-serif"];']
    seen: set[str] = set()
    waiting: list[Any] = [result]
    while waiting:
        variable = waiting.pop()
        node = f"v{variable.unique_id}"
        if node in seen:
            continue
        seen.add(node)
        label, colour = _content(variable), "#ffffff"
        history = variable.history
        is_leaf = variable.is_leaf() or variable.is_constant()
        if is_leaf and variable.name and variable.name != str(variable.unique_id):
            label = f"{variable.name}: {label}"
        if variable.unique_id in reached:
            derivative = reached[variable.unique_id]
            is_number = isinstance(derivative, (int, float))
            text = f"{derivative:.4g}" if is_number else _content(derivative)
            label += f"\\nd = {text}"
            colour = "#bcd8f5"
        lines.append(f'{node} [label="{label}", fillcolor="{colour}"];')
        if is_leaf:
            continue
        function = f"f{variable.unique_id}"
        name = history.last_fn.__name__
        lines.append(f'{function} [label="{name}", shape=ellipse, fillcolor="#f8e0a8"];')
        lines.append(f"{function} -> {node};")
        for i, parent in enumerate(history.inputs):
            if hasattr(parent, "unique_id"):
                lines.append(f"v{parent.unique_id} -> {function};")
                waiting.append(parent)
            else:  # an option, such as a dimension
                lines.append(
                    f'o{variable.unique_id}_{i} [label="{parent}", shape=plaintext, style=""];'
                )
                lines.append(f"o{variable.unique_id}_{i} -> {function};")
    return "\n".join([*lines, "}"])


def _show(variables: dict[str, Any], examples: tuple[str, ...], make_one: Any) -> None:
    """Show an expression of some variables."""
    example = choose("an expression", [*examples, "my own"], "example")
    text = st.text_input("my own", examples[0], key="text") if example == "my own" else example
    try:
        result = evaluate(text, variables)
        if not hasattr(result, "history"):
            raise ValueError(f"{text} has no variable in it")
        order = flowing(result, make_one(result))
    except (ValueError, ArithmeticError, TypeError) as error:
        st.error(f"{text}: {error}")
        return
    done = st.slider("steps of backpropagation", 0, len(order), 0, key="done")
    st.graphviz_chart(as_dot(result, order, done))
    st.caption(
        "Boxes are variables, ellipses the functions in their history. Backpropagation visits a variable "
        "when everything that uses it has been visited; a variable used twice gets the sum of two shares."
    )
    columns = st.columns(len(variables))
    reached = {variable.unique_id: derivative for variable, derivative in order[:done]}
    for column, (name, variable) in zip(columns, variables.items(), strict=True):
        derivative = reached.get(variable.unique_id)
        shown = "–" if derivative is None else str(derivative)[:40]
        column.metric(f"derivative by {name}", shown)


def scalar_page(hide_source: bool = False) -> None:
    """Show the page of module 1."""
    st.title("An expression of scalars and its derivatives")
    starts = {"x": 2.0, "y": 3.0, "z": -1.0}
    columns = zip(st.columns(len(starts)), starts.items(), strict=True)
    values = {
        name: column.slider(name, -5.0, 5.0, start, 0.5, key=name)
        for column, (name, start) in columns
    }
    variables = {name: Scalar(value, name=name) for name, value in values.items()}
    _show(variables, EXAMPLES, lambda result: 1.0)


def tensor_page(hide_source: bool = False) -> None:
    """Show the page of module 2."""
    st.title("An expression of tensors and its gradients")
    rows = st.slider("rows of x", 1, 4, 2, key="rows")
    cols = st.slider("columns of x and y", 1, 4, 3, key="cols")
    shapes = {"x": (rows, cols), "y": (cols,), "z": (rows, 1)}
    minitorch.manual_seed(0)
    variables: dict[str, Any] = {}
    for name, shape in shapes.items():
        variables[name] = minitorch.rand(shape, requires_grad=True)
        variables[name].name = name
    st.caption("Shapes: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    examples = ("(x * y).sum()", "(x + y).sigmoid() * z", "(x * z).exp().sum()", "x + y + z")
    _show(variables, examples, lambda result: result.zeros(result.shape) + 1.0)
