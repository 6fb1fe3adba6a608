"""The table of the options of attention: each one's type, default, checks, text, and how it is passed on.

:class:`Options` names the options for editors and type checkers, and an :class:`Option` is what the library
knows of one.  Checks, signatures, docstrings, the fields of ``Problem``, the schema of the PyTorch operator
and the random calls of tests are made from the table.  What an option does to a score is in
``kernels.scores.program``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, NamedTuple, TypedDict, get_type_hints

import numpy as np

from kernels.common.arguments import is_number, number, shown
from kernels.problem import option_values as values
from kernels.problem.float8 import check_precision  # beyond module 5
from kernels.problem.rungs import rung_of_run
from kernels.problem.shapes import is_whole
from kernels.scores.mods import as_mask_mod, as_score_mod  # beyond module 5
from kernels.sparsity.block_mask import BlockMask


class OptionType(NamedTuple):
    """The types that an option may have, besides a default of None."""

    words: str  #: The types in words.
    fits: Callable[[Any], bool]  #: Whether a value has one of them.
    usual: type | None = None  #: The most common type, which needs no further check.


def _is_window(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_whole, value))


def _is_score_mod(value: Any) -> bool:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2 and callable(value[0])
    return callable(value) or (is_pair and (value[1] is None or callable(value[1])))


FLAG = OptionType("True or False", lambda value: isinstance(value, (bool, np.bool_)), bool)
NUMBER = OptionType("a number", is_number, float)
WHOLE = OptionType("a whole number", is_whole, int)
NAME = OptionType("a name", lambda value: isinstance(value, str), str)
WINDOW = OptionType("(left, right), two whole numbers,", _is_window)
FUNCTION = OptionType("a function", callable)
SCORE_MOD = OptionType("a function, or a pair of it and its derivative,", _is_score_mod)
BLOCK_MASK = OptionType(
    "a kernels.BlockMask (BlockMask.from_dense makes one of an array)",
    lambda value: isinstance(value, BlockMask),
)
#: An array of any library, which the check of its value looks at.
ARRAY = OptionType("an array", lambda value: True)


class Option(NamedTuple):
    """One option of attention."""

    text: str  #: What it does, for docstrings.
    kind: OptionType  #: Its types.
    default: Any = None  #: Its default.
    #: ``(value, given)``: the checked value, where ``given`` is an ``option_values.Given``.
    check: Callable[[Any, values.Given], Any] = lambda value, given: value
    #: The field of ``Problem`` for the checked value, and of ``Operands`` for an array; the name of the
    #: option when "", and None if the value only becomes bounds or groups.
    field: str | None = ""
    #: Of an array of numbers for each head: "q" if it has one for each query row, "k" for each key,
    #: "qk" for each score; it repeats along the others.
    axes: str = ""
    #: Whether it is an array that receives a gradient: that of an array added to scores, unless
    #: ``launch`` names another.
    has_gradient: bool = False
    #: Its type in the schema of the PyTorch operator; "" for one that is a constant of the graph.
    schema: str = ""
    by_position: bool = False  #: Whether it may be given by position, as in PyTorch.
    is_packed: bool = True  #: Whether packed sequences support it.
    in_2022: bool = False  #: Whether the algorithm of 2022, the rung ``flash1``, has it.


def numbers(
    name: str, text: str, check: Any = None, axes: str = "", per_batch: bool = False, **more: Any
) -> Option:
    """Return an option that is an array: numbers for each head, or each (batch, head) if ``per_batch``.

    ``check`` is a further check of the value, ``axes`` and ``more`` are attributes of
    :class:`Option`.
    """

    def check_all(value: Any, given: values.Given) -> bool:
        is_given = values.check_numbers(name, value, given, axes, per_batch)
        if is_given and check is not None:
            check(value)
        return is_given

    own = {"schema": "Tensor?", "axes": axes, "is_packed": not axes, **more}
    return Option(text, ARRAY, None, check_all, **own)


# fmt: off
class Options(TypedDict, total=False):
    """Options of one attention call, all of which have defaults."""

    attn_mask: Annotated[Any, Option(
        "A boolean mask (True keeps), or an additive mask of the dtype of q, or of float32 where q has 16 "
        "bits; it broadcasts to (…, heads, seq_q, seq_k) and may have any strides.  Must be None for "
        "packed sequences.",
        ARRAY, None, values.check_mask, "mask", has_gradient=True, schema="Tensor?", by_position=True,
        is_packed=False, in_2022=True)]
    dropout_p: Annotated[float, Option(
        "Probability of dropping an attention weight, in [0, 1), rounded to a multiple of 2⁻¹⁶.  The "
        "remaining weights are divided by 1 - dropout_p.",
        NUMBER, 0.0, lambda value, given: number("dropout_p", value), schema="float",
        by_position=True, in_2022=True)]
    is_causal: Annotated[bool, Option(
        "Query i attends to keys 0 to i (top-left aligned, as in PyTorch).",
        FLAG, False, field=None, schema="bool", by_position=True, in_2022=True)]
    scale: Annotated[float | None, Option(
        "Factor of the scores; 1/sqrt(head_dim) when None.",
        NUMBER, None, values.check_scale, schema="float?", by_position=True, in_2022=True)]
    enable_gqa: Annotated[bool, Option(
        "Let groups of adjacent query heads share one head of k and v; the number of query heads must be "
        "a multiple of the number of heads of k and v.",
        FLAG, False, field=None, schema="bool", by_position=True, in_2022=True)]
    causal_offset: Annotated[int, Option(
        "Shift of the diagonal: with ``is_causal``, query ``row`` attends to columns up to ``row + "
        "causal_offset``; seq_k - seq_q aligns it bottom-right.",
        WHOLE, 0, values.check_offset, field=None, schema="SymInt", in_2022=True)]
    window_size: Annotated[tuple[int, int] | None, Option(
        "(left, right): query ``row`` attends to columns from ``row + causal_offset - left`` to ``row + "
        "causal_offset + right``, both inclusive; -1 is unbounded.",
        WINDOW, None, values.check_window, field=None, schema="SymInt[]?")]
    chunk_size: Annotated[int | None, Option(  # beyond module 5
        "Query ``row`` attends only to columns of its own chunk: those with ``col // chunk_size == (row +"
        " causal_offset) // chunk_size``, as in Llama 4.",
        WHOLE, None, values.check_chunk, field=None, schema="SymInt?")]
    softcap: Annotated[float, Option(
        "Scores become cap · tanh(score / cap); 0 turns it off.",
        NUMBER, 0.0, values.check_softcap, schema="float")]
    alibi_slopes: Annotated[Any, numbers(
        "alibi_slopes",
        "(heads,) or (batch, heads): slope · |row + causal_offset - col| is subtracted from each score.  "
        "The slopes are constants and receive no gradient.",
        values.check_slopes, per_batch=True, field="slopes")]
    sink: Annotated[Any, numbers(
        "sink",
        "(heads,), one logit per head, which enters the softmax as the score of an additional key whose "
        "value is zero: P = exp(S) / (exp(sink) + rowsum exp(S)).  lse includes it.",
        has_gradient=True)]
    block_mask: Annotated[BlockMask | None, Option(
        "A :class:`kernels.BlockMask`; tiles that it masks are skipped.  Must be None for packed "
        "sequences.",
        BLOCK_MASK, None, values.check_block_mask, is_packed=False)]
    mask_mod: Annotated[Callable[..., Any] | None, Option(  # beyond module 5
        "``(batch, head, row, col) -> bool``, True keeps; a function that numba can compile.",
        FUNCTION, None, lambda value, given: as_mask_mod(value))]
    score_table: Annotated[Any, Option(  # beyond module 5
        "An array of at most 3 dimensions, which ``score_mod`` receives after col and reads elements of, "
        "such as biases by head and distance.  Every row and col must give an index within it, also those "
        "that are masked.  Unlike a captured array it may change in every call, and may require a "
        "gradient.  Must be None for packed sequences.",
        ARRAY, None, values.check_table, has_gradient=True, schema="Tensor?",
        is_packed=False)]
    score_mod: Annotated[  # beyond module 5
        Callable[..., Any] | tuple[Callable[..., Any], ...] | None, Option(
        "``(score, batch, head, row, col) -> score``, applied after scale and softcap.  Its first and "
        "second derivatives with respect to the score are found from its source, see "
        ":func:`kernels.score_derivative`; for a function that cannot be differentiated so, pass a pair "
        "of it and its derivative.",
        SCORE_MOD, None,
        lambda value, given: as_score_mod(value, given.options.get("score_table")))]
    seed: Annotated[int | None, Option(
        "Seed of the dropout mask, from 0 to 2⁶⁴ - 1; a seed gives the same mask on every device.  "
        "Dropout on arrays requires one; on tensors the default is drawn from the generator of "
        "``minitorch.manual_seed``.",
        WHOLE, None, lambda value, given: values.check_dropout(given.options["dropout_p"], value),
        schema="Tensor?", in_2022=True)]
    precision: Annotated[str | None, Option(  # beyond module 5
        "For float32 operands, a lower precision that matrix products may use where a rung is faster with"
        ' it: "tf32" (11 bits of significand), "bfloat16" or "float16".  Sums stay in float32.  None '
        'selects "float32", as do rungs without such products.  In "float32", tensor cores compute each '
        'product as a sum of several float16 products.  For fp16 and bf16 operands, "float8_e4m3" rounds '
        "q, k, v and the probabilities to 4 bits of significand.  It supports only the forward pass and "
        'few options; the suffixes "+hadamard", "+blocks" and "+blocks+hadamard" reduce the error.',
        NAME, None, check_precision, in_2022=True)]
    deterministic: Annotated[bool, Option(
        "Make gradients bitwise reproducible; False lets a kernel add them in any order where that is "
        "faster.",
        FLAG, True, lambda value, given: bool(value), schema="bool", in_2022=True)]
    return_lse: Annotated[bool, Option(
        "Also return lse, on tensors; a forward call on arrays always returns it.",
        FLAG, False, field=None, in_2022=True)]
    rung: Annotated[str, Option(
        'Name of the kernel.  "auto" selects the one that the environment variable ``MINITORCH_RUNG`` '
        "names or, if it is unset, the fastest one that can run the call.",
        NAME._replace(words="the name of a kernel or 'auto'"), "auto",
        lambda value, given: rung_of_run() if value == "auto" else value, in_2022=True)]
# fmt: on


#: The table: name → option, in the order of signatures.
OPTIONS: dict[str, Option] = {}
#: Name → type.
TYPES: dict[str, Any] = {}
for _name, _hint in get_type_hints(Options, include_extras=True).items():
    TYPES[_name], OPTIONS[_name] = _hint.__origin__, _hint.__metadata__[0]
#: Name → default.
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
#: The options that are arrays, in the order of ``Operands``.
ARRAY_ORDER = tuple(name for name, option in OPTIONS.items() if option.kind is ARRAY)
ARRAYS = frozenset(ARRAY_ORDER)
#: Field of ``Problem`` and ``Operands`` → option, of each array.
OPTION_ARRAYS = {OPTIONS[name].field or name: name for name in ARRAY_ORDER}
#: Field → axes, of the arrays of numbers for each head: all but the mask and the table.
AXES = {
    field: OPTIONS[name].axes
    for field, name in OPTION_ARRAYS.items()
    if field not in ("mask", "score_table")
}
#: The arrays that receive a gradient.
WITH_GRADIENT = tuple(name for name in ARRAY_ORDER if OPTIONS[name].has_gradient)


def field_of(name: str) -> str:
    """Return the field of ``Problem``, and of ``Operands``, for an option."""
    return OPTIONS[name].field or name


@cache
def text_of(name: str) -> list[str]:
    """Return the lines that describe an option in a docstring."""
    return textwrap.wrap(
        f"{name}: {OPTIONS[name].text}", 104, initial_indent=" " * 4, subsequent_indent=" " * 8
    )


def check_types(**options: Any) -> None:
    """Check the types of options by name, except those of arrays; otherwise raise a TypeError."""
    for name, value in options.items():
        kind, default = OPTIONS[name].kind, OPTIONS[name].default
        if type(value) is kind.usual or (value is None and default is None):
            continue
        if not kind.fits(value):
            words = kind.words if default is not None else f"{kind.words} or None"
            raise TypeError(f"{name} must be {words}, got {shown(value)}")
