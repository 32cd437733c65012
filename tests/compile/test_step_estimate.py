"""Estimates from real schedules: a kernel whose work is known, and whole models that may not become slower."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rayserve_moe.cli import main
from rayserve_moe.tools.estimate.bundles import read_schedule
from rayserve_moe.tools.estimate.dump import DumpFolder, NoScheduleError
from rayserve_moe.tools.served_cases import devices_of
from tests.compile.step_estimates import baseline, figures_of

TOLERANCE = 1.02
"""A change of the compiler's mood (an op fused otherwise) moves an estimate by less."""
ROWS, WIDTH, STEPS = 1024, 1024, 8

COMPILE_KERNELS = f"""
import sys
from pathlib import Path
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.dump import dump_environment
set_environment_defaults(COMPILER_ENVIRONMENT | dump_environment(Path(sys.argv[1])))
use_host_alone()
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tests.compile.topologies import compile_for

def double(read, written):
    written[...] = read[...] * 2

block = pl.BlockSpec(({ROWS // STEPS}, {WIDTH}), lambda step: (step, 0))
shape = jax.ShapeDtypeStruct(({ROWS}, {WIDTH}), jnp.float32)

def compile_as(name, chip, semantics):
    options = pltpu.CompilerParams(dimension_semantics=(semantics,))
    specs = {{"in_specs": [block], "out_specs": block, "compiler_params": options, "name": name}}
    run = pl.pallas_call(double, out_shape=shape, grid=({STEPS},), **specs)
    assert name in compile_for(chip, lambda array: run(array), shape).as_text()

compile_as("doubled", "v6e", "arbitrary")
compile_as("on_one_core", "v5p", "arbitrary")
compile_as("on_two_cores", "v5p", "parallel")
"""


@pytest.fixture(scope="module")
def spent(tmp_path_factory):
    """What some small kernels spend by their schedules, by name."""
    folder = tmp_path_factory.mktemp("schedules")
    command = [sys.executable, "-c", COMPILE_KERNELS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0]: read_schedule(text).spent() for name, text in DumpFolder(folder).take().items()}


def test_the_schedule_of_a_kernel_says_what_it_copies(spent):
    doubled = spent["doubled"]
    assert doubled.hbm_bytes == 2 * ROWS * WIDTH * 4, "read once and written once"
    assert not doubled.is_least
    # A bundle loads and stores a few registers of 1024 numbers.
    assert ROWS * WIDTH / 1024 / 4 < doubled.bundles < 4 * ROWS * WIDTH / 1024


def test_a_schedule_is_that_of_one_core(spent):
    """On a chip whose cores share a device, a kernel with a parallel grid has half of its steps in it."""
    alone, shared = spent["on_one_core"], spent["on_two_cores"]
    assert alone.hbm_bytes == 2 * shared.hbm_bytes == spent["doubled"].hbm_bytes
    assert 1.8 * shared.bundles < alone.bundles < 2.2 * shared.bundles


@pytest.mark.slow
def test_a_process_that_has_loaded_libtpu_is_told_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    monkeypatch.delenv("LIBTPU_INIT_ARGS")  # what the command sets is not for the tests that follow
    devices_of("v6e:2x4")
    with pytest.raises(NoScheduleError, match="loaded before the dump was requested"):
        DumpFolder(tmp_path).take()
    few = ["--model", "qwen3-30b-a3b", "--topology", "v6e:2x4", "--layers", "2", "--batch", "2", "--context", "256"]
    assert main(["compile-check", *few, "--programs", "decode_2", "--estimate"]) == 2
    assert "libtpu wrote no schedules" in capsys.readouterr().err


@pytest.mark.slow
def test_an_estimate_is_printed_with_the_ops_of_a_layer():
    few = ["--model", "qwen3-30b-a3b", "--topology", "v6e:2x4", "--layers", "2", "--batch", "16"]
    command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", *few, "--programs", "decode_16"]
    done = subprocess.run([*command, "--estimate"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ESTIMATED, not measured: from schedules" in done.stdout
    assert "step of 48 layers (2 compiled)" in done.stdout
    assert "1 x low_latency_dispatch" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", baseline())
def test_no_step_is_estimated_slower_than_the_baseline(case):
    """Where a change is meant to cost this, `python -m tests.compile.step_estimates` writes the baseline anew."""
    found, known = figures_of(case), baseline()[case]
    slower = {name: (known[name], value) for name, value in found.items() if value > known[name] * TOLERANCE}
    assert not slower, json.dumps(slower)
