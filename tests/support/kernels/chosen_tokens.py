"""The kernels of sparse attention, interpreted, next to the reference.

    python -m tests.support.kernels.chosen_tokens CASE ...

prints what came out of each case, as JSON. It is a process of its own: see `low_latency_dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from rayserve_moe.kernels import packed_blocks
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference import token_index as index_reference
from rayserve_moe.kernels.reference.attention import BlockPlaces, ScoreConfig
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import SPARSE_ATTENTION, sparse_latents
from rayserve_moe.kernels.token_index import IndexConfig
from rayserve_moe.kernels.tpu import (
    chosen_attention,
    paged_attention,
    paged_choice,
    paged_sizes,
    token_index,
    top_tokens,
)
from rayserve_moe.kernels.tpu.chosen_attention import RowStream
from rayserve_moe.kernels.tpu.packed_rows import packed_latents
from rayserve_moe.kernels.tpu.paged_choice import TileChoice
from tests.support.kernels.interpreter import FAULTS_FOUND, INTERPRETED, Outcome, print_outcomes
from tests.support.kernels.paged_attention import NextBuffer, no_wait_for_pages, pages_into_the_block_in_use
from tests.unit.kernels.latent_cases import LatentModel

PAGE, TABLE_WIDTH = 16, 24
SCORES, LATENT, ROTATED = ScoreConfig(scale=0.1), 128, 64


@dataclass(frozen=True)
class IndexCase:
    """Blocks of queries (position of the first, how many) on scattered pages; all that no query sees is NaN.

    Scores are small integers, so float32 sums are exact in any order and ties are frequent.
    """

    blocks: tuple[tuple[int, int], ...]
    num_queries: int
    top_k: int
    num_heads: int = 6
    width: int = 18
    dtype: str = "float32"
    score_bytes: int = 1 << 20
    num_cores: int = 1
    weights: tuple[int, int] = (-2, 3)
    """Least weight of a head, and the end of weights."""
    num_nan: int = 0
    """Keys of each block that queries see although they are NaN."""


@dataclass(frozen=True)
class AttentionCase:
    """Single tokens at positions (-1: padding) that see some of the tokens before them, on pages as in `IndexCase`.

    `whole` are the numbers of tokens that see all.
    """

    positions: tuple[int, ...]
    top_k: int
    whole: tuple[int, ...] = ()
    num_heads: int = 4
    dtype: str = "float32"
    num_cores: int = 1


@dataclass(frozen=True)
class PromptCase:
    """Blocks of queries as in `IndexCase` that see up to `top_k` of the tokens before them, in tiles of `max_rows`.

    Tokens from `masked_until` on are attended one by one.
    """

    blocks: tuple[tuple[int, int], ...]
    num_queries: int
    top_k: int
    num_heads: int = 8
    dtype: str = "float32"
    max_rows: int = 1024
    num_cores: int = 1
    word_bits: int = 32
    masked_until: int = 1 << 20


@dataclass(frozen=True)
class BlockCase:
    """Blocks of queries as in `IndexCase` that see `top_k` blocks of 128 tokens, others by each of two KV heads."""

    blocks: tuple[tuple[int, int], ...]
    num_queries: int
    num_heads: int = 16
    dtype: str = "float32"
    top_k: int = 2
    max_rows: int = 1024
    word_bits: int = 32


SINGLES = IndexCase(((300, 1), (0, 0), (39, 1), (383, 1), (40, 1), (7, 1)), 1, 40)
FEW = AttentionCase((300, -1, 130, 383), 130)
PROMPTS = PromptCase(((100, 4), (0, 0), (38, 3), (0, 4), (125, 4), (380, 4)), 4, 40, word_bits=2)
BLOCKS = BlockCase(((380, 4), (0, 0), (126, 4), (254, 4), (300, 3)), 4, word_bits=2)
Case = IndexCase | AttentionCase | PromptCase | BlockCase
CASES: dict[str, Case] = {
    "index of single tokens": SINGLES,
    "index of prompts in tiles, on two cores": IndexCase(
        ((100, 4), (0, 0), (38, 3), (0, 4), (380, 4)), 4, 40, score_bytes=2 * 4 * PAGE * TABLE_WIDTH, num_cores=2
    ),
    "index of many tokens, of 16 heads, in bfloat16": IndexCase(
        ((383, 1), (299, 1), (301, 1), (0, 0)), 1, 300, num_heads=16, width=128, dtype="bfloat16"
    ),
    "index of keys that are NaN, fewer than are chosen": replace(SINGLES, num_nan=9),
    "index of more such keys": replace(SINGLES, num_nan=60),
    "index of no positive score": replace(SINGLES, blocks=((300, 1), (383, 1), (150, 1)), weights=(-2, 0)),
    "few tokens of many": FEW,
    "all or few, on two cores, in bfloat16": AttentionCase(
        (100, -1, 77, 39, 210), 40, whole=(3,), num_heads=20, dtype="bfloat16", num_cores=2
    ),
    "prompts of six sequences": PROMPTS,
    "prompts in tiles, on two cores, in bfloat16": PromptCase(
        ((250, 8), (36, 8), (128, 5)), 8, 200, num_heads=20, dtype="bfloat16", max_rows=64, num_cores=2
    ),
    "prompts whose last tokens are copied": replace(PROMPTS, masked_until=127),
    "blocks of prompts": BLOCKS,
    "blocks of prompts, in tiles": replace(BLOCKS, num_queries=8, num_heads=6, max_rows=16),
    "blocks of single tokens": BlockCase(((383, 1), (0, 0), (100, 1), (128, 1), (300, 1)), 1),
}


class Pages:
    """A pool [N, page, width], and the page table of each block; rows that no query sees are NaN."""

    def __init__(self, rows: Callable[[tuple[int, ...]], np.ndarray], ends: list[int], width: int) -> None:
        generator, num_pages = np.random.default_rng(len(ends)), len(ends) * TABLE_WIDTH + 1
        self.pool = rows((num_pages, PAGE, width)).astype(np.float32)
        self.table = generator.permutation(np.arange(1, num_pages)).reshape(len(ends), -1).astype(np.int32)
        for pages, end in zip(self.table, ends, strict=True):
            hidden = (np.arange(TABLE_WIDTH * PAGE) >= end).reshape(TABLE_WIDTH, PAGE, 1)
            self.pool[pages] = np.where(hidden, np.nan, self.pool[pages])


def packed(pool: np.ndarray, dtype: str) -> jax.Array:
    """Return rows of a pool as `packed_latents` has them."""
    return packed_latents(jnp.asarray(pool, dtype).reshape(-1, 1, pool.shape[2])).reshape(*pool.shape[:2], -1)


def use_small_blocks() -> None:
    """Have the kernels take blocks of 128 keys and of 16 chosen tokens, which are interpreted sooner."""
    token_index.BLOCK_KEYS = 128
    chosen_attention.BLOCK_ROWS, chosen_attention.BLOCK_TOKENS = 128, 16


def index_outcome(case: IndexCase) -> Outcome:
    """Return the number of tokens that are chosen by one of kernel and definition alone."""
    use_small_blocks()
    token_index.SCORE_BYTES = case.score_bytes
    paged_attention.cores_of_device = lambda _=None: case.num_cores
    generator = np.random.default_rng(7)
    pages = Pages(partial(generator.integers, -1, 2), [sum(block) for block in case.blocks], case.width)
    for table, (first, count) in zip(pages.table, case.blocks, strict=True):
        places = np.random.default_rng(first).permutation(first + count)[: case.num_nan]
        pages.pool[table[places // PAGE], places % PAGE] = np.nan
    shape = (len(case.blocks), case.num_queries, case.num_heads)
    queries = jnp.asarray(generator.integers(-1, 2, (*shape, case.width)), case.dtype)
    weights = jnp.asarray(generator.integers(*case.weights, shape), jnp.float32)
    positions = np.full(shape[:2], -1, np.int32)
    for block, (first, count) in enumerate(case.blocks):
        positions[block, :count] = np.arange(first, first + count)
    places = BlockPlaces(jnp.asarray(pages.table), jnp.asarray(positions))
    pool = jnp.asarray(pages.pool[:, :, None], case.dtype)
    expected = np.asarray(index_reference.choose_tokens(queries, weights, pool, places, top_k=case.top_k))
    found = token_index.choose_tokens(
        queries, weights, packed(pages.pool, case.dtype), places, top_k=case.top_k, interpret=INTERPRETED
    )
    return FAULTS_FOUND.outcome((np.asarray(found) != expected).sum(), (expected >= 0).sum())


def attention_outcome(case: AttentionCase) -> Outcome:
    """The kernel next to its definition; AssertionError if one that sees all has not the bits of dense attention."""
    use_small_blocks()
    paged_attention.cores_of_device = lambda _=None: case.num_cores
    generator, num_tokens = np.random.default_rng(9), len(case.positions)
    pages = Pages(generator.standard_normal, [place + 1 for place in case.positions], LATENT + ROTATED)
    queries = jnp.asarray(generator.standard_normal((num_tokens, 1, case.num_heads, LATENT + ROTATED)), case.dtype)
    chosen = np.full((num_tokens, 1, case.top_k), -1, np.int32)
    for token, place in enumerate(case.positions):
        count = min(place + 1, case.top_k if token in case.whole else case.top_k - token)
        some = np.arange(count) if token in case.whole else generator.permutation(place + 1)[:count]
        chosen[token, 0, :count] = np.sort(some)
    positions = jnp.asarray(case.positions, jnp.int32)[:, None]
    places = BlockPlaces(jnp.asarray(pages.table), positions, chosen_BQK=jnp.asarray(chosen))
    pool, knobs = packed(pages.pool, case.dtype), {"config": SCORES, "latent_width": LATENT}
    of_reference = jnp.asarray(pages.pool[:, :, None], case.dtype)
    expected = np.asarray(attention_reference.attend(queries, of_reference, places, **knobs), np.float32)
    found = chosen_attention.attend_all_or_chosen(queries, pool, places, **knobs, interpret=INTERPRETED)
    dense = paged_attention.attend(queries, pool, places, **knobs, interpret=INTERPRETED)
    for token in case.whole:
        np.testing.assert_array_equal(np.asarray(found[token]), np.asarray(dense[token]))
    return FAULTS_FOUND.outcome(np.abs(np.asarray(found, np.float32) - expected).max(), np.abs(expected).max())


def prompt_outcome(case: PromptCase) -> Outcome:
    """Compare a kernel with its definition; AssertionError if blocks that see all differ from dense attention."""
    use_small_blocks()
    paged_attention.cores_of_device = lambda _=None: case.num_cores
    paged_sizes.MAX_ROWS, paged_sizes.MAX_KEYS = case.max_rows, 128
    paged_choice.WORD_BITS, paged_choice.HALF_BITS = case.word_bits, case.word_bits // 2
    generator = np.random.default_rng(13)
    pages = Pages(generator.standard_normal, [sum(block) for block in case.blocks], LATENT + ROTATED)
    sizes = len(case.blocks), case.num_queries
    queries = jnp.asarray(generator.standard_normal((*sizes, case.num_heads, LATENT + ROTATED)), case.dtype)
    positions, chosen = np.full(sizes, -1, np.int32), np.full((*sizes, case.top_k), -1, np.int32)
    for block, (first, count) in enumerate(case.blocks):
        for query in range(count):
            place = positions[block, query] = first + query
            num_seen = min(place + 1, case.top_k)
            # Every other query sees none of the last 100 tokens, so none of the last block of keys.
            some = generator.permutation(place + 1 if query % 2 else max(num_seen, place - 100))[:num_seen]
            chosen[block, query, :num_seen] = np.sort(some)
    places = BlockPlaces(jnp.asarray(pages.table), jnp.asarray(positions), chosen_BQK=jnp.asarray(chosen))
    pool, knobs = packed(pages.pool, case.dtype), {"config": SCORES, "latent_width": LATENT}
    of_reference = jnp.asarray(pages.pool[:, :, None], case.dtype)
    expected = np.asarray(attention_reference.attend(queries, of_reference, places, **knobs), np.float32)
    every, until = places._replace(chosen_BQK=None), case.masked_until
    found = chosen_attention.attend_prompts(queries, pool, places, **knobs, masked_until=until, interpret=INTERPRETED)
    dense = paged_attention.attend(queries, pool, every, **knobs, interpret=INTERPRETED)
    found, dense = (np.asarray(each, np.float32) for each in (found, dense))
    is_dense = positions.max(axis=1) < case.top_k
    np.testing.assert_array_equal(found[is_dense], dense[is_dense])
    assert (found != dense).any(axis=(2, 3))[positions >= case.top_k].all(), "no query chooses all tokens"
    return FAULTS_FOUND.outcome(np.abs(found - expected).max(), np.abs(expected).max())


def block_outcome(case: BlockCase) -> Outcome:
    """Compare a kernel with its definition; AssertionError if blocks that see all differ from dense attention."""
    paged_attention.cores_of_device = lambda _=None: 1
    paged_sizes.MAX_ROWS, paged_sizes.MAX_KEYS = case.max_rows, 128
    paged_choice.WORD_BITS, paged_choice.HALF_BITS = case.word_bits, case.word_bits // 2
    generator, num_kv_heads, width = np.random.default_rng(17), 2, 128
    pages = Pages(generator.standard_normal, [sum(block) for block in case.blocks], num_kv_heads * 2 * width)
    sizes = len(case.blocks), case.num_queries
    queries = jnp.asarray(generator.standard_normal((*sizes, case.num_heads, width)), case.dtype)
    positions, chosen = np.full(sizes, -1, np.int32), np.full((*sizes, num_kv_heads, case.top_k), -1, np.int32)
    for block, query in [(block, query) for block, (_, count) in enumerate(case.blocks) for query in range(count)]:
        place = positions[block, query] = case.blocks[block][0] + query
        for head in range(num_kv_heads):
            others = np.sort(generator.permutation(place // width)[: case.top_k - 1])
            chosen[block, query, head, : len(others) + 1] = [*others, place // width]
    places = BlockPlaces(jnp.asarray(pages.table), jnp.asarray(positions), chosen_BQK=jnp.asarray(chosen))
    pool, knobs = jnp.asarray(pages.pool), {"config": SCORES, "block_size": width}
    of_reference = pool.reshape(*pool.shape[:2], num_kv_heads, 2 * width)
    expected = np.asarray(attention_reference.attend(queries, of_reference, places, **knobs))
    attend = packed_blocks.attend_single_tokens if case.num_queries == 1 else paged_attention.attend
    found = np.asarray(attend(queries, pool, places, **knobs, interpret=INTERPRETED))
    every = places._replace(chosen_BQK=None)
    dense = np.asarray(paged_attention.attend(queries, pool, every, config=SCORES, interpret=INTERPRETED))
    is_dense = positions.max(axis=1) // width < case.top_k
    if case.num_heads == BLOCKS.num_heads:  # others are padded, and products of more rows may have other bits
        np.testing.assert_array_equal(found[is_dense], dense[is_dense])
    assert (found != dense).any(axis=(2, 3))[positions // width >= case.top_k].all(), "no query chooses all blocks"
    return FAULTS_FOUND.outcome(np.abs(found - expected).max(), np.abs(expected).max())


def outcome_of(case: Case) -> Outcome:
    """Return the outcome of a case of any kernel."""
    if isinstance(case, BlockCase):
        return block_outcome(case)
    if isinstance(case, PromptCase):
        return prompt_outcome(case)
    return index_outcome(case) if isinstance(case, IndexCase) else attention_outcome(case)


def cut_outcome() -> Outcome:
    """Return the number of tokens that queries choose in a block or alone only, by scores of any value."""
    use_small_blocks()
    paged_attention.cores_of_device = lambda _=None: 1
    generator, num_queries = np.random.default_rng(3), 4
    pages = Pages(generator.standard_normal, [384], 128)
    pool, dtype = packed(pages.pool, "bfloat16"), jnp.bfloat16
    queries = jnp.asarray(generator.standard_normal((1, num_queries, 32, 128)), dtype)
    weights = jnp.asarray(generator.standard_normal((1, num_queries, 32)), jnp.float32)
    positions = jnp.arange(380, 384, dtype=jnp.int32)[None]
    choose = partial(token_index.choose_tokens, key_pages=pool, top_k=130, interpret=INTERPRETED)
    together = choose(queries, weights, places=BlockPlaces(jnp.asarray(pages.table), positions))
    alone = BlockPlaces(jnp.asarray(np.repeat(pages.table, num_queries, axis=0)), positions.T)
    single = choose(jnp.swapaxes(queries, 0, 1), jnp.swapaxes(weights, 0, 1), places=alone)
    return FAULTS_FOUND.outcome((np.asarray(together[0]) != np.asarray(single[:, 0])).sum(), num_queries * 130)


MODEL = LatentModel(64, q_lora=34, kv_lora=128)
INDEX, STEP_PAGES, LAYER = IndexConfig(4, 20, MODEL.norm_eps, 1e-6, interleaved_rotation=True), 5, 1
ANGLES = (100.0 ** (-np.arange(0, MODEL.rope, 2) / MODEL.rope)).astype(np.float32)


def layer_outcome() -> Outcome:
    """Return a layer of single tokens and of two blocks, next to the reference; AssertionError for another choice."""
    use_small_blocks()
    paged_attention.cores_of_device = lambda _=None: 1
    generator = np.random.default_rng(2)
    shapes = {"index_q_LRi": (34, 4 * 18), "index_k_LDd": (64, 18), "index_weights_LDA": (64, 4)}
    shapes |= {"index_k_norm_Ld": (18,), "index_k_norm_bias_Ld": (18,)}
    weights = MODEL.weights() | {
        name: generator.standard_normal((MODEL.num_layers, *shape)).astype(np.float32) * 0.3
        for name, shape in shapes.items()
    }
    weights = {name: jnp.asarray(array) for name, array in weights.items()}
    positions = np.array([70, -1, 12, *range(17, 21), *range(60, 63), -1], np.int32)
    tables = generator.permutation(np.arange(1, 1 + 5 * STEP_PAGES)).reshape(5, STEP_PAGES).astype(np.int32)
    table_of = np.repeat(tables, [1, 1, 1, 4, 4], axis=0)
    places = np.maximum(positions, 0)
    slots = np.where(positions >= 0, table_of[np.arange(len(places)), places // PAGE] * PAGE + places % PAGE, 0)
    batch = TokenBatch(
        jnp.zeros_like(positions), jnp.asarray(positions), jnp.asarray(slots, jnp.int32), jnp.asarray(tables), 3
    )
    inputs = AttentionInputs(weights, batch, rotation_of(batch.positions_T, ANGLES), jnp.int32(LAYER))
    hidden = jnp.asarray(generator.standard_normal((len(positions), MODEL.hidden)), jnp.float32)
    num_rows = MODEL.num_layers * (1 + 5 * STEP_PAGES)
    pools = [generator.standard_normal((num_rows, PAGE, width)).astype(np.float32) for width in (132, 18)]
    config = LatentConfig(MODEL.nope, MODEL.norm_eps, MODEL.scale, MODEL.interleaved)
    results = []
    for attention, rows in (
        (SPARSE_ATTENTION["cpu"][0].run, lambda pool: jnp.asarray(pool)[:, :, None]),
        (sparse_latents(interpret=INTERPRETED), partial(packed, dtype="float32")),
    ):
        chosen, _ = attention.choose_tokens(hidden, rows(pools[1]), inputs, config=INDEX)
        of_layer = inputs._replace(chosen_TK=chosen)
        out, _ = attention.attend(hidden, rows(pools[0]), of_layer, config=config)
        results.append((np.asarray(chosen), np.asarray(out)))
    (chosen, out), (found_chosen, found) = results
    np.testing.assert_array_equal(found_chosen, chosen)
    return FAULTS_FOUND.outcome(np.abs(found - out).max(), np.abs(out).max())


LAYERS: dict[str, Callable[[], Outcome]] = {
    "queries alone and in a block": cut_outcome,
    "a layer of single tokens and prompts": layer_outcome,
}
"""Cases besides those of a kernel alone."""


def signs_tell_zeros_apart() -> None:
    token_index.ordered = lambda scores: jax.lax.bitcast_convert_type(scores, jnp.int32)


def ties_to_the_last() -> None:
    kth = top_tokens._kth_largest
    top_tokens._kth_largest = lambda *of: kth(*of) - 1


def scores_of_the_last_query() -> None:
    token_index._forget = lambda *_: None


def no_wait_for_rows() -> None:
    RowStream.wait = lambda *_: None


def rows_into_the_block_in_use() -> None:
    start = RowStream.start
    RowStream.start = lambda stream, *place: start(replace(stream, blocks=NextBuffer(stream.blocks)), *place)


def rows_after_the_own_one() -> None:
    RowStream.clear = lambda *_: None


def group_of_a_neighbour() -> None:
    place_of = chosen_attention._place_of
    chosen_attention._place_of = lambda positions, page_size: place_of(positions ^ 8, page_size)


def marks_of_the_last_tile() -> None:
    mark = TileChoice.mark
    TileChoice.mark = lambda choice, visit: pl.when(jax.lax.rem(visit, 2) == 0)(lambda: mark(choice, visit))


def every_tile_sees_all() -> None:
    paged_attention.sees_all = lambda places: places.positions_BQ >= 0


def bit_of_the_next_row() -> None:
    keys = TileChoice._keys
    TileChoice._keys = lambda choice, query, row: keys(choice, query, row ^ 1) ^ 128


def choice_of_the_next_query() -> None:
    keys = TileChoice._keys
    TileChoice._keys = lambda choice, query, row: keys(choice, query ^ 1, row)


def choice_of_another_head() -> None:
    keys = TileChoice.keys_of_rows
    TileChoice.keys_of_rows = lambda choice, first, key, *, shape: keys(choice, first ^ 4, key, shape=shape)


def block_of_tokens_for_a_token() -> None:
    mark = TileChoice.mark
    TileChoice.mark = lambda choice, visit: mark(replace(choice, has_blocks=False), visit)


INDEX_FAULTS: dict[str, Callable[[], None]] = {
    "no wait for keys": no_wait_for_pages,
    "keys into the block in use": pages_into_the_block_in_use,
    "signs tell zeros apart": signs_tell_zeros_apart,
    "ties to the last": ties_to_the_last,
    "scores of the last query": scores_of_the_last_query,
}
ATTENTION_FAULTS: dict[str, Callable[[], None]] = {
    "no wait for rows": no_wait_for_rows,
    "rows into the block in use": rows_into_the_block_in_use,
    "rows after the own one": rows_after_the_own_one,
    "group of a neighbour": group_of_a_neighbour,
}
PROMPT_FAULTS: dict[str, Callable[[], None]] = {
    "marks of the last tile": marks_of_the_last_tile,
    "every tile sees all": every_tile_sees_all,
    "bit of the next row": bit_of_the_next_row,
    "choice of the next query": choice_of_the_next_query,
    "group of a neighbour in a prompt": group_of_a_neighbour,
}
BLOCK_FAULTS: dict[str, Callable[[], None]] = {
    "choice of another head": choice_of_another_head,
    "block of tokens for a token": block_of_tokens_for_a_token,
}
FAULTS = INDEX_FAULTS | ATTENTION_FAULTS | PROMPT_FAULTS | BLOCK_FAULTS


def case_of(name: str) -> Callable[[], Outcome]:
    """Return what runs a case, with its fault planted if it is one."""
    if name in LAYERS:
        return LAYERS[name]
    if name in CASES:
        return partial(outcome_of, CASES[name])
    FAULTS[name]()
    if name in BLOCK_FAULTS:
        return partial(outcome_of, replace(BLOCKS, blocks=((380, 4),)))
    if name in PROMPT_FAULTS:
        return partial(outcome_of, replace(PROMPTS, blocks=((380, 4), (125, 4)), masked_until=382))
    smaller = CASES["index of no positive score"], replace(FEW, positions=(383, 300))
    return partial(outcome_of, smaller[name in ATTENTION_FAULTS])


if __name__ == "__main__":
    print_outcomes(case_of)
