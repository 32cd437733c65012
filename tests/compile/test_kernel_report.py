"""The report of a start names the kernels that the lowered programs have."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rayserve_moe.execution.kernel_report import kernel_report
from rayserve_moe.execution.programs.compiled import lowered
from rayserve_moe.execution.programs.specs import programs_of, step_name
from rayserve_moe.tools.served_cases import case_of_model, lay_out

KERNELS = {
    "add_norm",
    "delta_rule",
    "streamed_heads",
    "rotary_heads",
    "top_experts",
    "grouped_ffn",
    "low_latency_dispatch",
    "device_sums",
    "absorb_queries",
    "expand_values",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "topology", "values"),
    [
        pytest.param("qwen3-30b-a3b", "v6e:2x4", {"num_layers": 2}, id="qwen3"),
        pytest.param("qwen3-30b-a3b", "v6e:2x4", {"kv_cache_dtype": "fp8"}, id="fp8", marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "v6e:2x4", {"expert_backend": "all_to_all"}, id="exchange"),
        pytest.param("gpt-oss-20b", "v6e:2x4", {}, id="gpt-oss", marks=pytest.mark.slow),
        pytest.param("qwen3.5-35b-a3b", "v6e:2x4", {}, id="hybrid", marks=pytest.mark.slow),
        pytest.param("kimi-linear-48b-a3b", "v6e:2x4", {}, id="kimi", marks=pytest.mark.slow),
        pytest.param("nemotron-3-nano-30b-a3b", "v6e:2x2", {"num_layers": 7}, id="mamba", marks=pytest.mark.slow),
        pytest.param("qwen3-235b-a22b", "v5p:2x4x4", {"num_redundant_experts": 32}, id="v5p", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "v5p:4x4x4", {}, id="latents", marks=pytest.mark.slow),
        pytest.param("gemma-4-26b-a4b", "v6e:2x2", {}, id="gemma4", marks=pytest.mark.slow),
        pytest.param("mimo-v2-flash", "v6e:4x4", {"tp": 4, "expert_dtype": "int8"}, id="mimo", marks=pytest.mark.slow),
    ],
)
def test_programs_have_the_kernels_of_the_report(model, topology, values):
    """In the smallest and the largest step."""
    values = dict(values)
    sizes = {"num_layers": values.pop("num_layers", 4), "tp": values.pop("tp", 0)}
    served = lay_out(case_of_model(model, topology, **sizes, values=values))
    programs = {program.name: program for program in programs_of(served, num_pages=64)}
    for shape in (served.shapes[0], served.shapes[-1]):
        report = kernel_report(replace(served, shapes=(shape,)))
        chosen = {text.split(" ")[0] for text in report.values()}
        text = lowered(programs[step_name(shape)], served.config.plan).as_text()
        found = set(re.findall(r'kernel_name = "(\w+)"', text))
        assert found & KERNELS == chosen & KERNELS, (shape, report)
        assert ("ragged_dot" in text) == ("ragged_dot" in chosen)
        assert ("paged_attention" in found) == ("paged" in chosen)


def test_a_choice_that_depends_on_the_number_of_tokens_has_its_ranges():
    report = kernel_report(lay_out(case_of_model("qwen3-30b-a3b", "v6e:2x4", values={})))
    assert report["attention gqa"] == "paged"
    assert re.fullmatch(
        r"2-\d+ tokens: low_latency_dispatch \(local: experts lie on 8 devices\), "
        r"\d+-\d+ tokens: device_sums \(local: .*; low_latency_dispatch: .* MiB of a core's memory; replicated: .*\)",
        report["experts"],
    )
