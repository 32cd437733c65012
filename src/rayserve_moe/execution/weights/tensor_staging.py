"""Sent weights, staged on this host tensor by tensor until they are activated like a checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rayserve_moe.checkpoints.adapters.placing import merged_tensors
from rayserve_moe.checkpoints.bucket import Heads, SentPiece, WantedTensor, adapter_in
from rayserve_moe.checkpoints.files import CheckpointFiles
from rayserve_moe.checkpoints.names import walk
from rayserve_moe.checkpoints.open_shares import WeightShare
from rayserve_moe.checkpoints.sent_parameters import SentParameters
from rayserve_moe.config.given_files import Reach
from rayserve_moe.execution.memory import memory_available, spare_bytes
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step.pytrees import ModelWeights
from rayserve_moe.execution.weights.huge_pages import use_huge_pages
from rayserve_moe.execution.weights.placing import parameter_tree, read_parameters
from rayserve_moe.execution.weights.share import write_share
from rayserve_moe.execution.weights.staged import SPARE_SHARE, StagedWeights, refusing
from rayserve_moe.model.family_table import family_of, rules_of
from rayserve_moe.model.parameters import parameters_in_files
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.requests.records import WeightsRefusedError
from rayserve_moe.scheduling.step_plan import StartReport

log = logging.getLogger(__name__)

NOT_BEGUN = "no update has begun on this host"


class TensorStaging:
    """Staging of an update: `begin`, then `wanted` and `add` for its tensors, then `finish`, or `drop`.

    `files` are the checkpoint's; senders use its names. `weights` returns the current weights on the devices. All
    methods raise WeightsRefusedError, in a single line.
    """

    def __init__(
        self,
        staged: StagedWeights,
        served: ServedModel,
        *,
        files: CheckpointFiles,
        weights: Callable[[], ModelWeights],
    ) -> None:
        self._staged, self._served, self._weights, self._files = staged, served, weights, files
        self._rules = rules_of(files.config, files.tensors)
        self._ignored = getattr(family_of(files.config), "IGNORED", ())
        self._sent: SentParameters | None = None
        self._slots: np.ndarray | None = None
        """Expert of every slot, [MoE layers, slots], for the begun update."""
        self._merged: dict[str, Any] | None = None
        """Parameters with an adapter, once they are read."""
        self.max_rounding = 0.0
        """Largest rounding error of this host's share of the last merged adapter."""

    def unstarted(self) -> StartReport:
        """Return the start report before anything is loaded: expert layout and dtypes."""
        served, rules = self._served, self._rules
        specs = (spec for _, spec in walk(parameter_tree(served.config, dtype=served.dtype)) if not spec.is_scale)
        roles = dict.fromkeys(spec.role for spec in specs if spec.dtype == "float32" != served.dtype)
        return StartReport(
            0,
            num_expert_ranks=served.config.plan.num_expert_ranks,
            num_redundant_experts=served.config.experts.num_redundant,
            dtype=served.dtype,
            float32_tensors=tuple(rules[role].format(layer="*", expert="*") for role in roles),
        )

    def begin(self, expert_of_slot: np.ndarray | None) -> None:
        """Begin an update, dropping an earlier one."""
        self.drop()
        served = self._served
        tree = parameter_tree(served.config, dtype=served.dtype)
        slots = served.placement.expert_of_slot if expert_of_slot is None else np.array(expert_of_slot)
        self._slots = slots
        with refusing():
            self._sent = SentParameters(
                parameters_in_files(tree, self._rules, spec=served.config.spec),
                rules=self._rules,
                ignored=self._ignored,
                sharding_of=lambda spec: served.config.plan.sharding(spec.axes),
                expert_of_slot=slots,
                serving=self._weights().params,
            )

    def wanted(self, heads: Heads) -> list[WantedTensor]:
        """Return the parts of some tensors that this host wants."""
        with refusing():
            return [self._begun().wanted(name, shape) for name, shape in heads]

    def add(self, pieces: Sequence[SentPiece]) -> None:
        """Store pieces: all parts that this host wants of their tensors."""
        by_name: dict[str, list[SentPiece]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
        with refusing():
            for name, of_tensor in by_name.items():
                self._begun().add(name, of_tensor)

    def merge(self, body: np.ndarray, given_up: threading.Event) -> None:
        """Read this host's share of the checkpoint with an adapter, `SentAdapter.body`, in place of sent tensors."""
        self._begun()
        plan = self._served.config.plan
        with refusing():
            config, tensors = adapter_in(body)
            tree = parameter_tree(self._served.config, dtype=self._served.dtype)
            in_files = parameters_in_files(tree, self._rules, spec=self._served.config.spec)
            adapter = None if config is None else merged_tensors(config, tensors, tree=in_files, rules=self._rules)
            assert self._slots is not None, "the update has begun"
            self._merged = read_parameters(
                replace(self._files, adapter=adapter, reach=Reach(self._files.reach.roots, given_up)),
                tree,
                plan=plan,
                expert_of_slot=self._slots,
                in_host_memory=self._is_full,
                num_threads=1 if platform_of(plan.mesh) == "cpu" else 0,
            )
        self.max_rounding = 0.0 if adapter is None else adapter.max_rounding

    def finish(self, given_up: threading.Event) -> None:
        """Stage the received weights: on the devices if memory suffices, else in host memory."""
        sent, merged = self._begun(), self._merged
        self._sent = self._merged = None
        if merged is not None:
            self._staged.hold(merged, given_up=given_up)
            return
        mesh, is_full = self._served.config.plan.mesh, self._is_full
        with refusing():
            ready: dict[str, Any] = {}
            for (*groups, name), parameter in sent.finished():
                node = ready
                for group in groups:
                    node = node.setdefault(group, {})
                node[name] = parameter if is_full else parameter.on_devices()
            if not is_full and platform_of(mesh) == "cpu":
                use_huge_pages(jax.tree.leaves(ready))
        self._staged.hold(ready, given_up=given_up)

    @property
    def _is_full(self) -> bool:
        """Return True if the devices have no memory for other weights beside the current ones."""
        devices = list(self._served.config.plan.mesh.local_devices)
        return spare_bytes(devices) < SPARE_SHARE * self._staged.bytes_per_device

    @property
    def share_bytes(self) -> int:
        """Return the bytes of this host's share on its devices."""
        return self._staged.bytes_per_device * len(self._served.config.plan.mesh.local_devices)

    def share(self, token: str) -> WeightShare | None:
        """Return this host's share of the current weights with the staged changes; None without memory for it."""
        try:
            if self.share_bytes * SPARE_SHARE > memory_available():
                raise MemoryError(f"{self.share_bytes} bytes")
            tree = parameter_tree(self._served.config, dtype=self._served.dtype)
            by_slot = {path for path, spec in walk(tree) if spec.num_experts}
            return write_share(token, self._weights(), staged=self._staged.ready, by_slot=by_slot)
        except (OSError, MemoryError) as error:
            log.warning("the sent weights are not kept, and are lost with their host: %s", error)
            return None

    def drop(self) -> None:
        """Drop the update, staged or not."""
        self._sent = self._merged = None
        self._staged.drop()

    def _begun(self) -> SentParameters:
        if self._sent is None:
            raise WeightsRefusedError(NOT_BEGUN)
        return self._sent
