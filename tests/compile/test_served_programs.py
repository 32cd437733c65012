"""The gate looks at what is served: its programs are those of a start, and its settings those of the config."""

from __future__ import annotations

import json
import logging
import math
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.cli import main
from rayserve_moe.config.load import settings_from
from rayserve_moe.execution.programs.specs import programs_of
from rayserve_moe.execution.served_model import runner_settings, served_model
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import UnsupportedModelError
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools import program_report
from rayserve_moe.tools.compile_check import check, faults_of
from rayserve_moe.tools.program_report import ProgramReport
from rayserve_moe.tools.served_cases import NoTopologyError, case_of_config, case_of_model, lay_out
from tests.support.engine.host_runners import TWO_SHAPES, new_runner

CONFIGS = sorted(Path("configs").glob("*.yaml"))
ON_TPU = [path for path in CONFIGS if "tpu_topology:" in path.read_text().replace("`tpu_topology`", "")]
FILLS = {"broadcast_in_dim", "_broadcast_arrays", "_full", "full", "fill", "convert_element_type", "zeros_like"}
"""What allocates arrays of zeros; no step, and nothing of a model in it."""


@contextmanager
def compiled_names(caplog):
    """Names of all modules that XLA is given meanwhile."""
    names: set[str] = set()
    with caplog.at_level(logging.DEBUG, logger="jax._src.interpreters.pxla"):
        yield names
    found = (re.match(r"Compiling (?:jit\()?(\w+)", record.getMessage()) for record in caplog.records)
    names |= {match[1] for match in found if match}


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"enable_eplb": True, "num_redundant_experts": 4}, id="eplb"),
    ],
)
def test_a_start_compiles_the_programs_of_the_gate(values, core_checkpoint, caplog):
    """Settings and a mesh alone say what a start compiles; the weights have no part in it."""
    settings = {**TWO_SHAPES, "enable_return_routed_experts": True, "compile_cache": "off", **values}
    runner = new_runner(core_checkpoint, mesh=(2, 2), **settings)
    num_pages = runner.load()
    with compiled_names(caplog) as names:
        runner.prepare(num_pages)
    found = settings_from({"model_path": core_checkpoint, **settings})
    spec, plan = spec_from_config(read_config(core_checkpoint)), plan_for(jax.devices()[:4], data_size=2)
    served = served_model(spec, plan, settings=runner_settings(found, found.model))
    programs = {program.name for program in programs_of(served, num_pages=num_pages)}
    assert names - FILLS == programs
    assert ("fetch_slots" in programs) == bool(values)


def refuse(*_: object, **__: object) -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\n\nbuffers")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem.endswith("v6e8") else pytest.mark.slow) for path in ON_TPU],
    ids=lambda path: path.stem,
)
@pytest.mark.parametrize("stage", ["lowered", pytest.param("optimized", marks=pytest.mark.slow)])
def test_the_gate_takes_every_program_and_setting_of_a_config(path, stage, monkeypatch):
    """Reject programs in the compiler, or before tracing, which takes 20 s per config."""
    monkeypatch.setattr(program_report, stage, refuse)
    case = case_of_config(path, num_layers=2)
    served = lay_out(case)
    report = check(case)
    assert [program.name for program in report.programs] == [
        program.name for program in programs_of(served, num_pages=report.num_pages)
    ]
    assert {program.error for program in report.programs} == {"RESOURCE_EXHAUSTED: no room"}
    assert len(report.faults) == len(report.programs) and not report.fits
    step = served.step_config(report.num_pages)
    assert step.page_size == 128 and step.capture_routing
    assert served.config.experts.backend == "auto"
    assert served.config.plan.mesh.size == len(served.config.plan.mesh.devices.flat)
    assert served.config.spec.num_layers == 2


@pytest.mark.parametrize("path", ON_TPU, ids=lambda path: path.stem)
def test_fewer_layers_are_compiled_in_the_shapes_of_all(path):
    assert lay_out(case_of_config(path, num_layers=2)).shapes == lay_out(case_of_config(path)).shapes


def test_8_bit_keys_take_half_the_memory():
    narrow, wide = (
        lay_out(case_of_model("qwen3-30b-a3b", "v6e:2x4", values={"kv_cache_dtype": name})) for name in ("fp8", "auto")
    )
    pools = [each.state(9).pools["kv"][0] for each in (narrow, wide)]
    assert [str(pool.dtype) for pool in pools] == ["int16", "bfloat16"]
    row_bytes = [
        math.prod(each.state(9).pools["kv"][0].shape) * each.state(9).pools["kv"][0].dtype.itemsize
        for each in (narrow, wide)
    ]
    assert 2 * row_bytes[0] == row_bytes[1]
    for model, tp in (("qwen3-30b-a3b", 4), ("gpt-oss-20b", 1)):
        served = lay_out(case_of_model(model, "v6e:2x4", tp=tp, values={"kv_cache_dtype": "fp8"}))
        assert served.config.kernels.attention.has_packed_rows, "one KV head on a device, sinks and heads of 64"
    with pytest.raises(UnsupportedModelError, match="kv_cache_dtype fp8 does not store latents"):
        lay_out(case_of_model("glm-4.7-flash", "v6e:2x4", values={"kv_cache_dtype": "fp8"}))
    with pytest.raises(UnsupportedModelError, match="page_size 8 is no multiple of 16"):
        lay_out(case_of_model("qwen3-30b-a3b", "v6e:2x4", values={"page_size": 8}))


def test_a_draft_model_is_laid_out_by_its_config_with_its_own_pool_and_programs(tmp_path):
    layer = {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 6144}
    head = {"hidden_size": 2048, "vocab_size": 151936, "draft_vocab_size": 32000, "num_hidden_layers": 1, **layer}
    (tmp_path / "config.json").write_text(json.dumps(head))
    eagle3 = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(tmp_path)}
    for model, values in (("qwen3-30b-a3b", eagle3), ("glm-4.5-air", {"speculative_algorithm": "NEXTN"})):
        drafting = lay_out(case_of_model(model, "v6e:2x4", num_layers=2, values=values))
        assert "draft_16" in {program.name for program in programs_of(drafting, num_pages=64)}
        own = drafting.state(64).draft
        assert own is not None and own.pools["kv"][0].shape[0] == drafting.config.plan.data_size * (
            64 + drafting.num_rows
        )
    (tmp_path / "config.json").write_text(json.dumps({**head, "num_key_value_heads": 1}))
    narrow = lay_out(case_of_model("qwen3-30b-a3b", "v6e:2x4", values={"kv_cache_dtype": "fp8", **eagle3}))
    own = narrow.state(64).draft
    assert own is not None and own.pools["kv"][0].dtype == "int16"


def eagle3_head(folder: Path) -> dict[str, str]:
    """Settings of a head for Qwen3-30B-A3B, of which there is the config alone."""
    layer = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144}
    head = {"hidden_size": 2048, "vocab_size": 151936, "draft_vocab_size": 32000, "num_hidden_layers": 1, **layer}
    (folder / "config.json").write_text(json.dumps(head))
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder)}


@pytest.mark.slow
def test_chains_are_drafted_and_verified_in_place(tmp_path):
    values = {**eagle3_head(tmp_path), "speculative_num_steps": 5}
    case = case_of_model("qwen3-30b-a3b", "v6e:2x2", num_layers=3, values=values)
    report = check(case, names=("decode_48", "draft_16"))
    assert len(report.programs) == 2 and not report.faults and report.fits
    decode = next(program for program in report.programs if program.name == "decode_48")
    assert "paged_attention_of_groups" in decode.kernels and "paged_attention" not in decode.kernels


def test_what_serves_on_cpus_is_skipped_unless_a_topology_is_named(capsys):
    on_cpu = [path for path in CONFIGS if path not in ON_TPU]
    assert len(on_cpu) == 2
    for path in on_cpu:
        with pytest.raises(NoTopologyError, match="serves on CPU hosts"):
            case_of_config(path)
        assert main(["compile-check", "--config", str(path)]) == 0
        assert "skipped" in capsys.readouterr().err
        settings = case_of_config(path, topology="v6e:2x4").settings.parallel
        served = lay_out(case_of_config(path, topology="v6e:2x4"))
        assert served.config.plan.mesh.size == settings.num_hosts * (settings.devices_per_host or 1)


def test_a_limit_that_is_exceeded_is_a_fault():
    program = ProgramReport("decode_16", is_in_place=True, copied_activation_bytes=1001)
    assert list(faults_of(program, {"copied_activation_bytes": 1001})) == []
    (fault,) = faults_of(program, {"copied_activation_bytes": 1000})
    assert fault == "decode_16: copied_activation_bytes is 1,001, more than 1,000"
    with pytest.raises(ValueError, match="unknown report fields in the limits: speed"):
        check(case_of_config(ON_TPU[0], num_layers=2), limits={"decode_16": {"speed": 1}})
    copying = replace(program, copied_bytes={"kv": 2_500_000}, is_in_place=False)
    assert len(list(faults_of(copying, {}))) == 2


def test_limits_are_those_of_every_program_of_a_shipped_config():
    limits = json.loads(Path("benchmarks/compile_limits.json").read_text())
    by_name = {path.stem: path for path in ON_TPU}
    assert limits.keys() == by_name.keys()
    for name, of_programs in limits.items():
        programs = programs_of(lay_out(case_of_config(by_name[name])), num_pages=4097)
        assert set(of_programs) == {program.name for program in programs}
