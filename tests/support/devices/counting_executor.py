"""An executor without a model: every sequence counts on from its last token. For tests of the engine around it."""

from __future__ import annotations

import threading

import numpy as np

from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.requests.records import ModelCard, RoutingLayout, WeightsRefusedError
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED, StartReport, StepPlan, StepResult

VOCABULARY = 1000
REFUSED_PATH, LOST_PATH = "/refused", "/lost"

CARD = ModelCard(
    name="counting",
    max_model_len=100,
    vocab_size=VOCABULARY,
    eos_token_ids=(500,),
    routing=RoutingLayout(num_hidden_layers=1, layer_ids=(0,), num_experts=4, top_k=1),
    returns_routing=False,
)


ROUTING = RoutingLayout(num_hidden_layers=1, layer_ids=(0,), num_experts=256, top_k=2)
"""Its routing rows say of a token at which position it stands, and which step computed it."""


class CountingExecutor:
    """Samples last token + 1. It can be held in the middle of a step, and fails from call number `fails_from` on.

    `num_prompt_tokens` were computed that nobody sampled just before. It stages any weights but those at REFUSED_PATH
    and LOST_PATH, and can be held while it does. Every step brings the same `tally`, if any.
    """

    def __init__(self, num_pages: int = 64) -> None:
        self._num_pages = num_pages
        self._last_tokens: dict[int, int] = {}
        self._in_flight: StepResult | None = None
        self.may_step = threading.Event()
        self.may_step.set()
        self.in_step = threading.Event()
        self.may_stage = threading.Event()
        self.may_stage.set()
        self.in_stage = threading.Event()
        self.staged: str | None = None
        self.serving = "first"
        self.fails_from = float("inf")
        self.num_calls = 0
        self.num_prompt_tokens = 0
        self.num_steps = 0
        self.released = threading.Event()
        self.num_shutdowns = 0
        self.tally: np.ndarray | None = None

    def start(self) -> StartReport:
        return StartReport(self._num_pages)

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.num_calls += 1
        self.in_step.set()
        self.may_step.wait()
        self.in_step.clear()
        if self.num_calls >= self.fails_from:
            raise ExecutorFailure("host 1 is gone")
        if plan.takes_staged_weights:
            assert self._in_flight is None and self.staged is not None and not plan.num_chunks
            self.serving, self.staged = self.staged, None
            return None
        before, self._in_flight = self._in_flight, self._compute(plan) if plan.num_chunks else None
        return before

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        self.in_stage.set()
        self.may_stage.wait()
        self.in_stage.clear()
        if model_path == LOST_PATH:
            raise ExecutorFailure("host 1 is gone")
        if model_path == REFUSED_PATH:
            raise WeightsRefusedError("a tensor is missing")
        self.staged = model_path

    def _compute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.num_prompt_tokens += int((plan.chunks.token_ids != LAST_SAMPLED).sum())
        ids = []
        chunks = plan.chunks
        ends = np.cumsum(chunks.lengths) - 1
        for row, token_id in zip(chunks.rows[chunks.samples], chunks.token_ids[ends][chunks.samples], strict=True):
            last = self._last_tokens[row] if token_id == LAST_SAMPLED else int(token_id)
            self._last_tokens[row] = (last + 1) % VOCABULARY
            ids.append(self._last_tokens[row])
        count = len(ids)
        routing = _rows(plan) if plan.wants_routing else None
        sampled = np.asarray(ids, np.int32), np.full(count, -0.5), np.ones(count, bool)
        return StepResult(plan.step_id, *sampled, routing, tally=self.tally)

    def release(self) -> None:
        self.released.set()

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def _rows(plan: StepPlan) -> np.ndarray:
    first_tokens = np.cumsum(plan.chunks.lengths) - plan.chunks.lengths
    positions = np.arange(plan.num_tokens) + np.repeat(plan.chunks.starts - first_tokens, plan.chunks.lengths)
    rows = np.stack([positions, np.full(plan.num_tokens, plan.step_id)], axis=1) % ROUTING.num_experts
    return rows[:, None].astype(ROUTING.dtype)
