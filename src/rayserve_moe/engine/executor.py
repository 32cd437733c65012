"""What the engine needs of whatever runs its steps, and how that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rayserve_moe.checkpoints.bucket import Heads, SentShares, SentTensor, WantedTensor
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult


class ExecutorFailure(RuntimeError):
    """The executor lost a host or a device: no further step can run on it before its hosts are replaced.

    `in_step`: every host lives, and one raised an error in a step, which may be the fault of what the step computes.
    Where it is no loss, the executor can have more hosts than it has now. `is_final`: the weights that served are
    nowhere, unless someone keeps them in this moment.
    """

    def __init__(self, message: str, *, in_step: bool = False, is_loss: bool = True, is_final: bool = False) -> None:
        super().__init__(message)
        self.in_step, self.is_loss, self.is_final = in_step, is_loss, is_final


@dataclass(frozen=True)
class GroupLayout:
    """What the hosts of an executor serve as; one that does without hosts has fewer data ranks and expert ranks."""

    num_data_ranks: int = 1
    num_expert_ranks: int = 1
    num_redundant_experts: int = 0
    num_hosts: int = 1
    num_slices: int = 1
    num_missing_hosts: int = 0


class TensorReceiver(Protocol):
    """Takes weights that are sent, beside the steps, one call at a time and none beside `Executor.stage_weights`.

    WeightsRefusedError where a host cannot use them. A plan with `takes_staged_weights` puts to use what is `finish`ed.
    """

    def begin(self, expert_of_slot: np.ndarray | None) -> None:
        """Forget what is staged, and begin an update. Experts go where `expert_of_slot` says, as in `stage_weights`."""
        ...

    def stage(self, tensors: Sequence[SentTensor]) -> None:
        """Give every host its share of some tensors, or changes of them."""
        ...

    def wanted(self, heads: Heads) -> list[list[WantedTensor]]:
        """What every host wants of some tensors, for a sender that cuts them itself."""
        ...

    def stage_shares(self, shares: SentShares) -> None:
        """Give every host what its sender has cut for it, all that is wanted of the tensors in it."""
        ...

    def finish(self) -> None:
        """Have every host lay out what has come, with the weights that serve where nothing has."""
        ...

    def keep(self) -> None:
        """Have the weights that serve kept for hosts that follow, where they are not yet; experts lie still."""
        ...

    def drop(self) -> None:
        """Forget the update."""
        ...


class Executor(Protocol):
    """Runs steps: in this process (`execution.runner`) or on other hosts (`cluster.step_transport`).

    Calls come from one thread, but for `stage_weights` and those of `tensors`. After `ExecutorFailure` only `shutdown`
    may follow, or a `Rebuilder.rebuild` of the same object (`engine.recovery.hosts`).
    """

    def start(self) -> StartReport:
        """Load weights, allocate pages, compile every step and run it once."""
        ...

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Hand a step to the devices, then wait for the result of the one before; None where there is none.

        So the devices find their next step waiting. A plan without chunks computes nothing.
        """
        ...

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        """Have every host read and check its share of a checkpoint, while steps run; one call at a time.

        Experts go where `expert_of_slot` [MoE layers, slots] says, None: where they were at the start. A plan with
        `takes_staged_weights` puts them to use. WeightsRefusedError where a host cannot use them, or has not read them
        in time: then none keeps any.
        """
        ...

    @property
    def tensors(self) -> TensorReceiver:
        """Takes weights that are sent."""
        ...

    def release(self) -> None:
        """Give back what costs CPU while no request is running; the next `execute` takes it again."""
        ...

    def shutdown(self) -> None:
        """Stop for good. May be called twice."""
        ...
