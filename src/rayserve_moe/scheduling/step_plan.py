"""The plan of one step for all hosts, and its result.

Both are small frozen records of numpy arrays: they travel to every host each step, so a plan holds only what
changed. A plan without chunks computes nothing and only collects the result of the step before it.

A chunk is a run of tokens of one sequence: `rows[c]` of `Chunks` is its row, its tokens sit at positions
`starts[c] .. starts[c] + lengths[c] - 1`, and the tokens of all chunks follow each other in `token_ids`. Where
`samples[c]`, the chunk ends at the last expected token and the next one is sampled. A token id of LAST_SAMPLED stands
for the token that was sampled last in that row: it may not have left the device yet.
A choice that forks off another has a chunk of no tokens behind the one that ends their prompt: it samples there too.
Where that is inside a page, the page of the other's row is copied to its own after the step.
A sequence whose drafts are verified has 1 + n chunks of one token each, next to each other: its last token, then the
drafts, each one position after the chunk before it. All sample, each as if the drafts before it were sampled tokens,
and count while those are.
Where the step before has drafts of that sequence too, and has not come back, only the devices know where it has got to:
such chunks are awaited. Their starts are AWAITED - d, for d behind the token that counts last, and a draft's id is
DRAFTED, for what the draft model has said of the row.

Rows are numbered over all data-parallel ranks: rank r has the rows `r * rows_per_rank .. (r + 1) * rows_per_rank - 1`.
The chunks of a rank stand together, ranks in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.balancing.migration import FailedFetch, MigrationPiece
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.requests.columns import Columns
from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.scheduling.token_probe import TokenProbe
from rayserve_moe.state.groups import EntryGroup, PageGroup

LAST_SAMPLED = -1
DRAFTED = AWAITED = -2

PREFILL_BLOCK_TOKENS = 32
"""Chunks of more than one token, and those of which more is asked, take up whole blocks of this many tokens."""

MAX_WITHHELD_IDS = 128
"""Ids that one request can withhold from its first tokens."""
WITHHELD = -np.inf
"""The bias of an id that is withheld."""

ALLOWED = np.inf
"""The bias of an id that is allowed where others are not."""


def _empty(dtype: type, columns: int | None = None) -> np.ndarray:
    return np.zeros((0,) if columns is None else (0, columns), dtype)


@dataclass(frozen=True)
class PageTableChanges:
    """Entries to set: row `rows[i]` keeps page `page_ids[i]` at index `indices[i]`. All integer [P].

    Page i of a sequence stands at index i. With G page tables (`PageGroup`), page i of table g stands at index
    i * G + g. Entries of pages that a state has released stay as they were: no query sees them.
    """

    rows: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    indices: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    page_ids: np.ndarray = field(default_factory=lambda: _empty(np.int32))


class RowFloats(NamedTuple):
    """Columns of float parameters, of one row or of several; as in `SamplingParams`, by default without effect."""

    temperature: Any = 0.0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0


class RowIntegers(NamedTuple):
    """Columns of integer parameters, of one row or of several.

    `adjusts`: whether logits are adjusted at all positions; `num_top`: likeliest tokens returned; `first_end`: the
    first position where withheld ids may stand.
    """

    top_k: Any = 0
    seed: Any = 0
    choice: Any = 0
    adjusts: Any = 0
    num_top: Any = 0
    first_end: Any = 0


NUM_FLOATS, NUM_INTEGERS = len(RowFloats._fields), len(RowIntegers._fields)


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of rows taken by new sequences.

    `rows` int32 [S]; `floats` float32 [S, F] has the columns of `RowFloats`, `integers` uint32 [S, I] those of
    `RowIntegers`.
    """

    rows: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    floats: np.ndarray = field(default_factory=lambda: _empty(np.float32, NUM_FLOATS))
    integers: np.ndarray = field(default_factory=lambda: _empty(np.uint32, NUM_INTEGERS))


@dataclass(frozen=True)
class RowAdjustment:
    """What a new row's logits are adjusted by: the tokens that penalties count, int32, and biases by token id.

    A bias of WITHHELD counts up to the first position where withheld ids may stand. Those of ALLOWED come first: where
    there are any, no other ids are sampled.
    """

    row: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray


@dataclass(frozen=True)
class BlockWork:
    """Chunks that take prefill blocks however short they are, and forced routing of some of their tokens."""

    chunks: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    forced_tokens: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Indices of tokens in the plan."""
    forced_rows: np.ndarray | None = None
    """Experts of each of the tokens in place of the router's choice, [N, MoE layers, k]."""


@dataclass(frozen=True)
class SampleMasks:
    """The words that samples of a plan may be: `samples` intp [N] says which, in the plan's order; the others may be
    any. `bits` int32 [N, W] has bit i % 32 of number i // 32 for id i. Of the samples `asking` intp [M] evidence is
    `asked`, int32 [M, F], as `SampleRules.asked` has it. Those of `processing` intp [O] are given to logit processors
    with `processed` int32 [O, X], what `allowed_logits` takes."""

    samples: np.ndarray
    bits: np.ndarray
    asking: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    asked: np.ndarray = field(default_factory=lambda: _empty(np.int32, 1 + MAX_LISTED_IDS))
    processing: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    processed: np.ndarray = field(default_factory=lambda: _empty(np.int32, 0))


@dataclass(frozen=True)
class Chunks:
    """The chunks of a plan, and the tokens of all of them."""

    rows: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Row of each chunk, [chunks]."""
    starts: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Position of the first token of each chunk, [chunks]."""
    lengths: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Number of tokens of each chunk, [chunks]."""
    token_ids: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    """Ids of the tokens of all chunks, int32 [tokens]."""
    samples: np.ndarray = field(default_factory=lambda: _empty(np.bool_))
    """True for a chunk after which a token is sampled, bool [chunks]."""
    num_forks: int = 0
    """Chunks without tokens."""
    max_drafts: int = 0
    """Maximum number of drafts of a sequence."""

    @property
    def sources(self) -> np.ndarray:
        """Which chunk computes what each samples after, intp [chunks]: itself, or the one that it forks off."""
        return np.maximum.accumulate(np.where(self.lengths > 0, np.arange(len(self.rows)), 0))


NO_PAGE_CHANGES, NO_NEW_ROWS, NO_BLOCK_WORK, NO_CHUNKS = PageTableChanges(), RowSampling(), BlockWork(), Chunks()


@dataclass(frozen=True)
class StepPlan:
    """One step for all hosts."""

    step_id: int
    chunks: Chunks = NO_CHUNKS
    pages: PageTableChanges = NO_PAGE_CHANGES
    sampling: RowSampling = NO_NEW_ROWS
    """Parameters of rows that new sequences have taken."""
    wants_routing: bool = False
    """Some row of this step is requested."""
    adjustments: tuple[RowAdjustment, ...] = ()
    """Of the rows of `sampling` whose logits are adjusted."""
    block_work: BlockWork = NO_BLOCK_WORK
    columns: tuple[str, ...] = ()
    """Names of the columns that some sample wants."""
    migration: MigrationPiece | None = None
    """Runs ahead of the step, on every host of the group; only with chunks, on a server that may move experts."""
    wants_expert_counts: bool = False
    """Only with chunks, on a server that may move experts."""
    takes_staged_weights: bool = False
    """Every host replaces the weights that it serves by those that it has staged. Only for a plan without chunks that
    follows another such plan."""
    holds_samples: bool = False
    """The step does not sample: the plan after it has the `masks` for that."""
    masks: SampleMasks | None = None
    """For the samples of the step before, whose tokens they take to be filled."""
    wants_drafts: bool = False
    """A draft model drafts what may follow the samples."""
    next_ids: np.ndarray | None = None
    """Known tokens behind chunks, int32 [chunks], -1 for none, if the draft model wants them."""
    probe: TokenProbe | None = None
    """Tokens that are probed after the step."""

    @property
    def has_blocks(self) -> bool:
        """Whether some chunk takes blocks."""
        chunks = self.chunks
        is_longer = (chunks.lengths > 1).any() if chunks.num_forks else len(chunks.token_ids) != len(chunks.rows)
        return bool(is_longer) or len(self.block_work.chunks) > 0

    @property
    def num_chunks(self) -> int:
        return len(self.chunks.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.chunks.token_ids)


@dataclass(frozen=True)
class StepResult:
    """What a step sampled, one entry per sampling chunk of its plan, in the order of the plan."""

    step_id: int
    token_ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32."""
    ranks: np.ndarray
    """int32; 0 for logits that were not finite."""
    routing: np.ndarray | None = None
    """Rows of all tokens of the plan, [tokens, MoE layers, k], if some were wanted."""
    pack_s: float = 0.0
    device_s: float = 0.0
    """Seconds that the host of rank 0 spent on the step."""
    columns: Columns = field(default_factory=dict)
    """What else was wanted of the samples, by name of `OUTPUT_COLUMNS`; as wide as the widest request."""
    probed: Columns = field(default_factory=dict)
    """What was found at the tokens of the plan's `probe`, by name of `PROBED_COLUMNS`, and `IS_FINITE`."""
    expert_counts: np.ndarray | None = None
    """Tokens since the start, this step's too, int32 [MoE layers, experts], if wanted. They wrap around."""
    tally: np.ndarray | None = None
    """Set if slots have a capacity, int64 [4]: assignments over all layers that were wanted, that got their own best
    expert, that got any, and those of the rank that got most."""
    failed_fetch: FailedFetch | None = None
    """Set in every result until another migration begins."""
    drafts: np.ndarray | None = None
    """Drafts of a draft model for every row that has sampled, int32 [rows, max drafts], if wanted."""
    draft_s: float = 0.0
    """Seconds of waiting for the drafts beyond the step."""

    @property
    def finite(self) -> np.ndarray:
        """Return for each sample whether its logits were finite, bool."""
        return self.ranks > 0


@dataclass(frozen=True)
class StartReport:
    """The result of starting an executor."""

    num_pages: int
    """KV pages of one data rank."""
    load_s: float = 0.0
    compile_s: float = 0.0
    """Wall-clock seconds of compilation."""
    compile_sum_s: float = 0.0
    """Sum of the seconds of all programs, which compile in parallel."""
    first_run_s: float = 0.0
    """Seconds of running every program once."""
    num_programs: int = 0
    num_programs_found: int = 0
    """Programs that are read from disk instead of compiled."""
    num_expert_ranks: int = 1
    num_redundant_experts: int = 0
    page_groups: tuple[PageGroup, ...] = ()
    """Groups of layers that share a page table."""
    entry_groups: tuple[EntryGroup, ...] = ()
    """Groups of layers with entries."""
    dtype: str = ""
    """Dtype of all weights except `float32_tensors`."""
    float32_tensors: tuple[str, ...] = ()
    """Names of float32 tensors, in which `*` stands for a number."""
    placement: ExpertPlacement | None = None
    """Placement of the experts; None for their own order."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Chosen kernel by operation, with the reasons against the ones preferred to it."""

    def __str__(self) -> str:
        windowed = "".join(
            f", {group.num_pages} for a window of {group.window}" for group in self.page_groups if group.window
        )
        return (
            f"{self.num_pages} KV pages per data rank{windowed}; weights loaded in {self.load_s:.1f} s, "
            f"{self.num_programs} programs compiled in {self.compile_s:.1f} s ({self.compile_sum_s:.1f} s one by one, "
            f"{self.num_programs_found} found on disk), each run in {self.first_run_s:.1f} s"
        )

    def statistics(self) -> dict[str, float]:
        """Return the numbers of the report as `start_<field>`, without pages and expert counts."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        left_out = ("num_pages", "num_expert_ranks", "num_redundant_experts")
        return {f"start_{name}": float(value) for name, value in numbers.items() if name not in left_out}


def slowest_start(reports: Sequence[StartReport]) -> StartReport:
    """Combine the reports of hosts that started in parallel: the worst of each number.

    All hosts serve the same model by the same plan, so the other fields are those of any report.
    """
    return replace(
        reports[0],
        num_pages=min(report.num_pages for report in reports),
        load_s=max(report.load_s for report in reports),
        compile_s=max(report.compile_s for report in reports),
        compile_sum_s=max(report.compile_sum_s for report in reports),
        first_run_s=max(report.first_run_s for report in reports),
        num_programs=max(report.num_programs for report in reports),
        num_programs_found=min(report.num_programs_found for report in reports),
    )
