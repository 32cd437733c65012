"""The recurrence on a grid of 64 tokens: it is the recurrence, and no bit depends on how tokens came."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference.gated_delta import (
    CHUNK,
    WINDOW_ROWS,
    DeltaPools,
    DeltaTokens,
    RowEntries,
    advance,
    cut_pieces,
)
from rayserve_moe.kernels.reference.short_conv import find_history, short_conv

HEADS, KEY_HEADS, WIDTH, TAPS = 4, 2, 8, 4
CHANNELS = 2 * WIDTH + HEADS // KEY_HEADS * WIDTH
NUM_TOKENS, BLOCK = 220, 32
KINDS = {"gdn": (True, False), "kda": (True, True), "ssd": (False, False)}
NUM_ENTRIES, NUM_ROWS = 7, 3


def drawn(kind: str, *, seed: int = 0, num_tokens: int = NUM_TOKENS) -> DeltaTokens:
    """Draw the inputs of a sequence, with decays that remember some tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((num_tokens, *shape)).astype(np.float32)

    def unit(rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows * rows).sum(-1, keepdims=True) + 1e-6)

    return DeltaTokens(
        unit(normal(KEY_HEADS, WIDTH)) * WIDTH**-0.5,
        unit(normal(KEY_HEADS, WIDTH)),
        normal(HEADS, WIDTH),
        -np.abs(normal(HEADS, WIDTH if KINDS[kind][1] else 1)) * (1.0 if kind == "kda" else 0.3),
        1 / (1 + np.exp(-normal(HEADS))),
        normal(KEY_HEADS, CHANNELS),
    )


def recurrence(tokens: DeltaTokens, *, delta: bool) -> np.ndarray:
    """Compute the rule token by token, in float64."""
    state, outputs = np.zeros((HEADS, WIDTH, WIDTH)), []
    for query, key, value, decay, beta in zip(*(part.astype(np.float64) for part in tokens[:5]), strict=True):
        query, key = (np.repeat(each, HEADS // KEY_HEADS, axis=0) for each in (query, key))
        state = state * np.exp(decay)[..., None]
        said = np.einsum("hdv,hd->hv", state, key) if delta else 0.0
        state = state + key[..., None] * (beta[:, None] * (value - said))[:, None]
        outputs.append(np.einsum("hdv,hd->hv", state, query))
    return np.array(outputs)


def empty_pools(kind: str, fill: float = 0.0) -> DeltaPools:
    """Return pools whose rings hold `fill`, and whose entry 0 is zeros."""
    entries, rows = NUM_ENTRIES, NUM_ROWS
    decays = WIDTH if KINDS[kind][1] else 1
    state = jnp.full((entries, HEADS, WIDTH, WIDTH), fill).at[0].set(0)
    window = jnp.full((entries, TAPS - 1, KEY_HEADS, CHANNELS), fill).at[0].set(0)
    shapes = ((CHUNK, KEY_HEADS, WIDTH), (CHUNK, HEADS, WIDTH), (CHUNK, HEADS, decays))
    rings = (jnp.full((rows, *shape), fill) for shape in (*shapes, (WINDOW_ROWS, KEY_HEADS, CHANNELS)))
    return DeltaPools(state, window, *rings)


@partial(jax.jit, static_argnames=("num_singles", "delta"))
def run_step(
    tokens: DeltaTokens,
    pools: DeltaPools,
    *,
    positions_T: jax.Array,
    rows_B: jax.Array,
    entries: RowEntries,
    taps: jax.Array,
    bias: jax.Array | None,
    num_singles: int,
    delta: bool,
) -> tuple[jax.Array, jax.Array, DeltaPools]:
    """Compute a step: outputs of the convolution and of the recurrence, and pools."""
    pieces = cut_pieces(positions_T, rows_B, entries, num_singles=num_singles, block_tokens=BLOCK)
    blocks = {"num_singles": num_singles, "block_tokens": BLOCK}
    history = find_history(positions_T, rows_B, entries, **blocks, num_taps=TAPS)
    zero = (jnp.int32(0), jnp.int32(0))
    mixed = short_conv(tokens.inputs_TKW, taps, pools, history, layer=zero, bias_KW=bias)
    out, pools = advance(tokens, pools, pieces, layer=zero, delta=delta)
    return mixed, out, pools


@dataclass
class Runner:
    """A row of one sequence: what a scheduler would keep of it."""

    kind: str
    tokens: DeltaTokens
    pools: DeltaPools
    row: int = 1
    own: int = 2
    source: int = 0
    source_base: int = 0
    position: int = 0
    company: bool = False
    """Another sequence is computed in every step."""
    mixed: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    """Bits of the own entry by the tokens before it."""

    def step(self, count: int, *, as_singles: bool, counted: int | None = None, tokens: DeltaTokens | None = None):
        """Compute the next `count` tokens, of which `counted` count."""
        tokens, counted = tokens or self.tokens, count if counted is None else counted
        num_singles = 8 if as_singles else 1
        num_blocks = 0 if as_singles else -(-count // BLOCK)
        total = num_singles + num_blocks * BLOCK
        positions, index = np.full(total, -1, np.int32), np.zeros(total, np.int64)
        first = 0 if as_singles else num_singles
        positions[first : first + count] = self.position + np.arange(count)
        index[first : first + count] = self.position + np.arange(count)
        rows = np.full(num_singles + num_blocks, self.row, np.int32)
        own, source, base = (np.full(len(rows), each) for each in (self.own, self.source, self.source_base))
        if self.company:
            place = num_singles - 1
            positions[place], index[place], rows[place] = self.position % CHUNK, (7 * self.position) % NUM_TOKENS, 2
            own[place], source[place], base[place] = 6, 0, 0
        given = DeltaTokens(*(jnp.asarray(part[index]) for part in tokens))
        mixed, out, self.pools = run_step(
            given,
            self.pools,
            positions_T=jnp.asarray(positions),
            rows_B=jnp.asarray(rows),
            entries=RowEntries(*(jnp.asarray(each, jnp.int32) for each in (own, source, base))),
            taps=jnp.asarray(taps_of()),
            bias=jnp.asarray(bias_of(self.kind)) if bias_of(self.kind).any() else None,
            num_singles=num_singles,
            delta=KINDS[self.kind][0],
        )
        self.mixed.append(np.asarray(mixed)[first : first + counted])
        self.outputs.append(np.asarray(out)[first : first + counted])
        self.position += counted
        last = (self.position - 1) // CHUNK * CHUNK
        if last > self.source_base and last not in self.states:
            state, window = self.pools.state_EHdv[self.own], self.pools.window_EJKW[self.own]
            self.states[last] = np.asarray(state).tobytes() + np.asarray(window).tobytes()

    def run(self, cuts: tuple[int, ...], *, end: int = NUM_TOKENS) -> Runner:
        """Compute up to `end` in steps of the given sizes, which repeat; sizes below 4 are single tokens."""
        for size in cycle(cuts):
            if self.position == end:
                return self
            count = min(size, end - self.position)
            self.step(count, as_singles=size < 4)
        return self


def taps_of() -> np.ndarray:
    """Return the taps of the convolution."""
    return np.random.default_rng(7).standard_normal((TAPS, KEY_HEADS, CHANNELS)).astype(np.float32)


def bias_of(kind: str) -> np.ndarray:
    """Return the bias of the convolution, which layers without the delta rule have."""
    bias = np.random.default_rng(8).standard_normal((KEY_HEADS, CHANNELS)).astype(np.float32)
    return bias if kind == "ssd" else np.zeros_like(bias)


def started(kind: str, **knobs) -> Runner:
    """Return a row at the first token of the kind's sequence."""
    return Runner(kind, drawn(kind), empty_pools(kind, knobs.pop("fill", 0.0)), **knobs)


def assert_same(one: Runner, other: Runner) -> None:
    """Assert that outputs, and all states that both have, are equal to the bit."""
    for name in ("mixed", "outputs"):
        ours, theirs = np.concatenate(getattr(one, name)), np.concatenate(getattr(other, name))
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)), name
    shared = one.states.keys() & other.states.keys()
    assert shared and all(one.states[at] == other.states[at] for at in shared)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_recurrence_and_a_causal_convolution(kind):
    found = started(kind).run((NUM_TOKENS,))
    ours, expected = np.concatenate(found.outputs), recurrence(found.tokens, delta=KINDS[kind][0])
    assert np.abs(ours - expected).max() < 3e-6 * np.abs(expected).max()
    padded = np.concatenate([np.zeros((TAPS - 1, KEY_HEADS, CHANNELS)), found.tokens.inputs_TKW])
    total = sum(padded[tap : tap + NUM_TOKENS] * taps_of()[tap] for tap in range(TAPS)) + bias_of(kind)
    assert np.allclose(np.concatenate(found.mixed), total / (1 + np.exp(-total)), atol=2e-6)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(1,), (7,), (64,), (100,), (37, 1, 1, 1, 90, 3), (5, 2, 3)], ids=str)
def test_no_bit_depends_on_cuts_company_or_what_a_ring_held(kind, cuts):
    whole = started(kind).run((NUM_TOKENS,))
    assert whole.states.keys() >= {192}
    assert_same(whole, started(kind, fill=np.nan, company=True).run(cuts))


def test_drafts_that_do_not_count_leave_no_trace():
    whole, rng = started("gdn").run((64,)), np.random.default_rng(3)
    found = started("gdn").run((33, 1), end=90)
    while found.position < NUM_TOKENS:
        room = min(4, NUM_TOKENS - found.position, CHUNK - found.position % CHUNK)
        counted = min(int(rng.integers(1, 5)), room)
        draft = DeltaTokens(*(part.copy() for part in found.tokens))
        for part in draft:
            part[found.position + counted : found.position + room] = [np.nan, 3.0][int(rng.integers(2))]
        found.step(room, as_singles=True, counted=counted, tokens=draft)
    assert_same(whole, found)


def test_a_token_that_is_not_finite_is_reported_and_poisons_nothing():
    found = started("gdn")
    found.tokens.values_THv[40] = np.inf
    found.run((NUM_TOKENS,))
    outputs = np.concatenate(found.outputs)
    assert np.flatnonzero(np.isnan(outputs).any(axis=(1, 2))).tolist() == [40]


@pytest.mark.parametrize("base", [64, 128, 192])
def test_a_row_continues_from_an_entry_that_another_row_wrote(base):
    whole = started("gdn").run((64,))
    found = started("gdn").run((50, 1), end=base + 1)
    follower = Runner("gdn", found.tokens, found.pools, row=0, own=3, source=2, source_base=base, position=base)
    follower.run((3, 40))
    ours, theirs = (np.concatenate(each.outputs) for each in (follower, whole))
    assert np.array_equal(ours.view(np.uint32), theirs[base:].view(np.uint32))
    assert all(whole.states[at] == bits for at, bits in follower.states.items())
    kept = np.asarray(follower.pools.state_EHdv[2]).tobytes()
    assert kept == np.asarray(found.pools.state_EHdv[2]).tobytes(), "the entry that it began with is as it was"
