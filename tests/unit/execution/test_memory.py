"""The page pool follows the free memory, the settings, and what can be of use."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from rayserve_moe.config.settings import CacheSettings, ExpertSettings, SchedulerSettings, SettingsError
from rayserve_moe.execution import memory
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.states import KeptState, states_of
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.state.kinds import ArraySpec, StateKind
from tests.support.models.core import CORE_CONFIG


def spec_with(**changes: object) -> ModelSpec:
    return spec_from_hf(CORE_CONFIG.hf_config("float32") | changes)


@pytest.mark.parametrize(("num_devices", "held_heads"), [(1, 2), (2, 1), (4, 1)])
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_a_page_is_keys_and_values_of_all_layers_on_one_device(num_devices, held_heads, dtype, itemsize):
    plan = plan_for(jax.devices()[:num_devices])
    found = memory.page_bytes(
        states_of(model_config(spec_with(), plan, experts=ExpertSettings())), page_size=16, dtype=dtype, plan=plan
    )
    num_layers, head_dim = CORE_CONFIG.num_hidden_layers, CORE_CONFIG.head_dim
    assert found == num_layers * 16 * 2 * held_heads * head_dim * itemsize


def test_a_page_holds_every_kind_of_state_with_its_own_dtype():
    """Three layers keep keys and values in the cache's dtype; two keep a row of float32, spread over the devices."""
    plan = plan_for(jax.devices()[:2])
    keys = ArraySpec((4, 8), ("kv_heads", None))
    mean = ArraySpec((16,), ("heads",), dtype="float32")
    states = [
        KeptState(StateKind("kv", "token", (keys,)), windows=(0, 0, 0)),
        KeptState(StateKind("mean", "token", (mean,)), windows=(0, 0)),
    ]
    found = memory.page_bytes(states, page_size=16, dtype="bfloat16", plan=plan)
    assert found == 16 * (3 * 2 * 8 * 2 + 2 * 8 * 4)


def fit(free: int, *, num_pages: int = 0, mem_fraction: float = 0.5, max_useful: int = 1000) -> int:
    cache = CacheSettings(num_pages=num_pages, mem_fraction=mem_fraction)
    return memory.num_pages_that_fit(cache, bytes_of=lambda count: 100 * count, free=free, max_useful=max_useful)


def test_pages_take_their_fraction_of_what_is_free():
    assert fit(10_000) == 50
    assert fit(10_000, mem_fraction=1.0) == 100
    assert fit(10_199) == 50


def test_no_more_pages_than_are_of_use():
    assert fit(10_000, max_useful=7) == 7


def test_a_given_number_of_pages_is_taken_as_it_is():
    assert fit(0, num_pages=12) == 12


def test_layers_that_see_less_leave_their_bytes_to_sequences():
    """What eight sequences need without windows is enough for thirteen when half of the layers see 128 positions."""
    num_rows, longest = 64, 4096
    free = 2 * 8 * longest // 16 * 100
    scheduler = SchedulerSettings(max_running_requests=num_rows, max_step_tokens=128)

    def sequences_that_fit(windows: tuple[int, ...]) -> int:
        layers = tuple(memory.LayerSize(window, 100) for window in windows)
        sizes = memory.PoolSizes(layers, scheduler, CacheSettings(mem_fraction=1.0, enable_prefix_caching=False))
        pages = sizes.num_pages_within(free, longest=longest)
        assert sizes.layer_bytes(pages) <= free
        assert pages == num_rows * longest // 16 + 1 or free < sizes.layer_bytes(pages + 1)
        return pages * 16 // longest

    assert [sequences_that_fit(windows) for windows in ((0, 0), (0, 128), (128, 128))] == [8, 13, num_rows]


def test_each_layer_counts_with_the_bytes_of_its_own_pages():
    """Full layers of 100 bytes a page, beside one of 300 whose window of 16 keeps 9 pages for two rows."""
    scheduler = SchedulerSettings(max_running_requests=2, max_step_tokens=16)
    layers = (memory.LayerSize(0, 100), memory.LayerSize(16, 300), memory.LayerSize(0, 100))
    sizes = memory.PoolSizes(layers, scheduler, CacheSettings(page_size=16, enable_prefix_caching=False))
    assert [sizes.layer_bytes(pages) for pages in (3, 100)] == [3 * 500, 100 * 200 + 8 * 300]


@pytest.mark.parametrize("free", [0, 150, 399])
def test_a_pool_without_room_for_two_pages_is_an_error_that_names_the_setting(free):
    with pytest.raises(SettingsError, match=r"mem_fraction 0\.5: no two KV pages of 100 bytes"):
        fit(free)
    assert fit(400) == 2


def test_free_is_what_nothing_holds_now_and_spare_what_nothing_has_held_on_the_fullest_device():
    stats = {"bytes_limit": 100, "bytes_in_use": 30, "peak_bytes_in_use": 60}
    others = [{**stats, "bytes_in_use": 10}, {**stats, "peak_bytes_in_use": 50}]
    devices = [SimpleNamespace(memory_stats=told.copy) for told in (others[0], stats, others[1])]
    assert (memory.free_bytes(devices), memory.spare_bytes(devices)) == (70, 40)
    del stats["peak_bytes_in_use"]
    silent = SimpleNamespace(memory_stats=stats.copy)
    assert memory.spare_bytes([*devices, silent]) == 0, "what a device does not tell is not counted on"


def test_emulated_devices_share_what_the_host_has():
    one, four = memory.free_bytes(jax.devices()[:1]), memory.free_bytes(jax.devices()[:4])
    assert one > 2**20
    assert 0.5 * one < 4 * four < 2 * one, "free memory changes between two looks, but not by that much"


@pytest.mark.parametrize("number", [0, 1, 15, 16, 1000, 10**10, 2**40 - 1])
def test_numbers_are_rounded_down_by_an_eighth_at_most_and_to_few(number):
    rounded = memory.rounded_down(number)
    assert 7 * number <= 8 * rounded <= 8 * number
    assert len({memory.rounded_down(n) for n in range(10**6, 2 * 10**6, 997)}) <= 10
    assert memory.rounded_down(rounded) == rounded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "num_attention_heads 6 does not divide over 4 devices"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads 6 does not divide over 4"),
        ({"num_experts": 6}, "6 experts do not spread over 4 devices with 0 redundant experts; .* that fits is 2"),
        ({"intermediate_size": 50}, "intermediate_size 50 does not divide over 4 devices; choose a divisor of 50"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_name(changes, message):
    with pytest.raises(SettingsError, match=message):
        model_config(spec_with(**changes), plan_for(jax.devices()[:4]), experts=ExpertSettings())
    model_config(spec_with(**changes), plan_for(jax.devices()[:1]), experts=ExpertSettings())


def test_few_kv_heads_an_unused_dense_width_and_an_odd_vocabulary_are_no_obstacle():
    plan = plan_for(jax.devices()[:4])
    for spec in (spec_with(), spec_with(mlp_only_layers=(), intermediate_size=50), spec_with(vocab_size=510)):
        assert model_config(spec, plan, experts=ExpertSettings()).spec == spec
