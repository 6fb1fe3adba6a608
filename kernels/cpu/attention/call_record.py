"""The record that passes a call to CPU kernels: its numbers, arrays and options."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int64, void

from kernels.common.geometry import ceil_div
from kernels.common.philox import attention_threshold, keep_scale
from kernels.cpu.attention import mods
from kernels.cpu.attention.dropout import keep_address
from kernels.cpu.attention.tile_scores import (
    BOOL_MASK,
    FLOAT_MASK,
    SETTINGS,
    SETTINGS_TYPE,
    score_address,
)
from kernels.cpu.matmul.tile_product import product_address
from kernels.cpu.runtime import plain_python
from kernels.cpu.runtime.function_pointers import address_of, run_alone, run_items
from kernels.problem.operands import Operands
from kernels.problem.options import AXES
from kernels.problem.question import DropoutOrigin, Problem
from kernels.runtime import launch_notes
from kernels.runtime.jit import JIT_DISABLED, get_num_threads
from kernels.runtime.launch_notes import Loop
from kernels.runtime.memory import Bind, Run

#: Multiply-adds below which a call runs on one thread: waking the others takes 100 microseconds.
ALONE_BELOW = 1 << 21
#: Writes an ``ARRAY`` into the bytes of a record, ten times as fast as NumPy.
_pack_array = struct.Struct("=9q").pack_into
#: Size of an integer of the record, in bytes.
WORD = 8
#: Offset of each field.
_OFFSETS = {name: int(SETTINGS.fields[name][1]) for name in SETTINGS.names or ()}  # type: ignore[index]
_SEED, _PHASE = (_OFFSETS[name] // WORD for name in ("seed", "phase"))


@cache
def _address(make: Callable[[Any], Any], dtype: np.dtype[Any]) -> int:
    """Return the address of a kernel, a function of the record and a work item, for one dtype."""
    return address_of(make(dtype.type), void(SETTINGS_TYPE, int64))


class CallOptions:
    """The record of a call, ``settings``, (1,) of ``SETTINGS``.

    With ``by_keys``, lanes are key columns and lines are query rows; else the reverse.  ``order`` is that
    of the highest derivative of the scores that is needed, and ``listed`` tells whether to visit only the
    tiles that the block mask lists.  With ``keeps_scores``, the scores before the user's functions take the
    place of derivatives.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        tile: tuple[int, int],
        by_keys: bool,
        order: int = 0,
        listed: bool = True,
        keeps_scores: bool = False,
    ):
        self.problem, self.tile = problem, tile
        self.settings = np.zeros(1, SETTINGS)
        self._record, self._bytes = self.settings[0], self.settings.view(np.uint8).data
        # References to the arrays whose addresses are in the record.
        self._arrays: dict[str, Any] = {}
        self._work: Any = None
        o = self._record
        o["scale"], o["lower"], o["upper"] = problem.scale, problem.lower, problem.upper
        o["by_keys"], o["heads"] = by_keys, problem.heads
        o["block_q"], o["block_k"] = tile
        o["product"] = product_address(problem.dtype)
        if problem.is_plain:
            return
        o["softcap"], o["diagonal"] = problem.softcap, problem.diagonal
        o["modifies_scores"] = order * bool(problem.softcap or problem.score_mod)
        o["user_pass"] = mods.pass_address(problem, order, keeps_scores)
        if numbers := [*chain(*problem.numbers)]:
            kinds = "".join("d" if isinstance(number, float) else "q" for number in numbers)
            words = np.frombuffer(struct.pack(f"={kinds}", *numbers), np.int64)
            self._arrays["numbers"], o["numbers"] = words, words.ctypes.data
        if problem.score_table:
            self.name(score_table=operands.score_table[(..., *[None] * (4 - problem.score_table))])
        for name in AXES:
            if getattr(problem, name):
                array = getattr(operands, name)
                every = np.broadcast_to(array, (*array.shape[:2], problem.seq_q, problem.seq_k))
                self.name(**{name: every if by_keys else every.swapaxes(2, 3)})
        hides = problem.mask or problem.block_mask is not None or problem.mask_mod is not None
        if hides:
            self._hiding_options(operands, by_keys, listed)
        if problem.features.modifies_scores or hides:
            o["score_pass"] = score_address(problem.dtype)
        if problem.dropout_p:
            o["keep_pass"] = keep_address(problem.dtype)
            o["seed"], o["threshold"] = problem.seed, attention_threshold(problem.dropout_p)
            o["kept"] = keep_scale(problem.dropout_p)
            origin = problem.origin or DropoutOrigin(problem.heads)
            o["whole_heads"], o["first_head"], o["first_row"], o["first_col"] = origin

    def name(self, **arrays: Any) -> None:
        """Write arrays of four dimensions to the record."""
        for field, array in arrays.items():
            self._arrays[field] = array
            address = array.__array_interface__["data"][0]
            _pack_array(self._bytes, _OFFSETS[field], address, *array.shape, *array.strides)

    def name_tangents(self, operands: Operands) -> None:
        """Write the tangents of q, k, v, out and lse to the record."""
        of_operands = {
            f"{x}_tangent": getattr(operands, f"{x}_tangent") for x in ("q", "k", "v", "out")
        }
        self.name(**of_operands, lse_tangent=operands.lse_tangent[..., None])

    def _hiding_options(self, operands: Operands, by_keys: bool, listed: bool) -> None:
        problem, o = self.problem, self._record
        block_mask = problem.block_mask

        def in_order(array: Any) -> Any:
            return array if by_keys else array.swapaxes(2, 3)

        if problem.mask:
            o["mask_kind"] = FLOAT_MASK if problem.mask == "float" else BOOL_MASK
            batch = operands.mask_batch[:, None, None, None]
            self.name(mask=in_order(operands.mask), mask_batch=batch)
        if block_mask is not None:
            o["pattern_heads"] = block_mask.heads
            self.name(
                states=in_order(block_mask.states[:, None]),
                patterns=in_order(block_mask.patterns[:, None]),
            )
            if listed:
                o["listed"] = 1
                tiles = block_mask.tile_list(*self.tile, by_keys=by_keys)
                columns = {name: x[:, None, None, None] for name, x in tiles._asdict().items()}
                self.name(**columns)
                self._work = np.diff(tiles.tile_ptr)

    def tile_table(self, of_keys: bool, parts: int = 1) -> int:
        """Write the tiles of query rows, or of keys, to the record, those with the most work first.

        The tiles ``i``, ``i + parts``, … are part ``i``. Returns the number of tiles.
        """
        problem, block = self.problem, self.tile[of_keys]
        bounds = problem.lower, problem.upper
        if problem.sequences is not None:
            whole = problem.sequences.tiles(block, of_keys)
            table = _in_order(whole, _visible(whole, block, of_keys, *bounds), parts)
        elif self._work is not None:
            whole = _whole_table(problem.seq_q, problem.seq_k, block, of_keys)
            table = _in_order(whole, self._work.reshape(-1, len(whole)).sum(axis=0), parts)
        else:
            table = _table_in_bounds(problem.seq_q, problem.seq_k, block, of_keys, bounds, parts)
        self.name(table=table)
        self._record["tiles"] = len(table)
        return len(table)

    def run(self, make: Callable[[Any], Any], items: int, phases: int = 1) -> Bind:
        """Call the kernel that a function of the dtype makes for each work item, ``phases`` times.

        Returns a function that binds the kernel to other arrays of the same layouts; see
        :data:`Bind`.
        """
        address = _address(make, self.problem.dtype)
        bind: Bind = partial(self._bind, address, items, phases)
        bind(())((), self.problem.seed)
        return bind

    def _bind(self, address: int, items: int, phases: int, names: Sequence[str]) -> Run:
        template = self.settings.view(np.int64)
        brought = [
            (_OFFSETS[name] // WORD, place)
            for place, name in enumerate(names)
            if name in self._arrays
        ]
        constants = [array for name, array in self._arrays.items() if name not in names]
        problem = self.problem
        work = math.prod(problem.scores_shape) * (problem.head_dim + problem.value_dim)
        threads_wanted = 1 if work < ALONE_BELOW else items
        has_user_pass = bool(self._record["user_pass"])

        def run(starts: Sequence[int], seed: int, *rest: Any, kept: Any = constants) -> bool:
            words = template.copy()
            for word, place in brought:
                words[word] = starts[place]
            words[_SEED] = seed
            settings = (
                [plain_python.Record(words.view(SETTINGS)[0])]
                if JIT_DISABLED
                else words.view(np.uint8)  # numba is slow to look up the type of a record
            )
            threads = min(get_num_threads(), threads_wanted) if threads_wanted > 1 else 1
            launches = launch_notes.thread.noted
            before = mods.failures() if has_user_pass else 0
            for phase in range(phases):
                words[_PHASE] = phase
                if launches is not None:
                    launches.append(Loop(items, threads))
                if threads > 1:
                    run_items(address, settings, np.zeros(1, np.int64), items, threads)
                else:
                    run_alone(address, settings, items)
            if has_user_pass:
                mods.check_finished(before)
            return True

        return run


def _visible(
    whole: npt.NDArray[np.int64], block: int, of_keys: bool, lower: int, upper: int
) -> Any:
    """Return the number of places that are visible to any line of each tile."""
    if of_keys:
        lower, upper = -upper, -lower
    start, lines, seq = whole[:, 5], whole[:, 4 if of_keys else 2], whole[:, 2 if of_keys else 4]
    stop = np.minimum(start + block, lines)
    return np.minimum(stop + upper, seq) - np.maximum(start + lower, 0)


def _in_order(whole: Any, work: Any, parts: int) -> Any:
    """Return a table of tiles, those with the most work first, (tiles, 6, 1, 1); see ``tile_table``."""
    order = np.argsort(-work, kind="stable")
    # Back and forth: the part that gets the larger tile of a round gets the smaller one of the next.
    rounds = len(order) // (2 * parts)
    if parts > 1 and rounds:
        pairs = order[: rounds * 2 * parts].reshape(rounds, 2, parts)
        pairs[:, 1] = pairs[:, 1, ::-1].copy()
    return whole[order][:, :, None, None]


@lru_cache(maxsize=64)
def _whole_table(seq_q: int, seq_k: int, block: int, of_keys: bool) -> Any:
    """Return the table of tiles of one sequence, (tiles, 6); see ``sequences.Tile``."""
    count = ceil_div(seq_k if of_keys else seq_q, block)
    table = np.zeros((count, 6), np.int64)
    table[:, 2], table[:, 4], table[:, 5] = seq_q, seq_k, np.arange(count) * block
    return table


@lru_cache(maxsize=64)
def _table_in_bounds(
    seq_q: int, seq_k: int, block: int, of_keys: bool, bounds: tuple[int, int], parts: int
) -> Any:
    whole = _whole_table(seq_q, seq_k, block, of_keys)
    return _in_order(whole, _visible(whole, block, of_keys, *bounds), parts)
