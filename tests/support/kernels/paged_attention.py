"""The paged attention kernel, interpreted, next to the reference; groups of single tokens have cases of their own.

    python -m tests.support.kernels.paged_attention CASE ...

prints what came out of each case, as JSON. It is a process of its own: see `low_latency_dispatch`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS, Drawn, write_checkpoint
from rayserve_moe.kernels.candidates import NO_CANDIDATES
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, NewRows, ScoreConfig
from rayserve_moe.kernels.table import GROUPED_ATTENTION, LATENT_ATTENTION, latent_products
from rayserve_moe.kernels.tpu import paged_attention, paged_sizes
from rayserve_moe.kernels.tpu.byte_pairs import nan_bits, paired_rows
from rayserve_moe.kernels.tpu.packed_rows import packed_kv, packed_latents
from rayserve_moe.kernels.tpu.paged_attention import visits_of
from rayserve_moe.kernels.tpu.paged_stream import PageStream
from rayserve_moe.kernels.tpu.paged_writes import RowWrites
from rayserve_moe.requests.records import GenerationRequest
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes
from tests.support.engine.run_requests import run_together
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.kernels.interpreter import FAULTS_FOUND, INTERPRETED, Outcome, print_outcomes

PAGE, TABLE_WIDTH = 16, 12


@dataclass(frozen=True)
class PagedCase:
    """Blocks of queries (position of the first, how many) on scattered pages; all that no query sees is NaN."""

    blocks: tuple[tuple[int, int], ...]
    num_queries: int
    num_heads: int = 8
    num_kv_heads: int = 4
    width: int = 64
    config: ScoreConfig = FULL_CAUSAL
    has_sinks: bool = False
    latent_width: int = 0
    is_described: bool = False
    is_writing: bool = False
    dtype: str = "float32"
    most_rows: int = 1024
    most_keys: int = 64
    num_cores: int = 1
    is_8_bit: bool = False
    value_width: int = 0

    @property
    def row(self) -> tuple[int, int]:
        """A token's row in the pool of the reference."""
        if self.latent_width:
            return 1, self.width
        return self.num_kv_heads, self.width + (self.value_width or self.width)

    @property
    def widths(self) -> dict[str, int]:
        """Sizes of values that kernels are told."""
        return {"latent_width": self.latent_width, "value_width": self.value_width}


SINGLES = PagedCase(((100, 1), (0, 0), (3, 1), (191, 1), (64, 1), (0, 0)), 1)
ALL_KNOBS = ScoreConfig(window=20, scale=-0.3, soft_cap=2.0)
CASES = {
    "single tokens": SINGLES,
    "padding first, heads of 128, sinks, in bfloat16": PagedCase(
        ((0, 0), (0, 0), (40, 1), (127, 1)), 1, num_kv_heads=2, width=128, has_sinks=True, dtype="bfloat16"
    ),
    "heads of 128, described, an odd number on two cores": PagedCase(
        ((70, 1), (0, 0), (5, 1), (0, 0), (191, 1)), 1, num_kv_heads=2, width=128, is_described=True, num_cores=2
    ),
    "one KV head of 64, described": PagedCase(
        ((70, 1), (0, 0), (5, 1)), 1, num_heads=4, num_kv_heads=1, config=ScoreConfig(window=33), is_described=True
    ),
    "prompts with every knob": PagedCase(
        ((100, 4), (0, 0), (3, 2), (0, 4), (160, 4)), 4, num_kv_heads=2, config=ALL_KNOBS, has_sinks=True
    ),
    "latents in tiles, on two cores": PagedCase(
        ((100, 4), (3, 2), (170, 4)), 4, 16, 1, 192, ScoreConfig(scale=0.1), latent_width=128, most_rows=32, num_cores=2
    ),
    "new rows of single tokens": replace(SINGLES, blocks=(*SINGLES.blocks, (16, 1), (79, 1)), is_writing=True),
    "new rows of twenty sequences, windows, described, on two cores, in bfloat16": PagedCase(
        tuple((place, int(place % 5 > 0)) for place in range(0, 190, 9)),
        1,
        num_kv_heads=2,
        width=128,
        config=ScoreConfig(window=40),
        is_described=True,
        is_writing=True,
        dtype="bfloat16",
        num_cores=2,
    ),
    "keys of 192 and values of 128, sinks, a window, described": PagedCase(
        ((70, 1), (0, 0), (5, 1), (127, 1)),
        1,
        num_kv_heads=2,
        width=192,
        value_width=128,
        config=ScoreConfig(window=33),
        has_sinks=True,
        is_described=True,
        is_writing=True,
    ),
    "prompts with narrow keys and wide values": PagedCase(
        ((100, 4), (0, 0), (3, 2), (160, 4)), 4, num_kv_heads=2, width=64, value_width=160
    ),
    "new latents, sinks": PagedCase(
        ((70, 1), (0, 0), (5, 1), (127, 1)), 1, 16, 1, 192, latent_width=128, has_sinks=True, is_writing=True
    ),
}


CASES |= {
    "8 bits: " + name: replace(CASES[name], is_8_bit=True)
    for name in (
        "single tokens",
        "padding first, heads of 128, sinks, in bfloat16",
        "prompts with every knob",
        "new rows of twenty sequences, windows, described, on two cores, in bfloat16",
    )
}
CASES["8 bits: heads of 256, new rows"] = PagedCase(
    ((70, 1), (0, 0), (5, 1)), 1, num_heads=4, num_kv_heads=1, width=256, is_writing=True, is_8_bit=True
)


AHEAD_OF_THE_LAST = "a race ahead of the last call"

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "an engine with sinks, windows and heads of 64": (
        "gpt-oss-tiny",
        {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "an engine with latents": ("deepseek-v3-tiny", {"kv_lora_rank": 128}),
}
"""Presets, and what is other about them."""


class PagedArrays:
    """The arrays of a case: queries, the pool as the reference has it, page table, positions and sinks."""

    def __init__(self, case: PagedCase) -> None:
        generator, num_blocks = np.random.default_rng(len(case.blocks) + case.width), len(case.blocks)
        row = case.row
        num_pages = num_blocks * TABLE_WIDTH + 1
        self.pool = generator.standard_normal((num_pages, PAGE, *row)).astype(np.float32)
        self.table = generator.permutation(np.arange(1, num_pages)).reshape(num_blocks, TABLE_WIDTH).astype(np.int32)
        shape = (num_blocks, case.num_queries, case.num_heads, case.width)
        self.queries = generator.standard_normal(shape).astype(np.float32)
        self.sinks = generator.standard_normal(case.num_heads).astype(np.float32) if case.has_sinks else None
        self.positions = np.full(shape[:2], -1, np.int32)
        for block, (first, count) in enumerate(case.blocks):
            self.positions[block, :count] = np.arange(first, first + count)
            least = max(0, first - case.config.window + 1) if case.config.window and count else 0
            is_seen = np.zeros(TABLE_WIDTH * PAGE, bool)
            is_seen[least : first + count if count else 0] = True
            hidden = ~is_seen.reshape(TABLE_WIDTH, PAGE)
            pages = self.table[block]
            self.pool[pages] = np.where(hidden[..., None, None], np.nan, self.pool[pages])


def outcome_of(case: PagedCase) -> Outcome:
    """Return the kernel next to its definition."""
    paged_sizes.MAX_ROWS, paged_sizes.MAX_KEYS = case.most_rows, case.most_keys
    paged_attention.cores_of_device = lambda _=None: case.num_cores
    arrays, knobs = (
        PagedArrays(case),
        {"config": case.config, **case.widths},
    )
    pool, queries = (jnp.asarray(array, case.dtype) for array in (arrays.pool, arrays.queries))
    places = BlockPlaces(jnp.asarray(arrays.table), jnp.asarray(arrays.positions))
    knobs["sinks_H"] = None if arrays.sinks is None else jnp.asarray(arrays.sinks)
    pool = pool.astype(jnp.float8_e4m3fn).astype(case.dtype) if case.is_8_bit else pool
    rows = pool.reshape(-1, *pool.shape[2:])
    flat = packed_latents(rows) if case.latent_width else packed_kv(*jnp.split(rows, [case.width], axis=2))
    expected = attention_reference.attend(queries, pool, places, **knobs)
    if case.is_described:
        sizes = {"page_size": PAGE, "table_width": TABLE_WIDTH, "windows": (0, case.config.window)}
        described = paged_attention.describe_singles(places.positions_BQ[:, 0], **sizes)
        places = places._replace(described=described[case.config.window])
    flat = (paired_rows(flat) if case.is_8_bit else flat).reshape(*pool.shape[:2], -1)
    if case.is_writing:
        found = written_and_attended(queries, flat, places, knobs)
    else:
        found = paged_attention.attend(queries, flat, places, **knobs, interpret=INTERPRETED)
    expected = np.asarray(expected, np.float32)
    difference = np.abs(np.asarray(found, np.float32) - expected).max()
    return FAULTS_FOUND.outcome(difference, np.abs(expected).max())


def written_and_attended(
    queries_B1Hh: jax.Array, flat: jax.Array, places: BlockPlaces, knobs: dict[str, Any]
) -> jax.Array:
    """What attends new rows that the pool does not have yet; AssertionError where the pool is then another one than
    with these rows, or holds them elsewhere. The layer's pages follow three of other layers."""
    positions_B = np.asarray(places.positions_BQ[:, 0])
    pages_B = np.take_along_axis(np.asarray(places.page_table_BP), positions_B[:, None] // PAGE, axis=1)[:, 0]
    at = pages_B, positions_B % PAGE
    is_real_B = positions_B >= 0
    rows_BX = jnp.where(is_real_B[:, None], flat[at], jnp.asarray(1e3, flat.dtype))
    nothing = np.int16(nan_bits() * 0x101 - 0x10000) if flat.dtype == jnp.int16 else jnp.nan
    missing = flat.at[tuple(part[is_real_B] for part in at)].set(nothing)
    others = jnp.full((3, *flat.shape[1:]), 7, flat.dtype)
    new = NewRows(rows_BX, jnp.int32(len(others)))
    found_BHv, pool = paged_attention.attend_new(
        queries_B1Hh[:, 0], jnp.concatenate([others, missing]), places, new, **knobs, interpret=INTERPRETED
    )
    np.testing.assert_array_equal(*(np.asarray(each, np.float32) for each in (pool, jnp.concatenate([others, flat]))))
    return found_BHv[:, None]


def engine_outcome(name: str) -> Outcome:
    """Sequences of a model with prompts in chunks and single tokens, next to the same by the reference: log-probs."""
    preset, changes = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = write_two_layers(Path(folder), preset, changes)
        plain = run_together(prepared_runner(path, **ENGINE), card_of(path), requests_of(3), way=WAY)
        with paged_instead():
            runner = prepared_runner(path, **ENGINE)
        assert runner.config.kernels.attention.has_packed_rows
        return difference(plain, run_together(runner, card_of(path), requests_of(3), way=WAY))


ENGINE = {**TWO_SHAPES, "dtype": "float32", "cpu_kernels": "off", "compile_cache": "off", "page_size": PAGE}
"""Settings of an engine whose kernels are interpreted."""


def write_two_layers(folder: Path, preset: str, changes: dict[str, Any]) -> Path:
    """Write a checkpoint of a preset with two layers."""
    model = FAMILY_PRESETS[preset]
    model = replace(model, config={**model.config, "num_hidden_layers": 2, **changes}, drawn=Drawn(scale=0.05))
    return write_checkpoint(folder / "model", model, seed=0, dtype="float32")


def requests_of(num_new: int) -> list[GenerationRequest]:
    """Return requests with a short prompt, one that has several pages, and one between."""
    generator = np.random.default_rng(5)
    return [request_for(draw_prompt(generator, n), f"r{n}", max_new_tokens=num_new) for n in (1, 9, 40)]


@contextmanager
def paged_instead() -> Iterator[None]:
    """Have runners that are prepared meanwhile take the kernel, interpreted, for all attention."""
    paged_attention.cores_of_device = lambda _=None: 1
    paged, writing = (partial(of, interpret=INTERPRETED) for of in (paged_attention.attend, paged_attention.attend_new))
    with ExitStack() as stack:
        for by_name in (LATENT_ATTENTION, GROUPED_ATTENTION):
            of_tpu = by_name["tpu"][0]
            own = latent_products(interpret=INTERPRETED) if by_name is LATENT_ATTENTION else {}
            attend = partial(of_tpu.run.attend, decode=paged, prefill=paged, write_and_decode=writing, **own)
            of_cpus = replace(of_tpu, run=replace(of_tpu.run, attend=attend, norm_and_project=NO_CANDIDATES))
            stack.enter_context(patch.dict(by_name, cpu=(of_cpus,)))
        yield


def difference(plain: Outcomes, found: Outcomes) -> Outcome:
    """Return the largest difference of log-probs; AssertionError for other ids."""
    assert all(outcome.ids == found[key].ids for key, outcome in plain.items())
    differences = [np.abs(np.subtract(each.logprobs, found[key].logprobs)).max() for key, each in plain.items()]
    return FAULTS_FOUND.outcome(max(differences), 1.0)


def no_wait_for_pages() -> None:
    PageStream.wait = lambda *_: None


class NextBuffer:
    """Buffers of the stream, shifted by one."""

    def __init__(self, blocks: Any) -> None:
        self.at, self.blocks = self, blocks

    def __getitem__(self, place: tuple[Any, Any]) -> Any:
        return self.blocks.at[(place[0] + 1) % self.blocks.shape[0], place[1]]


def pages_into_the_block_in_use() -> None:
    start = PageStream.start
    PageStream.start = lambda stream, *place: start(replace(stream, blocks=NextBuffer(stream.blocks)), *place)


def nothing_cleared() -> None:
    PageStream.clear = lambda *_, **__: None


def one_key_too_many() -> None:
    def wrong(positions_BQ: Any, config: ScoreConfig, **sizes: Any) -> Any:
        visits = visits_of(positions_BQ, config, **sizes)
        return visits._replace(end_W=visits.end_W + (visits.end_W > 0))

    paged_attention.visits_of = wrong


class Unchanged:
    """Blocks of the stream that keep what they hold."""

    def __init__(self, blocks: Any) -> None:
        self.blocks, self.dtype = blocks, blocks.dtype

    def __getitem__(self, place: Any) -> Any:
        return self.blocks[place]

    def __setitem__(self, place: Any, rows: Any) -> None:
        """Nothing is stored."""


def row_not_in_sight() -> None:
    """The row goes to the pool alone, as if the page were read before it has arrived there."""
    put = RowWrites.put
    RowWrites.put = lambda writes, stream, *place: put(writes, replace(stream, blocks=Unchanged(stream.blocks)), *place)


def row_on_another_page() -> None:
    place_of = PageStream.place_of
    PageStream.place_of = lambda stream, reach, key: place_of(stream, reach, key - PAGE)


def staged_rows_overwritten() -> None:
    RowWrites.wait = lambda *_: None


def row_of_a_neighbour() -> None:
    put = RowWrites.put
    RowWrites.put = lambda writes, stream, visit, *place: put(writes, stream, visit + 1, *place)


WRITE_FAULTS: dict[str, Callable[[], None]] = {
    "row not in sight": row_not_in_sight,
    "row on another page": row_on_another_page,
    "staged rows overwritten": staged_rows_overwritten,
    "row of a neighbour": row_of_a_neighbour,
}
FAULTS: dict[str, Callable[[], None]] = {
    "no wait for pages": no_wait_for_pages,
    "pages into the block in use": pages_into_the_block_in_use,
    "nothing cleared": nothing_cleared,
    "one key too many": one_key_too_many,
}


def race_ahead_of_the_last_call() -> Outcome:
    """Return a call whose copies race, then one whose copies do not; AssertionError if that one shows a race, too."""
    case, start = replace(SINGLES, blocks=((100, 1), (191, 1))), PageStream.start
    pages_into_the_block_in_use()
    outcome_of(case)
    PageStream.start = start
    found = outcome_of(case)
    assert FAULTS_FOUND.num_calls == 2 and FAULTS_FOUND.racing == {1}
    return found


def case_of(name: str) -> Callable[[], Outcome]:
    """Return what runs a case, with its fault planted if it is one."""
    if name == AHEAD_OF_THE_LAST:
        return race_ahead_of_the_last_call
    if name in MODELS:
        return partial(engine_outcome, name)
    if name in CASES:
        return partial(outcome_of, CASES[name])
    (FAULTS | WRITE_FAULTS)[name]()
    return partial(outcome_of, replace(SINGLES, blocks=((100, 1), (191, 1)), is_writing=name in WRITE_FAULTS))


if __name__ == "__main__":
    print_outcomes(case_of)
