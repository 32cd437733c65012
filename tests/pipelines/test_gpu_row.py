"""An engine over the row of GPUs, interpreted on a CPU: ids, log-probs and rows are the reference's in every way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS, Drawn, write_checkpoint
from rayserve_moe.execution.kernel_report import kernel_report
from rayserve_moe.execution.runner import HostRunner
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every, run_together
from tests.support.engine.workload import mixed_workload
from tests.support.kernels.gpu_row import gpu_row_instead
from tests.support.models.core import CORE_CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.float32("the row computes in float32 here")]
SETTINGS = {**TWO_SHAPES, "dtype": "float32", "cpu_kernels": "off", "enable_return_routed_experts": True}
WIDE = replace(
    CORE_CONFIG, hidden_size=128, head_dim=32, moe_intermediate_size=32, drawn=Drawn(scale=0.1, norm_jitter=0.2)
)
"""The core model in widths that the kernels take, with logits of about the same size."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpu") / "model", WIDE, seed=0, dtype="float32")


@pytest.fixture(scope="module")
def row(checkpoint: Path) -> Iterator[HostRunner]:
    """A runner over the interpreted row."""
    with gpu_row_instead():
        yield prepared_runner(checkpoint, **SETTINGS, compile_cache="off")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Outcomes:
    """Outcomes of the workload over the reference kernels."""
    runner = prepared_runner(checkpoint, **SETTINGS)
    return run_together(runner, card_of(checkpoint), mixed_workload(), way=WAY)


def test_a_step_of_the_row_takes_its_kernels(row: HostRunner):
    report = kernel_report(row.served)
    assert report["project_and_write"] == "fused_heads" and report["expert_product"] == "triton"
    assert report["products"] == "triton" and report["attention gqa"] == "cpu"
    assert "top_experts" in report["router"]


@pytest.mark.parametrize(
    "way",
    [
        WAY,
        replace(WAY, chunk_tokens=16, num_rows=5),
        replace(WAY, num_rows=3, num_pages=29, intervene=preempt_every(14)),
        replace(WAY, overlaps=False, caches_prefixes=False),
    ],
    ids=["all at once", "small chunks", "preempted", "without overlap"],
)
def test_scheduling_does_not_show(row: HostRunner, checkpoint: Path, expected: Outcomes, way: Way):
    assert_all_same(run_together(row, card_of(checkpoint), mixed_workload(), way=way), expected)


@pytest.mark.parametrize("name", ["gpt-oss-tiny", "deepseek-v3-tiny"])
def test_windows_sinks_biases_and_latents_are_the_reference(name: str, tmp_path: Path):
    path = write_checkpoint(tmp_path / "model", FAMILY_PRESETS[name], seed=0, dtype="float32")
    requests = mixed_workload()[:6]
    plain = run_together(prepared_runner(path, **SETTINGS), card_of(path), requests, way=WAY)
    with gpu_row_instead():
        runner = prepared_runner(path, **SETTINGS, compile_cache="off")
        assert runner.served.config.kernels.experts.results.candidates[0].name == "triton"
        found = run_together(runner, card_of(path), requests, way=WAY)
    assert_all_same(found, plain)


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)], ids=["two data ranks", "two devices of a rank"])
def test_two_cards_exchange_the_rows_of_experts(mesh: tuple[int, int], checkpoint: Path, expected: Outcomes):
    requests = mixed_workload()[:8]
    with gpu_row_instead():
        runner = prepared_runner(checkpoint, mesh=mesh, expert_backend="all_to_all", **SETTINGS, compile_cache="off")
        report = kernel_report(runner.served)
        assert report["experts"] == "all_to_all" and report["expert_product"] == "triton"
        found = run_together(runner, card_of(checkpoint), requests, way=WAY)
    assert_all_same(found, {key: expected[key] for key in found})
