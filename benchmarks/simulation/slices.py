"""Replicas on TPU slices: how long their steps are estimated to take, and the pages that fit beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulation.costs import EstimatedSteps
from benchmarks.simulation.replica import HostMemory
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.chips import chip_of
from rayserve_moe.tools.plan_slice.candidates import (
    MEM_FRACTION,
    Assumptions,
    Split,
    Traffic,
    candidate,
    row_bytes,
)
from rayserve_moe.tools.presets import read_config
from rayserve_moe.tools.served_cases import devices_of, known_model

HOST_BYTES = 512 << 30
"""Bytes for pages, of the 1,536 GiB that a host of v6e has (docs.cloud.google.com/tpu/docs/v6e)."""
COPY_RATE = 10e9
"""Bytes per second between a chip and host memory. The link of a v6e is PCIe Gen5 (same page): 31.5e9 by 8 lanes, which
is more than a thread copies."""


@dataclass(frozen=True)
class SliceReplica:
    """A published model in bfloat16 on a slice: its steps, its data ranks, and pages of each."""

    steps: EstimatedSteps
    num_data_ranks: int
    num_pages: int
    page_bytes: float
    """Bytes of a page on a device."""
    num_devices: int

    def host_memory(self) -> HostMemory:
        """Return a cache of evicted pages in the memory of the replica's host."""
        return HostMemory(int(HOST_BYTES / (self.page_bytes * self.num_devices)), self.page_bytes / COPY_RATE)


def slice_replica(name: str, topology: str, *, num_data_ranks: int, page_size: int, longest: int) -> SliceReplica:
    """Estimate a replica; ValueError where the model does not fit the slice, or does not divide there."""
    set_environment_defaults(COMPILER_ENVIRONMENT)
    use_host_alone()
    devices, spec = devices_of(topology), spec_from_config(read_config(known_model(name)))
    split = Split(topology, num_data_ranks, len(devices) // num_data_ranks, 0)
    traffic = Traffic(longest // 2, longest - longest // 2, num_data_ranks)
    found = candidate(spec, split, traffic=traffic, given=Assumptions())
    if found is None:
        raise ValueError(f"{name} does not fit {topology} with {num_data_ranks} data ranks")
    plan = plan_for(devices, data_size=num_data_ranks)
    model = model_config(spec, plan, experts=ExpertSettings())
    free = (chip_of(topology).device_capacity - found.weights_gb * 1e9) * MEM_FRACTION
    page_bytes = row_bytes(model, longest, kv_dtype="bfloat16") * page_size / longest
    steps = EstimatedSteps(model, topology=topology, imbalance=found.imbalance)
    return SliceReplica(steps, num_data_ranks, int(free / page_bytes), page_bytes, len(devices))
