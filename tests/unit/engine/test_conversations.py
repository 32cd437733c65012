"""Conversations that come back find all of their earlier turns that can be cached."""

from __future__ import annotations

import queue
from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.config.settings import CacheSettings, SchedulerSettings, Settings
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from tests.support.devices.counting_executor import CARD, CountingExecutor

NUM_CONVERSATIONS = 16
NUM_TURNS = 8
PAGE_SIZE = 16
TIMEOUT_S = 600


class Conversations:
    """Conversations that take turns; every turn's prompt is all that was said before, and something new."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._generator = np.random.default_rng(4)
        self.said: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
        self.num_ideal = 0

    def take_turns(self) -> None:
        """Let every conversation go on by one turn, all of them at once."""
        arrived: queue.SimpleQueue[list[ChoiceResult]] = queue.SimpleQueue()
        for i in self._generator.permutation(NUM_CONVERSATIONS).tolist():
            said = self.said[i]
            # The last token of an answer is sampled, and not computed any more.
            num_covered = max(0, len(said) - 1) // PAGE_SIZE * PAGE_SIZE
            said += [i, *self._generator.integers(0, 400, self._generator.integers(4, 60)).tolist()]
            self.num_ideal += len(said) - num_covered
            sampling = SamplingParams(max_new_tokens=int(self._generator.integers(4, 40)), ignore_eos=True)
            self._loop.submit(GenerationRequest(str(i), np.asarray(said, np.int32), sampling), arrived.put)
        num_open = NUM_CONVERSATIONS
        while num_open:
            for update in arrived.get(timeout=TIMEOUT_S):
                self.said[int(update.request_id)] += update.token_ids
                num_open -= update.finish is not None


@pytest.mark.parametrize("overlap_steps", [True, False])
def test_little_more_is_computed_than_what_is_new(overlap_steps: bool):
    executor = CountingExecutor(num_pages=1024)
    settings = Settings(
        scheduler=SchedulerSettings(max_running_requests=8, max_step_tokens=128, overlap_steps=overlap_steps),
        cache=CacheSettings(page_size=PAGE_SIZE),
    )
    loop = EngineLoop(executor, replace(CARD, max_model_len=1000), settings=settings)
    conversations = Conversations(loop)
    for _ in range(NUM_TURNS):
        conversations.take_turns()
    loop.check_integrity()
    loop.shutdown()
    num_without_cache = NUM_TURNS / 2 * sum(map(len, conversations.said))
    assert num_without_cache > 5 * conversations.num_ideal, "there is much to save"
    assert conversations.num_ideal <= executor.num_prompt_tokens <= 1.01 * conversations.num_ideal
