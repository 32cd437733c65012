"""Flat keys become Settings, or an error that names the key and what to do about it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from rayserve_moe.config.load import (
    ENVIRONMENT_KEYS,
    default_cache_directory,
    settings_from,
    settings_from_yaml,
)
from rayserve_moe.config.settings import Settings, SettingsError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ENVIRONMENT_KEYS:
        monkeypatch.delenv(variable, raising=False)


def test_pages_are_larger_on_a_tpu_unless_their_size_is_given():
    on_slice = {"model_path": "m", "tpu_topology": "2x2", "tpu_version": "v6e"}
    assert settings_from({"model_path": "m"}).cache.page_size == 16
    assert settings_from(on_slice).cache.page_size == 128
    assert settings_from({"model_path": "m"}, on_tpu=True).cache.page_size == 128
    assert settings_from({**on_slice, "page_size": 16}).cache.page_size == 16
    assert settings_from({"model_path": "m", "page_size": 32}, on_tpu=True).cache.page_size == 32


def test_keys_find_their_section_and_the_rest_are_defaults():
    settings = settings_from(
        {
            "model_path": "m",
            "enable_return_routed_experts": True,
            "precompile_bs_paddings": [1, 16],
            "page_size": 32,
            "idle_release_s": 3,
        }
    )
    assert settings.model.path == "m"
    assert settings.replay.enabled is True
    assert settings.scheduler.decode_batch_sizes == (1, 16)
    assert settings.cache.page_size == 32
    assert settings.cluster.idle_release_s == 3.0 and type(settings.cluster.idle_release_s) is float
    assert settings.server == Settings().server


def test_every_setting_has_one_key_of_its_own():
    declared = [field for section in get_type_hints(Settings).values() for field in fields(section)]
    keys = [field.metadata.get("key", field.name) for field in declared]
    aliases = [alias for field in declared for alias in field.metadata.get("aliases", ())]
    assert len({*keys, *aliases}) == len(keys) + len(aliases)
    assert set(ENVIRONMENT_KEYS.values()) <= set(keys)


WRONG = {
    "unknown, with the nearest known": ({"page_sise": 16}, "unknown setting 'page_sise'; did you mean 'page_size'?"),
    "unknown, like nothing": ({"zzzz": 1}, "unknown setting 'zzzz'; known settings: .*page_size"),
    "text for a number": ({"page_size": "16"}, "page_size must be of type int, found '16'"),
    "a number for a switch": ({"enable_return_routed_experts": 1}, "enable_return_routed_experts must be of type bool"),
    "a number that YAML takes for text": ({"page_size": "1e9"}, "of type int, found '1e9'; it may be 1 to 4096"),
    "a switch for a number": ({"page_size": True}, "page_size must be of type int"),
    "a fraction for a count": ({"num_pages": 1.5}, "num_pages must be of type int"),
    "null": ({"dtype": None}, "dtype must be of type str"),
    "no such choice": ({"dtype": "float64"}, "dtype must be one of auto, float32, bfloat16"),
    "too small": ({"max_running_requests": 0}, "max_running_requests must be at least 1, found 0"),
    "below zero": ({"chunked_prefill_size": -1}, "chunked_prefill_size must be at least 0"),
    "not a number": ({"idle_release_s": float("nan")}, "idle_release_s must be at least 0, found nan"),
    "no list": ({"precompile_bs_paddings": 4}, r"precompile_bs_paddings .* integers, for example \[4\], found 4"),
    "no positive integers": ({"precompile_bs_paddings": [4, 0]}, "precompile_bs_paddings must be at least 1, found 0"),
    "mem_fraction of zero": ({"mem_fraction": 0}, "mem_fraction must be at least 0.01, found 0"),
    "mem_fraction above one": ({"mem_fraction": 1.2}, r"mem_fraction must be at most 1\.0, found 1\.2"),
    "nowhere to keep programs": ({"compile_cache": ""}, "compile_cache must be auto, off or a directory, found ''"),
    "more sizes than anybody compiles": (
        {"precompile_bs_paddings": [16] * 65},
        "precompile_bs_paddings must have at most 64 entries, found 65",
    ),
    "more tokens than 32 bits count": (
        {"num_pages": 1 << 24, "page_size": 128},
        r"num_pages \* page_size must be at most 2147483647",
    ),
    "chips beyond counting": ({"tpu_topology": f"4x4x{4 * 10**30}", "tpu_version": "v4"}, "tpu_topology .* is invalid"),
    "a root that depends on where one stands": (
        {"weight_roots": ["/good", "bad"]},
        "weight_roots must be absolute directories or URLs, found 'bad'",
    ),
    "one root without a list": ({"weight_roots": "/good"}, r"weight_roots .* texts, for example \['/good'\]"),
    "one key for everything": ({"api_key": "k", "admin_api_key": "k"}, "admin_api_key equals api_key"),
    "shared matrices without adapters of experts": (
        {"max_loras": 2, "lora_shared_outer": True},
        "lora_shared_outer needs lora_experts",
    ),
    "adapters of experts without a place": ({"lora_experts": True}, "lora_experts needs max_loras"),
    "one page": ({"num_pages": 1}, "num_pages must be at least 2"),
    "a placement without experts that move": ({"expert_placement": "planned.json"}, "needs enable_eplb: true"),
    "a topology without its version": ({"tpu_topology": "2x4"}, "tpu_topology and tpu_version belong together"),
    "a version without its topology": ({"tpu_version": "v6e"}, "tpu_topology and tpu_version belong together"),
    "mem_fraction is not a number": ({"mem_fraction": float("nan")}, "mem_fraction must be at least 0.01, found nan"),
    "no such backend": (
        {"expert_backend": "dense"},
        "expert_backend must be one of auto, local, replicated, all_to_all",
    ),
    "too many replicas": ({"num_redundant_experts": 129}, "num_redundant_experts must be at most 128, found 129"),
    "out of range under another name": ({"dp_size": 0}, "dp_size must be at least 1, found 0"),
    "one setting under two names": (
        {"data_parallel_size": 2, "dp_size": 2},
        "data_parallel_size and dp_size name the same setting: give only one of them",
    ),
    "groups that do not divide the devices": (
        {"num_hosts": 2, "devices_per_host": 4, "data_parallel_size": 3},
        r"data_parallel_size 3 does not divide num_hosts \* devices_per_host = 8",
    ),
    "slices that do not divide the hosts": (
        {"num_hosts": 3, "num_slices": 2, "data_parallel_size": 2},
        "num_slices 2 does not divide num_hosts = 3",
    ),
    "slices that would share a group": (
        {"num_hosts": 4, "num_slices": 4, "data_parallel_size": 2},
        "num_slices 4 does not divide data_parallel_size = 2",
    ),
    "a single host that may be lost": (
        {"elastic_after_s": 5},
        "elastic_after_s: elastic_max_lost 1 leaves none of 1 slices or emulated hosts",
    ),
    "data ranks over two hosts that may be lost": (
        {"elastic_after_s": 5, "num_hosts": 4, "data_parallel_size": 2},
        "4 slices or emulated hosts have no whole data ranks each with data_parallel_size 2: take a multiple of 4",
    ),
    "programs ahead of a loss": (
        {"elastic_programs": "ahead", "num_hosts": 2, "data_parallel_size": 2, "elastic_after_s": 5},
        "elastic_programs must be on_loss or left out, found 'ahead': .* compile_cache keeps them",
    ),
    "batches smaller than rows": (
        {"precompile_bs_paddings": [1, 4], "max_running_requests": 8},
        "precompile_bs_paddings reaches 4 rows, max_running_requests is 8",
    ),
    "selection of no known kind": (
        {"expert_selection": "best"},
        "expert_selection must be one of auto, topk, replicas_",
    ),
    "capacity of nothing": ({"capacity_factor": 0.0}, "capacity_factor must be at least 0.01, found 0.0"),
    "endless capacity": ({"capacity_factor": float("inf")}, "capacity_factor must be at most 1000.0, found inf"),
    "balanced and replayed": (
        {"expert_selection": "balanced", "enable_return_routed_experts": True},
        "expert_selection balanced and enable_return_routed_experts exclude each other: .* replicas_only",
    ),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named(values, message):
    with pytest.raises(SettingsError, match=message):
        settings_from({"model_path": "m", **values})


def test_a_model_is_needed():
    with pytest.raises(SettingsError, match="model_path is missing"):
        settings_from({})


DECLARED = [
    (field, get_type_hints(section)[field.name])
    for section in get_type_hints(Settings).values()
    for field in fields(section)
]
NUMBERS = {
    field.metadata.get("key", field.name): (kind, field.metadata.get("bounds"))
    for field, kind in DECLARED
    if kind in (int, float, tuple[int, ...])
}
INFINITE, NAN = float("inf"), float("nan")


def test_every_number_states_finite_bounds_and_its_default_keeps_them():
    assert [key for key, (_, bounds) in NUMBERS.items() if bounds is None] == [], (
        "give the field `_number(default, ...)`"
    )
    for field, kind in DECLARED:
        if "bounds" in field.metadata:
            least, most = field.metadata["bounds"]
            assert kind in (int, float, tuple[int, ...]) and -INFINITE < least <= most < INFINITE
            values = field.default if isinstance(field.default, tuple) else (field.default,)
            assert all(least <= value <= most for value in values)
        assert kind is not str or field.default in field.metadata.get("choices", (field.default,))


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_beyond_its_bounds_is_refused_by_its_bound(key):
    """Whatever the loader takes for a number of that kind: the message names the setting and the bound."""
    kind, (least, most) = NUMBERS[key]
    step = 1 if kind is not float else 0.5
    beyond = {least - step: least, most + step: most, -(10**30): least, 10**5000: most}
    if kind is float:
        beyond |= {INFINITE: most, -INFINITE: least, NAN: least, 1e30: most}
    for value, bound in beyond.items():
        with pytest.raises(SettingsError) as refusal:
            settings_from({"model_path": "m", key: [value] if kind == tuple[int, ...] else value})
        message = str(refusal.value)
        assert message.startswith(f"{key} must be at ") and f" {bound}, found " in message
        assert "\n" not in message and len(message) < 200


@pytest.mark.parametrize("key", NUMBERS)
def test_a_count_is_never_a_fraction(key):
    kind, _ = NUMBERS[key]
    for value in (INFINITE, NAN, 1e30, 2.0) if kind is not float else ("1", None, True):
        with pytest.raises(SettingsError, match=key):
            settings_from({"model_path": "m", key: [value] if kind == tuple[int, ...] else value})


def test_the_bounds_themselves_are_allowed():
    """One at a time, beside what makes them possible."""
    company = {"model_path": "m", "precompile_bs_paddings": [8192], "page_size": 16}
    apart = {"num_pages", "num_hosts", "data_parallel_size", "num_slices", "elastic_after_s"}
    apart |= {"precompile_bs_paddings", "hidden_state_layers"}
    for key, (kind, bounds) in NUMBERS.items():
        for value in bounds if key not in apart else ():
            settings_from({**company, key: kind(value)})


def test_another_name_is_the_same_setting():
    values = {"model_path": "m", "num_hosts": 2, "devices_per_host": 4}
    found = settings_from({**values, "dp_size": 4})
    assert found == settings_from({**values, "data_parallel_size": 4})
    assert found.parallel.data_parallel_size == 4


def test_groups_are_not_checked_against_devices_that_hosts_will_find():
    settings_from({"model_path": "m", "devices_per_host": 0, "data_parallel_size": 3})


def test_the_environment_fills_what_is_not_given(monkeypatch):
    monkeypatch.setenv("RAYSERVE_MOE_MODEL_PATH", "from-environment")
    monkeypatch.setenv("RAYSERVE_MOE_API_KEY", "secret")
    settings = settings_from({})
    assert (settings.model.path, settings.server.api_key) == ("from-environment", "secret")
    assert settings_from({"model_path": "given"}).model.path == "given"


def test_an_empty_variable_is_no_value(monkeypatch):
    monkeypatch.setenv("RAYSERVE_MOE_API_KEY", "")
    assert settings_from({"model_path": "m"}).server.api_key == ""


def test_yaml_is_a_flat_mapping_or_a_serve_config(tmp_path):
    flat, serve = tmp_path / "flat.yaml", tmp_path / "serve.yaml"
    flat.write_text("model_path: m\npage_size: 8\n")
    serve.write_text("applications:\n- name: a\n  import_path: b:c\n  args:\n    model_path: m\n    page_size: 8\n")
    assert settings_from_yaml(flat) == settings_from_yaml(serve) == settings_from({"model_path": "m", "page_size": 8})


@pytest.mark.parametrize(
    "text",
    ["- a\n- b\n", "a: [", "just text", "", f"page_size: {'9' * 5000}", "a: " + "[" * 600 + "]" * 600],
    ids=["list", "unfinished", "text", "empty", "a number of 5000 digits", "nested"],
)
def test_yaml_that_holds_no_settings_is_named(tmp_path, text):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"wrong\.yaml"):
        settings_from_yaml(file)


def test_a_yaml_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"absent\.yaml"):
        settings_from_yaml(tmp_path / "absent.yaml")


def test_a_path_object_is_a_path(tmp_path):
    assert settings_from({"model_path": tmp_path}).model.path == str(tmp_path)


def test_the_cache_lies_where_the_desktop_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "rayserve_moe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / ".cache" / "rayserve_moe"


def test_the_only_value_of_a_fixed_setting_changes_nothing():
    assert settings_from({"model_path": "m", "elastic_programs": "on_loss"}) == settings_from({"model_path": "m"})


def test_the_old_name_of_a_key_is_taken_with_a_warning_and_not_beside_the_new_one(caplog):
    settings = settings_from({"model_path": "m", "most_rebuilds_in_hour": 7})
    assert settings.cluster.max_rebuilds_in_hour == 7
    assert "most_rebuilds_in_hour is named max_rebuilds_in_hour" in caplog.text
    with pytest.raises(SettingsError, match="most_rebuilds_in_hour and max_rebuilds_in_hour name the same setting"):
        settings_from({"model_path": "m", "max_rebuilds_in_hour": 7, "most_rebuilds_in_hour": 7})


def test_the_old_name_of_a_value_is_taken_with_a_warning(caplog):
    settings = settings_from({"model_path": "m", "expert_backend": "pushed"})
    assert settings.experts.backend == "low_latency_dispatch"
    assert "expert_backend pushed is named low_latency_dispatch" in caplog.text
