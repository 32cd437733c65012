"""The gate: few layers of real models on real topologies, and refusals in the compiler's words."""

from __future__ import annotations

import json
import math

import pytest

from rayserve_moe.cli import main
from rayserve_moe.model.family_table import FAMILIES, spec_from_config
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.tools.check_command import render
from rayserve_moe.tools.compile_check import CheckReport, check, estimator_of
from rayserve_moe.tools.hlo_report import Collective
from rayserve_moe.tools.presets import PresetError, preset_names, read_config
from rayserve_moe.tools.program_report import DeviceMemory, ProgramReport
from rayserve_moe.tools.served_cases import ServedCase, case_of_model

GB = 1e9
CONTEXT = {"max_model_len": 4096}
SAMPLED = [
    ("qwen3-30b-a3b", "v6e:2x4", {"expert_backend": "all_to_all"}),
    ("qwen3-30b-a3b", "v5e:2x4", {"tp": 4, "expert_backend": "replicated"}),
    ("qwen3-235b-a22b", "v5p:2x4x4", {"num_redundant_experts": 32, "expert_backend": "all_to_all"}),
]
WHOLE = [
    ("qwen3-30b-a3b", "v5e:4x4", {}),
    ("qwen3-30b-a3b", "tpu7x:2x2x1", {"tp": 2}),
    ("qwen3-235b-a22b", "v6e:8x8", {"dp": 32, "tp": 2}),
    ("qwen3-235b-a22b", "v6e:8x8", {"expert_backend": "fused"}),
]


DECODE, PREFILL = "decode_16", "prefill_1024"
MOVES = ("fetch_slots", "swap_layer")
REBALANCED = [
    ("qwen3-30b-a3b", "v6e:2x4", 32, 0.189),
    pytest.param("qwen3-30b-a3b", "v6e:2x4", 128, 0.302, marks=pytest.mark.slow),
    pytest.param("qwen3-235b-a22b", "v5p:2x4x4", 32, 0.189, marks=pytest.mark.slow),
    pytest.param("qwen3-235b-a22b", "v5p:2x4x4", 128, 0.302, marks=pytest.mark.slow),
]
"""With redundant experts, and the HBM that the staging area takes on a device, GB."""


def name_of(case: object) -> str:
    return "-".join(f"{key}-{value}" for key, value in case.items()) if isinstance(case, dict) else str(case)


def case_of(model: str, topology: str, values: dict, *, num_layers: int = 2) -> ServedCase:
    sizes = {name: size for name, size in values.items() if name in ("dp", "tp")}
    settings = {name: value for name, value in values.items() if name not in sizes}
    return case_of_model(model, topology, num_layers=num_layers, values={**CONTEXT, **settings}, **sizes)


def assert_sound(program: ProgramReport) -> None:
    """It fits, keeps weights and KV where they are, and multiplies experts by a grouped kernel."""
    assert program.error == ""
    assert program.copies == [] and program.is_in_place
    assert program.memory.peak <= program.memory.limit
    assert program.kernels["paged_attention"] > 0
    assert program.kernels.keys() & {"grouped_ffn", "ragged-dot-none", "low_latency_dispatch"}


def program_of(model: str, topology: str, values: dict, name: str) -> ProgramReport:
    (program,) = check(case_of(model, topology, values), names=(name,)).programs
    return program


@pytest.mark.slow
@pytest.mark.parametrize(("model", "topology", "values"), SAMPLED, ids=name_of)
def test_two_layers_decode_without_copies(model, topology, values):
    program = program_of(model, topology, values, DECODE)
    assert_sound(program)
    assert program.memory.temporaries <= 0.2 * GB, "with sampling"
    exchanges = {exchange.operation for exchange in program.collectives}
    assert ("ragged-all-to-all" in exchanges) == (values["expert_backend"] == "all_to_all")


def test_one_layer_decodes_two_sequences_without_copies():
    """Compile the cheapest step."""
    values = {"tp": 8, "expert_backend": "replicated", "max_running_requests": 2}
    (program,) = check(case_of("qwen3-30b-a3b", "v5e:2x4", values, num_layers=1), names=("decode_2",)).programs
    assert_sound(program)
    assert "ragged-all-to-all" not in {exchange.operation for exchange in program.collectives}


@pytest.mark.slow
def test_steps_with_adapters_copy_no_weights():
    case = case_of("qwen3-30b-a3b", "v6e:2x4", {"max_loras": 8, "expert_backend": "all_to_all"})
    step, put = check(case, names=(f"{DECODE}_adapters", "put_adapter")).programs
    assert_sound(step)
    assert put.error == "" and put.is_in_place and put.copies == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-oss-20b", "glm-4.7-flash"])
def test_sinks_and_latents_are_attended_where_they_lie(model):
    """Prompts and single tokens, by the kernel of our own; KV is as large as its rows, which are not padded."""
    for name in (DECODE, PREFILL):
        program = program_of(model, "v6e:2x4", {}, name)
        assert program.error == "" and program.is_in_place
        assert program.memory.peak <= program.memory.limit
        assert program.kernels["paged_attention"] > 0
        assert {"kv", "window_kv", "latent_kv"}.isdisjoint(copy.kind for copy in program.copies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "topology", "num_layers", "num_states"),
    [
        ("qwen3.5-35b-a3b", "v6e:2x4", 8, 6),
        ("qwen3.5-35b-a3b", "v5p:2x2x1", 8, 6),
        ("kimi-linear-48b-a3b", "v6e:2x4", 8, 6),
        ("nemotron-3-nano-30b-a3b", "v6e:2x2", 7, 3),
        ("granite-4.0-h-small", "v6e:2x2", 6, 5),
    ],
)
def test_states_and_rings_are_advanced_where_they_lie(model, topology, num_layers, num_states):
    """A period or two of a hybrid model, with and without prompts."""
    settings = {"max_running_requests": 8, "max_step_tokens": 128, "page_size": 64}
    case = case_of(model, topology, settings, num_layers=num_layers)
    for program in check(case, names=("decode_8", "prefill_128")).programs:
        assert_sound(program)
        assert program.kernels["delta_rule"] == num_states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "topology", "values"),
    [("gemma-4-26b-a4b", "v6e:2x2", {}), ("mimo-v2-flash", "v6e:4x4", {"tp": 4, "expert_dtype": "int8"})],
    ids=name_of,
)
def test_kinds_of_attention_read_their_own_pools_in_place(model, topology, values):
    """A layer without a window and one with, whose heads differ; experts of Gemma 4 are 704 wide."""
    program = program_of(model, topology, values, DECODE)
    assert_sound(program)
    assert program.kernels["paged_attention"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5.2"])
def test_matrices_of_latents_are_multiplied_where_they_lie(model):
    """Compile all layers, because XLA copies nothing of a few small ones. Layers of GLM-5.2 differ in their index."""
    values = {"tp": 8, "expert_dtype": "int8", "max_model_len": 2048}
    (program,) = check(case_of(model, "v6e:4x8", values, num_layers=0), names=(DECODE,)).programs
    assert_sound(program)


def moves_of(model: str, topology: str, redundant: int, *, num_layers: int = 2) -> list[ProgramReport]:
    values = {"num_redundant_experts": redundant, "enable_eplb": True}
    return check(case_of(model, topology, values, num_layers=num_layers), names=MOVES).programs


@pytest.mark.parametrize(("model", "topology", "redundant", "staging_gb"), REBALANCED)
def test_experts_move_without_copies(model, topology, redundant, staging_gb):
    """One exchange per kind of weight reads the slots where they lie; a swap writes in place and needs no room."""
    fetch, swap = moves_of(model, topology, redundant)
    for program in (fetch, swap):
        assert program.error == "" and program.copies == [] and program.is_in_place
    assert {exchange.operation for exchange in fetch.collectives} == {"ragged-all-to-all"}
    assert sum(exchange.times for exchange in fetch.collectives) == 3
    assert swap.collectives == [] and swap.memory.temporaries <= 0.001 * GB
    arrived = sum(exchange.num_bytes * exchange.times for exchange in fetch.collectives)
    assert fetch.memory.temporaries <= 2 * arrived
    assert fetch.memory.aliased == pytest.approx(staging_gb * GB, rel=0.01), "the staging area, one layer's slots"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "topology", "redundant", "staging_gb"), REBALANCED)
def test_moving_experts_takes_no_more_room_with_all_layers(model, topology, redundant, staging_gb):
    few, whole = (moves_of(model, topology, redundant, num_layers=count) for count in (2, 0))
    for program, of_few in zip(whole, few, strict=True):
        assert program.error == "" and program.copies == [] and program.is_in_place
        assert program.memory.temporaries <= of_few.memory.temporaries + 0.001 * GB


@pytest.mark.slow
@pytest.mark.parametrize(("model", "topology", "values"), WHOLE, ids=name_of)
def test_two_layers_decode_everywhere(model, topology, values):
    assert_sound(program_of(model, topology, values, DECODE))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "topology", "values"), SAMPLED, ids=name_of)
def test_two_layers_prefill_without_copies(model, topology, values):
    assert_sound(program_of(model, topology, values, PREFILL))


V6E8 = "configs/qwen3_30b_a3b_v6e8.yaml"
TOO_LARGE = ["--model", "qwen3-30b-a3b", "--layers", "2", "--topology", "v5e:2x4", "--batch", "2000"]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_compilers_numbers(capsys):
    status = main(["compile-check", *TOO_LARGE, "--programs", "decode_2000", "--json"])
    assert status == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    (program,) = report["programs"]
    assert report["fits"] is False and program["memory"] is None
    assert "RESOURCE_EXHAUSTED" in program["error"] and "15.75G" in program["error"]
    assert program["error"] in shown.err


def test_the_table_shows_what_fits_and_what_does_not():
    memory = DeviceMemory(15_000_000_000, 40_000_000, 0, 0, 15_200_000_000, 33_550_000_000)
    exchange = Collective("ragged-all-to-all", 8, "bf16[256,2048]", 1 << 20, 96, is_least=True)
    fitting = ProgramReport(
        "decode", memory=memory, copied_bytes={"experts": 2_000_000_000}, collectives=[exchange], kernels={"ragged": 48}
    )
    refused = ProgramReport("prefill", error="Used 40G of 31G hbm.")
    sections = {"experts": {"backend": "auto"}, "cache": {"page_size": 16}, "replay": {"enabled": True}}
    sizes = {"num_layers": 48, "dp": 8, "tp": 1, "num_expert_slots": 128, "weights_bytes": 8_000_000_000}
    report = CheckReport(
        "a-model",
        "v6e:2x4",
        sections,
        **sizes,
        num_pages=4097,
        kv_pool_bytes=7_000_000_000,
        compilers={},
        programs=[fitting, refused],
        faults=["prefill does not compile"],
    )
    assert not report.fits
    shown = render(report)
    for words in (
        "temporaries 0.040, peak 15.20 of 33.55 GB",
        "copied: experts 2.000 GB",
        "ragged-all-to-all over 8 devices: at least 96 x bf16[256,2048] (1,048,576 bytes)",
        "kernels: 48 x ragged",
        "prefill: DOES NOT FIT",
        "Used 40G of 31G hbm.",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nobody/nothing", "--topology", "v6e:2x4"], "nobody/nothing: no such directory"),
        (["--model", "qwen3-30b-a3b", "--topology", "v6e:2x4", "--dp", "3"], "dp 3 times tp 2 is not the 8 devices"),
        (["--model", "qwen3-30b-a3b"], "pass --config, or --model and --topology"),
        (["--config", V6E8, "--page-size", "32"], "--page-size requires --model"),
        (["--config", V6E8, "--tp", "2"], "--tp requires --model"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", V6E8, "--limits", "nowhere.json"], "nowhere.json"),
        (["--model", "qwen3-30b-a3b", "--topology", "v9x:2x4"], "topology v9x:2x4"),
        (["--model", "qwen3-30b-a3b", "--topology", "v6e:2x4", "--layers", "49"], "has 48 layers"),
        (
            ["--model", "qwen3-30b-a3b", "--topology", "v6e:2x4", "--programs", "verify"],
            "no program verify; known programs",
        ),
        (
            ["--model", "qwen3-30b-a3b", "--topology", "v6e:2x4", "--speculative-algorithm", "EAGLE3"],
            "speculative_algorithm EAGLE3 needs speculative_draft_model_path",
        ),
    ],
)
def test_wrong_use_is_answered_with_a_sentence(arguments, message, capsys):
    assert main(["compile-check", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_few_layers_that_alternate_are_not_estimated(tmp_path):
    case = case_of("nemotron-3-nano-30b-a3b", "v6e:2x2", {}, num_layers=7)
    with pytest.raises(ValueError, match=r"estimating 7 layers: kinds of layers alternate, up to \d+; compile all"):
        estimator_of(case, dump=tmp_path)


PUBLISHED = {
    "deepseek-v2-lite": (16, 3),
    "deepseek-v3": (671, 38),
    "deepseek-v3.2": (672, 38),  # with the index, like glm-5.2
    "dots.llm1": (143, 14),
    "ernie-4.5-21b-a3b": (22, 3),
    "gemma-4-26b-a4b": (25, 4),  # without the vision tower
    "glm-4.5-air": (107, 13),
    "glm-4.7-flash": (30, 4),
    "glm-5.2": (743, 41),
    "gpt-oss-120b": (117, 6),
    "gpt-oss-20b": (21, 4),
    "granite-3.0-3b-a800m": (3, 1),
    "granite-4.0-h-small": (32, 9),
    "hunyuan-a13b": (80, 13),
    "hy3": (295, 21),
    "kimi-k2": (1026, 33),
    "kimi-linear-48b-a3b": (49, 3),
    "laguna-xs-2.1": (33, 3),
    "ling-3.0-flash": (124, 6),
    "ling-mini-2.0": (16, 1),
    "mimo-v2-flash": (309, 15),
    "minimax-m2": (229, 11),
    "minimax-m3": (426, 26),  # without the vision tower
    "mistral-small-4": (119, 7),  # without the vision tower
    "mixtral-8x7b": (47, 13),
    "nemotron-3-nano-30b-a3b": (32, 4),
    "nemotron-3-super-120b-a12b": (121, 13),
    "olmoe-1b-7b": (7, 1),
    "qwen1.5-moe-a2.7b": (14, 3),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-30b-a3b": (31, 3),
    "qwen3-next-80b-a3b": (80, 4),
    "qwen3.5-35b-a3b": (35, 3),
    "qwen3.5-397b-a17b": (396, 17),  # without the vision tower
    "solar-open-100b": (103, 12),
    "step-3.7-flash": (197, 12),  # without the vision tower
    "trinity-mini": (26, 3),
}
"""Parameters of each preset, and of one token's path with the embedding and the head, in units of 1e9."""


HYBRID, MULTIMODAL = "qwen3.5-35b-a3b", "Qwen3_5MoeForConditionalGeneration"


def test_presets_are_the_published_sizes():
    sizes = {}
    for name in preset_names():
        spec = spec_from_config(read_config(name))
        params = [param for specs in parameter_specs(spec, dtype="bfloat16").values() for param in specs.values()]
        share = spec.router.top_k / spec.router.num_experts
        on_path = (math.prod(param.shape) * (share if param.num_experts else 1) for param in params)
        sizes[name] = (round(sum(math.prod(param.shape) for param in params) / 1e9), round(sum(on_path) / 1e9))
    assert sizes == PUBLISHED


def test_every_family_has_a_preset():
    assert {spec_from_config(read_config(name)).family for name in preset_names()} == {
        module.__name__.rsplit(".", 1)[1] for module in FAMILIES.values()
    }


@pytest.mark.parametrize("name", ["nemotron-3-nano-30b-a3b", "granite-4.0-h-small", "ling-3.0-flash"])
def test_a_model_whose_layers_are_listed_is_cut_to_its_first_ones(name):
    assert spec_from_config(read_config(name, num_layers=8)).layers == spec_from_config(read_config(name)).layers[:8]


def test_a_directory_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(read_config("qwen3-30b-a3b", num_layers=3)))
    assert read_config(str(tmp_path))["num_hidden_layers"] == 3
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [MULTIMODAL], "text_config": read_config(HYBRID)})
    )
    assert spec_from_config(read_config(str(tmp_path), num_layers=8)).num_layers == 8
    with pytest.raises(PresetError, match="the model has 40 layers, 41 are requested"):
        read_config(str(tmp_path), num_layers=41)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not an object"):
        read_config(str(tmp_path))
    for text in ("{", '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", '{"num_hidden_layers": 1e400}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            read_config(str(tmp_path))
