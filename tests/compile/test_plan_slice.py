"""Slices for a model's traffic: estimates are near those of compiled programs, and change as they must."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import yaml

from benchmarks.made_up import MODELS, step_of_plan
from rayserve_moe.cli import main
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.config.topology import slice_for
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.estimate.chips import CHIPS, OVERHEAD_S
from rayserve_moe.tools.estimate.rates import calibrated
from rayserve_moe.tools.plan_slice.candidates import (
    Assumptions,
    Candidate,
    Split,
    Traffic,
    candidate,
    eplb_headroom,
    imbalance_of,
    splits,
    topologies,
)
from rayserve_moe.tools.plan_slice.command import ranked
from rayserve_moe.tools.plan_slice.step_cost import StepTokens, step_cost
from rayserve_moe.tools.presets import read_config
from rayserve_moe.tools.served_cases import case_of_model, devices_of, lay_out
from tests.compile import plan_table

SPEC = spec_from_config(read_config("qwen3-30b-a3b"))
SLICE = "v6e:2x4"
TRAFFIC = Traffic(1024, 512, 128)
COMPILED = json.loads(Path("benchmarks/results/step_estimate.json").read_text(encoding="utf-8"))["step_estimate"]
MADE_UP = json.loads(Path("benchmarks/results/made_up.json").read_text(encoding="utf-8"))["made_up"]
GATE = json.loads(Path("benchmarks/results/compile_gate.json").read_text(encoding="utf-8"))["compile_gate"]
STEPS = {
    "30B on v6e:2x4, decode, 16 sequences": StepTokens(2, 1024),
    "30B on v6e:2x4, decode, 128 sequences": StepTokens(16, 1024),
    "30B on v6e:2x4, decode, 256 sequences": StepTokens(32, 1024),
    "30B on v6e:2x4, decode, 1024 sequences": StepTokens(128, 1024),
    "30B on v6e:2x4, prefill, 65536 tokens": StepTokens(16, 1024, 8192),
}


@cache
def model(expert_dtype: str = "auto") -> ModelConfig:
    return model_config(
        SPEC, plan_for(devices_of(SLICE), data_size=8), experts=ExpertSettings(weight_dtype=expert_dtype)
    )


def estimated(split: Split, *, traffic: Traffic = TRAFFIC, **given) -> Candidate:
    found = candidate(SPEC, split, traffic=traffic, given=Assumptions(**given))
    assert found is not None
    return found


@pytest.mark.parametrize("name", STEPS)
def test_a_step_costs_what_the_compiled_one_is_estimated_at(name):
    """Operations as its bound has them; links within a sixth or 20 us, ops within an eighth, both steps within 6 %."""
    expert_dtype = "int8" if "int8" in name else "auto"
    compiled, cost = COMPILED[name], step_cost(model(expert_dtype), STEPS[name], topology=SLICE)
    assert cost.flops_s == pytest.approx(compiled["roofline"]["flops_s"])
    assert cost.link_s == pytest.approx(compiled["step"]["link_s"], rel=1 / 6, abs=2e-5)
    assert cost.ops_s == pytest.approx(compiled["step"]["num_ops"] * OVERHEAD_S, rel=1 / 8, abs=1e-5)
    assert cost.hbm_s >= compiled["roofline"]["hbm_s"]
    assert cost.peak_seconds == pytest.approx(compiled["step"]["peak_seconds"], rel=0.06)
    assert cost.seconds == pytest.approx(compiled["step"]["seconds"], rel=0.06)
    assert cost.min_seconds < cost.seconds < cost.max_seconds and cost.peak_seconds < cost.seconds


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-4-26b-a4b", "mimo-v2-flash", "qwen3.5-35b-a3b"])
def test_a_step_waits_for_the_keys_that_it_reads(name):
    """Plan models with several kinds of attention, and with layers without keys."""
    plan = plan_for(devices_of(SLICE), data_size=4)
    own = model_config(spec_from_config(read_config(name)), plan, experts=ExpertSettings())
    short, long = (step_cost(own, StepTokens(16, context), topology=SLICE) for context in (2048, 4096))
    rates = calibrated(CHIPS["v6e"])
    exposed_s = rates.exposed_share * (long.hbm_s - short.hbm_s) / rates.hbm_share
    assert long.waits_s - short.waits_s == pytest.approx(exposed_s) and exposed_s > 0


@pytest.mark.parametrize("name", MADE_UP)
def test_a_plan_is_within_10_percent_of_the_compiled_step_of_a_made_up_model(name):
    """`python -m benchmarks.made_up --compile` compiles them; the plan is made anew."""
    found, one = MADE_UP[name], MODELS[name]
    assert found["sizes"] == one.sizes, "drawn from the same seed"
    assert step_of_plan(one) == pytest.approx(found["compiled"]["step"]["seconds"], rel=0.10)


@pytest.mark.parametrize("case", sorted(name for name in GATE if "@" in name and "," not in name))
def test_weights_are_those_of_the_compile_check(case):
    """Cases without a draft model are laid out anew, which needs no compiling."""
    name, _, slice_and_more = case.partition("@")
    topology, _, redundant = slice_and_more.partition("+")
    spec, dp = spec_from_config(read_config(name)), GATE[case]["dp"]
    split = Split(topology, dp, len(devices_of(topology)) // dp, int(redundant or 0))
    found = candidate(spec, split, traffic=TRAFFIC, given=Assumptions())
    slots = GATE[case]["num_expert_slots"] // len(devices_of(topology))
    expert = 3 * spec.hidden_size * spec.experts.intermediate_size * 2
    staging = slots * expert if redundant else 0
    moving = {"num_redundant_experts": int(redundant), "enable_eplb": True} if redundant else {}
    values = {"expert_backend": "all_to_all", **moving}
    served = lay_out(case_of_model(name, topology, tp=GATE[case]["tp"], values=values))
    assert found.weights_gb * 1e9 == pytest.approx(bytes_on_device(served.weights) + staging)


def test_keys_and_values_are_those_of_whole_sequences():
    found = estimated(Split(SLICE, 8, 1))
    assert found.kv_gb * 1e9 == pytest.approx(16 * (1024 + 512) * 2 * 4 * 128 * 2 * 48)


def test_what_does_not_fit_is_no_candidate():
    big = spec_from_config(read_config("qwen3-235b-a22b"))
    for split in splits(big, "v5e:2x4"):
        assert candidate(big, split, traffic=TRAFFIC, given=Assumptions()) is None, split


def test_rows_are_as_many_as_the_memory_holds():
    crowd = Traffic(1024, 512, 100_000)
    found = estimated(Split(SLICE, 8, 1), traffic=crowd)
    assert found.served == 8 * found.split.rows < crowd.concurrency
    half = estimated(Split(SLICE, 8, 1), traffic=crowd, kv_dtype="float8_e4m3fn")
    assert found.split.rows * 2 <= half.split.rows <= found.split.rows * 2 + 1
    assert candidate(SPEC, Split(SLICE, 2, 4), traffic=crowd, given=Assumptions(kv_dtype="float8_e4m3fn")) is not None


def test_experts_in_int8_take_half_the_memory_and_less_time():
    wide, narrow = estimated(Split(SLICE, 8, 1)), estimated(Split(SLICE, 8, 1), expert_dtype="int8")
    experts = SPEC.num_layers * 16 * 3 * SPEC.hidden_size * SPEC.experts.intermediate_size
    scales = SPEC.num_layers * 16 * (2 * SPEC.experts.intermediate_size + SPEC.hidden_size) * 4
    assert (wide.weights_gb - narrow.weights_gb) * 1e9 == pytest.approx(experts - scales)
    assert narrow.decode.seconds < wide.decode.seconds and narrow.decode.backend == "low_latency_dispatch"


def test_replicas_even_out_skewed_experts_and_cost_memory():
    assert imbalance_of(128, 8, redundant=0, skew=0.0) == pytest.approx(1.0)
    plain, spread = imbalance_of(128, 8, redundant=0, skew=0.7), imbalance_of(128, 8, redundant=8, skew=0.7)
    assert plain > 1.2 > 1.02 > spread >= 1.0
    without, with_replicas = (estimated(Split(SLICE, 8, 1, redundant)) for redundant in (0, 8))
    assert with_replicas.weights_gb > without.weights_gb
    assert with_replicas.imbalance < without.imbalance


def test_the_best_candidates_serve_everybody():
    found = ranked(SPEC, [SLICE], traffic=TRAFFIC, given=Assumptions())
    shapes = {(one.split.dp, one.split.tp, one.split.redundant) for one in found}
    assert len(shapes) == len(found) == 8, "1, 2, 4 and 8 data ranks, with a slot more per device and without"
    assert [one.served for one in found] == [128] * 8
    assert [one.per_chip for one in found] == sorted((one.per_chip for one in found), reverse=True)


@pytest.mark.parametrize("generation", CHIPS)
def test_slices_of_every_generation_are_known(generation):
    names = list(topologies(generation, max_chips=16))
    assert names and all(name.startswith(f"{generation}:") for name in names)


def test_the_command_prints_a_table_and_json(capsys):
    command = ["plan-slice", "--config", "configs/qwen3_30b_a3b_v6e8.yaml", "--traffic", "1024/512/128", "--chips"]
    assert main([*command, "v6e", "--max-chips", "8"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ESTIMATED") and "* v6e:2x4" in shown and "  v6e:2x2" in shown
    assert main([*command, "v6e", "--max-chips", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["split"] == {"topology": SLICE, "dp": 8, "tp": 1, "redundant": 0, "rows": 16}
    assert {one["split"]["topology"] for one in found["candidates"]["v6e"]} == {"v6e:2x2", SLICE}


def test_the_row_to_take_is_marked_and_its_settings_can_be_pasted(capsys):
    """With a config it is of the config's slice; under its settings the slice is the one that was planned."""
    command = [
        "plan-slice",
        "--config",
        "configs/qwen3_30b_a3b_v6e8.yaml",
        "--traffic",
        "1024/512/128",
        "--chips",
        "v6e",
    ]
    assert main([*command, "--max-chips", "16", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.startswith("> "))
    found = ranked(SPEC, [SLICE], traffic=TRAFFIC, given=Assumptions())
    assert row.split()[1] == SLICE and f"{found[0].tokens_per_s:,.0f}" in row
    settings = settings_from(
        {"model_path": "m", **yaml.safe_load(shown[shown.index("    tpu_version") :])}, on_tpu=True
    )
    tpu = slice_for(settings.cluster, num_hosts=settings.parallel.num_hosts, num_slices=1)
    best = found[0].split
    assert tpu.num_chips == found[0].chips and settings.parallel.data_parallel_size == best.dp
    assert (settings.scheduler.max_running_requests, settings.experts.num_redundant) == (best.rows, best.redundant)
    assert settings.model.max_model_len == TRAFFIC.length


def test_the_table_of_the_page_is_what_the_command_says():
    """`python -m tests.compile.plan_table` writes it anew."""
    page = plan_table.PAGE.read_text(encoding="utf-8")
    assert page == plan_table.written(page)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--traffic", "1/2/3"], "pass --model, --config or --mixer"),
        (["--model", "qwen3-30b-a3b", "--traffic", "1024"], "PROMPT/OUTPUT/CONCURRENCY"),
        (["--model", "qwen3-30b-a3b", "--traffic", "1/0/3"], "PROMPT/OUTPUT/CONCURRENCY"),
        (["--model", "qwen3-30b-a3b", "--traffic", "1/2/3", "--chips", "h100"], "known chips: v5e, v5p, v6e, tpu7x"),
        (["--model", "qwen3-30b-a3b", "--traffic", "1/2/3", "--topology", "v6e:3x5"], "v6e:3x5"),
        (["--model", "qwen3-30b-a3b", "--traffic", "90000/2/3", "--topology", SLICE], "40960 positions"),
        (["--model", "no-such-model", "--traffic", "1/2/3"], "no-such-model"),
        (["--model", "qwen3-235b-a22b", "--traffic", "1/2/3", "--topology", "v5e:2x4"], "fits none of the slices"),
        (["--model", "qwen3-30b-a3b", "--traffic", "1/2/3", "--skew", "-1"], "--skew -1.0 is not positive"),
        (["--config", "configs/qwen3_moe.yaml", "--traffic", "1/2/3"], "CPU hosts"),
        (["--mixer", "gqa", "--traffic", "1/2/3", "--layers", "0"], "--layers 0 is less than 1"),
        (["--mixer", "gqa", "--traffic", "1/2/3", "--latent-width", "512"], "has no kv_lora_rank"),
        (["--mixer", "gqa", "--traffic", "1/2/3", "--top-k", "200"], "200 exceeds 128 experts"),
        (["--mixer", "gqa", "--model", "qwen3-30b-a3b", "--traffic", "1/2/3"], "remove --model"),
        (
            ["--config", "configs/qwen3_30b_a3b_v6e8.yaml", "--traffic", "1/2/3", "--layers", "3"],
            "serves its own model",
        ),
    ],
)
def test_a_wrong_call_is_one_line(options, words, capsys):
    assert main(["plan-slice", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rayserve-moe plan-slice: ") and words in error and error.count("\n") == 1


def test_a_made_up_model_has_its_sizes_and_can_be_compiled(tmp_path, capsys):
    """Write a model without weights, whose lists of layers repeat their pattern."""
    sizes = ["--layers", "50", "--width", "2880", "--experts", "64", "--top-k", "2"]
    command = ["plan-slice", "--mixer", "windowed", *sizes, "--traffic", "512/512/64", "--topology", SLICE]
    assert main([*command, "--save-config", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "A request: first token after" in shown and "perfect balance would add" in shown
    spec = spec_from_config(read_config(str(tmp_path)))
    assert (spec.num_layers, spec.hidden_size, spec.router.num_experts, spec.router.top_k) == (50, 2880, 64, 2)
    windows = [layer.window for layer in spec.layers]
    assert windows[48:] == windows[:2] != windows[1:3]


def test_balance_adds_nothing_where_experts_are_equally_popular():
    one = estimated(Split(SLICE, 8, 1))
    assert eplb_headroom(SPEC, one, traffic=TRAFFIC, given=Assumptions(skew=0.0)) == 0.0
    assert 0.0 < eplb_headroom(SPEC, one, traffic=TRAFFIC, given=Assumptions(skew=1.5)) < 1.0
