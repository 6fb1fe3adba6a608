"""Hardware counters: Nsight Compute's table is read and summed over the kernels of a pass."""

from __future__ import annotations

import pytest
from measurements import hardware_counters as counters

NCU = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","lts__t_sectors_op_read.sum","{ld}"
"","","byte","sector","byte"
"0","product","1,000","2","96"
"1","softmax","500","n/a","32"
==PROF== Disconnected
""".format(ld="l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum")


def test_counters_are_summed_over_the_kernels_of_a_pass() -> None:
    found = counters.summed(NCU)
    assert found["kernels"] == ["product", "softmax"]
    assert found["dram_gb"] == pytest.approx(1.5e-6) and found["asked_gb"] == pytest.approx(128e-9)
    assert found["l2_gb"] == pytest.approx(64e-9)
    with pytest.raises(ValueError, match="no table"):
        counters.summed("==ERROR== nothing")
