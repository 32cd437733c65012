"""How even the load of the ranks really is, counted in the steps, against what the plan of the experts promised.

    python -m benchmarks.realised_balance [--devices 4] [--prompts 112] [--out FILE.json]

Prompts run with experts in their own order, are run again after a rebalance to a plan made from what was counted, and
then others after them. A callback inside the compiled step counts how many tokens each slot takes, on each device.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.narrow import NARROW, NUM_REDUNDANT, eplb_of, narrow_engine, num_ended, submit_all
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.planning import imbalance, rank_loads
from rayserve_moe.experts import all_to_all
from rayserve_moe.experts.slot_mapping import choose_slots
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.results import ChoiceResult

PROMPT_TOKENS, ROWS_PER_DEVICE, STEP_TOKENS = 480, 4, 256


class SlotTap:
    """Counts the tokens that every slot takes, as the steps run: `tokens` [layers, slots]."""

    def __init__(self, num_slots: int) -> None:
        self.tokens = np.zeros((NARROW.num_hidden_layers, num_slots), np.int64)
        self._writing = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the steps that are compiled meanwhile count."""
        all_to_all.choose_slots = self._choose
        try:
            yield
        finally:
            all_to_all.choose_slots = choose_slots

    def _choose(self, *arguments: Any, **named: Any) -> jax.Array:
        slots_TK = choose_slots(*arguments, **named)
        counts_P = jnp.zeros(self.tokens.shape[1] + 1, jnp.int32).at[slots_TK].add(1)[:-1]
        jax.debug.callback(self._add, named["layer"], counts_P)
        return slots_TK

    def _add(self, layer: jax.Array, counts_P: jax.Array) -> None:
        with self._writing:
            self.tokens[int(layer)] += np.asarray(counts_P)


def run_prompts(engine: Engine, tap: SlotTap, prompts: np.ndarray) -> np.ndarray:
    """Run prompts, one new token each; returns the tokens that each slot took, int64 [layers, slots]."""
    jax.effects_barrier()
    tap.tokens[:] = 0
    ended, left = threading.Event(), [len(prompts)]

    def receive(updates: list[ChoiceResult]) -> None:
        left[0] -= num_ended(updates)
        if left[0] == 0:
            ended.set()

    submit_all(engine.loop, list(prompts), num_new_tokens=1, sink=receive)
    ended.wait()
    jax.effects_barrier()
    return tap.tokens.copy()


def measure(engine: Engine, tap: SlotTap, *, num_prompts: int) -> dict[str, Any]:
    """Measure realised and promised imbalances by layer, before and after a rebalance, for the same and new prompts."""
    eplb, generator = eplb_of(engine), np.random.default_rng(0)
    first, others = generator.integers(FIRST_PLAIN_ID, NARROW.vocab_size, (2, num_prompts, PROMPT_TOKENS), np.int32)
    old = eplb.migration.placement

    def realised(tokens: np.ndarray) -> np.ndarray:
        return imbalance(tokens.reshape(len(tokens), old.ep_size, -1).sum(axis=2))

    before = run_prompts(engine, tap, first)
    note("before: done")
    load = np.zeros((old.num_layers, old.num_experts))
    np.add.at(load, (np.arange(old.num_layers)[:, None], old.expert_of_slot), before)
    placement = plan(load, ep_size=old.ep_size, num_redundant=old.num_redundant)
    eplb.set_target(placement)
    while eplb.migration.progress.version == 0 or not eplb.migration.progress.is_done:
        run_prompts(engine, tap, others[:ROWS_PER_DEVICE])
    note("rebalanced")
    phases = {
        "before": (before, imbalance(rank_loads(old, load))),
        "after, the same prompts": (run_prompts(engine, tap, first), imbalance(rank_loads(placement, load))),
        "after, other prompts": (run_prompts(engine, tap, others), imbalance(rank_loads(placement, load))),
    }
    return {
        name: {
            "tokens": int(tokens.sum(axis=1).min() // NARROW.num_experts_per_tok),
            "realised": realised(tokens).tolist(),
            "promised": promised.tolist(),
        }
        for name, (tokens, promised) in phases.items()
    }


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="emulated")
    parser.add_argument("--prompts", type=int, default=112, help=f"of {PROMPT_TOKENS} tokens each")
    parser.add_argument("--out", type=Path, default=RESULTS / "realised_balance.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    tap = SlotTap(NARROW.num_experts + NUM_REDUNDANT)
    settings = {"enable_prefix_caching": False, "compile_cache": "off"}
    with (
        tap.installed(),
        narrow_engine(
            arguments.devices, rows_per_device=ROWS_PER_DEVICE, step_tokens=STEP_TOKENS, **settings
        ) as engine,
    ):
        phases = measure(engine, tap, num_prompts=arguments.prompts)
    found = {"devices": arguments.devices, "redundant": NUM_REDUNDANT, "phases": phases}
    result = {"facts": machine_facts(load_before), "realised_balance": found}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
