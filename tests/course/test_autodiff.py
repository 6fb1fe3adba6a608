"""Module 1: the chain rule, the order of the graph and backpropagation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import data as any_data
from hypothesis.strategies import integers

from minitorch import Context, Scalar, ScalarFunction, ScalarHistory
from minitorch.autodiff import topological_sort

from ..strategies import result_of

DEEP = 10_000  # far beyond Python's recursion limit of 1,000


class Slant(ScalarFunction):
    """f(x, y) = x + 2 y + 3."""

    @staticmethod
    def forward(ctx: Context, x: float, y: float) -> float:
        return x + 2.0 * y + 3.0

    @staticmethod
    def backward(ctx: Context, d_output: float) -> tuple[float, float]:
        return d_output, 2.0 * d_output


class Bend(ScalarFunction):
    """f(x, y) = x (y + 1)."""

    @staticmethod
    def forward(ctx: Context, x: float, y: float) -> float:
        ctx.save_for_backward(x, y)
        return float(x * (y + 1))

    @staticmethod
    def backward(ctx: Context, d_output: float) -> tuple[float, float]:
        x, y = ctx.saved_values
        return d_output * (y + 1), d_output * x


class Product(ScalarFunction):
    """f(x, y) = x y, with a backward of its own."""

    @staticmethod
    def forward(ctx: Context, x: float, y: float) -> float:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Context, d_output: float) -> tuple[float, float]:
        x, y = ctx.saved_values
        return d_output * y, d_output * x


# --- task 1.3: chain rule --------------------------------------------------------------------


@pytest.mark.task1_3
def test_chain_rule_pairs_every_input_with_its_derivative() -> None:
    x, y = Scalar(1.0), Scalar(2.0)
    back = list(Scalar(0.0, ScalarHistory(Slant, Context(), (x, y))).chain_rule(5.0))
    assert all(isinstance(pair, tuple) for pair in back), (
        f"chain_rule gives {back}, expected a pair for each input: the input and its derivative"
    )
    assert [v.unique_id for v, _ in back] == [x.unique_id, y.unique_id], (
        "chain_rule of f(x, y) must give a pair for x, then one for y: the order of history.inputs"
    )
    given = [derivative for _, derivative in back]
    why = "_backward gets d_output, and what it returns is multiplied by it already"
    if given == [10.0, 5.0]:
        why = "each input gets the derivative of the other one"
    assert given == [5.0, 10.0], (
        f"f(x, y) = x + 2 y + 3: chain_rule(5.0) gives the derivatives {given}, expected [5.0, 10.0]: "
        f"{why}"
    )


@pytest.mark.task1_3
def test_chain_rule_reads_what_forward_saved() -> None:
    x, y = Scalar(4.0), Scalar(6.0)
    given = [derivative for _, derivative in Bend.apply(x, y).chain_rule(5.0)]
    assert given == [5.0 * 7.0, 5.0 * 4.0], (
        f"f(x, y) = x (y + 1) at x = 4, y = 6: chain_rule(5.0) gives the derivatives {given}, expected "
        "[35.0, 20.0]"
    )


@pytest.mark.task1_3
def test_chain_rule_keeps_numbers_in_their_place() -> None:
    """A number became a leaf, so it has a pair of its own and the next input stays second."""
    y = Scalar(6.0)
    back = list(Bend.apply(4, y).chain_rule(5.0))
    assert len(back) == 2
    assert back[0][0].is_leaf()
    assert back[1][0] is y
    assert back[1][1] == 5.0 * 4.0


@pytest.mark.task1_3
def test_chain_rule_wraps_the_single_derivative_of_a_single_input() -> None:
    x = Scalar(2.0)
    grown = x.exp()
    call = "chain_rule of log, whose backward returns a number, and _backward always a tuple,"
    ((variable, derivative),) = result_of(call, grown.log().chain_rule, 3.0)
    assert variable is grown
    assert derivative == pytest.approx(3.0 / grown.data)


@pytest.mark.task1_3
def test_chain_rule_refuses_a_leaf_and_a_backward_with_too_few_derivatives() -> None:
    class Forgetful(Slant):
        @staticmethod
        def backward(ctx: Context, d_output: float) -> float:  # pyright: ignore
            return d_output

    for what, v in (
        ("a leaf, which no function made", Scalar(1.0)),
        ("a function of 2 inputs that returns 1 derivative", Forgetful.apply(Scalar(1.0), 2.0)),
    ):
        try:
            v.chain_rule(1.0)
        except AssertionError:
            continue
        except NotImplementedError:
            raise
        except Exception as error:
            pytest.fail(f"chain_rule of {what} raises {error!r}, expected an AssertionError")
        pytest.fail(f"chain_rule of {what} raises nothing, expected an AssertionError")


# --- task 1.4: backpropagation ---------------------------------------------------------------


@pytest.mark.task1_4
def test_a_variable_stands_before_what_it_was_computed_from() -> None:
    """The short arm is found first, and what both arms come from is found twice."""
    x = Scalar(2.0)
    y = Slant.apply(x, 1.0)
    z = Slant.apply(y, x)
    out = Slant.apply(x, z)
    names = {v.unique_id: name for v, name in ((x, "x"), (y, "y"), (z, "z"), (out, "out"))}
    order = [names[v.unique_id] for v in topological_sort(out) if v.unique_id in names]
    assert order == ["out", "z", "y", "x"], (
        f"topological_sort gives {order} for y = f(x), z = f(y, x), out = f(x, z); expected out, z, y, x, "
        "each once: a variable stands before those it was computed from"
    )


@pytest.mark.task1_4
def test_a_leaf_used_twice_by_one_function_gets_both_shares() -> None:
    x = Scalar(3.0)
    Slant.apply(x, x).backward()
    assert x.derivative == 3.0, (
        f"f(x, x) with f(x, y) = x + 2 y + 3 has derivative 3.0, and backward gives {x.derivative}: a "
        "variable that is used more than once gets a share from each use, and they add up"
    )


@pytest.mark.task1_4
def test_a_diamond_is_summed_before_it_is_handed_on() -> None:
    """Both arms come from `shared`; handing it on at the first arrival would count it twice."""
    x = Scalar(2.0)
    shared = Product.apply(x, x)
    left, right = Product.apply(shared, 3.0), Slant.apply(shared, shared)
    (left + right).backward()
    expected = (3.0 + 1.0 + 2.0) * 2.0 * x.data
    assert x.derivative == expected, (
        f"s = x x, out = 3 s + f(s, s): the derivative in x = 2 is {x.derivative}, expected {expected}: "
        "s passes its derivative on once, when all its shares are added up"
    )
    assert shared.derivative is None, "only leaves collect derivatives"


@pytest.mark.task1_4
def test_a_chain_of_ten_thousand_does_not_hit_the_recursion_limit() -> None:
    x = Scalar(1.0)
    chain = [x]  # frees the last one first; all at once need more stack than a browser has
    for _ in range(DEEP):
        chain.append(chain[-1] + x)
    chain[-1].backward()
    assert chain[-1].data == DEEP + 1
    assert x.derivative == DEEP + 1


# --- the rest of the contract ----------------------------------------------------------------


@pytest.mark.task1_4
@given(any_data())
def test_any_graph_differentiates_exactly(data) -> None:
    """Forward mode, which carries the slope along with each value, must agree with backward."""
    x = Scalar(0.5)
    nodes, slopes = [x], [1.0]
    for _ in range(data.draw(integers(1, 12), label="operations")):
        pick = integers(0, len(nodes) - 1)
        i, j = data.draw(pick), data.draw(pick)
        a, b = nodes[i], nodes[j]
        if data.draw(integers(0, 1), label="multiply"):
            nodes.append(Product.apply(a, b))
            slopes.append(slopes[i] * b.data + a.data * slopes[j])
        else:
            nodes.append(a + Product.apply(b, -0.25))
            slopes.append(slopes[i] - slopes[j] * 0.25)
    nodes[-1].backward()
    # The last slope may be a small difference of large ones, so measure against the largest.
    largest = max(abs(slope) for slope in slopes)
    assert (x.derivative or 0.0) == pytest.approx(slopes[-1], rel=0, abs=1e-9 * largest), (
        f"the derivative is {x.derivative}, expected {slopes[-1]}"
    )

    order = list(topological_sort(nodes[-1]))
    place = {v.unique_id: n for n, v in enumerate(order)}
    assert order[0] is nodes[-1]
    assert len(place) == len(order), "a variable is visited twice"
    for v in order:
        assert all(place[p.unique_id] > place[v.unique_id] for p in v.parents)


@pytest.mark.task1_4
def test_constants_take_no_part() -> None:
    x, constant = Scalar(2.0), Scalar(3.0, None)
    out = Product.apply(x, constant)
    assert constant.is_constant() and not constant.is_leaf()
    assert [v.unique_id for v in topological_sort(out)] == [out.unique_id, x.unique_id]
    out.backward()
    assert x.derivative == 3.0, (
        f"x times the constant 3 has derivative {x.derivative} in x, expected 3.0"
    )
    assert constant.derivative is None, "a constant collects no derivative"
    assert list(topological_sort(constant)) == []
