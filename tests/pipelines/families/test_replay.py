"""Routing rows, returned and taken: laws of the core model, held over a model of every family."""

from __future__ import annotations

import pytest

from rayserve_moe import Engine
from tests.pipelines import test_forced_routing as forced_routing
from tests.pipelines import test_routing as routing
from tests.pipelines import test_routing_equality as equality
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.pipelines.families.conftest import families
from tests.support.engine.outputs import Outcomes
from tests.support.engine.run_requests import Way, preempt_every, run_together

pytestmark = [pytest.mark.slow, families()]

test_number_of_rows = routing.test_there_is_one_row_per_token_but_the_last
test_rows_alone = routing.test_no_new_tokens_give_all_prompt_rows_and_nothing_else
test_choices_share_rows = routing.test_choices_agree_on_the_prompt_and_say_what_they_shared
test_rows_of_preempted = routing.test_rows_of_sampled_tokens_survive_preemption
uncached = equality.uncached
test_ways_to_the_same_rows = equality.test_the_way_does_not_show
test_rows_on_two_data_ranks = equality.test_two_data_ranks_do_not_show
test_aborted = equality.test_aborted_and_continued_is_as_if_never_aborted
test_replay = equality.test_replaying_what_was_captured_changes_nothing
test_replay_of_an_answer = equality.test_replaying_a_whole_answer_in_a_scoring_request_changes_nothing
free, forced = forced_routing.free, forced_routing.forced
test_captured = forced_routing.test_captured_routing_reproduces_the_run
test_rollout = forced_routing.test_a_whole_rollout_is_reproduced
test_other_experts = forced_routing.test_other_experts_are_taken_and_change_the_log_probs
WAYS = {name: way for name, way in forced_routing.WAYS.items() if name != "preemption every 2 steps"}
"""Recurrent layers resume at a multiple of 64 tokens: with 16 tokens a step, two steps bring no progress."""
WAYS["preemption every 3 steps"] = Way(chunk_tokens=64, intervene=preempt_every(3))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_forced_ways(engine: Engine, free: Outcomes, forced: Outcomes, way: Way):
    forced_routing.test_forced_outcomes_do_not_depend_on_scheduling(engine, free, forced, way)


@pytest.mark.float32("XLA rounds a weighted result before it adds it to exchanged ones, native kernels do not")
def test_forced_on_two_data_ranks(two_ranks: Engine, free: Outcomes, forced: Outcomes):
    """In bfloat16, one sum in some 29,000 is rounded to another number, and a state keeps it: 0.013 in a log-prob."""
    forced_routing.test_forced_outcomes_do_not_depend_on_data_ranks(two_ranks, free, forced)


def test_forced_rows_on_two_data_ranks(two_ranks: Engine, free: Outcomes, forced: Outcomes):
    """The tokens and rows are equal in bfloat16, too."""
    requests = forced_routing.forced_requests(free, two_ranks.card.routing.num_experts)
    found = run_together(two_ranks.runner, two_ranks.card, requests, way=ON_TWO_RANKS)
    equality.assert_same_routing(found, forced)


test_forced_is_not_cached = forced_routing.test_nobody_finds_what_was_computed_under_forced_routing


@pytest.mark.float32("weights of more than two experts are added up in the order of the row")
def test_order_of_rows(engine: Engine, free: Outcomes):
    forced_routing.test_the_order_of_a_row_is_kept_and_changes_nothing_else(engine, free)
