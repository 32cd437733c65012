"""Groups of single tokens in the paged attention kernel, interpreted, next to the reference, which writes rows first.

    python -m tests.support.kernels.paged_groups CASE ...

prints what came out of each case, as JSON. It is a process of its own: see `low_latency_dispatch`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, NewRows, ScoreConfig, Together
from rayserve_moe.kernels.tpu import paged_attention, paged_sizes, paged_tiles, paged_writes
from rayserve_moe.kernels.tpu.byte_pairs import paired_rows
from rayserve_moe.kernels.tpu.packed_rows import packed_kv, packed_latents
from rayserve_moe.kernels.tpu.paged_tiles import GroupTokens
from rayserve_moe.kernels.tpu.paged_writes import GroupWrites
from tests.support.engine.host_runners import WAY, card_of, prepared_runner
from tests.support.engine.run_requests import run_together
from tests.support.kernels.interpreter import FAULTS_FOUND, INTERPRETED, Outcome, print_outcomes
from tests.support.kernels.paged_attention import (
    ENGINE,
    Unchanged,
    difference,
    paged_instead,
    requests_of,
    write_two_layers,
)
from tests.support.speculation.draft_checkpoints import AUX_KEY, write_eagle_head
from tests.support.speculation.oracle_proposer import Oracle

PAGE, TABLE_WIDTH, FIRST_PAGE = 16, 12, 3


@dataclass(frozen=True)
class GroupCase:
    """Groups of single tokens (where the first stands, how many) on scattered pages, in order; (0, 0) is padding.

    What lies beyond a sequence's last key, and where its rows are to be written, is NaN. `poisoned` tokens have keys
    and values that are NaN.
    """

    groups: tuple[tuple[int, int], ...]
    most: int
    num_heads: int = 8
    num_kv_heads: int = 2
    width: int = 128
    config: ScoreConfig = FULL_CAUSAL
    has_sinks: bool = False
    latent_width: int = 0
    dtype: str = "float32"
    most_keys: int = 64
    num_cores: int = 1
    table_bytes: int = paged_sizes.PAGE_TABLE_BYTES
    poisoned: tuple[int, ...] = ()
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


CHAINS = GroupCase(((100, 4), (0, 0), (3, 1), (14, 4), (0, 3), (188, 4), (0, 0), (62, 4), (46, 2)), 4)
LONG = replace(CHAINS, groups=((100, 6), (0, 0), (0, 32), (30, 9), (61, 1), (95, 32)), most=32)
CASES = {
    "chains over borders of pages and blocks": CHAINS,
    "chains in bfloat16, sinks, narrow heads, windows": replace(
        CHAINS, dtype="bfloat16", has_sinks=True, width=64, num_kv_heads=4, config=ScoreConfig(window=20)
    ),
    "chains on two cores, an odd number, every knob": replace(
        CHAINS, num_cores=2, has_sinks=True, config=ScoreConfig(window=20, scale=-0.3, soft_cap=2.0)
    ),
    "chains in several calls, which they reach over": replace(CHAINS, table_bytes=4 * TABLE_WIDTH * 3),
    "latents, sinks": replace(CHAINS, num_heads=16, num_kv_heads=1, width=192, latent_width=128, has_sinks=True),
    "keys of 192 and values of 128, sinks, a window": replace(
        CHAINS, width=192, value_width=128, has_sinks=True, config=ScoreConfig(window=20)
    ),
    "long chains": LONG,
    "long chains of latents in bfloat16, in chunks of rows, on two cores": replace(
        LONG, num_heads=16, num_kv_heads=1, width=192, latent_width=128, dtype="bfloat16", num_cores=2
    ),
    "long chains over many blocks": replace(LONG, most_keys=16),
    "three query heads of each": replace(CHAINS, num_heads=6, most=5, groups=((20, 5), (7, 5), (8, 1))),
    "nothing but padding": replace(CHAINS, groups=((0, 0),) * 5, num_cores=2),
    "a poisoned draft": replace(CHAINS, poisoned=(2, 8)),
    "a poisoned draft of latents": replace(
        CHAINS, num_heads=16, num_kv_heads=1, width=192, latent_width=128, poisoned=(2, 8)
    ),
    "a poisoned draft of a long chain": replace(LONG, poisoned=(3, 20)),
}


CASES |= {
    "8 bits: " + name: replace(CASES[name], is_8_bit=True)
    for name in (
        "chains over borders of pages and blocks",
        "chains in bfloat16, sinks, narrow heads, windows",
        "long chains over many blocks",
        "a poisoned draft",
    )
}


class GroupArrays:
    """The arrays of a case: queries, new rows and the pool as the reference has them, a page table, positions and
    sequences of tokens."""

    def __init__(self, case: GroupCase) -> None:
        generator = np.random.default_rng(len(case.groups) + case.width)
        counts = np.array([max(1, count) for _, count in case.groups])
        self.sequences = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        row = case.row
        num_pages, num_tokens = len(counts) * TABLE_WIDTH + 1, len(self.sequences)
        self.pool = generator.standard_normal((FIRST_PAGE + num_pages, PAGE, *row)).astype(np.float32)
        pages = generator.permutation(np.arange(1, num_pages)).reshape(len(counts), TABLE_WIDTH)
        self.table = pages[self.sequences].astype(np.int32)
        self.queries = generator.standard_normal((num_tokens, case.num_heads, case.width)).astype(np.float32)
        self.rows = generator.standard_normal((num_tokens, *row)).astype(np.float32)
        self.rows[list(case.poisoned)] = np.nan
        self.sinks = generator.standard_normal(case.num_heads).astype(np.float32) if case.has_sinks else None
        self.positions = np.full(num_tokens, -1, np.int32)
        at = 0
        for sequence, (first, count) in enumerate(case.groups):
            self.positions[at : at + count] = np.arange(first, first + count)
            lost = self.pool[FIRST_PAGE + pages[sequence]].reshape(-1, *row)
            lost[first:] = np.nan
            self.pool[FIRST_PAGE + pages[sequence]] = lost.reshape(TABLE_WIDTH, PAGE, *row)
            at += max(1, count)

    def sees_poison(self, case: GroupCase) -> np.ndarray:
        """Which tokens see a poisoned row, bool [U]."""
        sees = np.zeros(len(self.positions), bool)
        for token in case.poisoned:
            sees |= (self.sequences == self.sequences[token]) & (np.arange(len(sees)) >= token)
        return sees & (self.positions >= 0)


def flat_of(case: GroupCase, rows: jnp.ndarray) -> jnp.ndarray:
    """Rows as the kernel's pool has them."""
    rows = rows.reshape(-1, *rows.shape[-2:])
    flat = packed_latents(rows) if case.latent_width else packed_kv(*jnp.split(rows, [case.width], axis=2))
    return paired_rows(flat) if case.is_8_bit else flat


def outcome_of(case: GroupCase) -> Outcome:
    """Return the kernel next to the reference; AssertionError where the pool is then another one."""
    paged_sizes.MAX_KEYS, paged_sizes.PAGE_TABLE_BYTES = case.most_keys, case.table_bytes
    paged_attention.cores_of_device = lambda _=None: case.num_cores
    arrays = GroupArrays(case)
    knobs: dict[str, Any] = {"config": case.config, **case.widths}
    knobs["sinks_H"] = None if arrays.sinks is None else jnp.asarray(arrays.sinks)
    queries, pool, rows = (jnp.asarray(of, case.dtype) for of in (arrays.queries, arrays.pool, arrays.rows))
    if case.is_8_bit:
        pool, rows = (of.astype(jnp.float8_e4m3fn).astype(case.dtype) for of in (pool, rows))
    positions = jnp.asarray(arrays.positions)
    together = Together(jnp.asarray(arrays.sequences), case.most)
    sizes = {"page_size": PAGE, "table_width": TABLE_WIDTH, "windows": (0, case.config.window)}
    described = paged_attention.describe_singles(positions, **sizes, together=together)
    table = jnp.asarray(arrays.table)
    places = BlockPlaces(table, positions[:, None], described[case.config.window], together)
    new = NewRows(rows, jnp.int32(FIRST_PAGE))
    expected, expected_pool = attention_reference.attend_new(queries, pool, places, new, **knobs)
    flat = flat_of(case, pool).reshape(*pool.shape[:2], -1)
    new = NewRows(flat_of(case, rows), new.first_page)
    interpreter = replace(INTERPRETED, num_cores_or_threads=case.num_cores)
    found, found_pool = paged_attention.attend_new(queries, flat, places, new, **knobs, interpret=interpreter)
    expected_pool = flat_of(case, expected_pool).reshape(flat.shape)
    # Padding of the reference writes into the first page, which no sequence owns.
    np.testing.assert_array_equal(*(np.asarray(each, np.float32)[1:] for each in (found_pool, expected_pool)))
    found, expected = (np.asarray(each, np.float32) for each in (found, expected))
    sees = arrays.sees_poison(case)
    compared = ~sees & (arrays.positions >= 0)
    assert np.isnan(found[sees]).all() and np.isfinite(found[compared]).all()
    difference = np.abs(found - expected)[compared].max(initial=0)
    return FAULTS_FOUND.outcome(difference, np.abs(expected[compared]).max(initial=0))


@dataclass(frozen=True)
class EngineCase:
    """A model, what is other about it, its settings of drafts, and the width of heads of a draft model, if any."""

    preset: str
    changes: dict[str, Any]
    settings: dict[str, Any]
    draft_heads: int = 0


CHAIN = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
ENGINES = {
    "an engine with chains, sinks, windows and heads of 64": EngineCase(
        "gpt-oss-tiny", {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]}, CHAIN
    ),
    "an engine with chains and latents": EngineCase("deepseek-v3-tiny", {"kv_lora_rank": 128}, CHAIN),
    "an engine with chains of a draft model": EngineCase(
        "olmoe-tiny", {"head_dim": 128}, CHAIN | {"speculative_algorithm": "EAGLE3"}, draft_heads=128
    ),
}


def engine_outcome(case: EngineCase) -> Outcome:
    """Sequences with drafts by the kernel, next to the same without drafts by the reference: log-probs."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_two_layers(Path(folder), case.preset, case.changes)
        plain = run_together(prepared_runner(path, **ENGINE), card_of(path), requests_of(9), way=WAY)
        more, proposer = {}, None
        if case.draft_heads:
            target = json.loads((path / "config.json").read_text())
            own_heads = {"head_dim": case.draft_heads, AUX_KEY: [0, 1, 2]}
            head = write_eagle_head(Path(folder) / "head", target, **own_heads)
            more, proposer = {"speculative_draft_model_path": str(head)}, ModelProposer("drafts")
        with paged_instead():
            runner = prepared_runner(path, **ENGINE, **case.settings, **more)
        layers = [each for each in (runner.config, runner.served.draft and runner.served.draft.layer) if each]
        assert all(each.kernels.attention.has_packed_rows for each in layers)
        speculation, words = runner.served.settings.speculation, runner.config.spec.vocab_size
        proposer = proposer or Oracle(plain, share=0.8, vocab_size=words)
        way = replace(WAY, proposer=proposer, num_drafts=speculation.max_drafts)
        return difference(plain, run_together(runner, card_of(path), requests_of(9), way=way))


def rows_not_in_sight() -> None:
    """Rows go to the pool alone, as if pages were read before they have arrived there."""
    put = GroupWrites.put
    GroupWrites.put = lambda writes, stream, *place, **how: put(
        writes, replace(stream, blocks=Unchanged(stream.blocks)), *place, **how
    )


def rows_on_another_page() -> None:
    send = GroupWrites._send
    GroupWrites._send = lambda writes, rows, key, *place: send(writes, rows, key - PAGE, *place)


def pieces_overwritten() -> None:
    """A piece of a group is written from where that ahead of it still is, and no group waits for another one's."""

    def begin_anew(writes: GroupWrites) -> None:
        writes.num_used[0] = 0

    GroupWrites.wait = begin_anew


def rows_of_a_neighbour() -> None:
    rows_from = GroupWrites._rows_from
    GroupWrites._rows_from = lambda writes, token: rows_from(writes, token + 1)


def last_row_left_out() -> None:
    among = GroupWrites._among

    def wrong(writes: GroupWrites, held: Any, key: Any, stream: Any, reach: Any) -> Any:
        is_new, written = among(writes, held, key, stream, reach)
        is_last = key + jax.lax.broadcasted_iota(jnp.int32, held.shape, 0) == reach.end - 1
        return is_new & ~is_last, jnp.where(is_last, held, written)

    GroupWrites._among = wrong


def results_overwritten() -> None:
    def begin_anew(tokens: GroupTokens) -> None:
        tokens.num_used[0] = 0

    GroupTokens.wait = begin_anew


def nan_left_among_values() -> None:
    paged_writes.without_lone_nan = lambda rows, *_: rows


def every_group_cut_in_two() -> None:
    """The second part of a group reads pages that the first writes."""
    groups_of = paged_attention.groups_of

    def wrong(positions: Any, sequences: Any, *given: Any, **how: Any) -> Any:
        return groups_of(positions, jnp.arange(len(sequences)) // 2, *given, **how)

    paged_attention.groups_of = wrong


def later_drafts_of_a_chain_seen() -> None:
    is_seen = paged_tiles._is_seen
    paged_tiles._is_seen = lambda keys, positions, *given: is_seen(keys, positions + (positions >= 0), *given)


FAULTS: dict[str, tuple[GroupCase, Callable[[], None]]] = {
    "rows not in sight": (CHAINS, rows_not_in_sight),
    "rows on another page": (CHAINS, rows_on_another_page),
    "pieces overwritten": (CHAINS, pieces_overwritten),
    "rows of a neighbour": (CHAINS, rows_of_a_neighbour),
    "last row left out": (CHAINS, last_row_left_out),
    "results overwritten": (CHAINS, results_overwritten),
    "NaN left among values": (CASES["a poisoned draft"], nan_left_among_values),
    "every group cut in two": (CHAINS, every_group_cut_in_two),
    "later drafts of a chain seen": (CHAINS, later_drafts_of_a_chain_seen),
}


def case_of(name: str) -> Callable[[], Outcome]:
    """Return what runs a case, with its fault planted if it is one."""
    if name in CASES:
        return partial(outcome_of, CASES[name])
    if name in ENGINES:
        return partial(engine_outcome, ENGINES[name])
    case, plant = FAULTS[name]
    plant()
    return partial(outcome_of, case)


if __name__ == "__main__":
    print_outcomes(case_of)
