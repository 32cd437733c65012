"""Two slices, as libtpu compiles them: what is sent between them is what has to be."""

from __future__ import annotations

from functools import cache

import pytest

from rayserve_moe.config.settings import BalancingSettings
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.tools.compile_check import check
from rayserve_moe.tools.program_report import ProgramReport
from rayserve_moe.tools.served_cases import ServedCase, case_of_model, lay_out

pytestmark = pytest.mark.slow

MODEL, TOPOLOGY, SLICES, TENSOR, LAYERS, ROWS = "qwen3-30b-a3b", "v6e:2x4", 2, 2, 2, 16
SMALL = 32 << 10
"""Bytes: ids, counts, and what is known of the best tokens; less than the hidden states of eight tokens."""


def case_of(*, moves: bool) -> ServedCase:
    values = {"num_slices": SLICES, "enable_eplb": moves, "num_redundant_experts": 16 if moves else 0}
    return case_of_model(MODEL, TOPOLOGY, tp=TENSOR, num_layers=LAYERS, values={"max_model_len": 4096, **values})


@cache
def programs_of(*names: str, moves: bool) -> dict[str, ProgramReport]:
    report = check(case_of(moves=moves), names=names)
    assert all(not program.error for program in report.programs)
    return {program.name: program for program in report.programs}


def large(program: ProgramReport) -> list[tuple[str, int, int]]:
    """Transfer, bytes that a device hands over for the other slice, times."""
    return [(one.transfer, one.num_bytes, one.times) for one in program.crossings if one.num_bytes >= SMALL]


def served() -> ServedModel:
    return lay_out(case_of(moves=True))


def test_the_devices_of_a_tensor_group_share_a_slice():
    slices = [{device.slice_index for device in group} for group in served().config.plan.mesh.devices]
    assert [len(group) for group in slices] == [1] * 8 and set.union(*slices) == {0, 1}


def test_a_decoded_token_goes_to_the_other_slice_once_a_layer_and_its_sum_comes_back():
    """Attention sends nothing. Outside the layers rows of the embedding come, and tokens go to the vocabulary."""
    (decode,) = programs_of(f"decode_{ROWS}", moves=False).values()
    hidden = served().config.spec.hidden_size
    row = hidden * 2
    of_layers = {
        ("all-gather", ROWS // TENSOR * row, LAYERS),
        ("reduce-scatter", ROWS // TENSOR * 2 * row, LAYERS),
    }
    of_vocabulary = {("reduce-scatter", ROWS * row, 1), ("all-gather", ROWS * row, 1)}
    assert set(large(decode)) == of_layers | of_vocabulary


def test_rows_of_experts_that_may_move_are_exchanged_and_those_for_the_own_slice_stay_on_its_links():
    (decode,) = programs_of(f"decode_{ROWS}", moves=True).values()
    within = [one for one in decode.collectives if one.operation == "ragged-all-to-all" and one.group_size == 8]
    assert sum(one.times for one in within) >= 2 * LAYERS


def test_a_fetch_hands_over_only_the_slots_that_it_moves():
    programs = programs_of("fetch_slots", "swap_layer", moves=True)
    model = served()
    slot_bytes = 3 * model.config.spec.hidden_size * 768 * 2
    moved = sum(num_bytes * times for transfer, num_bytes, times in large(programs["fetch_slots"]))
    assert moved > 0
    most = BalancingSettings().slots_per_step
    offsets = 3 * (256 << 10)
    assert moved <= most * slot_bytes + offsets
    within = [one for one in programs["fetch_slots"].collectives if one.group_size == 8]
    assert {one.operation for one in within} == {"ragged-all-to-all"} and len(within) == 2
    assert programs["swap_layer"].crossings == []
