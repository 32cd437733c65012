"""A balanced selection compiles into a step for TPUs: what it adds are its own cycles and one gather of scores."""

from __future__ import annotations

from collections import Counter

import pytest

from rayserve_moe.tools.compile_check import check
from rayserve_moe.tools.program_report import ProgramReport
from rayserve_moe.tools.served_cases import case_of_model
from tests.compile.test_compile_check import assert_sound

NUM_LAYERS, NUM_EXPERTS, BATCH = 2, 128, 64
VALUES = {"num_redundant_experts": 32, "expert_backend": "all_to_all", "max_model_len": 1024}
CASES = [("qwen3-30b-a3b", "v6e:2x4"), ("qwen3-235b-a22b", "v5p:2x4x4")]


def decode(model: str, topology: str, selection: str) -> ProgramReport:
    """Two layers; 64 sequences on every data rank."""
    case = case_of_model(
        model,
        topology,
        num_layers=NUM_LAYERS,
        values={**VALUES, "expert_selection": selection, "max_running_requests": BATCH},
    )
    (program,) = check(case, names=(f"decode_{BATCH}",)).programs
    assert program.error == "" and program.copies == [] and program.is_in_place
    return program


def gathered_bytes(program: ProgramReport) -> int:
    sizes = Counter()
    for exchange in program.collectives:
        sizes[exchange.operation] += exchange.num_bytes * exchange.times
    return sizes["all-gather"]


@pytest.mark.slow
def test_a_step_with_balanced_selection_decodes_without_copies():
    program = decode(*CASES[0], "balanced")
    assert_sound(program)
    assert "ragged-all-to-all" in {exchange.operation for exchange in program.collectives}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "topology"), CASES)
def test_balancing_takes_its_part_of_the_cycles(model, topology, record_property):
    plain, balanced = (decode(model, topology, selection) for selection in ("replicas_only", "balanced"))
    added = balanced.cycles.xla_cycles_once - plain.cycles.xla_cycles_once
    record_property("share_of_cycles", added / balanced.cycles.xla_cycles_once)
    record_property("cycles_per_layer", balanced.cycles.xla_cycles - plain.cycles.xla_cycles)
    assert 0 < added < 0.5 * balanced.cycles.xla_cycles_once, "with every loop counted once"
    num_ranks = 32 if "v5p" in topology else 8
    scores = NUM_LAYERS * num_ranks * BATCH * NUM_EXPERTS * 4
    assert 0 < gathered_bytes(balanced) - gathered_bytes(plain) <= 1.1 * scores, "scores, and who is valid"
