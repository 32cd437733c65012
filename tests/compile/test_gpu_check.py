"""The gate for GPUs: steps compile for sm_90 without a GPU, in place, with the kernels of the row."""

from __future__ import annotations

import pytest

from rayserve_moe.cli import main
from rayserve_moe.tools.compile_check import allowed_copies, check, faults_of
from rayserve_moe.tools.gpu_targets import GPU_TARGETS, GpuTargetError, gpu_devices, is_available, limit_of
from rayserve_moe.tools.hlo_report import kernels_of, ops_per_layer
from rayserve_moe.tools.hlo_text import read_program
from rayserve_moe.tools.program_report import DeviceMemory, ProgramReport
from rayserve_moe.tools.served_cases import ServedCase, TopologyError, case_of_model, devices_of

needs_plugin = pytest.mark.skipif(not is_available(), reason="jax-cuda13-plugin is not installed (extra gpu-compiler)")
SIZES = {"max_model_len": 1280, "max_running_requests": 16, "max_step_tokens": 1024}
KERNELS = {
    "gpu_paged_attention",
    "gpu_fused_heads",
    "gpu_stacked_product",
    "gpu_experts_gate_up",
    "gpu_experts_down",
    "gpu_tile_order",
}


def case_of(topology: str, **values: object) -> ServedCase:
    return case_of_model("qwen3-30b-a3b", topology, values={**SIZES, **values}, num_layers=2)


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["h100:1", "h200:1"])
def test_a_step_compiles_in_place_by_the_kernels_of_the_row(topology: str):
    report = check(case_of(topology, enable_return_routed_experts=True), names=("decode_16",))
    (decode,) = report.programs
    assert report.faults == [] and decode.is_in_place and decode.copies == []
    assert KERNELS | {"gpu_top_experts"} <= decode.kernels.keys()
    assert decode.memory is not None and decode.memory.limit == limit_of(topology)
    assert decode.ops_per_layer > 10 and decode.roofline_s > 0


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("gpt-oss-20b", {}),
        ("qwen3-30b-a3b", {"expert_dtype": "fp8", "kv_cache_dtype": "fp8"}),
        ("qwen3-30b-a3b", {"expert_dtype": "int8"}),
        ("qwen3-30b-a3b", {"dtype": "float32"}),
    ],
    ids=["windows, sinks and biases", "fp8", "int8", "float32"],
)
def test_other_formats_compile_in_place(model: str, values: dict[str, str]):
    case = case_of_model(model, "h200:1", values={**SIZES, **values}, num_layers=2)
    report = check(case, names=("decode_16", "prefill_1024"))
    assert report.faults == []
    for program in report.programs:
        assert {"gpu_paged_attention", "gpu_experts_gate_up", "gpu_experts_down"} <= program.kernels.keys()
    assert "gpu_stacked_product" in next(each for each in report.programs if each.name == "decode_16").kernels


@needs_plugin
@pytest.mark.slow
def test_two_gpus_exchange_rows_between_experts():
    report = check(case_of("h200:2", expert_backend="all_to_all"), names=("decode_16",))
    (decode,) = report.programs
    assert report.faults == [] and (report.dp, report.tp) == (2, 1)
    assert any(each.operation == "ragged-all-to-all" for each in decode.collectives)


@pytest.mark.skipif(is_available(), reason="jax-cuda13-plugin is installed")
def test_without_the_plugin_a_topology_of_gpus_is_refused_by_name():
    with pytest.raises(
        TopologyError, match=r"topology h200:1: jax has no plugin for GPUs here; pip install .*gpu-comp"
    ):
        case_of("h200:1")


@pytest.mark.parametrize("topology", ["h200", "h200:0", "h200:1x1", "h100:123"])
def test_a_topology_of_gpus_is_a_card_and_a_number(topology: str):
    with pytest.raises(GpuTargetError, match="write a card and a number of them, such as h200:1"):
        gpu_devices(topology)


def test_a_card_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(TopologyError, match=r"topology a100:1: .*; GPUs are h100, h200, such as h200:1"):
        devices_of("a100:1")
    with pytest.raises(TopologyError, match=r"topology v6e:9x9: [^;]*$"):
        devices_of("v6e:9x9")


def test_gpus_of_a_machine_are_no_slices():
    with pytest.raises(TopologyError, match="topology h200:1: GPUs of a machine are no slices; remove --slices"):
        devices_of("h200:1", num_slices=2)


@pytest.mark.parametrize("option", ["--estimate", "--row-sums"])
def test_schedules_are_those_of_tpus(option: str, capsys):
    assert main(["compile-check", "--model", "qwen3-30b-a3b", "--topology", "h200:1", option]) != 0
    assert "--estimate and --row-sums read what the TPU compiler writes" in capsys.readouterr().err


def test_a_step_with_prompts_may_copy_a_layer_and_no_more():
    case = ServedCase("m", None, {}, "h200:1", num_layers=2)  # ty: ignore[invalid-argument-type]
    prefill = ProgramReport(
        "prefill_1024", is_in_place=True, copied_bytes={"gqa": 38_000_000, "experts": 2_400_000_000}
    )
    (fault,) = faults_of(prefill, {}, allowed=allowed_copies(prefill, case))
    assert fault == "prefill_1024 copies 2400.0 MB of experts"
    decode = ProgramReport("decode_16", is_in_place=True, copied_bytes={"gqa": 38_000_000})
    assert list(faults_of(decode, {}, allowed=allowed_copies(decode, case))) == ["decode_16 copies 38.0 MB of gqa"]


def test_a_program_that_takes_more_than_a_card_has_does_not_fit():
    """The report checks the limit, because GPU compilers do not."""
    limit = limit_of("h200:1")
    least, most = (
        ProgramReport("decode_16", memory=DeviceMemory(limit, 0, 0, 0, peak, limit), is_in_place=True)
        for peak in (limit, limit + 10_000_000)
    )
    assert least.fits and list(faults_of(least, {})) == []
    assert not most.fits and list(faults_of(most, {})) == ["decode_16 needs 129.73 GB of a device's 129.72 GB"]


@needs_plugin
@pytest.mark.slow
def test_a_server_that_is_larger_than_its_card_is_refused():
    """Pages of 100 GB, and an H100 has 80."""
    report = check(case_of("h100:1", page_size=128, num_pages=190_000), names=("decode_16",))
    (decode,) = report.programs
    assert not report.fits and decode.memory is not None and decode.memory.peak > 100e9
    assert report.faults == [f"decode_16 needs {decode.memory.peak / 1e9:.2f} GB of a device's 79.03 GB"]


PROGRAM = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %call.2 = f32[8]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/while/body/attention/gpu_paged_attention/pallas_call"}, backend_config={grid_x = 64 : i32}
  %copy.1 = f32[8]{0} copy(%call.2)
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %copy.1)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %done = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501 (a line of the compiler's)


def test_kernels_of_a_program_are_counted_by_name():
    program = read_program(PROGRAM)
    assert kernels_of(program) == {"gpu_paged_attention": 3}
    assert ops_per_layer(program) == 2


def test_cards_have_their_memory():
    assert set(GPU_TARGETS) == {"h100", "h200"}
    assert limit_of("h100:1") < 80e9 < limit_of("h200:4") < 141e9
