"""A repeated call launches what it would if it were the first of its kind, with its own arrays and seed."""

from __future__ import annotations

import gc
import sys
from threading import Thread
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import kernels
import minitorch
from kernels import BlockMask, bound_calls
from kernels.cuda.device import per_device
from kernels.cuda.matmul.dispatch import multiply_heads
from kernels.cuda.runtime.arrays import (
    device_view,
    element_strides,
    empty_device,
    pool,
    to_device,
    to_host,
)
from kernels.cuda.runtime.recorder import Recording, drawn
from kernels.cuda.runtime.repeated import noted
from kernels.runtime.known_calls import KnownCalls
from kernels.runtime.targets import EMULATED

from ...support.device.fake_device import FakeDriver, fake_device

pytestmark = pytest.mark.skipif(EMULATED, reason="the emulated GPU has no driver to record")

#: The fake device's pieces of memory begin at multiples of this.
PIECE = 1 << 28
#: Bytes of a tensor map.
MAP_BYTES = 128


def _halved(score: float, batch: int, head: int, row: int, col: int) -> float:
    return score * 0.5


def _half(score: float, batch: int, head: int, row: int, col: int) -> float:
    return 0.5


def _two_of_three(batch: int, head: int, row: int, col: int) -> bool:
    return (row + col) % 3 != 0


#: Options, and how the operands of a call are made.
CALLS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal, permuted": {"is_causal": True, "permuted": True},
    "one array": {"alias": True},
    "window and softcap": {"window_size": (5, 3), "softcap": 3.0},
    "dropout": {"dropout_p": 0.1, "seed": 77},
    "boolean mask and dropout": {"attn_mask": "bool", "dropout_p": 0.1, "seed": 9},
    "floating mask and dropout": {"attn_mask": "float", "dropout_p": 0.1, "seed": 9},
    "slopes and sinks": {"alibi_slopes": 0.5, "sink": 0.25},
    "mods": {"mask_mod": _two_of_three, "score_mod": (_halved, _half)},
    "block mask": {"block_mask": True, "dropout_p": 0.2, "seed": 5},
    "atomic": {"deterministic": False},
    "flash2": {"rung": "flash2"},
    "flash1": {"rung": "flash1"},
    "naive": {"rung": "naive"},
}
#: dtype, (batch, query heads, key heads, query rows, keys, head_dim, value_dim).
SHAPES: list[tuple[Any, tuple[int, ...]]] = [
    (ml_dtypes.bfloat16, (1, 2, 2, 70, 131, 64, 64)),
    (np.float16, (2, 4, 2, 40, 40, 40, 24)),
    (np.float32, (1, 2, 2, 130, 200, 64, 64)),
    (np.float32, (1, 2, 2, 5, 300, 32, 32)),
    (np.float64, (1, 2, 1, 20, 20, 8, 8)),
]


class Device:
    """Calls on the fake device, and what they launch.

    Args:
        own: Its driver.
    """

    def __init__(self, own: FakeDriver):
        self.own = own
        self.maps: dict[bytes, Any] = {}  # the bytes of a tensor map → what was encoded
        self.at: dict[int, Any] = {}  # the address of tensor maps → what was encoded
        self.encode = per_device.encode_tensor_map

    def encoded(self, *about: Any) -> Any:
        """Encode a tensor map, and remember what it is of."""
        found = self.encode(*about)
        self.maps[found.tobytes()] = about
        return found

    def launches(self, dtype: Any, shape: tuple[int, ...], call: dict[str, Any]) -> list[Any]:
        """Make a call forward and backward; return its launches, addresses by name."""
        batch, heads, key_heads, rows, cols, head_dim, value_dim = shape
        options = {name: x for name, x in call.items() if name not in ("permuted", "alias")}
        options["enable_gqa"] = heads != key_heads

        def made(*sizes: int) -> Any:
            if not call.get("permuted"):
                return to_device(np.zeros(sizes, dtype))
            b, h, n, d = sizes
            array = to_device(np.zeros((b, n, h, d), dtype))
            steps = element_strides(array)
            return device_view(array, sizes, (steps[0], steps[2], steps[1], steps[3]))

        q, k = made(batch, heads, rows, head_dim), made(batch, key_heads, cols, head_dim)
        v, dout = made(batch, key_heads, cols, value_dim), made(batch, heads, rows, value_dim)
        if call.get("alias"):
            k = q if q.shape == k.shape else k
            v = k if v.shape == k.shape else v
        names = {"q": q, "k": k, "v": v, "dout": dout}
        more: dict[str, Any] = {}
        if kind := options.get("attn_mask"):
            mask_dtype = bool if kind == "bool" else dtype
            names["mask"] = options["attn_mask"] = to_device(np.ones((rows, cols), mask_dtype))
            more["mask_gradient"] = kind == "float"
        for name in ("alibi_slopes", "sink"):
            if name in options:
                options[name] = np.full(heads, options[name])
                more["sink_gradient"] = True
        if "block_mask" in options:
            options["block_mask"] = BlockMask.from_dense(np.tri(rows, cols, dtype=bool), 16)
        self.own.launches.clear()
        out, lse = kernels.flash_attention_forward(q, k, v, **options)
        gradients = kernels.flash_attention_backward(dout, q, k, v, out, lse, **options, **more)
        names |= {"out": out, "lse": lse}
        names |= {f"gradient {i}": x for i, x in enumerate(gradients)}
        return self.named_launches(names)

    def named_launches(self, names: dict[str, Any]) -> list[Any]:
        """Return what was launched, with the addresses of arrays by their names."""
        for copied in self.own.calls:
            if copied.name.startswith("cuMemcpy") and isinstance(copied.about[1], bytes):
                content = copied.about[1]
                maps = [content[i : i + MAP_BYTES] for i in range(0, len(content), MAP_BYTES)]
                if all(one in self.maps for one in maps):
                    self.at[int(copied.about[0])] = [self.maps[one] for one in maps]
        known = {int(x.device_ctypes_pointer.value): name for name, x in reversed([*names.items()])}
        return [
            (one.kernel, one.sizes, [self._named(word, known) for word in one.words])
            for one in self.own.launches
            if one.kernel != "evaluate_blocks"  # of a mask_mod, by the first call of its kind alone
        ]

    def _named(self, word: int, known: dict[int, str]) -> Any:
        """Return an address by the name of its array, or by the order in which it appears."""
        if word in self.at:
            maps = self.at[word]
            return "maps", [(self._named(address, known), *rest) for address, *rest in maps]
        base = word - word % PIECE
        if not 1 << 32 <= base < 1 << 48 or word % PIECE > PIECE // 2:
            return word
        if base in known:
            return known[base], word % PIECE
        # A repeated call has its scratch memory in one piece.
        return known.setdefault(-word, f"memory {len(known)}")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: str(np.dtype(x[0])) + str(x[1][-2:]))
@pytest.mark.parametrize("call", CALLS)
def test_a_repeated_call_launches_what_a_first_one_does(call: str, shape: Any) -> None:
    with fake_device() as own:
        device = Device(own)
        memory = pool()
        assert memory is not None
        memory.is_cached = False  # so that each allocation has an address of its own
        with (
            patch.object(per_device, "encode_tensor_map", device.encoded),
            patch.object(Recording, "layout", apart),
        ):
            for repeat in range(3):
                options = {**CALLS[call]}
                if "seed" in options:
                    options["seed"] += repeat
                again = device.launches(shape[0], shape[1], options)
                with patch.object(bound_calls, "_calls", KnownCalls()):
                    assert again == device.launches(shape[0], shape[1], options)
        assert all(call.repeat is not None for call in bound_calls._calls.values())


def test_a_repeated_product_of_several_arrays_has_maps_of_its_own_arrays() -> None:
    kept = []
    with fake_device() as own:
        device, found = Device(own), list[Any]()
        with patch.object(per_device, "encode_tensor_map", device.encoded):
            for _ in range(3):
                arrays = [to_device(np.zeros(64 * 64, np.float16)) for _ in range(7)]
                kept.append(arrays)
                own.launches.clear()
                multiply_heads((3, 1, 3), (3, 64, 64, 64), (64, 1), (64, 1), None, *arrays)
                found.append(device.named_launches({str(i): x for i, x in enumerate(arrays)}))
    assert found[0] == found[1] == found[2] != []


def apart(recording: Recording, elsewhere: Any) -> Any:
    """Stand for ``Recording.layout``, with a place for each allocation."""
    recording._events[:] = [number for number in recording._events if number >= 0]
    return layout(recording, elsewhere)


layout = Recording.layout


def _bytes(size: int) -> Any:
    return empty_device((size,), np.dtype(np.uint8))


def test_pieces_of_scratch_memory_do_not_overlap() -> None:
    sizes = [1, 512, 513, 40_000, 7]

    def run(arrays: Any, seed: int) -> Any:
        made = [_bytes(size) for size in sizes]
        return made[2], None

    with fake_device():
        _, repeat = noted(run, [_bytes(3), None, _bytes(4)], 0)
        assert repeat is not None
        one, nothing = repeat.arrays([1 << 32, 1 << 33], 0)
    assert one.shape == (513,) and nothing is None
    stops = [*repeat._offsets[1:], repeat.scratch]
    pieces = zip(repeat._offsets, stops, [1, 512, 40_000, 7], strict=True)
    assert all(start % 512 == 0 and stop - start >= size for start, stop, size in pieces)


@pytest.mark.parametrize(
    "run",
    [
        lambda array: array,
        lambda array: device_view(_bytes(8), (4,), (1,), 4),
        lambda array: _bytes(drawn(lambda: 8)),
        lambda array: _bytes(1 + int(to_host(array)[0])),
    ],
    ids=["an operand", "a part", "drawn", "read"],
)
def test_what_a_call_cannot_find_again_is_not_repeated(run: Any) -> None:
    with fake_device():
        assert noted(lambda arrays, seed: [run(*arrays)], [_bytes(3)], 0)[1] is None


def test_threads_that_share_a_launch_launch_with_their_own_arrays() -> None:
    with fake_device() as own:
        tensors = [minitorch.zeros((3,), minitorch.CudaBackend, dtype=np.float32) for _ in range(4)]
        assert all((tensors[0] + tensors[1]).shape == (3,) for _ in range(3))
        own.launches.clear()
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [Thread(target=lambda x=x: [x + x for _ in range(50)]) for x in tensors]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        places = [x.array().device_ctypes_pointer.value for x in tensors]
        found = [[word for word in one.words if word in places] for one in own.launches]
    assert sorted(found) == sorted([place, place] for place in places for _ in range(50))


def test_what_is_kept_of_a_kind_of_call_holds_none_of_its_arrays() -> None:
    with fake_device() as driver:

        def held() -> int:
            """Return the bytes in use."""
            gc.collect()
            source = pool()
            assert source is not None
            source.trim()
            return sum(driver.memory.values())

        model = minitorch.SequenceClassifier(
            16,
            64,
            2,
            256,
            10,
            attention="naive",
            backend=minitorch.CudaBackend,
            precision="bfloat16",
        )
        before = held()
        for _ in range(3):
            model.loss(np.ones((8, 256), np.int64), np.zeros(8, np.int64)).backward()
        for parameter in model.parameters():
            parameter.value.zero_grad_()
        assert held() - before < 2 * 256 * 256  # the scores of a head in 16 bits
