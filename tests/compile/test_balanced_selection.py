"""A balanced selection compiles into a step for TPUs: what it adds are its own cycles and one gather of scores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rayserve_moe.tools.compile_check import ProgramReport, check
from rayserve_moe.tools.presets import read_config
from rayserve_moe.tools.step_programs import ServedSetting
from tests.compile.test_compile_check import assert_sound

NUM_LAYERS, NUM_EXPERTS, BATCH = 2, 128, 64
CASES = [
    ("qwen3-30b-a3b", ServedSetting("v6e:2x4", redundant_experts=32, expert_backend="all_to_all")),
    ("qwen3-235b-a22b", ServedSetting("v5p:2x4x4", redundant_experts=32, expert_backend="all_to_all")),
]


def decode(model: str, setting: ServedSetting, selection: str) -> ProgramReport:
    """Two layers; 64 sequences on every data rank."""
    setting = replace(setting, expert_selection=selection, batch=BATCH, context=1024)
    (program,) = check(
        read_config(model, num_layers=NUM_LAYERS), setting, model=model, names=("decode_forward",)
    ).programs
    assert program.error == "" and program.copies == [] and program.is_in_place
    return program


def gathered_bytes(program: ProgramReport) -> int:
    sizes = Counter()
    for exchange in program.collectives:
        sizes[exchange.operation] += exchange.num_bytes * exchange.times
    return sizes["all-gather"]


def test_a_step_with_balanced_selection_decodes_without_copies():
    program = decode(*CASES[0], "balanced")
    assert_sound(program)
    assert "ragged-all-to-all" in {exchange.operation for exchange in program.collectives}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setting"), CASES)
def test_balancing_takes_its_part_of_the_cycles(model, setting, record_property):
    plain, balanced = (decode(model, setting, selection) for selection in ("replicas_only", "balanced"))
    added = balanced.xla_cycles_once - plain.xla_cycles_once
    record_property("share_of_cycles", added / balanced.xla_cycles_once)
    record_property("cycles_per_layer", balanced.xla_cycles - plain.xla_cycles)
    assert 0 < added < 0.5 * balanced.xla_cycles_once, "with every loop counted once"
    num_ranks = 32 if "v5p" in setting.topology else 8
    scores = NUM_LAYERS * num_ranks * BATCH * NUM_EXPERTS * 4
    assert 0 < gathered_bytes(balanced) - gathered_bytes(plain) <= 1.1 * scores, "scores, and who is valid"
