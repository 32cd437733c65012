"""Memory of recurrent layers: entries and rings beside pages, and settings that do not fit their grid."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from rayserve_moe.config.settings import CacheSettings, ModelSettings, ReplaySettings, SchedulerSettings, SettingsError
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.served_model import RunnerSettings, ServedModel, served_model
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.presets import read_config

ROWS, MIB = 8, 1 << 20
SETTINGS = RunnerSettings(
    ModelSettings(path="none", max_model_len=4096, dtype="bfloat16"),
    SchedulerSettings(max_running_requests=ROWS, max_step_tokens=512),
    CacheSettings(num_pages=1000, page_size=16, kv_dtype="bfloat16"),
    ReplaySettings(),
)
SPEC = spec_from_config(read_config("qwen3.5-35b-a3b"))


def laid_out(num_devices: int = 1, *, spec: ModelSpec = SPEC, **cache: object) -> ServedModel:
    settings = replace(SETTINGS, cache=replace(SETTINGS.cache, **cache))
    return served_model(spec, plan_for(jax.devices()[:num_devices]), settings=settings)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_an_entry_and_a_ring_take_the_bytes_of_their_formula_on_each_device(num_devices: int):
    """Thirty layers of 32 heads of 128 x 128, with three inputs of 8,192 channels ahead of an entry, all float32."""
    served = laid_out(num_devices)
    (sizes,) = served.pool.entries
    heads, key_heads, channels = 32 // num_devices, 16 // num_devices, 8192 // num_devices
    assert sizes.entry_bytes == 30 * 4 * (heads * 128 * 128 + 3 * channels)
    assert sizes.ring_bytes == 30 * 4 * (64 * (key_heads * 128 + heads * 128 + heads) + 16 * channels)
    (group,) = served.pool.entry_groups(1000)
    allocated = bytes_on_device(served.state(1000).pools["delta"])
    assert allocated == group.num_entries * sizes.entry_bytes + ROWS * sizes.ring_bytes


@pytest.mark.parametrize(
    ("model", "num_layers", "num_heads", "num_groups", "num_devices"),
    [
        *(("nemotron-3-nano-30b-a3b", 23, 64, 8, num_devices) for num_devices in (1, 4)),
        *(("nemotron-3-super-120b-a12b", 40, 128, 8, num_devices) for num_devices in (1, 4)),
        ("granite-4.0-h-small", 36, 128, 1, 1),
    ],
)
def test_mamba2_takes_the_bytes_of_its_formula_on_each_device(
    model: str, num_layers: int, num_heads: int, num_groups: int, num_devices: int
):
    """Heads of 64 with states of 128. For Nano, 50 MB an entry and 40 MB a ring; for Super 173 and 122."""
    served = laid_out(num_devices, spec=spec_from_config(read_config(model)))
    (sizes,) = served.pool.entries
    (group,) = served.pool.entry_groups(1000)
    allocated = bytes_on_device(served.state(1000).pools["delta"])
    assert allocated == group.num_entries * sizes.entry_bytes + ROWS * sizes.ring_bytes
    heads, groups = num_heads // num_devices, num_groups // num_devices
    channels = heads * 64 + 2 * groups * 128
    assert sizes.entry_bytes == num_layers * 4 * (heads * 128 * 64 + 3 * channels)
    assert sizes.ring_bytes == num_layers * 4 * (64 * (groups * 128 + heads * 64 + heads) + 16 * channels)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize(("model", "num_layers"), [("kimi-linear-48b-a3b", 20), ("ling-3.0-flash", 35)])
def test_kimi_delta_takes_the_bytes_of_its_formula_on_each_device(num_devices: int, model: str, num_layers: int):
    """32 heads of 128 x 128 and a decay per element of a key. For Kimi-Linear, 45 MB an entry and 79 MB a ring."""
    (sizes,) = laid_out(num_devices, spec=spec_from_config(read_config(model))).pool.entries
    inner = 32 * 128 // num_devices
    assert sizes.entry_bytes == num_layers * 4 * (inner * 128 + 3 * 3 * inner)
    assert sizes.ring_bytes == num_layers * 4 * (64 * 3 * inner + 16 * 3 * inner)


def test_entries_of_prefixes_take_their_share_beside_two_for_each_row():
    (sizes,) = laid_out().pool.entries
    for share in (0.0, 0.3, 0.6):
        (group,) = laid_out(state_fraction=share).pool.entry_groups(100_000)
        num_kept, of_pages = group.num_entries - 1 - 2 * ROWS, 100_000 * sizes.page_bytes
        assert num_kept == int(of_pages * share / (1 - share)) // sizes.entry_bytes
    (group,) = laid_out(enable_prefix_caching=False).pool.entry_groups(100_000)
    assert group.num_entries == 1 + 2 * ROWS


def test_pages_and_entries_fit_the_memory_that_is_free():
    served, free = laid_out(num_pages=0, mem_fraction=1.0), 3072 * MIB
    num_pages = served.num_pages_within(free)
    assert bytes_on_device(served.state(num_pages).pools) <= free < bytes_on_device(served.state(num_pages + 1).pools)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"page_size": 48}, "page_size 48: the states of recurrent layers are kept every 64 tokens"),
        ({"state_interval": 100}, "state_interval 100 must be a multiple of 64"),
    ],
)
def test_settings_that_do_not_fit_the_grid_are_refused(cache: dict[str, int], message: str):
    with pytest.raises(SettingsError, match=message):
        laid_out(**cache)
