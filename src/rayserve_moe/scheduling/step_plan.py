"""Plan of a step for all hosts, and its result.

Both are small frozen records of numpy arrays. They are sent to every host each step, so a plan holds only changes. A
plan without chunks computes nothing and only collects the result of the previous step.

A chunk is a run of tokens of a sequence: `rows[c]` of `Chunks` is its row, its tokens have positions `starts[c] ..
starts[c] + lengths[c] - 1`, and the tokens of all chunks are concatenated in `token_ids`. If `samples[c]`, a token is
sampled after the chunk. The token id LAST_SAMPLED stands for the last token sampled in that row, which may still be on
the device.

A choice that forks off another has a chunk of no tokens after the chunk that ends their prompt: it samples there too.
If the prompt ends inside a page, this page is copied to the fork's own page after the step.

A sequence with drafts has 1 + n consecutive chunks of a single token each, at consecutive positions: its last token,
then the drafts. All sample, each as if the drafts before it were accepted. A sample counts only if they are.

If the previous step also has drafts of that sequence and has not come back, only the devices know its position: such
chunks are awaited. Their starts are AWAITED - d, for d tokens after the last accepted token. A draft's id is DRAFTED,
for the draft that the draft model has left in the row.

Rows are numbered over all data-parallel ranks: rank r has the rows `r * rows_per_rank .. (r + 1) * rows_per_rank - 1`.
The chunks of a rank are consecutive, in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.balancing.migration import FailedFetch, MigrationPiece
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.requests.columns import Columns, Ragged
from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.scheduling.token_probe import TokenProbe
from rayserve_moe.state.groups import EntryGroup, PageGroup

LAST_SAMPLED = -1
NO_SLOT = -1
DRAFTED = AWAITED = -2

MAX_FORCED_CHOICES = 256
"""Tokens of a data rank whose choices of an index a step can force: 128 MB of positions for DeepSeek-V3.2."""
PREFILL_BLOCK_TOKENS = 32
"""Block size in tokens. Chunks of several tokens, and chunks with extra work (`BlockWork`), occupy whole blocks."""

MAX_WITHHELD_IDS = 128
"""Maximum number of ids that a request can withhold from its first tokens."""
WITHHELD = -np.inf
"""Bias of a withheld id."""

ALLOWED = np.inf
"""Bias of an allowed id; other ids are then forbidden."""


def _empty(dtype: type, columns: int | None = None) -> np.ndarray:
    return np.zeros((0,) if columns is None else (0, columns), dtype)


@dataclass(frozen=True)
class PageTableChanges:
    """Entries to set in page tables: row `rows[i]` gets page `page_ids[i]` at index `indices[i]`. All integer [P].

    Page i of a sequence has index i. With G page tables (`PageGroup`), page i of table g has index i * G + g. Entries
    of released pages stay unchanged, because no query reads them.
    """

    rows: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    indices: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    page_ids: np.ndarray = field(default_factory=lambda: _empty(np.int32))


class RowFloats(NamedTuple):
    """Columns of float parameters, for a row or several; as in `SamplingParams`, with defaults that have no effect."""

    temperature: Any = 0.0
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    presence_penalty: Any = 0.0
    frequency_penalty: Any = 0.0


class RowIntegers(NamedTuple):
    """Columns of integer parameters, for a row or several."""

    top_k: Any = 0
    seed: Any = 0
    choice: Any = 0
    adjusts: Any = 0
    """True if logits are adjusted at all positions."""
    num_top: Any = 0
    """Number of most likely tokens to return."""
    first_end: Any = 0
    """First position at which withheld ids may be sampled."""


NUM_FLOATS, NUM_INTEGERS = len(RowFloats._fields), len(RowIntegers._fields)


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of rows taken by new sequences."""

    rows: np.ndarray = field(default_factory=lambda: _empty(np.int32))
    """int32 [S]."""
    floats: np.ndarray = field(default_factory=lambda: _empty(np.float32, NUM_FLOATS))
    """Columns of `RowFloats`, float32 [S, F]."""
    integers: np.ndarray = field(default_factory=lambda: _empty(np.uint32, NUM_INTEGERS))
    """Columns of `RowIntegers`, uint32 [S, I]."""


@dataclass(frozen=True)
class RowAdjustment:
    """Logit adjustments of a new row: tokens that penalties count, int32, and biases by token id.

    A bias of WITHHELD applies up to the first position at which withheld ids may be sampled. Biases of ALLOWED come
    first; if there are any, no other ids are sampled.
    """

    row: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray


@dataclass(frozen=True)
class BlockWork:
    """Chunks that occupy prefill blocks at any length, and forced routing of some of their tokens."""

    chunks: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Indices of chunks in the plan."""
    forced_tokens: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Indices of tokens in the plan."""
    forced_rows: np.ndarray | None = None
    """Experts of each of the tokens in place of the router's choice, [N, MoE layers, k]."""
    forced_index: Ragged | None = None
    """Packed index rows of each of the tokens in place of the index's choice, uint8; empty for none."""
    forced_gates: np.ndarray | None = None
    """Weights of these experts, float32 like `forced_rows`, NaN for none; None without forced weights."""


@dataclass(frozen=True)
class SampleMasks:
    """Restrictions, requested evidence and processor inputs of samples, given by their index in the plan's samples."""

    samples: np.ndarray
    """Restricted samples, intp [N]."""
    bits: np.ndarray
    """Allowed ids of the restricted samples, int32 [N, W]: id i is bit i % 32 of number i // 32."""
    evidence_samples: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Samples with requested evidence, intp [M]."""
    requested: np.ndarray = field(default_factory=lambda: _empty(np.int32, 1 + MAX_LISTED_IDS))
    """Their evidence, int32 [M, F], as `SampleRules.requested`."""
    processing: np.ndarray = field(default_factory=lambda: _empty(np.intp))
    """Samples with logit processors, intp [O]."""
    processed: np.ndarray = field(default_factory=lambda: _empty(np.int32, 0))
    """Their processor inputs, int32 [O, X], as `allowed_logits` takes them."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of a plan and their tokens."""

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
        """Return the chunk that computes each chunk's last token, intp [chunks]: itself, or its leader's for a fork."""
        return np.maximum.accumulate(np.where(self.lengths > 0, np.arange(len(self.rows)), 0))


@dataclass(frozen=True)
class AdapterWork:
    """Adapters of a step's chunks, and adapters to make resident before it."""

    slots: np.ndarray
    """Place of each chunk's adapter among the resident ones, int32 [chunks]; -1 for none."""
    loads: tuple[tuple[int, str], ...] = ()
    """Places, with the key of the adapter that each receives."""


class HostSizes(NamedTuple):
    """Slots in host memory for the pages of a data rank, and for entries after them."""

    num_pages: int
    num_entries: int = 0


class CopyTimes(NamedTuple):
    """Number of pages that the devices of a host copied in both directions, and the seconds, summed over devices."""

    num_pages: int
    seconds: float


NO_HOST_PAGES, NO_COPIES = HostSizes(0), CopyTimes(0, 0.0)


@dataclass(frozen=True)
class PageMoves:
    """Copies of pages between devices and host memory. Every host copies its own shards.

    A copy is a data rank, a slot of host memory, the slot of its entries or NO_SLOT, then the page in every page table
    and the entry in every entry group, 0 for none. Pages are offloaded before the step, which may overwrite them.
    Restored pages are on the devices before the next step.
    """

    offloads: np.ndarray
    """Copies to host memory, int32 [N, 3 + tables + entry groups]."""
    restores: np.ndarray
    """Copies from host memory, int32 [N, 3 + tables + entry groups]."""


NO_PAGE_CHANGES, NO_NEW_ROWS, NO_BLOCK_WORK, NO_CHUNKS = PageTableChanges(), RowSampling(), BlockWork(), Chunks()


@dataclass(frozen=True)
class StepPlan:
    """Plan of a step for all hosts."""

    step_id: int
    chunks: Chunks = NO_CHUNKS
    pages: PageTableChanges = NO_PAGE_CHANGES
    sampling: RowSampling = NO_NEW_ROWS
    """Parameters of rows that new sequences have taken."""
    wants_routing: bool = False
    """True if routing rows of some token of this step are requested."""
    adjustments: tuple[RowAdjustment, ...] = ()
    """Adjustments of new rows."""
    block_work: BlockWork = NO_BLOCK_WORK
    columns: tuple[str, ...] = ()
    """Names of the columns that some sample wants."""
    migration: MigrationPiece | None = None
    """Runs before the step, on every host of the group; only with chunks, on a server that may move experts."""
    wants_expert_counts: bool = False
    """True to return expert counts; only with chunks, on a server that may move experts."""
    takes_staged_weights: bool = False
    """True to activate the staged weights on every host. Only in a plan without chunks after another such plan."""
    holds_samples: bool = False
    """True if sampling is deferred: the `masks` for it come with the next plan."""
    masks: SampleMasks | None = None
    """Masks for the deferred samples of the previous step."""
    wants_drafts: bool = False
    """True if a draft model drafts the tokens after the samples."""
    next_ids: np.ndarray | None = None
    """Known token after each chunk, int32 [chunks], -1 for none, if the draft model needs them."""
    probe: TokenProbe | None = None
    """Tokens to probe after the step."""
    adapters: AdapterWork | None = None
    """Adapters of the chunks; None if no chunk has one."""
    moves: PageMoves | None = None
    """Copies of pages, also of a plan without chunks; None for no copies."""

    @property
    def has_blocks(self) -> bool:
        """Return True if some chunk occupies blocks."""
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
    """Samples of a step, an entry per sampling chunk, in the order of the plan."""

    step_id: int
    token_ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32."""
    ranks: np.ndarray
    """int32; 0 for logits that were not finite."""
    routing: np.ndarray | None = None
    """Routing rows of all tokens of the plan, [tokens, MoE layers, k], if requested."""
    row_parts: Columns = field(default_factory=dict)
    """Captured parts of the routing rows (`requests.row_parts`), an entry per token; packed index rows are uint8."""
    pack_s: float = 0.0
    device_s: float = 0.0
    """Seconds that the host of rank 0 spent packing the step and waiting for the devices."""
    columns: Columns = field(default_factory=dict)
    """Other requested columns of samples, by name of `OUTPUT_COLUMNS`; as wide as the widest request."""
    probed: Columns = field(default_factory=dict)
    """Results at the tokens of the plan's `probe`, by name of `PROBED_COLUMNS`, and `IS_FINITE`."""
    expert_counts: np.ndarray | None = None
    """Tokens per expert since the start, including this step, int32 [MoE layers, experts], if requested.

    The counts may wrap around.
    """
    tally: np.ndarray | None = None
    """Assignment counts over all layers, int64 [4], if slots have a capacity.

    They count requested assignments, assignments that got their first choice, assignments that got any expert, and
    assignments on the busiest rank.
    """
    failed_fetch: FailedFetch | None = None
    """Set in every result until another migration begins."""
    drafts: np.ndarray | None = None
    """Drafts of a draft model for every row that has sampled, int32 [rows, max drafts], if requested."""
    draft_s: float = 0.0
    """Seconds of waiting for the drafts after the step."""
    copied: CopyTimes = NO_COPIES
    """Copies of pages since the result before, on the host of rank 0."""

    @property
    def finite(self) -> np.ndarray:
        """Return True for each sample with finite logits, bool."""
        return self.ranks > 0


@dataclass(frozen=True)
class StartReport:
    """Report of a started executor."""

    num_pages: int
    """KV pages of a data rank."""
    load_s: float = 0.0
    compile_s: float = 0.0
    """Wall-clock seconds of compilation."""
    compile_sum_s: float = 0.0
    """Sum of the seconds of all programs, which compile in parallel."""
    first_run_s: float = 0.0
    """Seconds of running every program once."""
    num_programs: int = 0
    num_programs_found: int = 0
    """Programs that were read from disk instead of compiled."""
    num_expert_ranks: int = 1
    num_redundant_experts: int = 0
    page_groups: tuple[PageGroup, ...] = ()
    """Groups of layers that share a page table."""
    entry_groups: tuple[EntryGroup, ...] = ()
    """Groups of layers with entries."""
    dtype: str = ""
    """Dtype of all weights except `float32_tensors`."""
    float32_tensors: tuple[str, ...] = ()
    """Names of float32 tensors; `*` stands for a number."""
    placement: ExpertPlacement | None = None
    """Placement of the experts; None for their own order."""
    kernels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Chosen kernel by operation, with the reasons against the ones preferred to it."""
    host: HostSizes = NO_HOST_PAGES
    """Evicted pages of a data rank that host memory holds."""

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

    All hosts run the same model by the same plan, so the other fields are equal in all reports.
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
