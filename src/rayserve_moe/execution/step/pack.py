"""Packing of a StepPlan into the padded vectors of a compiled shape.

This is the only place that turns plans into device input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rayserve_moe.execution.step.inputs import InputLayout, Sections
from rayserve_moe.execution.step.page_copies import copy_vectors
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.replay.index_rows import unpacked_index
from rayserve_moe.requests.records import IndexLayout
from rayserve_moe.scheduling.record_copies import with_fields
from rayserve_moe.scheduling.step_plan import MAX_FORCED_CHOICES, BlockWork, Chunks, PageTableChanges, StepPlan

_NO_TOKEN = 1 << 30
"""Number of a token beyond every step."""


@dataclass(frozen=True)
class PackedBlocks:
    """Forced routing of tokens in prefill blocks."""

    forced: np.ndarray | None
    """int16 [ranks, MoE layers, block tokens, k], -1 for tokens left to the router; None without forced routing."""
    gates: np.ndarray | None = None
    """Weights of these experts, float32 of the same shape, NaN for none; None without forced weights."""
    choices: tuple[np.ndarray, np.ndarray] | None = None
    """Forced choices of an index, int32 [ranks, F] and [ranks, indexer layers, F, top_k], as `ForcedChoices`; None
    without any."""


@dataclass(frozen=True)
class PackedStep:
    """A step ready to run, with the mapping back to its plan. It shares no memory with the plan."""

    step_id: int
    shape: StepShape
    vectors: np.ndarray
    """Input vectors, int32 [data ranks, W]."""
    token_places: np.ndarray
    """Index of each token of the plan among the tokens of all ranks, padding included."""
    sample_places: np.ndarray
    """Index of each sample of the plan among the samples of all ranks."""
    blocks: PackedBlocks | None = None
    """Forced routing, or None."""
    held: np.ndarray | None = None
    """Inputs of deferred samples, int32 [data ranks, 3, S] (`sample_held`); the vectors then have no samples."""
    probed_places: np.ndarray | None = None
    """Index of each probed token among the tokens of all ranks; None without a probe."""
    copies: tuple[np.ndarray, ...] = ()
    """Vectors of pages to copy after the step."""


def forced_choice_shapes(layout: IndexLayout, *, num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of `PackedBlocks.choices`."""
    num_layers, count = len(layout.layer_ids), MAX_FORCED_CHOICES
    return (num_ranks, count), (num_ranks, num_layers, count, layout.top_k)


def unforced(layout: IndexLayout, *, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `PackedBlocks.choices` without any choice: tokens beyond every step."""
    tokens, chosen = forced_choice_shapes(layout, num_ranks=num_ranks)
    return np.full(tokens, _NO_TOKEN, np.int32), np.full(chosen, -1, np.int32)


class _Cut(NamedTuple):
    """Chunks of a plan as single tokens and blocks of a shape, an element per chunk."""

    shape: StepShape
    ranks: np.ndarray
    rows: np.ndarray
    """Rows within their ranks."""
    is_single: np.ndarray
    takes_blocks: np.ndarray
    """True for chunks in blocks; others are single tokens or empty."""
    blocks: np.ndarray
    """Numbers of blocks."""
    singles_before: np.ndarray
    blocks_before: np.ndarray
    samples_before: np.ndarray
    """Numbers of single tokens, blocks and samples of earlier chunks of the same rank."""


class Packer:
    """Packer of plans for ranks of `rows_per_rank` rows into the compiled `shapes`."""

    def __init__(
        self,
        shapes: tuple[StepShape, ...],
        *,
        rows_per_rank: int,
        num_data_ranks: int = 1,
        num_tables: int = 1,
        tells_nexts: bool = False,
        index: IndexLayout | None = None,
    ) -> None:
        self._index = index
        self.rows_per_rank, self._num_ranks, self._num_tables = rows_per_rank, num_data_ranks, num_tables
        self._block_tokens, self._tells_nexts = shapes[0].block_tokens, tells_nexts
        self.layouts = {shape: InputLayout(shape, rows_per_rank, num_tables, tells_nexts) for shape in shapes}
        self.use(shapes)
        self._places = np.arange(max(shape.num_singles for shape in shapes))

    def use(self, shapes: Sequence[StepShape]) -> None:
        """Restrict the choice to these of its shapes from now on. May be called from any thread."""
        decode = [self.layouts[shape] for shape in shapes if shape.num_blocks == 0 and not shape.num_adapters]
        decode.sort(key=lambda layout: _size(layout.shape))
        self._decode_layouts = decode, [layout for layout in decode if not layout.shape.drafts_rest]
        self.shapes = tuple(shapes)

    def fits(self, plan: StepPlan) -> bool:
        """Return True if the plan's changes fit beside its tokens; otherwise they must be applied before the step."""
        if len(plan.sampling.rows) or plan.has_blocks:
            return False
        if self._num_ranks == 1:
            return len(plan.pages.rows) <= plan.num_chunks * self._num_tables
        changes, singles = (
            np.bincount(rows // self.rows_per_rank, minlength=self._num_ranks)
            for rows in (plan.pages.rows, plan.chunks.rows)
        )
        return bool((changes <= singles * self._num_tables).all())

    def pack(self, plan: StepPlan, *, with_changes: bool) -> PackedStep:
        """Pack the plan's chunks: on each rank single tokens first, then every longer chunk in whole blocks."""
        packed = self._packed(plan, with_changes=with_changes)
        if plan.probe is not None:
            packed = replace(packed, probed_places=packed.token_places[plan.probe.tokens])
        return self._held(plan, packed) if plan.holds_samples else packed

    def _packed(self, plan: StepPlan, *, with_changes: bool) -> PackedStep:
        planned = plan.chunks
        if self._num_ranks == 1 and plan.adapters is None and not plan.has_blocks and not planned.num_forks:
            return self._pack_singles(plan, with_changes=with_changes)
        cut, lengths = self._cut(plan), planned.lengths
        shape, at = cut.shape, self.layouts[cut.shape].slices
        vectors = np.repeat(self.layouts[shape].padding[None], self._num_ranks, axis=0)
        self._fill_chunks(vectors, plan, cut=cut, at=at)

        blocks_at = shape.num_singles + cut.blocks_before * self._block_tokens
        places = np.where(cut.takes_blocks, blocks_at, cut.singles_before)
        token_places = np.repeat(cut.ranks * shape.num_tokens + places, lengths) + _offsets(lengths)
        ids = np.zeros((self._num_ranks, shape.num_tokens), np.int32)
        ids.reshape(-1)[token_places] = planned.token_ids
        vectors[:, at.single_ids], vectors[:, at.block_ids] = np.split(ids, [shape.num_singles], axis=1)

        chunks = np.flatnonzero(planned.samples)
        of_samples = cut.ranks[chunks], cut.samples_before[chunks]
        vectors[:, at.sample_places][of_samples] = (places + lengths - 1)[planned.sources[chunks]]
        vectors[:, at.sample_rows][of_samples] = cut.rows[chunks]
        if with_changes:
            self._fill_changes(vectors, plan.pages, at=at)
        sample_places = cut.ranks[chunks] * shape.num_singles + cut.samples_before[chunks]
        packed_blocks = _pack_blocks(plan.block_work, token_places, shape, self._num_ranks)
        if packed_blocks is not None and plan.block_work.forced_index is not None:
            packed_blocks = replace(packed_blocks, choices=self._choices(plan.block_work, token_places, shape))
        copies = tuple(copy_vectors(plan, rows_per_rank=self.rows_per_rank)) if planned.num_forks else ()
        return PackedStep(plan.step_id, shape, vectors, token_places, sample_places, packed_blocks, copies=copies)

    def _cut(self, plan: StepPlan) -> _Cut:
        """Cut the plan's chunks into single tokens and blocks, and choose the shape that holds them."""
        chunks = plan.chunks
        ranks, rows = np.divmod(chunks.rows, self.rows_per_rank)
        takes_blocks = chunks.lengths > 1
        takes_blocks[plan.block_work.chunks] = True
        blocks = np.where(takes_blocks, -(-chunks.lengths // self._block_tokens), 0)
        is_single = ~takes_blocks & (chunks.lengths > 0)
        singles_before, num_singles = self._on_ranks(is_single, ranks)
        blocks_before, num_blocks = self._on_ranks(blocks, ranks)
        samples_before, num_samples = self._on_ranks(chunks.samples, ranks)
        shapes = [
            shape
            for shape in self.shapes
            if bool(shape.num_adapters) == (plan.adapters is not None) and not (shape.drafts_rest and plan.wants_drafts)
        ]
        shape = choose_shape(shapes, num_singles=max(*num_singles, *num_samples), num_blocks=max(num_blocks))
        return _Cut(shape, ranks, rows, is_single, takes_blocks, blocks, singles_before, blocks_before, samples_before)

    def _fill_chunks(self, vectors: np.ndarray, plan: StepPlan, *, cut: _Cut, at: Sections) -> None:
        """Set rows, positions, adapters and next ids of single tokens and blocks."""
        starts, lengths, block, ranks = plan.chunks.starts, plan.chunks.lengths, self._block_tokens, cut.ranks
        singles = np.flatnonzero(cut.is_single)
        of_singles = ranks[singles], cut.singles_before[singles]
        vectors[:, at.single_rows][of_singles] = cut.rows[singles]
        vectors[:, at.single_positions][of_singles] = starts[singles]
        chunks, index = np.repeat(np.arange(len(cut.blocks)), cut.blocks), _offsets(cut.blocks)
        of_blocks = ranks[chunks], cut.blocks_before[chunks] + index
        vectors[:, at.block_rows][of_blocks] = cut.rows[chunks]
        vectors[:, at.block_starts][of_blocks] = starts[chunks] + index * block
        vectors[:, at.block_counts][of_blocks] = np.minimum(lengths[chunks] - index * block, block)
        if plan.adapters is not None:
            index_of = _fill_adapters(vectors, plan.adapters.slots, ranks, at=at)
            places_of = vectors[:, at.adapter_places]
            places_of[of_singles] = index_of[singles]
            places_of[of_blocks[0], cut.shape.num_singles + of_blocks[1]] = index_of[chunks]
        if self._tells_nexts and plan.next_ids is not None:
            longer = np.flatnonzero(cut.takes_blocks)
            last_blocks = (cut.blocks_before + cut.blocks - 1)[longer]
            vectors[:, at.block_nexts][ranks[longer], last_blocks] = plan.next_ids[longer]

    def _choices(self, work: BlockWork, token_places: np.ndarray, shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
        """Return the forced choices of an index, as `PackedBlocks.choices`."""
        layout, rows = self._index, work.forced_index
        assert layout is not None and rows is not None, "choices are forced on a server that captures them"
        tokens_NF, chosen_NIFK = unforced(layout, num_ranks=self._num_ranks)
        ranks, tokens = np.divmod(token_places[work.forced_tokens], shape.num_tokens)
        counts = [0] * self._num_ranks
        for rank, token, row in zip(ranks.tolist(), tokens - shape.num_singles, rows.entries(), strict=True):
            if len(row):
                place, counts[rank] = counts[rank], counts[rank] + 1
                tokens_NF[rank, place] = token
                chosen_NIFK[rank, :, place] = unpacked_index(
                    row.tobytes(), num_layers=len(layout.layer_ids), top_k=layout.top_k
                )
        return tokens_NF, chosen_NIFK

    def _pack_singles(self, plan: StepPlan, *, with_changes: bool) -> PackedStep:
        """Pack a decode step of a single rank, the common case, in few calls."""
        chunks = plan.chunks
        count, rows = len(chunks.rows), chunks.rows
        layouts = self._decode_layouts[plan.wants_drafts]
        layout = next(layout for layout in layouts if layout.shape.num_singles >= count)
        vector, at, places = layout.padding.copy(), layout.slices, self._places[:count]
        num_samples = np.count_nonzero(chunks.samples)
        samples = places if num_samples == count else np.flatnonzero(chunks.samples)
        for section, values in (
            (at.single_rows, rows),
            (at.single_positions, chunks.starts),
            (at.single_ids, chunks.token_ids),
            (at.sample_places, samples),
            (at.sample_rows, rows[samples]),
        ):
            vector[section.start : section.start + len(values)] = values
        vectors = vector[None]
        if with_changes:
            self._fill_changes(vectors, plan.pages, at=at)
        return PackedStep(plan.step_id, layout.shape, vectors, places, self._places[:num_samples])

    def _held(self, plan: StepPlan, packed: PackedStep) -> PackedStep:
        """Return the step without its samples, and with the inputs to draw them later."""
        chunks, num_ranks = plan.chunks, self._num_ranks
        rows, ends, ids = _sampled(chunks)
        assert ends.min(initial=1) > 0, "deferred samples need positions that the host knows"
        held = np.zeros((3, num_ranks * packed.shape.num_singles), np.int32)
        held[0] = self.rows_per_rank
        held[:, packed.sample_places] = rows if num_ranks == 1 else rows % self.rows_per_rank, ends, ids
        packed.vectors[:, self.layouts[packed.shape].slices.sample_rows] = self.rows_per_rank
        by_rank = held[None] if num_ranks == 1 else held.reshape(3, num_ranks, -1).swapaxes(0, 1)
        return with_fields(packed, held=by_rank)

    def _on_ranks(self, counts: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums of `counts` over the previous chunks of the same rank, and over all chunks of each rank."""
        totals = np.concatenate([[0], np.cumsum(counts)])
        borders = totals[np.searchsorted(ranks, np.arange(self._num_ranks + 1))]
        return totals[:-1] - borders[ranks], np.diff(borders)

    def _fill_changes(self, vectors: np.ndarray, pages: PageTableChanges, *, at: Sections) -> None:
        if len(pages.rows) == 0:
            return
        for rank, vector in enumerate(vectors):
            rows, indices, page_ids = pages.rows, pages.indices, pages.page_ids
            if self._num_ranks > 1:
                here = rows // self.rows_per_rank == rank
                rows, indices, page_ids = rows[here] - rank * self.rows_per_rank, indices[here], page_ids[here]
            vector[at.change_rows][: len(rows)] = rows
            vector[at.change_indices][: len(rows)] = indices
            vector[at.change_pages][: len(rows)] = page_ids


def _sampled(chunks: Chunks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, position of the new token, and last token of the chunks that sample, each [S]."""
    rows, starts, ids = chunks.rows, chunks.starts, chunks.token_ids
    has_one_each = len(ids) == len(rows) and not chunks.num_forks
    if has_one_each and chunks.samples.all():
        return rows, starts + 1, ids
    samples = np.flatnonzero(chunks.samples)
    last = samples if has_one_each else np.cumsum(chunks.lengths)[samples] - 1
    return rows[samples], starts[samples] + chunks.lengths[samples], ids[last]


def _fill_adapters(vectors: np.ndarray, slots: np.ndarray, ranks: np.ndarray, *, at: Sections) -> np.ndarray:
    """Set the adapters of each rank; return for each chunk the index of its adapter among them, -1 for none."""
    index_of = np.full(len(slots), -1, np.int32)
    for rank, vector in enumerate(vectors[:, at.adapter_slots]):
        here = np.flatnonzero((ranks == rank) & (slots >= 0))
        used, index_of[here] = np.unique(slots[here], return_inverse=True)
        assert len(used) <= len(vector), f"steps are compiled for {len(vector)} adapters, not {len(used)}"
        vector[: len(used)] = used
    return index_of


def choose_shape(shapes: Sequence[StepShape], *, num_singles: int, num_blocks: int) -> StepShape:
    """Return the shape with the fewest tokens that holds the plan; the scheduler never exceeds the largest shape."""
    fitting = [s for s in shapes if s.num_singles >= num_singles and s.num_blocks >= num_blocks]
    assert fitting, f"no compiled shape holds {num_singles} single tokens and {num_blocks} prefill blocks"
    return min(fitting, key=_size)


def _size(shape: StepShape) -> tuple[int, bool]:
    """Return the sort key of shapes: fewer tokens first, then shapes without drafts."""
    return shape.num_tokens, not shape.drafts_rest


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Return the index of each element within its run, for runs of these lengths."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _pack_blocks(work: BlockWork, token_places: np.ndarray, shape: StepShape, num_ranks: int) -> PackedBlocks | None:
    """Pack forced routing; `token_places` are the locations of the plan's tokens."""
    if len(work.chunks) == 0:
        return None
    num_tokens = shape.num_blocks * shape.block_tokens
    if work.forced_rows is None:
        return PackedBlocks(None)
    _, num_layers, top_k = work.forced_rows.shape
    of_ranks, of_tokens = np.divmod(token_places[work.forced_tokens], shape.num_tokens)

    def by_layer(rows: np.ndarray, dtype: type, none: float) -> np.ndarray:
        values = np.full((num_ranks, num_layers, num_tokens, top_k), none, dtype)
        values.transpose(0, 2, 1, 3)[of_ranks, of_tokens - shape.num_singles] = rows
        return values

    gates = None if work.forced_gates is None else by_layer(work.forced_gates, np.float32, np.nan)
    return PackedBlocks(by_layer(work.forced_rows, np.int16, -1), gates)
