"""What a run is: its settings, kept beside it so that a resumed run is the same run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from examples.grpo.checkpoints import whole_file
from examples.grpo.hybrid import ensure_hybrid
from rayserve_moe.checkpoints.model_path import resolve_model_path

FILE = "settings.json"
CALCULATOR, HYBRID = "trained:calculator", "hybrid"


@dataclass(frozen=True)
class GrpoSettings:
    """A GRPO run. Only `steps` may differ when a run is resumed. ValueError for what no run can be."""

    steps: int = 60
    model: str = CALCULATOR
    """Model to train: `trained:calculator`, `hybrid` for the calculator with gated delta layers, or a directory."""
    prompts: int = 32
    group: int = 8
    learning_rate: float = 3e-4
    kl_weight: float = 0.15
    """Of the distance (k3, nats per token) to the policy before the run, which keeps what is not rewarded: without it
    differences lose 6 points by the end, with it 3 to 4; twice as much of it holds the sum itself at 0.9."""
    seed: int = 0
    task: str = "sum"
    """What is trained: see `tasks.GRPO_TASKS`, which has the defaults of others."""
    arm: str = "replay"
    asynchronous: bool = False
    partial: bool = False
    """Of an asynchronous run: weights change under samples, which go on with the new ones."""
    tunix: bool = False
    """Sample and send weights by tunix' `Sampler` protocol."""
    dtype: str = "bfloat16"
    """The server's: under bfloat16 the trainer's own routers choose otherwise now and then, which replay is for."""
    max_kl: float = 0.01
    """A batch whose replayed KL (k3, nats per token) is above this is refused."""
    probe_every: int = 5
    """Steps between two measurements on the probe set."""
    stop_at: float = 0.92
    stop_reward: float = 0.95
    """The run ends once the held-out probability of the sum was above `stop_at` twice, and the mean reward of the last
    three batches is above `stop_reward`."""

    def __post_init__(self) -> None:
        least = {"steps": 1, "prompts": 1, "group": 2, "seed": 0, "learning_rate": 0, "kl_weight": 0, "max_kl": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= bound):
                raise ValueError(f"{name} is {value}, but should be {bound} or more")
        if self.partial and not self.asynchronous:
            raise ValueError("partial is of an asynchronous run: only there samples are under way when weights change")


def agree(settings: GrpoSettings, directory: Path) -> None:
    """Write the settings of a new run. ValueError where the directory holds a run with others, or several runs."""
    if any(directory.glob(f"*/{FILE}")):
        raise ValueError(f"{directory} holds several runs: give another --out")
    directory.mkdir(parents=True, exist_ok=True)
    file, said = directory / FILE, asdict(settings)
    if file.exists():
        earlier = {**asdict(GrpoSettings()), **_read(file)}
        others = [name for name in said if name != "steps" and earlier.get(name) != said[name]]
        if others:
            raise ValueError(f"{directory} holds a run with another {', '.join(others)}: give another --out")
    with whole_file(file) as unfinished:
        unfinished.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def make_room_for_several(directory: Path) -> None:
    """Make a directory of several runs, each with one of its own in it. ValueError where it is itself that of a run."""
    if (directory / FILE).exists():
        raise ValueError(f"{directory} holds a single run: give another --out")
    directory.mkdir(parents=True, exist_ok=True)


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} does not hold the settings of a run: {error}") from error


def settings_of(given: dict[str, Any]) -> GrpoSettings:
    """Those of a mapping that may hold more."""
    return GrpoSettings(**{each.name: given[each.name] for each in fields(GrpoSettings) if each.name in given})


def model_directory(settings: GrpoSettings, *, cache: Path) -> Path:
    """The checkpoint that a run begins with; the hybrid calculator is trained where the cache lacks it."""
    if settings.model == HYBRID:
        return ensure_hybrid(cache / "checkpoints" / "grpo-hybrid")
    return resolve_model_path(settings.model, cache_directory=cache)


def server_settings(settings: GrpoSettings, *, model: Path) -> dict[str, Any]:
    """Flat settings of a server that samples whole batches of short answers at once, with their routing."""
    return {
        "model_path": str(model),
        "dtype": settings.dtype,
        "enable_return_routed_experts": True,
        "max_model_len": 64,
        "max_running_requests": 256,
        "max_step_tokens": 512,
        "precompile_bs_paddings": [64, 256],
        "num_pages": 600,
        "devices_per_host": 1,
        "drain_timeout_s": 1,
    }
