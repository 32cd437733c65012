"""What a measurement depends on besides the code: the machine, the checkpoint, the versions; kept with every result."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import jax

from benchmarks.figures import BUSY_LOAD
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.model_path import SYNTHETIC_PREFIX, resolve_model_path
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.inprocess.engine import Engine

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "ray", "transformers", "torch")


def load_before_start() -> float:
    """Return the machine's load average, and warn where it is busy; call before anything else."""
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print("the machine is busy: trust no figure, ratios of neighbouring runs at most", file=sys.stderr)
    return load


def checkpoint_of(size: str) -> Path:
    """Return the synthetic checkpoint of this size, written now if it is not there."""
    return resolve_model_path(SYNTHETIC_PREFIX + size, cache_directory=default_cache_directory())


def num_parameters(path: Path) -> int:
    """Return the number of values in the checkpoint's tensors."""
    return sum(math.prod(tensor.shape) for tensor in open_checkpoint(path).tensors.values())


def machine_facts(load_before: float) -> dict[str, Any]:
    """Return processor, cores, device kind, load before the start, versions of the packages that are installed."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": num_cores(),
        "device": jax.devices()[0].device_kind,
        "load_before": round(load_before, 2),
        "versions": {name: metadata.version(name) for name in PACKAGES if util.find_spec(name)},
    }


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conditions(engine: Engine, *, size: str, repeats: int, load_before: float) -> dict[str, Any]:
    """Return machine, parameters, dtype and devices, with which a result of one of our engines begins.

    `size` names its model. Waits until the engine compiles nothing more beside its steps.
    """
    if engine.runner.later is not None:
        engine.runner.later.wait()
    return {
        "size": size,
        "repeats": repeats,
        "machine": machine_facts(load_before),
        "num_parameters": num_parameters(Path(engine.card.path)),
        "ours": {"dtype": str(engine.runner.served.dtype), "devices": engine.runner.config.plan.mesh.size},
    }


def save(result: dict[str, Any], out: Path) -> None:
    """Write a result file, and the directory that it is in."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def note(line: str) -> None:
    """Tell whoever waits how far the measurement is."""
    print(line, file=sys.stderr, flush=True)
