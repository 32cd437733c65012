"""An executor whose sequences count on from their last token. For tests of the engine around it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.requests.records import ModelCard, RoutingLayout, WeightsRefusedError
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED, StartReport, StepPlan, StepResult
from tests.support.devices.simulated_device import VOCABULARY, SimulatedDevice, count_on

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


def rows_by_step(plan: StepPlan, positions: np.ndarray) -> np.ndarray:
    """Return for each token its position and the step."""
    rows = np.stack([positions, np.full(plan.num_tokens, plan.step_id)], axis=1) % ROUTING.num_experts
    return rows[:, None].astype(ROUTING.dtype)


def rows_by_position(plan: StepPlan, positions: np.ndarray) -> np.ndarray:
    """Return for each token its position, twice: the same whichever step computes it."""
    return (np.stack([positions, positions], axis=1)[:, None] % ROUTING.num_experts).astype(ROUTING.dtype)


class CountingExecutor:
    """Samples last token + 1. It can be held in the middle of a step, and fails from call number `fails_from` on.

    `num_prompt_tokens` were computed that nobody sampled just before. It stages any weights but those at REFUSED_PATH
    and LOST_PATH, and can be held while it does. Every step brings the same `tally`, if any.
    """

    routing_of = staticmethod(rows_by_step)

    def __init__(self, num_pages: int = 64) -> None:
        self._num_pages = num_pages
        self.device = SimulatedDevice(count_on, routing_of=self.routing_of)
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
            assert self.device.in_flight is None and self.staged is not None and not plan.num_chunks
            self.serving, self.staged = self.staged, None
            return None
        self.num_steps += bool(plan.num_chunks)
        self.num_prompt_tokens += int((plan.chunks.token_ids != LAST_SAMPLED).sum())
        result = self.device.execute(plan)
        return result if result is None or self.tally is None else replace(result, tally=self.tally)

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        self.in_stage.set()
        self.may_stage.wait()
        self.in_stage.clear()
        if model_path == LOST_PATH:
            raise ExecutorFailure("host 1 is gone")
        if model_path == REFUSED_PATH:
            raise WeightsRefusedError("a tensor is missing")
        self.staged = model_path

    def release(self) -> None:
        self.released.set()

    def shutdown(self) -> None:
        self.num_shutdowns += 1
