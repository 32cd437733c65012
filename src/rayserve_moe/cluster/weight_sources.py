"""Where the hosts of a replica have their weights from, so that those that follow can have them too."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rayserve_moe.checkpoints.open_shares import SharePlace
from rayserve_moe.cluster.group_tensors import GroupTensors
from rayserve_moe.cluster.host_group import GroupWeights
from rayserve_moe.cluster.weight_keepers import KEEP_S, KeptShare, WeightKeepers, by_host
from rayserve_moe.config.settings import ClusterSettings
from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.observability.fault_points import reach
from rayserve_moe.requests.records import WeightsRefusedError


class WeightSources:
    """Of the weights that serve, and of those that wait on all hosts for the swap. `workers` returns those of now.

    `tensors` takes what is sent, with `timeout_s()` for each call of a host. `on_change` is called once others serve,
    and once those are kept.
    """

    def __init__(
        self,
        workers: Callable[[], list[ActorHandle]],
        cluster: ClusterSettings,
        *,
        timeout_s: Callable[[], float],
        on_change: Callable[[], object],
    ) -> None:
        self._workers, self._keeps, self._on_change = workers, cluster.keep_sent_weights, on_change
        self.serving = self.waiting = GroupWeights()
        self.keepers = WeightKeepers(self._keep_again, keeps_next=cluster.keep_next_weights)
        shares = self._keeps in ("auto", "before_swap")
        self.tensors = GroupTensors(
            workers, timeout_s=timeout_s, on_finish=self.note_sent, on_keep=self.keep, shares=shares
        )

    @property
    def offered(self) -> tuple[KeptShare, ...]:
        """What other replicas can take of weights that were sent, where they serve; empty otherwise."""
        return self.keepers.shares(self.serving.token) if self.serving.token else ()

    def bring(self, nodes: Sequence[str]) -> GroupWeights:
        """Have the weights that serve where hosts are now; returns them. RayError or TimeoutError where none has them.

        What was sent is taken from keepers that live, of this replica or of another that offers it. Where those are
        shares of more or fewer hosts, all of them are offered to each, until `settle`.
        """
        serving = self.serving
        offered = [*self.keepers.shares(serving.token), *serving.offered]
        if serving.num_hosts not in (None, len(nodes)):
            serving = replace(serving, kept=(), offered=tuple(each[0] for each in by_host(offered)), placement=None)
        elif serving.offered:
            serving = replace(serving, kept=self.keepers.take(offered, nodes), offered=())
        elif serving.kept:
            serving = replace(serving, kept=self.keepers.move(serving.kept, nodes))
        self.serving = serving
        return serving

    def settle(self) -> None:
        """Have hosts that have read shares of more or fewer hosts share what they have in place of those.

        Where memory does not hold both, the others stay. ExecutorFailure where a host is lost.
        """
        if self.serving.offered:
            with suppress(WeightsRefusedError):
                self._share_serving()

    def note_read(self, source: str) -> None:
        """Note that all hosts have staged a checkpoint."""
        self.waiting = GroupWeights(source)

    def note_sent(self, places: Sequence[SharePlace | None]) -> None:
        """Note that all hosts have staged weights that were sent, and share them in these places, if they do."""
        self.waiting = GroupWeights(None, kept=self._kept(places))

    def keep(self) -> None:
        """Have keepers open what hosts share of the weights that serve, where those were sent and are not kept yet.

        WeightsRefusedError where a host cannot in time, ExecutorFailure where one is lost.
        """
        if self.serving.is_there or self._keeps not in ("auto", "after_swap"):
            return
        reach("keeping", self)
        for closing in self.keepers.keep_only(""):
            ray.wait([closing], timeout=KEEP_S)
        self._share_serving()
        self._on_change()

    def swap(self) -> None:
        """Note that what waited serves."""
        self.serving = replace(self.waiting, num_pages=self.serving.num_pages)
        self.keepers.keep_only(self.serving.token)
        self._on_change()

    def _share_serving(self) -> None:
        if kept := self._kept(self.tensors.share_serving(secrets.token_hex(8))):
            self.serving = replace(self.serving, kept=kept, offered=())
            self.keepers.keep_only(self.serving.token)

    def _kept(self, places: Sequence[SharePlace | None]) -> tuple[SharePlace, ...]:
        """Have keepers open the shares of the hosts that serve; returns where they are then.

        ExecutorFailure where one is lost.
        """
        try:
            processes = ray.get([worker.process.remote() for worker in self._workers()]) if places else []
        except RayError as error:
            raise ExecutorFailure(f"a host was lost before its share was kept: {error}") from error
        return self.keepers.keep([process.node_id for process in processes], places)

    def _keep_again(self) -> None:
        """A keeper has ended: others take over the shares that hosts have open."""
        for token in {self.serving.token, self.waiting.token} - {""}:
            with suppress(RayError, WeightsRefusedError, ExecutorFailure):
                if kept := self._kept(self.tensors.places(token)):  # else hosts are being replaced, or have none
                    self.serving = self.serving.kept_at(kept, token)
                    self.waiting = self.waiting.kept_at(kept, token)
