"""Pages from host memory stand for their own tokens in every kind of state, whatever happens between.

The scheduler's machine checks every step on a simulated device. Here its pools are so small that pages come and go.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.properties.test_scheduler import LONGEST_PROMPT, MOST_NEW, SchedulerMachine

NUM_ROUNDS, MAX_UNFINISHED, ANY = 150, 10, 1000
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]


def turn_over(machine: SchedulerMachine, generator: np.random.Generator) -> None:
    """Submit requests and later turns; preempt, abort and flush now and then."""

    def below(limit: int) -> int:
        return int(generator.integers(limit))

    for _ in range(NUM_ROUNDS):
        if len(machine.unfinished) < MAX_UNFINISHED:
            if len(machine.unfinished) < len(machine.choices) and below(10) < 6:
                machine.go_on_with_a_conversation(which=below(ANY), num_new=below(MOST_NEW))
            else:
                common, own, new, n = below(LONGEST_PROMPT), below(6), below(MOST_NEW), 1 + below(2)
                machine.submit(which=below(2), num_common=common, num_own=own, num_new=new, n=n, can_stop=True, salt="")
        event = below(50)
        if event < 3 and machine.scheduler.running:
            machine.preempt(which=below(ANY))
        elif event < 6 and machine.unfinished:
            machine.abort(which=below(ANY))
        elif event == 6:
            machine.flush(one_in_four=0)
        if machine.is_busy:
            machine.step(count=1 + below(6))
        machine.books_are_right()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("windows", "entry_tokens"), [((0,), 0), ((0, 3, 21), 0), ((0, 16), 16)])
def test_pages_come_back_as_they_went(windows: tuple[int, ...], entry_tokens: int, seed: int):
    generator, machine = np.random.default_rng(seed), SchedulerMachine()
    machine.set_up(
        num_rows=int(generator.integers(2, 5)),
        step_tokens=64,
        chunk_tokens=int(generator.choice([5, 16, 64])),
        page_size=4,
        num_pages=30,
        num_data_ranks=1 + seed % 2,
        caches_prefixes=True,
        overlaps=seed % 3 < 2,
        windows=windows,
        entry_tokens=entry_tokens,
        num_kept=9,
        interval=0,
        max_drafts=0 if seed % 3 < 2 else 3,
        num_hosted=(60, 12, 3)[seed % 3],
        seed=seed,
    )
    turn_over(machine, generator)
    machine.teardown()
    assert machine.hosted is not None
    statistics = machine.hosted.statistics()
    assert statistics["host_pages_offloaded"] > 100 and statistics["host_pages_restored"] > 5
