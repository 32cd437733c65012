"""`serve --dry-run` prints resolved settings, without secrets, and the memory they take; nothing is started."""

from __future__ import annotations

import subprocess
import sys

import yaml

from rayserve_moe.config.load import settings_from
from rayserve_moe.serving.start.dry_run import memory_lines, setting_lines


def test_settings_are_yaml_that_gives_the_same_settings():
    given = {"model_path": "trained:calculator", "dp_size": 2, "devices_per_host": 2, "precompile_bs_paddings": [8, 16]}
    settings = settings_from(given)
    lines = list(setting_lines(settings, given))
    assert settings_from(yaml.safe_load("\n".join(lines))) == settings
    marked = {line.partition(":")[0] for line in lines if line.endswith("  # given")}
    assert marked == {"model_path", "data_parallel_size", "devices_per_host", "precompile_bs_paddings"}


def test_no_secret_is_printed():
    given = {"model_path": "m", "api_key": "s3cret-a", "admin_api_key": "s3cret-b", "journal_key": "s3cret-c"}
    text = "\n".join(setting_lines(settings_from(given), given))
    assert "s3cret" not in text and text.count("'***'") == 3


def test_a_slice_of_tpus_is_left_to_the_compile_check():
    settings = settings_from({"model_path": "m", "tpu_topology": "2x4", "tpu_version": "v6e", "num_hosts": 2})
    assert "compile-check" in "\n".join(memory_lines(settings))


def test_the_command_prints_pages_and_starts_nothing():
    command = [sys.executable, "-m", "rayserve_moe.cli", "serve", "trained:calculator", "--dry-run"]
    settings = ["--max-model-len", "256", "--cpu-kernels", "off", "--no-enable-prefix-caching"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=True, timeout=300)
    assert "max_model_len: 256  # given" in done.stdout
    assert "257 pages, 4,096 tokens, 16.0 sequences of full length" in done.stdout and "starting" not in done.stdout
