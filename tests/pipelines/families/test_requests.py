"""Scheduling, preemption and cached prefixes: laws of the core model, held over a model of every family."""

from __future__ import annotations

import pytest

from tests.pipelines import test_independence as independence
from tests.pipelines import test_prefix_cache as prefix_cache
from tests.pipelines.families.conftest import families

pytestmark = [pytest.mark.slow, families()]

test_ways_to_schedule = independence.test_outputs_do_not_depend_on_scheduling
test_engine = independence.test_outputs_of_the_engine_are_those_of_its_steps
test_second_run = prefix_cache.test_the_second_run_finds_the_prompts_of_the_first_and_comes_to_the_same
test_conversation = prefix_cache.test_a_conversation_finds_the_answers_it_got
test_small_pool = prefix_cache.test_a_pool_too_small_for_all_prefixes_keeps_some_and_serves_all
test_preempted = prefix_cache.test_whoever_was_preempted_goes_on_from_its_pages
