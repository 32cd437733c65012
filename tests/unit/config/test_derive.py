"""Numbers that follow from settings."""

from __future__ import annotations

import pytest

from rayserve_moe.config import derive
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import (
    CacheSettings,
    ClusterSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    Settings,
    SettingsError,
)


def test_the_longest_sequence_is_the_models_or_what_was_asked():
    assert derive.max_model_len(ModelSettings(), 4096) == 4096
    assert derive.max_model_len(ModelSettings(max_model_len=100), 4096) == 100
    with pytest.raises(SettingsError, match=r"max_model_len 5000 exceeds .* 4096"):
        derive.max_model_len(ModelSettings(max_model_len=5000), 4096)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_hold_their_tokens(tokens, pages):
    assert derive.pages_per_sequence(tokens, 16) == pages


def test_more_pages_than_all_rows_can_fill_are_of_no_use():
    scheduler, cache = SchedulerSettings(max_running_requests=3), CacheSettings(page_size=16)
    assert derive.max_useful_pages(scheduler, cache, max_tokens=100) == 2 * 3 * 7 + 1, "as many again for prefixes"
    uncached = CacheSettings(page_size=16, enable_prefix_caching=False)
    assert derive.max_useful_pages(scheduler, uncached, max_tokens=100) == 3 * 7 + 1


@pytest.mark.parametrize(("chunk", "step", "tokens"), [(0, 512, 512), (64, 512, 64), (1024, 512, 512)])
def test_a_chunk_fits_a_step(chunk, step, tokens):
    settings = SchedulerSettings(chunked_prefill_size=chunk, max_step_tokens=step)
    assert derive.prefill_chunk_tokens(settings) == tokens


@pytest.mark.parametrize(
    ("setting", "platform", "checkpoint", "dtype"),
    [
        ("auto", "cpu", "bfloat16", "float32"),
        ("auto", "tpu", "bfloat16", "bfloat16"),
        ("auto", "tpu", "float16", "bfloat16"),
        ("auto", "tpu", "float32", "float32"),
        ("bfloat16", "cpu", "float32", "bfloat16"),
        ("float32", "tpu", "bfloat16", "float32"),
    ],
)
def test_the_compute_dtype_is_the_users_or_follows_platform_and_checkpoint(setting, platform, checkpoint, dtype):
    assert derive.compute_dtype(setting, platform=platform, checkpoint_dtype=checkpoint) == dtype


@pytest.mark.parametrize(
    ("setting", "topology", "transport"),
    [
        ("auto", "", "sockets"),
        ("auto", "2x4", "compiled_graph"),
        ("compiled_graph", "", "compiled_graph"),
        ("sockets", "2x4", "sockets"),
    ],
)
def test_emulated_hosts_block_and_tpu_hosts_poll(setting, topology, transport):
    cluster = ClusterSettings(transport=setting, tpu_topology=topology, tpu_version="v6e" if topology else "")
    assert derive.transport(cluster) == transport


@pytest.mark.parametrize(
    ("cluster", "parallel", "expected"),
    [
        ({}, {"num_hosts": 4}, [(4, 1, 1)]),
        (
            {"elastic_after_s": 5, "elastic_max_lost": 2},
            {"num_hosts": 4, "data_parallel_size": 8},
            [(4, 1, 8), (3, 1, 6), (2, 1, 4)],
        ),
        (
            {"elastic_after_s": 5, "tpu_topology": "2x4", "tpu_version": "v6e"},
            {"num_hosts": 6, "num_slices": 3, "data_parallel_size": 3},
            [(6, 3, 3), (4, 2, 2)],
        ),
        (
            {"elastic_after_s": 5, "elastic_max_lost": 1},
            {"num_hosts": 4, "num_slices": 2, "data_parallel_size": 2},
            [(4, 2, 2), (2, 1, 1)],
        ),
    ],
)
def test_a_group_does_without_whole_slices_or_single_emulated_hosts(cluster, parallel, expected):
    """Hosts, slices and data ranks."""
    sizes = derive.group_sizes(ClusterSettings(**cluster), ParallelSettings(**parallel))
    assert [(size.num_hosts, size.num_slices, size.data_parallel_size) for size in sizes] == expected


def served(**values: object) -> Settings:
    return settings_from({"model_path": "trained:calculator", **values})


ROLES = {"num_replicas": 2, "num_prefill_replicas": 1, "host_cache_mib": 8}


def test_roles_need_another_replica_and_memory_for_pages():
    derive.check_roles(served())
    derive.check_roles(served(**ROLES))
    for change, message in (
        ({"host_cache_mib": 0}, "num_prefill_replicas 1 needs host_cache_mib"),
        ({"num_replicas": 1}, "num_prefill_replicas 1 leaves none of 1 replicas"),
        ({"max_replicas": 4}, "num_prefill_replicas 1 leaves none of 1 replicas"),
        ({"prefix_routing": "off"}, "num_prefill_replicas 1 needs prefix_routing"),
    ):
        with pytest.raises(SettingsError, match=message):
            derive.check_roles(served(**ROLES | change))
