"""Recurrent layers by native kernels: as near to float32 as by XLA, and no bit depends on how tokens came."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.cpu_native import delta_call, mamba2_call
from rayserve_moe.kernels.cpu_native.calls import LAYOUT_OF
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference.delta_gates import GateRule
from rayserve_moe.kernels.reference.gated_delta import CHUNK, DeltaPools, Pieces, RowEntries
from rayserve_moe.kernels.table import CPU, CPU_NATIVE
from rayserve_moe.model.families.qwen3_5_moe_text import spec_from_hf
from rayserve_moe.model.layers.gated_delta import STATE, GatedDelta
from rayserve_moe.model.layers.kimi_delta import KimiDelta
from rayserve_moe.model.layers.kinds import LayerInputs
from rayserve_moe.model.layers.mamba2 import Mamba2
from rayserve_moe.model.layers.table import MIXERS
from rayserve_moe.model.model_config import ModelConfig, StepInputs
from rayserve_moe.model.spec import MixerSpec
from rayserve_moe.parallel.mesh import plan_for
from tests.support.kernels.native_kernels import laid_out, need_native_kernels

NUM_TOKENS, BLOCK, WIDTH = 220, 32, 48
NUM_ENTRIES, NUM_ROWS, NUM_LAYERS, LAYER = 7, 3, 2, 1
SIZES = {
    "three value heads per key head": GatedDelta(2, num_value_heads=6, key_dim=32, value_dim=48, num_taps=4),
    "odd widths": GatedDelta(3, num_value_heads=6, key_dim=20, value_dim=7, num_taps=3),
    "as published": GatedDelta(1, num_value_heads=2, key_dim=128, value_dim=128, num_taps=4),
    "mamba2": Mamba2(6, value_dim=48, num_key_heads=2, key_dim=32, num_taps=4, min_step=0.6, conv_bias=True),
    "mamba2, odd widths": Mamba2(6, value_dim=7, num_key_heads=3, key_dim=20, num_taps=3, min_step=0.1),
    "mamba2, as published": Mamba2(
        8, value_dim=64, num_key_heads=1, key_dim=128, num_taps=4, min_step=0.001, conv_bias=True
    ),
    "a decay per element": KimiDelta(
        3, head_dim=20, num_taps=3, gates=GateRule("sigmoid"), rank=6, decay_rates_in_block=True
    ),
    "bounded decays": KimiDelta(
        2, head_dim=16, num_taps=4, gates=GateRule("sigmoid", decay_floor=-0.5, rounds_decays=True)
    ),
    "Kimi-Linear": KimiDelta(1, head_dim=128, num_taps=4, gates=GateRule("sigmoid"), rank=128),
}
SMALL = SIZES["odd widths"]
EACH_KIND = pytest.mark.parametrize("own", [SMALL, SIZES["mamba2, odd widths"]], ids=lambda own: own.kind)


DRAWN = {"decay": (1.0, -2.0), "norm": (0.2, 1.0), "skip": (0.2, 1.0), "conv": (0.5, 0.0), "conv_bias": (0.3, 0.0)}
"""Scale and offset of weights by the end of their role; projections have others."""


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    need_native_kernels()


@cache
def config_of(own: MixerSpec, kernels: Kernels) -> ModelConfig:
    spec = spec_from_hf(FAMILY_PRESETS["qwen3.5-tiny"].hf_config("float32"))
    full = next(layer for layer in spec.layers if layer.mixer == "gqa")
    recurrent = replace(full, mixer=own.kind)
    spec = replace(spec, hidden_size=WIDTH, mixers=(own, spec.mixer("gqa")), layers=(recurrent, recurrent, full))
    return ModelConfig(spec, ExpertConfig(spec.router, kernels, plan_for(jax.devices()[:1])))


@cache
def weights_of(own: MixerSpec) -> dict[str, np.ndarray]:
    """Draw float32 weights that bfloat16 holds; decays remember some tokens."""
    rng = np.random.default_rng(1)
    specs = MIXERS[own.kind].parameters(own, config_of(own, CPU).spec, dtype="bfloat16", tensor_size=1)
    drawn = {}
    for name, each in specs.items():
        values = rng.standard_normal(each.shape, dtype=np.float32)
        ends = (drawing for end, drawing in DRAWN.items() if each.role.endswith(end))
        scale, offset = next(ends, (WIDTH**-0.5, 0.0))
        values = values * np.float32(scale) + np.float32(offset)
        drawn[name] = np.asarray(jnp.asarray(values, each.dtype).astype(jnp.float32))
    return drawn


def empty_pools(own: MixerSpec, fill: float = 0.0) -> DeltaPools:
    """Return pools that hold `fill`; entry 0 of each layer is zeros."""
    (state,) = MIXERS[own.kind].states(own, kernels=CPU, tensor_size=1)
    entries = [np.full((NUM_LAYERS * NUM_ENTRIES, *each.shape), fill, np.float32) for each in state.entry]
    for each in entries:
        each[::NUM_ENTRIES] = 0
    rings = (np.full((NUM_LAYERS * NUM_ROWS, *each.shape), fill, np.float32) for each in state.ring)
    return DeltaPools(*map(jnp.asarray, (*entries, *rings)))


@cache
def program_of(own: MixerSpec, kernels: Kernels, dtype: str, num_singles: int):
    """Return the weights, and a compiled function of a step that keeps no buffer of its pools."""
    config = config_of(own, kernels)
    specs = MIXERS[own.kind].parameters(own, config.spec, dtype=dtype, tensor_size=1)
    weights = {name: jnp.asarray(values, specs[name].dtype) for name, values in weights_of(own).items()}
    if kernels is CPU_NATIVE:
        weights = {name: laid_out(each) if LAYOUT_OF.get(name) else each for name, each in weights.items()}

    @partial(jax.jit, donate_argnums=2)
    def run(weights, hidden_TD, pools, batch):
        batch = TokenBatch(**batch, num_singles=num_singles)
        step = MIXERS[own.kind].prepare(own, batch, {STATE: tuple(pools)}, config=config)
        inputs = LayerInputs(weights, StepInputs(batch, batch.valid_T, {own.kind: step}), jnp.int32(LAYER), config)
        out_TD, pools = MIXERS[own.kind].apply(own, (hidden_TD.astype(dtype), {STATE: tuple(pools)}), inputs)
        return out_TD, DeltaPools(*pools[STATE])

    return weights, run


def drawn_hidden(num_tokens: int = NUM_TOKENS) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((num_tokens, WIDTH), dtype=np.float32)


@dataclass
class Row:
    """A row with one sequence, with the values that a scheduler keeps of it."""

    own: MixerSpec
    pools: DeltaPools
    hidden: np.ndarray = field(default_factory=drawn_hidden)
    kernels: Kernels = CPU_NATIVE
    dtype: str = "bfloat16"
    row: int = 1
    entries: tuple[int, int, int] = (2, 0, 0)
    """Own entry, source, and its number of tokens."""
    position: int = 0
    has_company: bool = False
    """True if another sequence is computed in every step."""
    outputs: list[np.ndarray] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    """Bits of the own entry by number of tokens."""

    def step(self, count: int, *, as_singles: bool, counted: int | None = None, hidden: np.ndarray | None = None):
        """Compute the next `count` tokens, of which `counted` count."""
        hidden, counted = self.hidden if hidden is None else hidden, count if counted is None else counted
        num_singles = 8 if as_singles else 1
        num_blocks = 0 if as_singles else -(-count // BLOCK)
        total = num_singles + num_blocks * BLOCK
        positions, index = np.full(total, -1, np.int32), np.zeros(total, np.int64)
        first = 0 if as_singles else num_singles
        positions[first : first + count] = index[first : first + count] = self.position + np.arange(count)
        rows = np.full(num_singles + num_blocks, self.row, np.int32)
        entries = np.tile(np.int32(self.entries), (len(rows), 1))
        if self.has_company:
            place = num_singles - 1
            positions[place], index[place] = self.position % CHUNK, 7 * self.position % NUM_TOKENS
            rows[place], entries[place] = 2, (6, 0, 0)
        weights, run = program_of(self.own, self.kernels, self.dtype, num_singles)
        nothing = np.zeros(total, np.int32)
        batch = {
            "token_ids_T": nothing,
            "positions_T": positions,
            "kv_slots_T": nothing,
            "page_table_BP": np.zeros((len(rows), 1), np.int32),
            "rows_B": rows,
            "entries_B3": entries,
        }
        out_TD, self.pools = run(weights, jnp.asarray(hidden[index]), self.pools, batch)
        self.outputs.append(np.asarray(out_TD, np.float32)[first : first + counted])
        self.position += counted
        last = (self.position - 1) // CHUNK * CHUNK
        if last > self.entries[2] and last not in self.states:
            self.states[last] = self.bits_of(self.entries[0])

    def bits_of(self, entry: int) -> bytes:
        """Return the bits of an entry."""
        place = LAYER * NUM_ENTRIES + entry
        return b"".join(np.asarray(pool[place]).tobytes() for pool in (self.pools.state_EHdv, self.pools.window_EJKW))

    def run(self, cuts: tuple[int, ...], *, end: int = NUM_TOKENS) -> Row:
        """Compute up to `end` in steps of the given sizes, which repeat; sizes below 4 are single tokens."""
        for size in cycle(cuts):
            if self.position == end:
                return self
            self.step(min(size, end - self.position), as_singles=size < 4)
        return self

    @property
    def output(self) -> np.ndarray:
        return np.concatenate(self.outputs)


def started(own: MixerSpec = SMALL, *, fill: float = 0.0, **values) -> Row:
    """Return a row ahead of its first token."""
    return Row(own, empty_pools(own, fill), **values)


def assert_same(one: Row, other: Row) -> None:
    """Assert that outputs, and all states that both have, are equal to the bit."""
    assert np.array_equal(one.output.view(np.uint32), other.output.view(np.uint32))
    shared = one.states.keys() & other.states.keys()
    assert shared and all(one.states[at] == other.states[at] for at in shared)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SIZES)
def test_it_is_as_near_to_float32_as_xla_is(name):
    own = SIZES[name]
    exact = started(own, kernels=CPU, dtype="float32").run((NUM_TOKENS,))
    by_xla, found = (started(own, kernels=kernels).run((NUM_TOKENS,)) for kernels in (CPU, CPU_NATIVE))
    theirs, ours = (np.abs(each.output - exact.output).max() for each in (by_xla, found))
    assert ours <= 1.5 * theirs < 0.1 * np.abs(exact.output).max()
    for held in ("state_EHdv", "window_EJKW"):
        of_exact, of_xla, of_found = (
            np.asarray(getattr(each.pools, held))[LAYER * NUM_ENTRIES + 2] for each in (exact, by_xla, found)
        )
        assert np.abs(of_found - of_exact).max() <= 1.5 * np.abs(of_xla - of_exact).max()
    untouched = np.asarray(found.pools.state_EHdv)[: LAYER * NUM_ENTRIES]
    assert not untouched.any(), "another layer's entries are as they were"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("cuts", [(1,), (7,), (64,), (100,), (37, 1, 1, 1, 90, 3), (5, 2, 3)], ids=str)
def test_no_bit_depends_on_cuts_company_or_what_a_ring_held(name, cuts):
    whole = started(SIZES[name]).run((NUM_TOKENS,))
    assert whole.states.keys() >= {192}
    assert_same(whole, started(SIZES[name], fill=np.nan, has_company=True).run(cuts))


@EACH_KIND
def test_drafts_that_do_not_count_leave_no_trace(own):
    whole, rng = started(own).run((64,)), np.random.default_rng(3)
    found = started(own).run((33, 1), end=90)
    while found.position < NUM_TOKENS:
        room = min(4, NUM_TOKENS - found.position, CHUNK - found.position % CHUNK)
        counted = min(int(rng.integers(1, 5)), room)
        draft = found.hidden.copy()
        draft[found.position + counted : found.position + room] = [np.nan, 3.0][int(rng.integers(2))]
        found.step(room, as_singles=True, counted=counted, hidden=draft)
    assert_same(whole, found)


@EACH_KIND
def test_a_token_that_is_not_finite_is_reported_and_poisons_nothing(own):
    found = started(own)
    found.hidden = found.hidden.copy()
    found.hidden[40, 3] = np.inf
    found.run((NUM_TOKENS,))
    assert np.flatnonzero(np.isnan(found.output).any(axis=1)).tolist() == [40]


@EACH_KIND
@pytest.mark.parametrize("base", [64, 128, 192])
def test_a_row_continues_from_an_entry_that_another_row_wrote(own, base):
    whole = started(own).run((64,))
    found = started(own).run((50, 1), end=base + 1)
    kept = found.bits_of(2)
    follower = Row(own, found.pools, row=0, entries=(3, 2, base), position=base).run((3, 40))
    assert np.array_equal(follower.output.view(np.uint32), whole.output[base:].view(np.uint32))
    assert all(whole.states[at] == bits for at, bits in follower.states.items())
    assert follower.bits_of(2) == kept, "the entry that it began with is as it was"


SOUND = {"row": 0, "start": 64, "known": 3, "count": 4, "token": 0, "own": 2, "source": 1, "source_base": 64}
BAD_PIECES = {
    "a row": {"row": NUM_ROWS},
    "no row": {"row": -1},
    "an own entry": {"own": NUM_ENTRIES},
    "a source": {"source": -1},
    "a start that is no multiple": {"start": 63},
    "too many tokens": {"known": 5},
    "tokens behind the step": {"token": 5},
    "a base behind the start": {"source_base": 128},
}


@EACH_KIND
@pytest.mark.parametrize("changes", [*BAD_PIECES.values()], ids=[*BAD_PIECES])
def test_a_piece_outside_the_step_or_the_pools_is_refused(own, changes):
    weights, _ = program_of(own, CPU_NATIVE, "bfloat16", 8)
    kernel = partial(delta_call.advance_layer, gates=GateRule())
    kernel = partial(mamba2_call.advance_layer, min_step=0.0) if isinstance(own, Mamba2) else kernel
    hidden, pools = jnp.zeros((8, WIDTH), jnp.bfloat16), empty_pools(own)

    def run(values: dict[str, int]) -> np.ndarray:
        row, start, known, count, token, own, source, base = (jnp.array([values[name]], jnp.int32) for name in SOUND)
        pieces = Pieces(row, start, known, count, token, RowEntries(own, source, base))
        step = jax.jit(partial(kernel, layer=jnp.int32(LAYER), eps=1e-6))
        return np.asarray(step(hidden, weights, pools, pieces)[0])

    assert np.isfinite(run(SOUND)).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside the step or the pools"):
        run(SOUND | changes)
