"""Moving experts on this host's devices: the staging area between fetches and swaps, and what failed."""

from __future__ import annotations

from rayserve_moe.balancing.migration import FailedFetch
from rayserve_moe.execution.compiled_steps import Movables
from rayserve_moe.execution.migration import (
    FetchError,
    MigrationPrograms,
    MigrationVectors,
    allocate_staging,
    run_piece,
)
from rayserve_moe.execution.step_types import ModelWeights
from rayserve_moe.model.transformer import ModelRule


class MigrationRunner:
    """Runs pieces of migrations; of one whose fetch has failed it runs no further piece, and says so until the next."""

    def __init__(self, rule: ModelRule, *, dtype: str, slots_per_step: int) -> None:
        self._rule, self._dtype = rule, dtype
        self.movables = Movables(allocate_staging(rule, dtype=dtype), slots_per_step)
        self.failed_fetch: FailedFetch | None = None

    def move(self, weights: ModelWeights, vectors: MigrationVectors, *, programs: MigrationPrograms) -> ModelWeights:
        """Run a piece; the weights are given away, and those to go on with are returned.

        FetchError where the devices are those of several hosts: the others wait for a fetch that this one cannot do.
        """
        if self.failed_fetch is not None and self.failed_fetch.version == vectors.version:
            return weights
        staging, self.failed_fetch = self.movables.staging, None
        try:
            weights, staging = run_piece(weights, staging, vectors=vectors, programs=programs)
        except FetchError as error:
            if self._rule.plan.mesh.is_multi_process:
                raise
            self.failed_fetch = FailedFetch(vectors.version, error.layer)
            staging = allocate_staging(self._rule, dtype=self._dtype)
        self.movables = self.movables._replace(staging=staging)
        return weights
