"""Hardware counters: Nsight Compute's table is read, and its kernels are those that were launched."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from measurements import hardware_counters as counters

from kernels.runtime.targets import IS_SIMULATOR

from ...support.device.fake_device import fake_device

pytestmark = pytest.mark.skipif(IS_SIMULATOR, reason="numba's simulator has no counters")

NCU = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","lts__t_sectors_op_read.sum","{ld}"
"","","byte","sector","byte"
"0","_ZN3product","1,000","2","96"
"1","softmax_v2","500","n/a","32"
"2","product","0","1","64"
==PROF== Disconnected
""".format(ld="l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum")


def test_counters_are_summed_by_pass() -> None:
    text = "\n".join(line for line in NCU.splitlines() if not line.endswith("Disconnected"))
    kernels = counters.parse(text)
    launched = [
        {"rung": "naive", "pass": "forward", "kernels": ["product", "softmax"]},
        {"rung": "naive", "pass": "backward", "kernels": ["product"]},
    ]
    forward, backward = counters.by_pass(kernels, launched)
    assert forward["dram_gb"] == pytest.approx(1.5e-6) and backward["dram_gb"] == 0
    assert forward["asked_gb"] == pytest.approx(128e-9) and backward["l2_gb"] == pytest.approx(
        32e-9
    )
    with pytest.raises(ValueError, match="launched were"):
        counters.by_pass(kernels[:2], launched)
    with pytest.raises(ValueError, match="no table"):
        counters.parse("==ERROR== nothing")


def test_launches_written_down_are_those_of_the_profiled_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = list[Any]()
    file = tmp_path / "launched.json"
    with fake_device() as device:
        recorded = SimpleNamespace(
            synchronize=lambda: None,
            profile_start=lambda: ranges.append(len(device.launches)),
            profile_stop=lambda: ranges.append(device.launches[ranges.pop() :]),
        )
        monkeypatch.setattr(counters, "cuda", recorded)
        counters.profiled(str(file), 1, 64, 16)
    written = json.loads(file.read_text(encoding="utf-8"))
    assert len(written) == len(ranges) > 2
    for entry, launches in zip(written, ranges, strict=True):
        assert entry["kernels"] == [one.kernel for one in launches] != []
