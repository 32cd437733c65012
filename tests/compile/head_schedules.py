"""Bundles of the kernel that projects, norms and rotates heads, by libtpu's schedules, and their baseline.

    python -m tests.compile.head_schedules [CHIP ...]

writes the baseline of chips, or of all of them, anew: after a change that is meant.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.tpu.streamed_heads import HEAD_WIDTH, project_streamed, stream_shape
from rayserve_moe.tools.estimate.bundles import read_schedule
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.dump import DumpFolder
from tests.compile.schedule_baselines import ScheduleBaseline
from tests.compile.topologies import compile_for

LAYERS = 4
MODELS = {"Qwen3-30B-A3B": (2048, 32, 4), "half of Qwen3-235B-A22B": (4096, 32, 2)}
"""Width, query heads and KV heads of a device."""
TOKENS = (2, 32, 128)


def memory_bundles(chip: str, model: str) -> float:
    """Bundles that the matrices of a core take on their way from HBM."""
    (width, heads, num_kv), figures = MODELS[model], CHIPS[chip]
    return 2 * width * (heads + 2 * num_kv) * HEAD_WIDTH / figures.device_hbm_bytes * figures.clock_hz


def compile_all(chip: str, dump: DumpFolder) -> dict[str, float]:
    """Compile every case for a chip; bundles of a core with its loops as they run."""
    found = {}
    for model, (width, heads, num_kv) in MODELS.items():
        sizes = {"q_LDH": (width, heads * HEAD_WIDTH), "k_LDG": (width, num_kv * HEAD_WIDTH)}
        sizes |= {"v_LDG": sizes["k_LDG"], "q_norm_Lh": (HEAD_WIDTH,), "k_norm_Lh": (HEAD_WIDTH,), "norm_LD": (width,)}
        weights = {name: jax.ShapeDtypeStruct((LAYERS, *size), jnp.bfloat16) for name, size in sizes.items()}
        for num_tokens in TOKENS:
            shape = stream_shape(num_tokens, weights, num_cores=CHIPS[chip].cores_per_device)
            assert shape is not None, f"{model} does not fit {chip}"
            hidden = jax.ShapeDtypeStruct((num_tokens, width), jnp.bfloat16)
            angles = Rotation(*[jax.ShapeDtypeStruct((num_tokens, HEAD_WIDTH // 2), jnp.float32)] * 2)

            def run(hidden, weights, layer, angles, shape=shape):
                stacked = StackedWeights(weights, layer)
                return project_streamed(hidden, hidden, stacked, angles, shape=shape, eps=1e-6, interpret=False)

            compile_for(chip.removeprefix("tpu"), run, hidden, weights, jax.ShapeDtypeStruct((), jnp.int32), angles)
            (text,) = (text for op, text in dump.take().items() if op.startswith("streamed_heads"))
            found[f"{model}, {num_tokens} tokens"] = read_schedule(text).spent().bundles
    return found


BASELINE = ScheduleBaseline("tests.compile.head_schedules", tuple(CHIPS), compile_all)

if __name__ == "__main__":
    BASELINE.main()
