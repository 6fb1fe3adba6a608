"""Modules 1 and 2: an expression as a graph, from its history, and the derivatives that flow back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import streamlit as st

import minitorch
from app_pages.expressions import evaluate
from app_pages.widgets import choose, own, refuse
from minitorch import Scalar

EXAMPLES = (
    "x * y + y", "(x * x + y).sigmoid() * z", "(x + y) * y", "(x * y).exp() - z.relu()",
    "-(x.sigmoid().log())", "(x - y) ** 2",
)  # fmt: skip
#: Colours of variables: not visited, reached by a share, visited; of functions, and of the last edges.
WHITE, GREEN, BLUE, AMBER, STRONG = "#ffffff", "#dcf2e0", "#bcd8f5", "#f8e0a8", "#c2410c"


def _content(variable: Any) -> str:
    """Return what stands in a node: a scalar's number, a tensor's shape."""
    if isinstance(variable, Scalar):
        return f"{variable.data:.4g}"
    return str(tuple(variable.shape))


def _number(value: Any) -> str:
    """Return a derivative in a few characters: a number, or the shape of a tensor."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else _content(value)


class Visit(NamedTuple):
    """A variable that backpropagation visits."""

    variable: Any  # its inputs get a share each
    derivative: Any  # of the result by the variable, complete
    shares: list[tuple[Any, Any]]  # one for each input of the function that made the variable


def flowing(result: Any, one: Any) -> list[Visit]:
    """Return the visits of backpropagation, in its order."""
    derivatives = {result.unique_id: one}
    order = []
    for variable in minitorch.topological_sort(result):
        derivative = derivatives[variable.unique_id]
        shares = [] if variable.is_leaf() else list(variable.chain_rule(derivative))
        order.append(Visit(variable, derivative, shares))
        for parent, share in shares:
            if not parent.is_constant():
                known = derivatives.get(parent.unique_id)
                derivatives[parent.unique_id] = share if known is None else known + share
    return order


def as_dot(result: Any, order: list[Visit], done: int) -> str:
    """Return the graph in the DOT language.

    An edge into a function shows the local derivative, and the share that has flowed back along it.
    """
    visited = {visit.variable.unique_id: visit for visit in order[:done]}
    last = order[done - 1].variable.unique_id if done else None
    arrived: dict[str, list[str]] = {}
    for visit in visited.values():
        for parent, share in visit.shares:
            arrived.setdefault(parent.unique_id, []).append(_number(share))
    lines = [
        "digraph {", 'rankdir="LR"; nodesep=0.35; ranksep=0.7;',
        'node [shape=box, style=filled, fontname="sans-serif"]; edge [fontname="sans-serif", fontsize=12];',
    ]  # fmt: skip
    seen: set[str] = set()
    waiting: list[Any] = [result]
    while waiting:
        variable = waiting.pop()
        node = f"v{variable.unique_id}"
        if node in seen:
            continue
        seen.add(node)
        label, colour = _content(variable), WHITE
        history = variable.history
        is_leaf = variable.is_leaf() or variable.is_constant()
        if is_leaf and variable.name and variable.name != str(variable.unique_id):
            label = f"{variable.name}: {label}"
        shares = arrived.get(variable.unique_id, [])
        visit = visited.get(variable.unique_id)
        if visit is not None:
            total = _number(visit.derivative)
            has_terms = len(shares) > 1 and isinstance(visit.derivative, (int, float))
            terms = f"{' + '.join(shares)} = " if has_terms else ""
            label += f"\\nd = {terms}{total}"
            colour = BLUE
        elif shares and not variable.is_constant():
            label, colour = f"{label}\\nso far {' + '.join(shares)}", GREEN
        lines.append(f'{node} [label="{label}", fillcolor="{colour}"];')
        if is_leaf:
            continue
        function = f"f{variable.unique_id}"
        name = history.last_fn.__name__
        lines.append(f'{function} [label="{name}", shape=ellipse, fillcolor="{AMBER}"];')
        lines.append(f"{function} -> {node};")
        edges = _edges(variable, visit)
        strong = f', color="{STRONG}", penwidth=2' if variable.unique_id == last else ""
        for i, parent in enumerate(history.inputs):
            if hasattr(parent, "unique_id"):
                lines.append(f'v{parent.unique_id} -> {function} [label="{edges[i]}"{strong}];')
                waiting.append(parent)
            else:  # an option, such as a dimension
                lines.append(
                    f'o{variable.unique_id}_{i} [label="{parent}", shape=plaintext, style=""];'
                )
                lines.append(f"o{variable.unique_id}_{i} -> {function};")
    return "\n".join([*lines, "}"])


def _edges(variable: Any, visit: Visit | None) -> list[str]:
    """Return what stands at the edges from the inputs to the function that made a variable."""
    if not isinstance(variable, Scalar):  # a tensor's derivative by a tensor is no single number
        known = visit.shares if visit else ()
        shares = {parent.unique_id: f"share {_number(share)}" for parent, share in known}
        return [shares.get(getattr(p, "unique_id", None), "") for p in variable.history.inputs]
    local = [_number(value) for _, value in variable.chain_rule(1.0)]
    if visit is None:
        return [f"∂ = {value}" for value in local]
    d = _number(visit.derivative)
    return [
        f"{d} · {value} = {_number(share)}"
        for value, (_, share) in zip(local, visit.shares, strict=True)
    ]


def _show(variables: dict[str, Any], examples: tuple[str, ...], make_one: Any) -> None:
    """Show an expression of some variables."""
    example = choose("an expression", [*examples, "my own"], "example")
    text = (
        str(st.text_input("my own", examples[0], key=own("text")))
        if example == "my own"
        else example
    )
    try:
        result = evaluate(text, variables)
        if not hasattr(result, "history"):
            raise ValueError("it has no variable in it")
        order = flowing(result, make_one(result))
    except OverflowError:
        refuse(f"{text}: a number in it is too large for a floating-point number")
        return
    except (ValueError, ArithmeticError, TypeError, IndexError) as error:
        known = {"math domain error": "a logarithm or a root of a number that is not positive"}
        refuse(f"{text}: {known.get(str(error), error)}")
        return
    state, key = st.session_state, own("done")
    state[key] = min(state.get(key, 0), len(order))  # another expression may have fewer steps
    done = st.slider("steps of backpropagation", 0, len(order), key=key)
    st.graphviz_chart(as_dot(result, order, done))
    st.caption(
        "Backpropagation visits a variable when everything that uses it has been visited. Its derivative "
        "d times the local derivative ∂ of an edge is the share of that edge's input. A variable that is "
        "used twice gets two shares, and its derivative is their sum. A variable is white before a share "
        "arrives, green while shares are missing, and blue when it is visited. Numbers are float64."
    )
    columns = st.columns(len(variables))
    reached = {visit.variable.unique_id: visit.derivative for visit in order[:done]}
    for column, (name, variable) in zip(columns, variables.items(), strict=True):
        derivative = reached.get(variable.unique_id)
        shown = "–" if derivative is None else _number(derivative)
        column.metric(f"derivative by {name}", shown)
        if derivative is not None and not isinstance(derivative, float):
            column.code(_numbers(derivative))


def _numbers(tensor: Any) -> str:
    """Return the numbers of a tensor with three digits."""
    return np.array2string(tensor.to_numpy(), precision=3, suppress_small=True)


def scalar_page(hide_source: bool = False) -> None:
    """Show the page of module 1."""
    starts = {"x": 2.0, "y": 3.0, "z": -1.0}
    columns = zip(st.columns(len(starts)), starts.items(), strict=True)
    values = {
        name: column.slider(name, -5.0, 5.0, start, 0.5, key=own(name))
        for column, (name, start) in columns
    }
    variables = {name: Scalar(value, name=name) for name, value in values.items()}
    _show(variables, EXAMPLES, lambda result: 1.0)


def tensor_page(hide_source: bool = False) -> None:
    """Show the page of module 2."""
    rows = st.slider("rows of x", 1, 4, 2, key=own("rows"))
    cols = st.slider("columns of x and y", 1, 4, 3, key=own("cols"))
    shapes = {"x": (rows, cols), "y": (cols,), "z": (rows, 1)}
    minitorch.manual_seed(0)
    variables: dict[str, Any] = {}
    for name, shape in shapes.items():
        variables[name] = minitorch.rand(shape, requires_grad=True)
        variables[name].name = name
    st.caption("Shapes: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
    examples = (
        "(x * y).sum()", "(x + y).sigmoid() * z", "(x * z).exp().sum()", "x + y + z", "x ** 2 / y",
    )  # fmt: skip
    _show(variables, examples, lambda result: result.zeros(result.shape) + 1.0)
