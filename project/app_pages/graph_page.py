"""Modules 1 and 2: an expression as a graph, from its history, and the derivatives that flow back."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
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
#: Characters of an expression at most.
LONGEST = 1000
#: What the signs mean.
SIGNS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def evaluate(text: str, variables: dict[str, Any]) -> Any:
    """Return the value of an expression of + - * /, the variables and METHODS; no code of it is run.

    Raises:
        ValueError: If it has anything else, or is no expression.
    """
    if len(text) > LONGEST:
        raise ValueError(
            f"it has {len(text):,} characters, {LONGEST:,} are the most; write a shorter one"
        )
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, variables)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is too deep; write a shorter one") from None


def _value(node: ast.expr, variables: dict[str, Any]) -> Any:
    """Return the value of a part of an expression; raise ValueError for what is not known here."""
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name() if node.id in variables:
            return variables[node.id]
        case ast.BinOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](_value(node.left, variables), _value(node.right, variables))
        case ast.UnaryOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](_value(node.operand, variables))
        case ast.Call(func=ast.Attribute(value=inner, attr=name), keywords=[]) if name in METHODS:
            owner = _value(inner, variables)
            if not hasattr(owner, name):
                raise ValueError(
                    f"{ast.unparse(node.func)} is not known here: no variable is in it"
                )
            return getattr(owner, name)(*(_value(arg, variables) for arg in node.args))
    text = ast.unparse(node)
    match node:
        case ast.Name():
            raise ValueError(f"{text} is not known here; {', '.join(variables)} are")
        case ast.Constant():
            raise ValueError(f"{text} is no number")
        case ast.Call() if not isinstance(node.func, ast.Attribute):
            raise ValueError(f"{text}: functions are methods here, as in x.exp()")
    raise ValueError(f"{text} is not known here; + - * / and {', '.join(METHODS)} are")


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
