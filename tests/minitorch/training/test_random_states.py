"""States of random generators: they go on where they were, and damaged ones are refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minitorch
from minitorch.training.random_states import random_state, set_random_state


@given(
    st.sampled_from(["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]),
    st.integers(0, 2**32),
    st.integers(0, 5),
)
def test_random_numbers_go_on_where_they_were(kind: str, seed: int, drawn: int) -> None:
    rng = np.random.Generator(getattr(np.random, kind)(seed))
    minitorch.manual_seed(seed)

    def draw() -> list[float]:
        # Small integers and normal numbers leave a half-used word, or a second number, behind.
        return [
            *rng.integers(0, 9, 3, dtype=np.int32), rng.standard_normal(), random.gauss(0.0, 1.0),
            random.getrandbits(63), np.random.standard_normal(), np.random.rand(),
        ]  # fmt: skip

    for _ in range(drawn):
        draw()
    state = json.loads(json.dumps(random_state({"mine": rng})))
    expected = draw()
    set_random_state(state, {"mine": rng})
    assert draw() == expected
    with pytest.raises(ValueError, match="random numbers cannot be restored"):
        set_random_state(state, {"other": rng})


@given(
    st.sampled_from(["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]),
    st.integers(0, 7),
    st.sampled_from([-1, 10**9, 2**128, 10**400, 1.5, None, "1", [], {}, [10**30] * 4]),
)
def test_a_damaged_state_changes_no_generator(kind: str, place: int, value: object) -> None:
    rng = np.random.Generator(getattr(np.random, kind)(0))
    before = random_state({"mine": rng})
    state = json.loads(json.dumps(before))
    parts = [state["generators"]["mine"], state["generators"]["mine"]["state"], state["numpy"]]
    own = [(part, key) for part in parts for key in part]
    part, key = own[place % len(own)]
    part[key] = value
    try:
        set_random_state(state, {"mine": rng})
    except ValueError as error:
        assert "random numbers cannot be restored" in str(error)
        assert random_state({"mine": rng}) == before
    else:  # a number that the generator can have
        assert key == "gauss" or (isinstance(value, int) and value < 2**128)
        assert key not in ("pos", "buffer_pos")
        rng.standard_normal(700)
        np.random.set_state(np.random.RandomState(0).get_state())
