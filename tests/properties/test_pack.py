"""Whatever a plan holds, every token of it stands exactly once in the padded step, and padding touches nobody."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.config.settings import SchedulerSettings
from rayserve_moe.execution.buckets import choose_shape, step_shapes
from rayserve_moe.execution.pack import pack
from rayserve_moe.execution.row_state import RowState
from rayserve_moe.execution.step_types import StepShape
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS, PageTableChanges, RowSampling, StepPlan

LONGEST = 96


@st.composite
def schedulers(draw: st.DrawFn) -> SchedulerSettings:
    num_rows = draw(st.integers(1, 9))
    sizes = draw(st.sampled_from([(), (num_rows,), (1, num_rows), (3, 2, num_rows + 2)]))
    return SchedulerSettings(
        max_running_requests=num_rows,
        max_step_tokens=draw(st.integers(32, 200)),
        decode_batch_sizes=sizes if not sizes or max(sizes) >= num_rows else (*sizes, num_rows),
    )


@st.composite
def plans(draw: st.DrawFn, scheduler: SchedulerSettings) -> tuple[StepPlan, RowState]:
    """A plan such as the scheduler makes: each row at most once, longer chunks within the budget of whole blocks."""
    num_rows, page_size = scheduler.max_running_requests, draw(st.sampled_from([1, 4, 16, 48]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=num_rows, unique=True))
    blocks_left, lengths = scheduler.max_step_tokens // PREFILL_BLOCK_TOKENS, []
    for _ in chosen:
        length = min(draw(st.integers(1, LONGEST)), blocks_left * PREFILL_BLOCK_TOKENS) or 1
        blocks_left -= 0 if length == 1 else -(-length // PREFILL_BLOCK_TOKENS)
        lengths.append(length)
    lengths_array = np.asarray(lengths, np.int32)
    starts = generator.integers(0, LONGEST - lengths_array + 1).astype(np.int32)
    pages_per_row = -(-LONGEST // page_size)
    state = RowState(num_rows=num_rows, pages_per_row=pages_per_row, page_size=page_size)
    pages = generator.permutation(np.arange(1, num_rows * pages_per_row + 1)).astype(np.int32)
    rows, indices = np.divmod(np.arange(num_rows * pages_per_row, dtype=np.int32), pages_per_row)
    plan = StepPlan(
        step_id=0,
        chunk_rows=np.asarray(chosen, np.int32),
        chunk_starts=starts,
        chunk_lengths=lengths_array,
        token_ids=generator.integers(1, 1000, lengths_array.sum()).astype(np.int32),
        chunk_samples=generator.random(len(chosen)) < 0.6,
        pages=PageTableChanges(rows, indices, pages),
        sampling=RowSampling(
            np.arange(num_rows, dtype=np.int32),
            generator.random((num_rows, 3)).astype(np.float32),
            generator.integers(0, 2**32, (num_rows, 3)).astype(np.uint32),
        ),
    )
    state.apply(plan)
    return plan, state


@given(st.data())
def test_every_token_is_placed_once_with_its_position_page_and_sampling(data: st.DataObject):
    scheduler = data.draw(schedulers())
    plan, rows = data.draw(plans(scheduler))
    packed = pack(plan, rows, shapes=step_shapes(scheduler))
    batch, shape = packed.step_input.batch, packed.shape
    token_ids, positions, slots = (np.asarray(a) for a in (batch.token_ids_T, batch.positions_T, batch.kv_slots_T))
    page_table = np.asarray(batch.page_table_BP)
    assert len(token_ids) == len(positions) == len(slots) == shape.num_tokens
    assert len(page_table) == shape.num_singles + shape.num_blocks

    taken: set[int] = set()
    token = 0
    for chunk in range(plan.num_chunks):
        row = plan.chunk_rows[chunk]
        for offset in range(plan.chunk_lengths[chunk]):
            place, position = int(packed.token_places[token]), plan.chunk_starts[chunk] + offset
            assert place not in taken
            taken.add(place)
            assert token_ids[place] == plan.token_ids[token]
            assert positions[place] == position
            page, within = rows.page_table[row, position // rows.page_size], position % rows.page_size
            assert slots[place] == page * rows.page_size + within
            np.testing.assert_array_equal(page_table[_attention_block(place, shape)], rows.page_table[row])
            assert (place < shape.num_singles) == (plan.chunk_lengths[chunk] == 1)
            token += 1
    assert token == plan.num_tokens == len(packed.token_places)
    padding = [place for place in range(shape.num_tokens) if place not in taken]
    assert (positions[padding] == -1).all(), "padding attends to nothing"
    assert (slots[padding] < rows.page_size).all(), "padding is written to page 0"

    _check_samples(plan, rows, packed.step_input, packed.sample_places, packed.token_places)


def _check_samples(plan, rows, step_input, sample_places, token_places):
    ends = np.cumsum(plan.chunk_lengths)
    used: list[int] = []
    for chunk in range(plan.num_chunks):
        sample = int(sample_places[chunk])
        if not plan.chunk_samples[chunk]:
            assert sample == -1
            continue
        used.append(sample)
        sampling, row = step_input.sampling, plan.chunk_rows[chunk]
        assert step_input.sampled_tokens_S[sample] == token_places[ends[chunk] - 1]
        assert sampling.position_S[sample] == plan.chunk_starts[chunk] + plan.chunk_lengths[chunk]
        floats = [sampling.temperature_S[sample], sampling.top_p_S[sample], sampling.min_p_S[sample]]
        integers = [sampling.top_k_S[sample], sampling.seed_S[sample], sampling.choice_S[sample]]
        np.testing.assert_array_equal(floats, rows.sampling_floats[row])
        np.testing.assert_array_equal(integers, rows.sampling_integers[row])
    assert len(set(used)) == len(used), "two chunks share a sample"
    unused = np.setdiff1d(np.arange(len(step_input.sampled_tokens_S)), used)
    assert (np.asarray(step_input.sampling.temperature_S)[unused] == 0).all(), "padding costs no random numbers"


def _attention_block(place: int, shape: StepShape) -> int:
    if place < shape.num_singles:
        return place
    return shape.num_singles + (place - shape.num_singles) // shape.block_tokens


@given(st.data())
def test_the_largest_step_of_the_scheduler_has_a_shape(data: st.DataObject):
    scheduler = data.draw(schedulers())
    num_singles = data.draw(st.integers(0, scheduler.max_running_requests))
    num_blocks = data.draw(st.integers(0, scheduler.max_step_tokens // PREFILL_BLOCK_TOKENS))
    shapes = step_shapes(scheduler)
    chosen = choose_shape(shapes, num_singles=num_singles, num_blocks=num_blocks)
    assert chosen.num_singles >= num_singles and chosen.num_blocks >= num_blocks
    roomy = [s for s in shapes if s.num_singles >= num_singles and s.num_blocks >= num_blocks]
    assert chosen.num_tokens == min(shape.num_tokens for shape in roomy)
    assert len(set(shapes)) == len(shapes), "no shape is compiled twice"
