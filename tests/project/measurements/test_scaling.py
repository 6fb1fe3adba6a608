"""The model of ring attention's scaling, its fit, and the measurement on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import harness, records, ring_time
from hypothesis import given
from hypothesis import strategies as st
from measurements import scaling

from ...support.ranks import needs_mpi

WAYS = ("forward", "backward")
machines = st.builds(
    ring_time.Machine,
    forward=st.floats(1e9, 1e15),
    backward=st.floats(1e9, 1e15),
    latency=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e9, 1e12),
    call=st.floats(1e-6, 1e-3),
)
works = st.builds(
    ring_time.Work,
    tokens=st.integers(10, 24).map(lambda x: 2**x),
    heads=st.sampled_from([8, 32]),
    key_heads=st.sampled_from([1, 8]),
    head_dim=st.sampled_from([64, 128]),
    itemsize=st.sampled_from([2, 4]),
    causal=st.booleans(),
)


@given(works, machines, st.sampled_from([2, 3, 8, 1024]), st.sampled_from(WAYS))
def test_overlap_hides_at_most_all_of_the_transfer(
    work: Any, machine: Any, ranks: int, way: str
) -> None:
    hidden = ring_time.ring_time(work, ranks, machine, way)
    shown = ring_time.ring_time(work, ranks, machine._replace(overlaps=False), way)
    assert shown.total == pytest.approx(hidden.compute + hidden.transfer)
    assert max(hidden.compute, hidden.transfer) <= hidden.total * (1 + 1e-12)
    assert hidden.total <= shown.total * (1 + 1e-12)
    alone = ring_time.ring_time(work, 1, machine, way)
    assert alone.total == alone.compute and alone.exposed == 0.0


@given(machines)
def test_the_fit_finds_the_machine_of_its_rows(machine: Any) -> None:
    # That of cores which compute longer than they send.
    rates = {way: 1e11 * (1.0 + getattr(machine, way) / 1e15) for way in WAYS}
    machine = machine._replace(overlaps=False, latency=1e-2 * machine.latency, **rates)
    rows: list[dict[str, Any]] = []
    for n in (1, 2, 4):
        for tokens in (1024, 4096, 16384):
            row: dict[str, Any] = {"ranks": n, "tokens": tokens}
            work = scaling.work_of(row)
            for way in WAYS:
                seconds = ring_time.ring_time(work, n, machine, way).total
                row[way] = {"median": 1e3 * seconds}
            row["transfer"] = {"median": 1e3 * ring_time.messages(work, n, machine, 4)}
            rows.append(row)
    found = scaling.fitted(rows)
    for row in rows:
        for way in WAYS:
            seconds = ring_time.ring_time(scaling.work_of(row), row["ranks"], found, way).total
            assert 1e3 * seconds == pytest.approx(row[way]["median"], rel=1e-3)


def test_the_time_of_two_gpus_is_that_of_their_operations() -> None:
    machine = ring_time.Machine(500e12, 450e12, 0.0, 450e9, overlaps=False)
    time = ring_time.ring_time(ring_time.Work(65536, 4, 4, 128), 2, machine, "forward")
    # 4 · 65536² · 128 · 4 / 2 operations on 2 GPUs of 500 TFLOP/s.
    assert time.compute == pytest.approx(4.398e-3, rel=1e-3) and time.total > time.compute


@needs_mpi
def test_scaling(tmp_path: Path) -> None:
    record, figure = tmp_path / "record.json", tmp_path / "figure.svg"
    places = ["--json", str(record), "--figure", str(figure), "--ranks", "2"]
    sizes = ["--lengths", "64", "128", "--rounds", "3"]
    assert harness.run(scaling.MEASUREMENT, [*places, *sizes]) == 0
    found = records.read_record(record)
    assert [(row["ranks"], row["tokens"]) for row in found["rows"]] == [
        (1, 64), (1, 128), (2, 64), (2, 128),
    ]  # fmt: skip
    assert all(row["efficiency"] == 1.0 for row in found["rows"][:2])
    assert all(0.0 <= row["exposed"] < 1.0 for row in found["predicted"])
