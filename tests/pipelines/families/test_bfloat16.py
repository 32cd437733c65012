"""Logits of every family by the native kernels: as near to float32 as those of XLA in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.kernels.table import CPU_NATIVE
from tests.pipelines.families.conftest import families
from tests.support.engine.host_runners import new_runner
from tests.support.engine.workload import FIRST_ORDINARY_ID
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import FamilyCase, write_family
from tests.support.models.full_logits import prompt_logits_of

pytestmark = families("gpt_oss-0", variants=3)

LENGTH, NUM_PROMPTS = 48, 16


def loaded(path: Path, **settings: str) -> HostRunner:
    runner = new_runner(path, **settings)
    runner.load()
    return runner


def test_logits_are_as_near_to_float32_as_those_of_xla(case: FamilyCase, tmp_path: Path):
    """Both round to 8 bits, at different places. Near a tie of a router it may turn, and then all of a token's logits
    move: so it is the median token that is held."""
    need_native_kernels()
    path = write_family(case, tmp_path, seed=5, dtype="bfloat16")
    ids = np.random.default_rng(1).integers(FIRST_ORDINARY_ID, case.config["vocab_size"], (NUM_PROMPTS, LENGTH))
    runners = {
        "native": loaded(path, dtype="bfloat16", cpu_kernels="native"),
        "xla": loaded(path, dtype="bfloat16", cpu_kernels="off"),
        "exact": loaded(path, dtype="float32", cpu_kernels="off"),
    }
    assert runners["native"].config.kernels.name == CPU_NATIVE.name
    native, xla, exact = (
        np.stack([*map(prompt_logits_of(runner, longest=LENGTH), ids.tolist())]) for runner in runners.values()
    )
    ours, theirs = (np.median(np.std(found - exact, axis=-1)) for found in (native, xla))
    assert ours <= 1.25 * theirs
