"""Whatever a plan holds, the devices see each of its tokens once, on its own pages, and padding touches nobody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.config.settings import SchedulerSettings
from rayserve_moe.execution.programs.buckets import step_shapes
from rayserve_moe.execution.step.inputs import DeviceInput, InputLayout, change_pages, unpack
from rayserve_moe.execution.step.pack import PackedStep, Packer, choose_shape
from rayserve_moe.execution.step.pytrees import DeviceState, StepShape
from rayserve_moe.execution.step.row_updates import apply_update, update_vectors
from rayserve_moe.scheduling.step_plan import (
    LAST_SAMPLED,
    NUM_FLOATS,
    NUM_INTEGERS,
    PREFILL_BLOCK_TOKENS,
    Chunks,
    PageTableChanges,
    RowSampling,
    StepPlan,
)
from tests.support.devices.rank_state import state_of_rows

LONGEST = 96
PAGE_SIZES = {3: 4, 7: 48}
SHAPES = {3: [(1, 0), (3, 0), (3, 5)], 7: [(7, 0), (7, 1), (7, 4)]}
"""Single tokens and prefill blocks of the compiled shapes, by rows of a data rank."""


@dataclass
class Rows:
    """What the rows of all data ranks should hold, [all rows, ...]; `state` is what goes to one rank's device."""

    page_size: int
    page_table: np.ndarray
    floats: np.ndarray
    integers: np.ndarray
    last_tokens: np.ndarray

    def state(self, rank: int, rows_per_rank: int) -> DeviceState:
        own = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        return state_of_rows(
            rows_per_rank,
            page_table_RP=self.page_table[own],
            sampling_floats_RF=self.floats[own],
            sampling_integers_RI=self.integers[own],
            last_tokens_R=self.last_tokens[own],
        )

    def apply(self, plan: StepPlan) -> None:
        self.page_table[plan.pages.rows, plan.pages.indices] = plan.pages.page_ids
        self.floats[plan.sampling.rows] = plan.sampling.floats
        self.integers[plan.sampling.rows] = plan.sampling.integers


@cache
def compiled_unpack(layout: InputLayout, page_size: int):
    def on_device(vector, rows):
        rows = replace(rows, page_table_RP=change_pages(rows, vector, layout=layout))
        return rows, unpack(vector, rows, layout=layout, page_size=page_size)

    return jax.jit(on_device)


compiled_update = jax.jit(apply_update)


def some(generator: np.random.Generator, count: int, share: float) -> np.ndarray:
    """Some of the numbers below `count`, in any order."""
    return generator.permutation(count)[: generator.binomial(count, share)]


def random_integers(generator: np.random.Generator, count: int) -> np.ndarray:
    """Integers of sampling parameters; some rows adjust nothing, and withhold words up to some position."""
    integers = generator.integers(0, 2**32, (count, NUM_INTEGERS))
    integers[:, 3] %= 2
    integers[:, 5] %= LONGEST
    return integers.astype(np.uint32)


def random_rows(generator: np.random.Generator, num_rows: int, page_size: int) -> Rows:
    width = -(-LONGEST // page_size)
    floats = generator.random((num_rows, NUM_FLOATS)).astype(np.float32)
    integers = random_integers(generator, num_rows)
    pages = generator.integers(1, 500, (num_rows, width)).astype(np.int32)
    return Rows(page_size, pages, floats, integers, generator.integers(1, 1000, num_rows).astype(np.int32))


def random_plan(data: st.DataObject, rows: Rows, *, rows_per_rank: int, num_ranks: int) -> StepPlan:
    """A plan such as the scheduler makes: a rank's chunks together, each row at most once, whole blocks that fit, forks
    after what they fork off."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    decodes, share = data.draw(st.booleans()), data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    num_rows, width = rows.page_table.shape
    chunk_rows, lengths, forks = [], [], data.draw(st.booleans())
    for rank in range(num_ranks):
        blocks_left = 0 if decodes else max(blocks for _, blocks in SHAPES[rows_per_rank])
        for place, row in enumerate(some(generator, rows_per_rank, 0.8)):
            if forks and place and generator.random() < 0.4:
                chunk_rows.append(rank * rows_per_rank + row)
                lengths.append(0)
                continue
            length = min(int(generator.integers(1, LONGEST)), blocks_left * PREFILL_BLOCK_TOKENS) or 1
            blocks_left -= 0 if length == 1 else -(-length // PREFILL_BLOCK_TOKENS)
            chunk_rows.append(rank * rows_per_rank + row)
            lengths.append(length)
    lengths_array = np.asarray(lengths, np.intp)
    token_ids = generator.integers(1, 1000, lengths_array.sum()).astype(np.int32)
    is_single = np.repeat(lengths_array == 1, lengths_array)
    token_ids[is_single & (generator.random(len(token_ids)) < 0.5)] = LAST_SAMPLED
    starts = generator.integers(0, LONGEST - lengths_array + 1)
    for chunk in np.flatnonzero(lengths_array == 0):
        starts[chunk] = starts[chunk - 1] + lengths_array[chunk - 1]
    changed_rows = some(generator, num_rows, share)
    new_rows = some(generator, num_rows, 0.0 if decodes and not forks else share)
    return StepPlan(
        step_id=0,
        chunks=Chunks(
            np.asarray(chunk_rows, np.intp),
            starts=starts,
            lengths=lengths_array,
            token_ids=token_ids,
            samples=generator.random(len(lengths)) < 0.6,
            num_forks=lengths.count(0),
        ),
        pages=PageTableChanges(
            changed_rows,
            generator.integers(0, width, len(changed_rows)),
            generator.integers(500, 900, len(changed_rows)).astype(np.int32),
        ),
        sampling=RowSampling(
            new_rows,
            generator.random((len(new_rows), NUM_FLOATS)).astype(np.float32),
            random_integers(generator, len(new_rows)),
        ),
    )


@given(st.data())
def test_the_devices_see_what_the_plan_says(data: st.DataObject):
    rows_per_rank, num_ranks = data.draw(st.sampled_from([*SHAPES])), data.draw(st.integers(1, 2))
    page_size = PAGE_SIZES[rows_per_rank]
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = random_rows(generator, num_ranks * rows_per_rank, page_size)
    plan = random_plan(data, rows, rows_per_rank=rows_per_rank, num_ranks=num_ranks)
    shapes = tuple(StepShape(*sizes, PREFILL_BLOCK_TOKENS) for sizes in SHAPES[rows_per_rank])
    packer = Packer(shapes, rows_per_rank=rows_per_rank, num_data_ranks=num_ranks)
    if plan.num_chunks == 0:
        return
    states = [rows.state(rank, rows_per_rank) for rank in range(num_ranks)]
    ways = [False, True] if packer.fits(plan) else [False]
    rows.apply(plan)
    for with_changes in ways:
        packed = packer.pack(plan, with_changes=with_changes)
        steps = []
        for rank, state in enumerate(states):
            for vector in [] if with_changes else update_vectors(plan, rows_per_rank=rows_per_rank):
                state = compiled_update(state, vector, data_rank=rank)
            state, step = compiled_unpack(packer.layouts[packed.shape], page_size)(packed.vectors[rank], state)
            own = rows.state(rank, rows_per_rank)
            jax.tree.map(np.testing.assert_array_equal, state, own)
            steps.append(jax.tree.map(np.asarray, step))
        check_tokens(plan, packed, steps, rows=rows)
        check_samples(plan, packed, steps, rows=rows)


def test_changes_go_along_with_decoding_and_ahead_of_prompts_and_new_rows():
    packer = Packer((StepShape(3, 0, 32), StepShape(3, 2, 32)), rows_per_rank=3, num_data_ranks=2)
    decode = StepPlan(0, Chunks(*map(np.array, ([0, 1, 4], [5, 6, 7], [1, 1, 1], [9, 9, 9], [True] * 3))))

    def changed(*at: int) -> PageTableChanges:
        return PageTableChanges(np.array(at), np.zeros(len(at), np.intp), np.ones(len(at), np.int32))

    assert packer.fits(decode) and packer.fits(replace(decode, pages=changed(0, 1, 4)))
    assert not packer.fits(replace(decode, pages=changed(0, 4, 5))), "more than the second rank has tokens"
    new_row = RowSampling(np.array([2]), np.zeros((1, NUM_FLOATS), np.float32), np.zeros((1, NUM_INTEGERS), np.uint32))
    assert not packer.fits(replace(decode, sampling=new_row))
    prompt = replace(
        decode, chunks=replace(decode.chunks, lengths=np.array([1, 2, 1]), token_ids=np.array([9, 9, 9, 9]))
    )
    assert not packer.fits(prompt)


def check_tokens(plan: StepPlan, packed: PackedStep, steps: list[DeviceInput], *, rows: Rows) -> None:
    shape = packed.shape
    taken: set[tuple[int, int]] = set()
    last_tokens = np.cumsum(plan.chunks.lengths)
    rows_per_rank = len(rows.last_tokens) // len(steps)
    for chunk, row in enumerate(plan.chunks.rows.tolist()):
        length, start = int(plan.chunks.lengths[chunk]), int(plan.chunks.starts[chunk])
        tokens = slice(last_tokens[chunk] - length, last_tokens[chunk])
        rank, batch = row // rows_per_rank, steps[row // rows_per_rank].batch
        places = packed.token_places[tokens] - rank * shape.num_tokens
        taken |= {(rank, place) for place in places.tolist()}
        assert ((places >= 0) & (places < shape.num_tokens)).all()
        assert ((places < shape.num_singles) == (length == 1)).all()
        expected = plan.chunks.token_ids[tokens]
        expected = np.where(expected == LAST_SAMPLED, rows.last_tokens[row], expected)
        positions = np.arange(start, start + length)
        pages, within = rows.page_table[row, positions // rows.page_size], positions % rows.page_size
        np.testing.assert_array_equal(batch.token_ids_T[places], expected)
        np.testing.assert_array_equal(batch.positions_T[places], positions)
        np.testing.assert_array_equal(batch.kv_slots_T[places], pages * rows.page_size + within)
        blocks = [attention_block(place, shape) for place in places.tolist()]
        assert (batch.page_table_BP[blocks] == rows.page_table[row]).all()
    assert len(taken) == plan.num_tokens == len(packed.token_places)
    for rank, step in enumerate(steps):
        padding = [place for place in range(shape.num_tokens) if (rank, place) not in taken]
        assert (step.batch.positions_T[padding] == -1).all(), "padding attends to nothing"
        assert (step.batch.kv_slots_T[padding] < rows.page_size).all(), "padding is written to page 0"


def check_samples(plan: StepPlan, packed: PackedStep, steps: list[DeviceInput], *, rows: Rows) -> None:
    num_samples = packed.shape.num_singles
    rows_per_rank = len(rows.last_tokens) // len(steps)
    last_tokens = np.cumsum(plan.chunks.lengths) - 1
    sampling_chunks = np.flatnonzero(plan.chunks.samples).tolist()
    assert len(set(packed.sample_places.tolist())) == len(sampling_chunks) == len(packed.sample_places)
    for chunk, at in zip(sampling_chunks, packed.sample_places.tolist(), strict=True):
        row, (rank, sample) = int(plan.chunks.rows[chunk]), divmod(at, num_samples)
        step, sampling = steps[rank], steps[rank].sampling
        assert step.sample_rows_S[sample] == row - rank * rows_per_rank
        place = packed.token_places[last_tokens[chunk]] - rank * packed.shape.num_tokens
        assert step.sample_places_S[sample] == place
        assert sampling.position_S[sample] == plan.chunks.starts[chunk] + plan.chunks.lengths[chunk]
        _, *penalties, withholds = step.penalties
        limits = sampling.limits
        floats = [a[sample] for a in (sampling.temperature_S, limits.top_p_S, limits.min_p_S, *penalties)]
        integers = [a[sample] for a in (limits.top_k_S, sampling.seed_S, sampling.choice_S)]
        np.testing.assert_array_equal(floats, rows.floats[row])
        np.testing.assert_array_equal(integers, rows.integers[row, :3])
        is_withheld = sampling.position_S[sample] < rows.integers[row, 5]
        assert withholds[sample] == is_withheld
        assert step.penalties.is_adjusted_S[sample] == (rows.integers[row, 3] > 0 or is_withheld)
        assert sampling.num_top_S[sample] == rows.integers[row, 4]
    for rank, step in enumerate(steps):
        unused = np.setdiff1d(np.arange(num_samples), packed.sample_places - rank * num_samples)
        assert (step.sampling.temperature_S[unused] == 0).all(), "padding costs no random numbers"
        assert (step.sample_rows_S[unused] == rows_per_rank).all(), "what padding samples is nobody's last token"


def attention_block(place: int, shape: StepShape) -> int:
    if place < shape.num_singles:
        return place
    return shape.num_singles + (place - shape.num_singles) // shape.block_tokens


@given(st.data())
def test_the_largest_step_of_the_scheduler_has_a_shape(data: st.DataObject):
    num_rows = data.draw(st.integers(1, 9))
    sizes = data.draw(st.sampled_from([(), (num_rows,), (1, num_rows), (3, 2, num_rows + 2)]))
    scheduler = SchedulerSettings(
        max_running_requests=num_rows,
        max_step_tokens=data.draw(st.integers(32, 200)),
        decode_batch_sizes=sizes if not sizes or max(sizes) >= num_rows else (*sizes, num_rows),
    )
    num_singles = data.draw(st.integers(0, num_rows))
    num_blocks = data.draw(st.integers(0, scheduler.max_step_tokens // PREFILL_BLOCK_TOKENS))
    shapes = step_shapes(scheduler)
    chosen = choose_shape(shapes, num_singles=num_singles, num_blocks=num_blocks)
    assert chosen.num_singles >= num_singles and chosen.num_blocks >= num_blocks
    roomy = [s for s in shapes if s.num_singles >= num_singles and s.num_blocks >= num_blocks]
    assert chosen.num_tokens == min(shape.num_tokens for shape in roomy)
    assert len(set(shapes)) == len(shapes), "no shape is compiled twice"
