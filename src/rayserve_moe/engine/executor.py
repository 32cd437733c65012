"""Interface between the engine and the executor of its steps, and the failure of an executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.checkpoints.bucket import Heads, SentAdapter, SentShares, SentTensor, WantedTensor
from rayserve_moe.scheduling.host_slots import PageSlots
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult


class ExecutorFailure(RuntimeError):
    """Raised if a step failed, a host or device was lost, or lost hosts have returned.

    No step can run before the hosts are replaced.
    """

    def __init__(self, message: str, *, in_step: bool = False, is_loss: bool = True, is_final: bool = False) -> None:
        super().__init__(message)
        self.in_step = in_step
        """True if every host lives and an error was raised in a step, which the step's content may have caused."""
        self.is_loss = is_loss
        """False if no host is lost, but the executor can have more hosts than it has now."""
        self.is_final = is_final
        """True if no host has the current weights, unless another process keeps them."""


@dataclass(frozen=True)
class GroupLayout:
    """Layout of an executor's hosts; with missing hosts it has fewer data ranks and expert ranks."""

    num_data_ranks: int = 1
    num_expert_ranks: int = 1
    num_redundant_experts: int = 0
    num_hosts: int = 1
    num_slices: int = 1
    num_missing_hosts: int = 0
    placement: ExpertPlacement | None = None
    """Initial placement of experts on these hosts; None for the order of expert ids."""


class TensorReceiver(Protocol):
    """Receiver of sent weights, used beside the steps, one call at a time and never beside `Executor.stage_weights`.

    Calls raise WeightsRefusedError if a host cannot use the weights. After `finish`, a plan with `takes_staged_weights`
    activates them.
    """

    def begin(self, expert_of_slot: np.ndarray | None) -> None:
        """Drop staged weights and begin an update. Experts are placed by `expert_of_slot`, as in `stage_weights`."""
        ...

    def stage(self, tensors: Sequence[SentTensor]) -> None:
        """Give every host its share of some tensors, or of their changes."""
        ...

    def wanted(self, heads: Heads) -> list[list[WantedTensor]]:
        """Return the parts of some tensors that each host wants, for a sender that cuts them itself."""
        ...

    def stage_shares(self, shares: SentShares) -> None:
        """Give every host the parts that the sender has cut for it: all that it wants of these tensors."""
        ...

    def merge(self, adapter: SentAdapter) -> float:
        """Have every host read its share of the configured checkpoint with an adapter, in place of sent tensors.

        Returns: the largest |round(W) - W| of the merged matrices.
        """
        ...

    def finish(self) -> None:
        """Have every host lay out the staged weights; tensors that were not sent keep their current weights."""
        ...

    def keep(self) -> None:
        """Keep the current weights for hosts that start later, unless they are kept already. Experts must not move."""
        ...

    def drop(self) -> None:
        """Drop the update."""
        ...


class AdapterHosts(Protocol):
    """Hosts that hold adapters beside the weights, used beside the steps, one call at a time."""

    def add(self, key: str, adapter: SentAdapter) -> None:
        """Have every host hold an adapter under a key that plans may name from now on.

        Hosts that are replaced later receive it again, until it is dropped.

        Raises: WeightsRefusedError if a host cannot use it, ExecutorFailure if a host is lost.
        """
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Have every host drop adapters from host memory. Raises: ExecutorFailure if a host is lost."""
        ...


class PageHosts(Protocol):
    """Hosts that keep pages in host memory, used beside the steps.

    Shares are bytes of pages, or references to them, by place of a device in a data rank.
    """

    def read(self, pages: PageSlots) -> Mapping[int, Any]:
        """Return the shares of pages. Raises: ExecutorFailure or TimeoutError if a host does not answer."""
        ...

    def write(self, pages: PageSlots, shares: Mapping[int, Any]) -> Sequence[str]:
        """Have every host write its shares of another executor's pages into slots.

        Returns: the fault of each page, empty if it is written.

        Raises: ExecutorFailure or TimeoutError if a host does not answer, here or there.
        """
        ...


class Executor(Protocol):
    """Runner of steps: in this process (`execution.runner`) or on other hosts (`cluster.step_transport`).

    Calls come from a single thread, except for `stage_weights` and `tensors`. After `ExecutorFailure` only `shutdown`
    may follow, or `Rebuilder.rebuild` of the same object (`engine.recovery.hosts`).
    """

    def start(self) -> StartReport:
        """Load weights, allocate pages, compile every step program and run it once."""
        ...

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Submit a step to the devices, then wait for the result of the previous step; None without a previous step.

        The devices thus find their next step waiting. A plan without chunks computes nothing.
        """
        ...

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        """Have every host read and check its share of a checkpoint while steps run; one call at a time.

        Experts are placed by `expert_of_slot` [MoE layers, slots]; None is the placement of the start. A plan with
        `takes_staged_weights` activates the weights.

        Raises: WeightsRefusedError if a host cannot use them or has not read them in time; then no host keeps any.
        """
        ...

    @property
    def tensors(self) -> TensorReceiver:
        """Return the receiver of sent weights."""
        ...

    @property
    def adapters(self) -> AdapterHosts:
        """Return the hosts' adapters; only on a server with `max_loras`."""
        ...

    @property
    def pages(self) -> PageHosts:
        """Return the hosts' pages in host memory; only on a server with `host_cache_mib`."""
        ...

    def release(self) -> None:
        """Release resources that cost CPU while no request runs; the next `execute` takes them again."""
        ...

    def shutdown(self) -> None:
        """Stop for good. May be called twice."""
        ...
