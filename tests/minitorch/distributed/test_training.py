"""Training on several ranks: each test starts ``mpiexec`` once."""

from __future__ import annotations

import pytest

from ...support.ranks import needs_mpi, run_check

pytestmark = [pytest.mark.slow, needs_mpi]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", ["gradients", "curves"])
def test_training_on_ranks_is_that_of_one_device(size: int, check: str) -> None:
    run_check(size, "training_on_ranks", check)


@pytest.mark.parametrize("check", ["state", "other_weights"])
def test_ranks_share_a_training(check: str) -> None:
    run_check(3, "training_on_ranks", check)


def test_rings_of_ranks_train_as_one_device() -> None:
    run_check(4, "training_on_ranks", "grids")
