"""Bundles of the kernels that multiply latents per head, by libtpu's schedules, and their baseline.

    python -m tests.compile.latent_schedules [CHIP ...]

writes the baseline of chips, or of all of them, anew: after a change that is meant.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import ProjectedRows
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.tpu.latent_heads import absorb, expand
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes
from rayserve_moe.tools.estimate.bundles import read_schedule
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.dump import DumpFolder
from tests.compile.schedule_baselines import ScheduleBaseline
from tests.compile.topologies import compile_for

LAYERS, LATENT = 4, 512
MODELS = {"DeepSeek-V3": (128, 128, 64, 128), "an eighth of GLM-5.2": (8, 192, 64, 256)}
"""Heads of a device, and widths of a head: without position, rotated, of values."""
TOKENS = (16, 128)


def memory_bundles(chip: str, model: str, num_tokens: int) -> dict[str, float]:
    """Bundles that a layer's matrices and the rows of tokens take on their way from and to HBM, by kernel."""
    (heads, nope, turning, value), figures = MODELS[model], CHIPS[chip]
    rate = figures.clock_hz / figures.device_hbm_bytes
    absorbed = num_tokens * (nope + turning + latent_lanes(LATENT + turning))
    expanded = num_tokens * (LATENT + value)
    return {
        "absorb_queries": 2 * heads * (nope * LATENT + absorbed) * rate,
        "expand_values": 2 * heads * (value * LATENT + expanded) * rate,
    }


def compile_all(chip: str, dump: DumpFolder) -> dict[str, float]:
    """Compile every case for a chip; bundles of a core with its loops as they run."""
    found = {}
    for model, (heads, nope, turning, value) in MODELS.items():
        sizes = {"k_b_LHC": nope, "v_b_LHC": value}
        weights = {
            name: jax.ShapeDtypeStruct((LAYERS, heads * size, LATENT), jnp.bfloat16) for name, size in sizes.items()
        }
        config = LatentConfig(nope, 1e-6, 0.1, interleaved_rotation=True)
        for num_tokens in TOKENS:
            queries = jax.ShapeDtypeStruct((num_tokens, heads * (nope + turning)), jnp.bfloat16)
            attended = jax.ShapeDtypeStruct((num_tokens, heads, LATENT), jnp.bfloat16)
            angles = Rotation(*[jax.ShapeDtypeStruct((num_tokens, turning // 2), jnp.float32)] * 2)

            def run(queries, attended, weights, layer, angles, config=config):
                call = ProjectedRows(queries, angles, None), StackedWeights(weights, layer)
                return absorb(queries, *call, config=config), expand(attended, *call)

            layer = jax.ShapeDtypeStruct((), jnp.int32)
            compile_for(chip.removeprefix("tpu"), run, queries, attended, weights, layer, angles)
            for op, text in dump.take().items():
                if (kernel := op.rpartition(".")[0]) in memory_bundles(chip, model, num_tokens):
                    found[f"{kernel}, {model}, {num_tokens} tokens"] = read_schedule(text).spent().bundles
    return found


BASELINE = ScheduleBaseline("tests.compile.latent_schedules", tuple(CHIPS), compile_all)

if __name__ == "__main__":
    BASELINE.main()
