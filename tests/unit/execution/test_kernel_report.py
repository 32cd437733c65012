"""A server reports the kernels of its steps, the same in its log and in its start report."""

from __future__ import annotations

import pytest

from rayserve_moe.execution.kernel_report import kernel_report
from tests.support.engine.host_runners import TWO_SHAPES, new_runner, prepared_runner
from tests.support.kernels.native_kernels import need_native_kernels


@pytest.mark.parametrize("kernels", ["cpu", "cpu_native"])
def test_a_cpu_has_one_implementation_of_every_operation(kernels, core_checkpoint):
    values = {"cpu_kernels": "off", "dtype": "float32"}
    if kernels == "cpu_native":
        need_native_kernels()
        values = {"cpu_kernels": "native", "dtype": "bfloat16"}
    report = kernel_report(new_runner(core_checkpoint, **TWO_SHAPES, **values).served)
    assert report["experts"] == "local"
    assert report["add_norm"] == report["expert_product"] == ("cpu_native" if kernels == "cpu_native" else "xla")
    assert report["attention gqa"] == kernels


def test_a_start_has_the_report_of_its_kernels(core_checkpoint):
    runner = prepared_runner(core_checkpoint, **TWO_SHAPES, dtype="bfloat16")
    assert runner.warm_up().kernels == kernel_report(runner.served)
