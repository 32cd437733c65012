"""What routes answer is what they answer without drafts: laws of other files, held over a server that speculates."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.proposers import SiblingProposer
from rayserve_moe.engine.speculation.steps import DraftedSteps
from rayserve_moe.inprocess.engine import Engine
from tests.http import test_dialects as dialects
from tests.http import test_ends as ends
from tests.http import test_forced_routing as forced_routing
from tests.http import test_logprobs as logprobs
from tests.http.conftest import served
from tests.support.engine.schedulers import some_reach
from tests.support.engine.shared_settings import SERVED

pytestmark = pytest.mark.slow
MOST = 3

free, stop, generated = ends.free, ends.stop, logprobs.generated
prompt, plain = dialects.prompt, dialects.plain
rollout = forced_routing.rollout
test_stop_strings = ends.test_stop_strings_wait_in_one_language_and_not_in_the_other
test_what_ended = ends.test_what_ended_a_choice_is_text_where_that_is_asked_for
test_min_length = dialects.test_no_id_ends_a_choice_before_its_min_length
test_answers = dialects.test_the_answer_is_that_of_the_engine_in_process
test_in_process = ends.test_the_engine_in_process_ends_as_the_route_does
test_allowed_ids = dialects.test_only_allowed_ids_are_sampled_and_scored_among_themselves
test_penalty = dialects.test_a_penalty_ends_a_repetition
test_bias = dialects.test_a_biased_token_is_the_only_one
test_scores = logprobs.test_scoring_an_output_gives_the_log_probs_it_had
test_echo = logprobs.test_echo_puts_the_prompt_before_the_completion
test_echoed_stream = logprobs.test_an_echoed_stream_adds_up_to_the_whole_answer
test_forced_rows = forced_routing.test_the_rollout_s_own_rows_give_its_log_probs


@pytest.fixture(scope="module")
def engine(checkpoint):
    """Repeated requests draft from the previous answer."""
    drafts = {"speculative_algorithm": "SIBLINGS", "speculative_num_steps": MOST}
    with Engine(model_path=str(checkpoint), **SERVED, **drafts) as engine:
        cycle = engine.loop._cycle
        proposer = SiblingProposer(engine.runner.served.settings.speculation)
        fixed = Speculation(cycle.scheduler.table, proposer, max_drafts=MOST, is_fixed=True, reach=some_reach())
        with patch.object(extension_of(cycle.extensions, DraftedSteps), "speculation", fixed):
            yield engine
        assert fixed.totals.drafted > fixed.totals.accepted > 0


@pytest.fixture(scope="module")
def url(engine):
    with served(engine) as url:
        yield url
