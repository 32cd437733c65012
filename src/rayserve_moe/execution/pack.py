"""From a StepPlan to the padded vectors of a compiled shape. The only place where plans become device input."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rayserve_moe.execution.buckets import choose_shape
from rayserve_moe.execution.step_input import InputLayout, Sections
from rayserve_moe.execution.step_types import StepShape
from rayserve_moe.scheduling.step_plan import BlockWork, StepPlan


@dataclass(frozen=True)
class PackedBlocks:
    """What is asked of tokens in prefill blocks, -1 where nothing is; None where nothing of a kind is asked at all.

    `targets` int32 [ranks, block tokens]; `forced` int16 [ranks, MoE layers, block tokens, k]. `score_places[i]` is
    where the plan's i-th score comes out among those of all ranks.
    """

    targets: np.ndarray | None
    forced: np.ndarray | None
    score_places: np.ndarray


@dataclass(frozen=True)
class PackedStep:
    """A step ready to run, and the way back.

    `vectors` int32 [data ranks, W]. `token_places[i]` is where the plan's i-th token stands among the tokens of all
    ranks, padding included; `sample_places[s]` where its s-th sample comes out among the samples of all ranks. `blocks`
    is what is asked of tokens in prefill blocks, where something is.
    """

    shape: StepShape
    vectors: np.ndarray
    token_places: np.ndarray
    sample_places: np.ndarray
    blocks: PackedBlocks | None = None


@dataclass(frozen=True)
class _RankPart:
    """Which chunks, tokens, samples of a plan are those of one data rank, and how many blocks each chunk takes."""

    rank: int
    chunks: slice
    tokens: slice
    samples: slice
    num_singles: int
    blocks_of_chunk: np.ndarray


class Packer:
    """Lays out plans for ranks of `rows_per_rank` rows in one of the compiled `shapes`."""

    def __init__(self, shapes: tuple[StepShape, ...], *, rows_per_rank: int, num_data_ranks: int = 1) -> None:
        self._rows_per_rank, self._num_ranks = rows_per_rank, num_data_ranks
        self._block_tokens = shapes[0].block_tokens
        self.layouts = {shape: InputLayout(shape, rows_per_rank) for shape in shapes}
        decode = [layout for shape, layout in self.layouts.items() if shape.num_blocks == 0]
        self._decode_layouts = sorted(decode, key=lambda layout: layout.shape.num_singles)
        self._places = np.arange(rows_per_rank)

    def fits(self, plan: StepPlan) -> bool:
        """Whether the changes of a plan fit beside its tokens; otherwise they have to go ahead of it."""
        if len(plan.sampling.rows) or plan.has_blocks:
            return False
        if self._num_ranks == 1:
            return len(plan.pages.rows) <= plan.num_chunks
        changes, singles = (
            np.bincount(rows // self._rows_per_rank, minlength=self._num_ranks)
            for rows in (plan.pages.rows, plan.chunk_rows)
        )
        return bool((changes <= singles).all())

    def pack(self, plan: StepPlan, *, with_changes: bool) -> PackedStep:
        """Lay out the plan's chunks: on each rank single tokens first, then every longer chunk in whole blocks."""
        if self._num_ranks == 1 and not plan.has_blocks:
            return self._pack_singles(plan, with_changes=with_changes)
        parts = list(self._parts(plan))
        num_blocks = [int(part.blocks_of_chunk.sum()) for part in parts]
        shape = choose_shape(
            tuple(self.layouts), num_singles=max(p.num_singles for p in parts), num_blocks=max(num_blocks)
        )
        layout = self.layouts[shape]
        vectors = np.repeat(layout.padding[None], self._num_ranks, axis=0)
        token_places, sample_places = [], []
        for part, vector in zip(parts, vectors, strict=True):
            sections = layout.sections(vector)
            places = self._fill(sections, plan, part, shape)
            token_places.append(places + part.rank * shape.num_tokens)
            num_samples = part.samples.stop - part.samples.start
            sample_places.append(np.arange(num_samples) + part.rank * shape.num_singles)
            if with_changes:
                self._fill_changes(sections, plan, part.rank)
        all_places = np.concatenate(token_places)
        blocks = _pack_blocks(plan.block_work, all_places, shape, self._num_ranks)
        return PackedStep(shape, vectors, all_places, np.concatenate(sample_places), blocks)

    def _pack_singles(self, plan: StepPlan, *, with_changes: bool) -> PackedStep:
        """The common case, decoding on one rank: what `pack` does, in few calls."""
        count, rows = plan.num_chunks, plan.chunk_rows
        layout = next(layout for layout in self._decode_layouts if layout.shape.num_singles >= count)
        vector, at, places = layout.padding.copy(), layout.slices, self._places[:count]
        for section, values in (
            (at.single_rows, rows),
            (at.single_positions, plan.chunk_starts),
            (at.single_ids, plan.token_ids),
        ):
            vector[section.start : section.start + count] = values
        num_samples = np.count_nonzero(plan.chunk_samples)
        samples = places if num_samples == count else np.flatnonzero(plan.chunk_samples)
        vector[at.sample_places.start : at.sample_places.start + num_samples] = samples
        vector[at.sample_rows.start : at.sample_rows.start + num_samples] = rows[samples]
        if with_changes and len(plan.pages.rows):
            self._fill_changes(layout.sections(vector), plan, 0)
        return PackedStep(layout.shape, vector[None], places, self._places[:num_samples])

    def _parts(self, plan: StepPlan) -> list[_RankPart]:
        """Cut a plan into its ranks' parts."""
        borders = np.searchsorted(plan.chunk_rows // self._rows_per_rank, np.arange(self._num_ranks + 1))
        tokens_before = np.concatenate([[0], np.cumsum(plan.chunk_lengths)])
        samples_before = np.concatenate([[0], np.cumsum(plan.chunk_samples)])
        takes_blocks = plan.chunk_lengths > 1
        takes_blocks[plan.block_work.chunks] = True
        parts = []
        for rank, (first, last) in enumerate(pairwise(borders.tolist())):
            lengths = plan.chunk_lengths[first:last]
            blocks = np.where(takes_blocks[first:last], -(-lengths // self._block_tokens), 0)
            spans = (slice(int(before[first]), int(before[last])) for before in (tokens_before, samples_before))
            parts.append(_RankPart(rank, slice(first, last), *spans, int((blocks == 0).sum()), blocks))
        return parts

    def _fill(self, sections: Sections[np.ndarray], plan: StepPlan, part: _RankPart, shape: StepShape) -> np.ndarray:
        """Write one rank's chunks into its vector; returns the places of its tokens, int [tokens]."""
        rows = plan.chunk_rows[part.chunks] - part.rank * self._rows_per_rank
        token_ids, lengths = plan.token_ids[part.tokens], plan.chunk_lengths[part.chunks]
        samples = plan.chunk_samples[part.chunks]
        chunk_places = self._fill_chunks(sections, plan, part, rows)
        offsets = np.arange(len(token_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        token_places = np.repeat(chunk_places, lengths) + offsets
        is_in_block = token_places >= shape.num_singles
        sections.single_ids[token_places[~is_in_block]] = token_ids[~is_in_block]
        sections.block_ids[token_places[is_in_block] - shape.num_singles] = token_ids[is_in_block]
        last_places = chunk_places + lengths - 1
        num_samples = part.samples.stop - part.samples.start
        sections.sample_places[:num_samples] = last_places[samples]
        sections.sample_rows[:num_samples] = rows[samples]
        return token_places

    def _fill_chunks(
        self, sections: Sections[np.ndarray], plan: StepPlan, part: _RankPart, rows: np.ndarray
    ) -> np.ndarray:
        """Describe single tokens and blocks; returns the place of each chunk's first token."""
        blocks, block = part.blocks_of_chunk, self._block_tokens
        starts, lengths = plan.chunk_starts[part.chunks], plan.chunk_lengths[part.chunks]
        is_single = blocks == 0
        sections.single_rows[: part.num_singles] = rows[is_single]
        sections.single_positions[: part.num_singles] = starts[is_single]
        num_blocks, first_block = int(blocks.sum()), np.cumsum(blocks) - blocks
        block_in_chunk = np.arange(num_blocks) - np.repeat(first_block, blocks)
        sections.block_rows[:num_blocks] = np.repeat(rows, blocks)
        sections.block_starts[:num_blocks] = np.repeat(starts, blocks) + block_in_chunk * block
        sections.block_counts[:num_blocks] = np.minimum(np.repeat(lengths, blocks) - block_in_chunk * block, block)
        singles_before = np.cumsum(is_single) - 1
        return np.where(is_single, singles_before, len(sections.single_rows) + first_block * block)

    def _fill_changes(self, sections: Sections[np.ndarray], plan: StepPlan, rank: int) -> None:
        pages = plan.pages
        if len(pages.rows) == 0:
            return
        rows = pages.rows - rank * self._rows_per_rank
        if self._num_ranks > 1:
            here = (rows >= 0) & (rows < self._rows_per_rank)
            rows, indices, page_ids = rows[here], pages.indices[here], pages.page_ids[here]
        else:
            indices, page_ids = pages.indices, pages.page_ids
        count = len(rows)
        sections.change_rows[:count] = rows
        sections.change_indices[:count] = indices
        sections.change_pages[:count] = page_ids


def _pack_blocks(work: BlockWork, token_places: np.ndarray, shape: StepShape, num_ranks: int) -> PackedBlocks | None:
    """Lay out what is asked of tokens; `token_places` are those of the plan's tokens."""
    if len(work.chunks) == 0:
        return None
    num_tokens = shape.num_blocks * shape.block_tokens
    targets = forced = None
    ranks, places = np.divmod(token_places[work.score_tokens], shape.num_tokens)
    places -= shape.num_singles
    if len(places):
        targets = np.full((num_ranks, num_tokens), -1, np.int32)
        targets[ranks, places] = work.score_targets
    if work.forced_rows is not None:
        _, num_layers, top_k = work.forced_rows.shape
        of_ranks, of_tokens = np.divmod(token_places[work.forced_tokens], shape.num_tokens)
        forced = np.full((num_ranks, num_layers, num_tokens, top_k), -1, np.int16)
        forced.transpose(0, 2, 1, 3)[of_ranks, of_tokens - shape.num_singles] = work.forced_rows
    return PackedBlocks(targets, forced, ranks * num_tokens + places)
