"""The score program: how each option of attention modifies a score, and which (row, col) is visible.

Every option is defined here once, and :func:`make_score_program` compiles it for a target.  The target
defines tanh and how the array of an option is read for an element (:class:`ScoreTarget`).  The order is:

    softcap           score = softcap * tanh(score / softcap)
    score_mod         score = score_mod(score, batch, head, row, col)
    alibi_slopes      score = score - slope * |row + diagonal - col|
    attn_mask         score = score + bias, if it is floating
    visibility        score = -inf where the bounds, a boolean attn_mask, block_mask or mask_mod mask it

A ``sink`` does not change a score: it is another term of the row sum (:func:`make_row_end`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.common.online_softmax import MINUS_INF, OnlineSoftmax

from .templates import derived, template_of  # beyond module 5
from .visibility import make_masks


class CacheForm(NamedTuple):
    """How a call on a key/value cache reads the keys and values.

    The query rows of the call are the last rows of the sequences.
    """

    is_paged: bool  #: Whether a table names the pages of each sequence.
    is_fixed: (
        bool  #: Whether keys are divided by their positions alone, so that no batch changes a bit.
    )


class Features(NamedTuple):
    """The options of a call, for which its kernels are compiled."""

    softcap: bool = False  #: Whether scores are capped.
    slopes: bool = False  #: Whether there are ALiBi slopes.
    #: "" without a mask, "bool", "float", or "float16" or "bfloat16" for a floating mask that a rung
    #: reads in that dtype.
    mask: str = ""
    dropout: bool = False  #: Whether there is dropout.
    block_mask: bool = False  #: Whether visited tiles come from a list.
    packed: bool = False  #: Whether sequences are packed.
    mask_mod: Callable[..., Any] | None = None  #: The user function, or None.
    score_mod: Any = None  #: The ``ScoreMod``, or None.
    score_table: int = 0  #: Dimensions of the array that score_mod reads; 0 without one.
    learns_table: bool = False  #: Whether kernels compute the gradient of that array.
    sink: bool = False  #: Whether there are sinks.
    moved: bool = False  #: Whether the dropout bits are those of a part of a larger attention.
    #: Whether listed tiles are fully visible in the block mask; a rung sets it for its tiles.
    whole_tiles: bool = False
    #: Whether the softcap is large; a rung sets it whose tanh is less accurate otherwise.
    large_cap: bool = False
    #: Whether the scale is a power of two; a rung sets it that would round products else.
    exact_scale: bool = False
    cache: CacheForm | None = None  #: The form of the cache that holds keys and values, or None.

    @property
    def modifier_count(self) -> int:
        """Number of options that modify a visible score; two for a table that learns."""
        has_mod = self.score_mod is not None
        return self.softcap + self.slopes + self.has_bias + has_mod + self.learns_table

    @property
    def modifies_scores(self) -> bool:
        """Whether a visible score differs from scale · q · k."""
        return self.modifier_count > 0

    @property
    def has_bias(self) -> bool:
        """Whether a mask is added to scores."""
        return self.mask not in ("", "bool")

    @property
    def has_lists(self) -> bool:
        """Whether ``block_mask`` or ``mask_mod`` masks elements, which kernels store as bits of a tile."""
        return self.block_mask or self.mask_mod is not None

    @property
    def has_patterns(self) -> bool:
        """Whether a block mask has listed tiles that are visible in part."""
        return self.block_mask and not self.whole_tiles

    @property
    def is_paged(self) -> bool:
        """Whether keys are in pages of a cache."""
        return self.cache is not None and self.cache.is_paged

    @property
    def is_fixed(self) -> bool:
        """Whether keys are divided by their positions alone."""
        return self.cache is not None and self.cache.is_fixed

    @property
    def has_mods(self) -> bool:
        """Whether there are user functions, which need the indices of elements."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def of_elements(self) -> Features:
        """The options that act on the elements of a whole tile, not on rows or on the choice of tiles."""
        return self._replace(
            block_mask=False, whole_tiles=False, packed=False, sink=False, cache=None
        )

    @property  # beyond module 5
    def templates(self) -> Features:  # beyond module 5
        """The options with what is compiled for user functions, which takes their numbers."""
        mod = self.score_mod
        own = None if mod is None else type(mod)(*map(template_of, mod))
        return self._replace(mask_mod=template_of(self.mask_mod), score_mod=own)

    @property
    def of_users(self) -> Features:
        """The options that are user functions."""
        names = "mask_mod", "score_mod", "score_table"
        return Features(**{name: getattr(self, name) for name in names})


PLAIN = Features()


def features_of(problem: Any) -> Features:
    """Return the options of a checked call, a ``Problem``; a field of the same name is taken from it."""
    drops = problem.dropout_p > 0.0
    found: dict[str, Any] = {
        "dropout": drops,
        "packed": problem.sequences is not None,
        "moved": drops and problem.origin is not None,
    }
    for name, default in Features._field_defaults.items():
        if name not in found and hasattr(problem, name):
            value = getattr(problem, name)
            found[name] = bool(value) if default is False else value
    return Features(**found)


class Place(NamedTuple):
    """The position of one score.

    Targets with arrays that broadcast have arrays here; others may have a record with more fields.
    """

    #: Batch index in the kernel's operands, which differs from ``batch`` if sequences are packed or
    #: heads are grouped.
    b: Any
    h: Any  #: Head index in the kernel's operands.
    batch: Any  #: The caller's batch index, or the index of the packed sequence.
    head: Any  #: The caller's index of the query head.
    row: Any  #: Query row, relative to the start of its sequence.
    col: Any  #: Key column, relative to the start of its sequence.


class ScoreTarget(NamedTuple):
    """The functions of a target that the score program calls.

    A function of ``(place, call)`` receives a :class:`Place` and the record of the numbers of a call:
    ``lower``, ``upper``, ``softcap`` and ``over_cap`` (1 / softcap).
    """

    #: Turns a plain function into one that the target's compiler can call.
    compile: Callable[[Any], Any]
    one: Any  #: 1 in the dtype of scores.
    tanh: Callable[..., Any]  #: Hyperbolic tangent of a score.
    #: Converts a ``score_mod`` or its derivative to a function ``(score, place, call)``.
    score_function: Callable[..., Any]  # beyond module 5
    #: Converts a ``mask_mod`` to a function ``(place, call)``.
    mask_function: Callable[..., Any]  # beyond module 5
    #: Returns the function ``(place, call)`` that reads the element of the array of an option, given
    #: the field of ``Operands``.
    element: Callable[[str], Callable[..., Any]]
    #: ``(place, call)``: |row + diagonal - col| in the dtype of scores.
    distance: Callable[..., Any]
    bias: Callable[..., Any]  #: ``(place, call)``: the element of a floating mask.
    in_mask: Callable[..., Any]  #: ``(place, call)``: the element of a boolean mask.
    #: ``(place, call)``: whether the element is visible in the block mask; None if the target does not
    #: test single elements.
    in_blocks: Callable[..., Any] | None
    scores_over_cap: bool = False  #: Whether scores are already divided by the softcap.
    #: The highest derivative of scores that ``modified`` computes; in place of those above it, it returns
    #: ``one`` and 0.
    order: int = 1
    #: Product of slope and distance.  A target whose compiler might fuse either this product or the
    #: score's own with their difference gives one that is rounded; the usual product when None.
    times: Callable[..., Any] | None = None


class ScoreProgram(NamedTuple):
    """Functions that apply the options of a call to a score; ``make_score_program`` returns them."""

    #: ``(score, place, call)``: the score after all options but visibility, and its first and second
    #: derivative by scale · q · k.
    modified: Callable[..., Any]
    #: ``(place, call)``: whether the element is visible in masks and ``mask_mod``.
    is_shown: Callable[..., Any]
    is_visible: Callable[..., Any]  #: ``(place, call)``: the same, and within the bounds.


def _times(x, y):
    return x * y


def make_score_program(features: Features, target: ScoreTarget) -> ScoreProgram:
    """Return the score program for the options of a call, compiled for a target."""
    compile_, one, tanh = target.compile, target.one, target.tanh
    distance, bias, slope = target.distance, target.bias, target.element("slopes")
    over_cap, derives, bends = not target.scores_over_cap, target.order > 0, target.order > 1
    times, zero = target.times or compile_(_times), one - one

    @compile_
    def capped(score, place, call):
        squashed = tanh(score * call.over_cap if over_cap else score)
        slope = one - squashed * squashed if derives else one
        bend = -(squashed + squashed) * slope * call.over_cap if bends else zero
        return call.softcap * squashed, slope, bend

    @compile_
    def less_distance(score, place, call):
        return score - times(slope(place, call), distance(place, call)), one, zero

    @compile_
    def biased(score, place, call):
        return score + bias(place, call), one, zero

    steps = []
    if features.softcap:
        steps.append(capped)
    if features.score_mod is not None:  # beyond module 5
        steps.append(_by_function(features, target))
    if features.slopes:
        steps.append(less_distance)
    if features.has_bias:
        steps.append(biased)
    shown = []
    if features.mask == "bool":
        shown.append(target.in_mask)
    if features.block_mask:
        shown.append(target.in_blocks)
    if features.mask_mod is not None:  # beyond module 5
        shown.append(target.mask_function(features.mask_mod))
    is_shown = _all_of(compile_, shown)
    in_bounds = make_masks(compile_).is_visible

    @compile_
    def is_visible(place, call):
        inside = in_bounds(place.row, place.col, call.lower, call.upper)
        return inside & is_shown(place, call)

    return ScoreProgram(_in_turn(compile_, one, steps), is_shown, is_visible)


def make_row_end(
    features: Features,
    compile_: Callable[[Any], Any],
    softmax: OnlineSoftmax,
    real: Any,
    sink_of: Callable[..., Any],
) -> Callable[..., Any]:
    """Return ``end_row(row_sum, shift, b, h, call)``: a row's 1 / l, which multiplies O, lse and its rest.

    ``real`` is the type of sums, and ``sink_of(b, h, call)`` the sink of a head; ``compile_`` and
    ``softmax`` are the target's.
    """
    shift_of, inverse_sum, log_sum_exp, merge_weight = softmax
    has_sink = features.sink

    @compile_
    def end_row(row_sum, shift, b, h, call):
        inverse = real(inverse_sum(row_sum))
        lse, rest = log_sum_exp(real(shift), real(row_sum))
        lse, rest = real(lse), real(rest)
        if not has_sink:
            return inverse, lse, rest
        # The sink is merged like another part of the keys, with L = sink and O = 0.
        sink = real(sink_of(b, h, call))
        if sink == MINUS_INF:
            return inverse, lse, rest
        top = real(shift_of(max(lse, sink)))
        weight = real(merge_weight(lse, rest, top))
        total = weight + real(merge_weight(sink, real(0), top))
        lse, rest = log_sum_exp(top, total)
        return inverse * weight * real(inverse_sum(total)), real(lse), real(rest)

    return end_row


def _by_function(features: Features, target: ScoreTarget) -> Callable[..., Any]:  # beyond module 5
    """Return the step of a ``score_mod``; derivatives that are not needed are constants."""
    one, zero, (plain, found) = target.one, target.one - target.one, features.score_mod
    has_slope = target.order > 0 and found is not None
    has_bend = has_slope and target.order > 1
    function = target.score_function(plain)
    derivative: Any = target.score_function(found) if has_slope else None
    second: Any = target.score_function(derived(found)) if has_bend else None

    @target.compile
    def by_function(score, place, call):
        slope = derivative(score, place, call) if has_slope else one
        bend = second(score, place, call) if has_bend else zero
        return function(score, place, call), slope, bend

    return by_function


def _in_turn(compile_: Any, one: Any, steps: list[Any]) -> Callable[..., Any]:
    """Combine steps to one, by the chain rule."""
    if not steps:
        zero = one - one

        @compile_
        def unchanged(score, place, call):
            return score, one, zero

        return unchanged
    if len(steps) == 1:
        return steps[0]
    first, rest = steps[0], _in_turn(compile_, one, steps[1:])

    @compile_
    def both(score, place, call):
        score, slope, bend = first(score, place, call)
        score, next_slope, next_bend = rest(score, place, call)
        return score, slope * next_slope, next_bend * slope * slope + next_slope * bend

    return both


def _all_of(compile_: Any, tests: list[Any]) -> Callable[..., Any]:
    """Combine tests of an element to one."""
    if not tests:

        @compile_
        def always(place, call):
            return True

        return always
    if len(tests) == 1:
        return tests[0]
    first, rest = tests[0], _all_of(compile_, tests[1:])

    @compile_
    def all_of(place, call):
        # Not "and": indices may be arrays that broadcast.
        return first(place, call) & rest(place, call)

    return all_of
