"""Gated delta and Mamba-2 layers in the TPU kernel, interpreted, next to the reference and to itself in other steps.

    python -m tests.support.kernels.delta_rule CASE ...

prints the outcome of each case, as JSON. It is a process of its own: see `low_latency_dispatch`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import (
    CHUNK,
    PIECE,
    WINDOW_ROWS,
    DeltaPools,
    DeltaTokens,
    RowEntries,
    advance,
    cut_pieces,
)
from rayserve_moe.kernels.table import CPU, KERNELS, TPU
from rayserve_moe.kernels.tpu import delta_rule, delta_state_space, delta_visits
from rayserve_moe.kernels.tpu.delta_call import NUM_BUFFERS
from rayserve_moe.kernels.tpu.delta_products import iota
from tests.support.engine.host_runners import WAY, card_of, prepared_runner
from tests.support.engine.run_requests import run_together
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.kernels.interpreter import FAULTS_FOUND, INTERPRETED, Outcome, interpreted, print_outcomes
from tests.support.kernels.paged_attention import ENGINE, write_two_layers
from tests.support.speculation.oracle_proposer import Oracle

WIDTH, TAPS, NUM_LAYERS, LAYER, BLOCK = 128, 4, 3, 1, 32
MAX_ERROR = 3e-6
"""Maximum relative difference of sums in float32 whose terms are added in another order."""


@dataclass(frozen=True)
class DeltaCase:
    """Chains of single tokens and prompts in blocks, each of a row of its own: (first position, number of tokens).

    A chain (0, 0) is padding. Rows begin at an entry of another row, unless a chain begins ahead of it. Rings hold NaN
    behind the cursor.
    """

    chains: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...] = ()
    source_base: int = 0
    num_heads: int = 8
    num_key_heads: int = 8
    dtype: str = "float32"
    num_cores: int = 1
    unsound: tuple[int, ...] = ()
    """Tokens whose values are infinite."""
    by_element: bool = False
    """True for a decay per element of a key."""
    delta: bool = True
    """False for Mamba-2."""
    value_dim: int = WIDTH

    @property
    def num_blocks(self) -> int:
        """Return the number of rows of values, which fill the lanes."""
        return self.num_heads * self.value_dim // WIDTH

    @property
    def input_rows(self) -> tuple[int, int]:
        """Return the number and the width of the rows that inputs of the convolution lie in."""
        channels = 2 * WIDTH + self.num_heads // self.num_key_heads * self.value_dim
        if self.delta:
            return self.num_key_heads, channels
        return 8 * math.ceil(self.num_key_heads * channels / (8 * WIDTH)), WIDTH

    @property
    def num_decays(self) -> int:
        """Return the number of decays of a head."""
        return WIDTH if self.by_element else 1


SINGLES = DeltaCase(((0, 1), (5, 1), (8, 1), (17, 1), (0, 0), (62, 1), (63, 1), (64, 1), (129, 1), (192, 1), (7, 1)))
DRAFTS = DeltaCase(((100, 4), (0, 0), (3, 1), (14, 4), (0, 3), (188, 4), (0, 0), (64, 4), (61, 3), (62, 6)))
MAMBA: dict[str, Any] = {"num_heads": 16, "num_key_heads": 2, "delta": False, "value_dim": 64}
CASES = {
    "few": DeltaCase(((5, 1), (0, 0), (64, 1), (62, 4))),
    "singles": SINGLES,
    "drafts": DRAFTS,
    "singles of more heads in bfloat16": replace(SINGLES, num_heads=32, num_key_heads=16, dtype="bfloat16"),
    "three heads of a key head": replace(SINGLES, num_heads=24),
    "four heads of two key heads": replace(DRAFTS, num_heads=4, num_key_heads=2, dtype="bfloat16"),
    "rows that begin at an entry": replace(
        SINGLES, chains=((64, 1), (65, 1), (127, 2), (128, 1), (140, 3), (192, 1)), source_base=64
    ),
    "drafts on two cores": replace(DRAFTS, num_cores=2),
    "singles on two cores, an odd number": replace(SINGLES, num_cores=2),
    "prompts": replace(DRAFTS, chains=(), prompts=((0, 40), (60, 6), (64, 1))),
    "prompts beside drafts on two cores": replace(
        DRAFTS, chains=((63, 2), (0, 0), (10, 1)), prompts=((50, 20), (128, 5)), num_cores=2
    ),
    "one token": replace(SINGLES, chains=((64, 1),)),
    "padding alone": replace(SINGLES, chains=((0, 0),) * 3, num_cores=2),
    "tokens that are not finite": replace(DRAFTS, unsound=(1, 6, 12)),
    "few by element": DeltaCase(
        ((5, 1), (0, 0), (64, 1), (62, 4)), num_heads=3, num_key_heads=3, dtype="bfloat16", by_element=True
    ),
    "singles by element": replace(SINGLES, by_element=True),
    "drafts by element in bfloat16 on two cores": replace(DRAFTS, by_element=True, dtype="bfloat16", num_cores=2),
    "prompts by element beside drafts": replace(
        DRAFTS, chains=((63, 2), (0, 0), (10, 1)), prompts=((50, 20), (128, 5)), by_element=True
    ),
    "rows by element that begin at an entry": replace(
        SINGLES, chains=((64, 1), (65, 1), (127, 2), (128, 1)), source_base=64, by_element=True, unsound=(2,)
    ),
    "few without delta": DeltaCase(((5, 1), (0, 0), (64, 1), (62, 4)), **MAMBA),
    "singles of two heads in a row in bfloat16": replace(SINGLES, **MAMBA, dtype="bfloat16"),
    "drafts of 32 heads of one key head on two cores": replace(
        DRAFTS, **{**MAMBA, "num_heads": 32, "num_key_heads": 1}, num_cores=2
    ),
    "prompts without delta beside drafts": replace(
        DRAFTS, chains=((63, 2), (0, 0), (10, 1)), prompts=((50, 20), (128, 5)), **MAMBA, unsound=(1,)
    ),
    "rows of wide heads without delta that begin at an entry": replace(
        SINGLES, chains=((64, 1), (65, 1), (127, 2), (128, 1)), source_base=64, delta=False, dtype="bfloat16"
    ),
    "four heads in a row": replace(SINGLES, **{**MAMBA, "value_dim": 32}),
}


class DeltaArrays:
    """The arrays of a case: tokens, pools of several layers, pieces."""

    def __init__(self, case: DeltaCase) -> None:
        self._random, chains = np.random.default_rng(len(case.chains) + case.num_heads), case.chains + case.prompts
        num_rows, heads, key_heads = len(chains) + 1, case.num_heads, case.num_key_heads
        singles = [max(1, count) for _, count in case.chains]
        blocks = [-(-count // BLOCK) for _, count in case.prompts]
        rows = np.repeat(np.arange(1, num_rows), [*singles, *blocks])
        num_singles, num_tokens = sum(singles), sum(singles) + BLOCK * sum(blocks)
        lengths = [*singles, *(BLOCK * count for count in blocks)]
        positions = np.concatenate(
            [
                np.where(np.arange(length) < count, first + np.arange(length), -1)
                for (first, count), length in zip(chains, lengths, strict=True)
            ]
        ).astype(np.int32)
        firsts = np.array([first for first, _ in chains])[rows - 1]
        bases = np.where(firsts >= case.source_base, case.source_base, 0)
        sources = np.where(bases > 0, num_rows + rows, 0)
        self.layer = jnp.int32(LAYER * 2 * num_rows), jnp.int32(LAYER * num_rows)
        self.pools = self._pools_of(case, num_rows)
        entries = RowEntries(*(jnp.asarray(each, jnp.int32) for each in (rows, sources, bases)))
        self.pieces = cut_pieces(
            jnp.asarray(positions), jnp.asarray(rows), entries, num_singles=num_singles, block_tokens=BLOCK
        )
        values = self._normal(num_tokens, heads, case.value_dim)
        values[list(case.unsound)] = np.inf
        units = (self._unit(num_tokens, key_heads, WIDTH) for _ in range(2))
        inputs = self._normal(num_tokens, *case.input_rows)
        decays = -np.abs(self._normal(num_tokens, heads, case.num_decays)) * 0.3
        betas = 1 / (1 + np.exp(-self._normal(num_tokens, heads)))
        queries, keys = (jnp.asarray(each, case.dtype) for each in units)
        others = (jnp.asarray(each, case.dtype) for each in (values, inputs))
        self.tokens = DeltaTokens(queries, keys, next(others), jnp.asarray(decays), jnp.asarray(betas), next(others))

    def _normal(self, *dims: int) -> np.ndarray:
        return self._random.standard_normal(dims).astype(np.float32)

    def _unit(self, *dims: int) -> np.ndarray:
        rows = self._normal(*dims)
        return rows / np.sqrt((rows * rows).sum(-1, keepdims=True))

    def _pools_of(self, case: DeltaCase, num_rows: int) -> DeltaPools:
        """Draw pools; rings hold NaN behind the cursors of their rows."""
        entries, rows = NUM_LAYERS * 2 * num_rows, NUM_LAYERS * num_rows
        keys = self._unit(rows, CHUNK, case.num_key_heads, WIDTH)
        fresh = self._normal(rows, CHUNK, case.num_blocks, WIDTH) * 0.5
        decay = -np.abs(self._normal(rows, CHUNK, case.num_heads, case.num_decays)).cumsum(1) * 0.1
        for row, (first, _) in enumerate(case.chains + case.prompts, start=LAYER * num_rows + 1):
            is_full = first % CHUNK == 0 and first > case.source_base
            for ring in (keys, fresh, decay):
                ring[row, CHUNK if is_full else first % CHUNK :] = np.nan
        pools = DeltaPools(
            self._normal(entries, case.num_blocks, WIDTH, WIDTH),
            self._normal(entries, TAPS - 1, *case.input_rows),
            keys.astype(case.dtype).astype(np.float32) if case.dtype != "float32" else keys,
            fresh,
            decay,
            self._normal(rows, WINDOW_ROWS, *case.input_rows),
        )
        decays = decay if case.by_element else np.concatenate([decay[..., 0].swapaxes(1, 2)] * 2, axis=2)
        return DeltaPools(*map(jnp.asarray, pools._replace(decay_RCHx=decays)))


def relative_difference(found: jax.Array, expected: jax.Array) -> float:
    """Return the maximum difference relative to the largest number; NaN must stand at the same places."""
    ours, theirs = np.asarray(found), np.asarray(expected)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    largest = max(np.nanmax(np.abs(theirs), initial=0.0), 1e-30)
    return float(np.nanmax(np.abs(ours - theirs), initial=0.0) / largest)


def outcome_of(case: DeltaCase) -> Outcome:
    """Compute a case by the kernel and by the reference, all pools included."""
    arrays = DeltaArrays(case)
    delta_rule.cores_of_device = lambda _=None: case.num_cores
    interpreter = replace(INTERPRETED, num_cores_or_threads=case.num_cores)
    call = arrays.tokens, arrays.pools, arrays.pieces
    knobs: dict[str, Any] = {"layer": arrays.layer, "delta": case.delta}
    expected_out, expected = advance(*call, **knobs)
    found_out, found = delta_rule.advance_tokens(*call, **knobs, interpret=interpreter)
    for name in ("window_EJKW", "keys_RCKd", "inputs_RJKW"):
        np.testing.assert_array_equal(*(np.asarray(getattr(pools, name)) for pools in (found, expected)))
    pairs = [(found_out, expected_out), *zip(found, expected, strict=True)]
    return FAULTS_FOUND.outcome(max(relative_difference(*pair) for pair in pairs), 1.0)


@dataclass(frozen=True)
class Cuts:
    """Steps of a sequence: tokens of a prompt, or of drafts if negative."""

    steps: tuple[int, ...]
    case: DeltaCase

    def run(self) -> tuple[np.ndarray, DeltaPools]:
        """Compute the sequence by the kernel: outputs, and pools."""
        total = sum(map(abs, self.steps))
        sequence = DeltaArrays(replace(self.case, chains=((0, total),)))
        pools, position, outputs = jax.tree.map(jnp.zeros_like, sequence.pools), 0, []
        for step in self.steps:
            count, is_single = abs(step), step < 0
            num_blocks = 0 if is_single else -(-count // BLOCK)
            lane = np.arange(count if is_single else num_blocks * BLOCK)
            rows = jnp.ones(count if is_single else num_blocks, jnp.int32)
            pieces = cut_pieces(
                jnp.asarray(np.where(lane < count, position + lane, -1), jnp.int32),
                rows,
                RowEntries(rows, 0 * rows, 0 * rows),
                num_singles=count if is_single else 0,
                block_tokens=BLOCK,
            )
            index = np.minimum(position + lane, total - 1)
            given = DeltaTokens(*(part[index] for part in sequence.tokens))
            out, pools = delta_rule.advance_tokens(
                given,
                pools,
                pieces,
                layer=sequence.layer,
                delta=self.case.delta,
                interpret=pltpu.InterpretParams(),
            )
            outputs.append(np.asarray(out)[:count])
            position += count
        return np.concatenate(outputs), pools


CUTS = {
    "cuts": DeltaCase(()),
    "cuts by element": DeltaCase((), num_heads=2, num_key_heads=2, by_element=True),
    "cuts without delta": DeltaCase((), **MAMBA),
}
WHOLE, OTHERS = (75,), ((37, -1, -5, 16, -12, 4), (64, 1, -3, 7))


def cuts_outcome(case: DeltaCase) -> Outcome:
    """Count the numbers that depend on how the tokens of a sequence came."""
    delta_rule.cores_of_device = lambda _=None: 1
    whole, *others = (Cuts(steps, case) for steps in (WHOLE, *OTHERS))
    expected, num_different = jax.tree.leaves(whole.run()), 0
    for found in (jax.tree.leaves(cuts.run()) for cuts in others):
        bits = ((np.asarray(each).view(np.uint32) for each in pair) for pair in zip(expected, found, strict=True))
        num_different += sum(int((ours != theirs).sum()) for ours, theirs in bits)
    return Outcome(float(num_different), float(np.abs(expected[0]).max()))


@contextmanager
def delta_instead() -> Iterator[None]:
    """Have runners that are prepared meanwhile take the kernel, interpreted, for single tokens."""
    advance_in_place = interpreted(TPU.recurrence.advance, pltpu.InterpretParams())
    recurrence = replace(TPU.recurrence, advance=advance_in_place)
    with patch.dict(KERNELS, cpu=replace(CPU, recurrence=recurrence)):
        yield


SIZES = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": WIDTH,
    "linear_value_head_dim": WIDTH,
    "num_hidden_layers": 4,
}
MAMBA_SIZES = {
    "mamba_num_heads": 8,
    "n_groups": 2,
    "mamba_head_dim": WIDTH // 2,
    "ssm_state_size": WIDTH,
    "hybrid_override_pattern": "ME*M",
    "num_hidden_layers": 4,
}
CHAINS = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "an engine": ("qwen3.5-tiny", SIZES, {}),
    "an engine with drafts": ("qwen3.5-tiny", SIZES, CHAINS),
    "an engine of Mamba-2": ("nemotron-3-tiny", MAMBA_SIZES, {}),
    "an engine of Mamba-2 with drafts": ("nemotron-3-tiny", MAMBA_SIZES, CHAINS),
}
"""Preset, changes of its config, and settings."""


def engine_outcome(preset: str, sizes: dict[str, Any], settings: dict[str, Any]) -> Outcome:
    """Compute a sequence across a fold by the kernel, and by the reference without drafts: log-probs."""
    prompt = draw_prompt(np.random.default_rng(5), 58)
    requests = [request_for(prompt, "across", max_new_tokens=10)]
    with tempfile.TemporaryDirectory() as folder:
        path = write_two_layers(Path(folder), preset, sizes)
        plain = run_together(prepared_runner(path, **ENGINE), card_of(path), requests, way=WAY)
        with delta_instead():
            runner = prepared_runner(path, **ENGINE, **settings)
        assert runner.config.kernels.recurrence.decay_places, "the kernel's pool"
        speculation, words = runner.served.settings.speculation, runner.config.spec.vocab_size
        proposer = Oracle(plain, share=0.8, vocab_size=words)
        way = replace(WAY, proposer=proposer, num_drafts=speculation.max_drafts) if settings else WAY
        (expected,), (found,) = (
            outcomes.values() for outcomes in (plain, run_together(runner, card_of(path), requests, way=way))
        )
        assert expected.ids == found.ids
        return Outcome(float(np.abs(np.subtract(expected.logprobs, found.logprobs)).max()), 1.0)


def no_wait_for_a_visit() -> None:
    """States and rings are read before they have arrived."""
    delta_visits._wait = lambda _: None


def no_wait_for_rows() -> None:
    """Rows are overwritten before they are in the pools, and a window is read before its rows are."""
    delta_visits._wait_for_writes = lambda *_: None


def a_visit_that_never_ends() -> None:
    """Sums of decays stay in the core's memory."""
    scalars = delta_rule.piece_scalars
    delta_rule.piece_scalars = lambda *given, **named: (found := scalars(*given, **named))._replace(
        ends_P=found.ends_P * 0
    )


class _SemaphoresOfNeighbours:
    """Semaphores of buffers, each found at the number of the next buffer."""

    def __init__(self, arrived_B: Any) -> None:
        self._arrived_B = arrived_B
        self.at = self

    def __getitem__(self, buffer: jax.Array) -> Any:
        return self._arrived_B.at[jax.lax.rem(buffer + NUM_BUFFERS - 1, NUM_BUFFERS)]


def a_visit_into_the_buffer_in_use() -> None:
    """Copies go to another buffer, but signal the semaphores of their own."""
    begin = delta_visits._begin_visit

    def begin_elsewhere(call: Any, visit: jax.Array, buffer: jax.Array) -> None:
        arrived_B = _SemaphoresOfNeighbours(call.semaphores.arrived_B)
        other = call._replace(semaphores=call.semaphores._replace(arrived_B=arrived_B))
        begin(other, visit, jax.lax.rem(buffer + 1, NUM_BUFFERS))

    delta_visits._begin_visit = begin_elsewhere


def a_ring_without_its_last_tile() -> None:
    num_tiles = delta_visits._num_tiles
    delta_visits._num_tiles = lambda call, piece: jnp.maximum(num_tiles(call, piece) - 1, 0)


def decays_that_stay() -> None:
    """Skip the writes of decays per element."""
    writes = delta_visits._row_writes

    def without_decays(*given: Any) -> Iterator[Any]:
        yield from (copy for number, copy in enumerate(writes(*given)) if number != 2)

    delta_visits._row_writes = without_decays


def lanes_of_the_first_head() -> None:
    """All heads of a block take the results and the decays of its first one."""
    delta_state_space._own_lanes = lambda of_heads, _: jnp.broadcast_to(of_heads[0], (len(of_heads[0]), WIDTH))


def a_piece_that_sees_itself_whole() -> None:
    """Queries of a piece see tokens behind their own."""
    delta_state_space._seen = lambda start: iota((1, CHUNK), 1) < start + iota((PIECE, 1), 0) * 0 + PIECE


FAULTS: dict[str, tuple[DeltaCase, Callable[[], None]]] = {
    "no wait for a visit": (SINGLES, no_wait_for_a_visit),
    "no wait for rows": (DRAFTS, no_wait_for_rows),
    "a visit that never ends": (SINGLES, a_visit_that_never_ends),
    "a visit into the buffer in use": (SINGLES, a_visit_into_the_buffer_in_use),
    "a ring without its last tile": (SINGLES, a_ring_without_its_last_tile),
    "decays by element that stay": (replace(SINGLES, by_element=True), decays_that_stay),
    "a ring by element without its last tile": (replace(SINGLES, by_element=True), a_ring_without_its_last_tile),
    "lanes of the first head": (replace(SINGLES, **MAMBA), lanes_of_the_first_head),
    "a piece that sees itself whole": (replace(DRAFTS, **MAMBA), a_piece_that_sees_itself_whole),
    "a ring without delta and without its last tile": (replace(SINGLES, **MAMBA), a_ring_without_its_last_tile),
}


def prepared(name: str) -> Callable[[], Outcome]:
    """Return a case, with its fault planted."""
    if name in ENGINES:
        return partial(engine_outcome, *ENGINES[name])
    if name in CUTS:
        return partial(cuts_outcome, CUTS[name])
    if name in CASES:
        return partial(outcome_of, CASES[name])
    case, plant = FAULTS[name]
    plant()
    return partial(outcome_of, case)


if __name__ == "__main__":
    # XLA on CPUs may recompute a value at each use, with other fused multiply-adds and therefore other roundings. TPUs
    # compute it once.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"
    print_outcomes(prepared)
