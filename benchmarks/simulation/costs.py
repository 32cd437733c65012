"""What a step takes: by figures of a served replica, or estimated for a TPU slice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.scheduling.step_plan import StepPlan
from rayserve_moe.tools.plan_slice.step_cost import StepTokens, step_cost

CONTEXT_GRAIN, PROMPT_GRAIN = 1024, 256
"""Estimates are made once for so many tokens of context, and of prompts."""


@dataclass(frozen=True)
class StepLoad:
    """What a data rank computes in a step: sequences that decode and the tokens before them in all, tokens of prompts
    and the tokens before these in all, and prompts that end."""

    rows: int = 0
    context: int = 0
    prompt: int = 0
    prompt_context: int = 0
    prompt_ends: int = 0


def load_of(plan: StepPlan, *, rows_per_rank: int) -> StepLoad:
    """Return the load of the rank with most tokens; the others wait for it."""
    if not plan.num_chunks:
        return StepLoad()
    chunks = plan.chunks
    ranks = chunks.rows // rows_per_rank
    decodes = (chunks.lengths == 1) & chunks.samples
    positions = chunks.starts * chunks.lengths + chunks.lengths * (chunks.lengths - 1) // 2
    busiest = np.argmax(np.bincount(ranks, weights=chunks.lengths))
    mine = ranks == busiest
    decoding, prompts = mine & decodes, mine & ~decodes
    return StepLoad(
        int(decoding.sum()),
        int(chunks.starts[decoding].sum()),
        int(chunks.lengths[prompts].sum()),
        int(positions[prompts].sum()),
        int((prompts & chunks.samples).sum()),
    )


class StepTimes(Protocol):
    """Seconds of a step, and of a request outside of steps, until it is in the engine."""

    request_s: float

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds from one step's results to the next's."""
        ...


@dataclass(frozen=True)
class MeasuredSteps:
    """A sum over what a step has, in seconds each: of any step, of one with prompts more, per sequence and per token
    before it, per prompt token and per token before that; `request_s` of a request before and behind the engine."""

    step_s: float
    row_s: float
    context_s: float
    prompt_step_s: float
    prompt_s: float
    prompt_context_s: float
    request_s: float

    def seconds(self, load: StepLoad) -> float:
        """Return the sum."""
        return (
            self.step_s
            + self.row_s * load.rows
            + self.context_s * load.context
            + (self.prompt_step_s if load.prompt else 0.0)
            + self.prompt_s * load.prompt
            + self.prompt_context_s * load.prompt_context
        )

    def write(self, path: Path) -> None:
        """Write a file for `read`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> MeasuredSteps:
        """Read the output of `write`, or of `python -m benchmarks.fleet_calibration`."""
        return MeasuredSteps(**json.loads(path.read_text(encoding="utf-8")))


class EstimatedSteps:
    """A TPU slice by the estimate of `rayserve-moe plan-slice`; the host's part of a step hides behind it.

    The hottest device has `imbalance` times the mean of expert rows; `request_s` is taken, not estimated.
    """

    def __init__(self, model: ModelConfig, *, topology: str, imbalance: float = 1.0, request_s: float = 0.005) -> None:
        self.request_s = request_s

        @cache
        def seconds(rows: int, context: int, prompt: int) -> float:
            tokens = StepTokens(rows, context * CONTEXT_GRAIN, prompt * PROMPT_GRAIN)
            return step_cost(model, tokens, topology=topology, imbalance=imbalance).seconds

        self._seconds = seconds

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds by tables of powers of two of sequences, and of grains of tokens."""
        rows = load.rows + load.prompt_ends
        mean = load.context / load.rows if load.rows else 0.0
        bucket = 1 << (max(rows, 1) - 1).bit_length()
        return self._seconds(bucket, max(1, int(-(-mean // CONTEXT_GRAIN))), -(-load.prompt // PROMPT_GRAIN))
