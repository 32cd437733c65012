"""What is compiled once is found on disk at the next start, and a disk that fails never stops one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.config.settings import (
    CacheSettings,
    CompileSettings,
    ModelSettings,
    ReplaySettings,
    SchedulerSettings,
    SettingsError,
)
from rayserve_moe.execution.compile_cache import programs_on_disk
from rayserve_moe.execution.compiled_steps import CompilationCount
from rayserve_moe.execution.host_runner import HostRunner, RunnerSettings
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult

OPTIONS = [
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
]


@pytest.fixture(autouse=True)
def settings_of_jax_are_put_back() -> Iterator[None]:
    before = {name: jax.config.values[name] for name in OPTIONS}
    yield
    assert {name: jax.config.values[name] for name in OPTIONS} == before


def started(path: Path, cache: str) -> tuple[StartReport, StepResult]:
    """Start a runner and decode one token."""
    settings = RunnerSettings(
        ModelSettings(path=str(path), max_model_len=32),
        SchedulerSettings(max_running_requests=2, max_step_tokens=32, decode_batch_sizes=(2,)),
        CacheSettings(num_pages=4),
        ReplaySettings(enabled=True),
        compile=CompileSettings(cache),
    )
    runner = HostRunner(settings, plan_for(jax.devices()[:1]))
    report = runner.prepare(runner.load())
    one, none = np.ones(1, np.intp), np.zeros(1, np.intp)
    runner.execute(StepPlan(0, none, none, one, np.array([7], np.int32), np.array([True]), wants_routing=True))
    result = runner.execute(StepPlan(1))
    assert result is not None
    return report, result


def compile_something(cache: str, *, platform: str = "cpu", factor: float = 2.0) -> int:
    """Compile a small program; returns how many were found on disk."""
    count = CompilationCount()
    with programs_on_disk(CompileSettings(cache), platform=platform):
        compiled = jax.jit(lambda x: jnp.sin(x) * factor).lower(np.ones(3, np.float32)).compile()
    np.testing.assert_allclose(compiled(np.ones(3, np.float32)), factor * np.sin(1.0), rtol=1e-6)
    return count.num_found


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*-cache"))


def test_a_second_start_finds_every_program_computes_the_same_and_says_what_took_time(core_checkpoint, tmp_path):
    cold, fresh = started(core_checkpoint, str(tmp_path))
    warm, found = started(core_checkpoint, str(tmp_path))
    assert (cold.num_programs, cold.num_programs_found) == (4, 0), "one decode shape, one mixed shape, two updates"
    assert (warm.num_programs, warm.num_programs_found) == (4, 4)
    assert len(files(tmp_path)) == 4
    assert found.token_ids == fresh.token_ids and found.logprobs == fresh.logprobs
    np.testing.assert_array_equal(found.routing.rows, fresh.routing.rows)
    for report in (cold, warm):
        assert report.num_pages == 4
        assert min(report.load_s, report.compile_s, report.compile_sum_s, report.first_run_s) > 0
        assert report.compile_sum_s >= report.compile_s / report.num_programs
    assert warm.compile_s < cold.compile_s


def test_nothing_is_kept_where_it_is_off(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert compile_something("off") == compile_something("off") == 0
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_the_user_is_taken_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (compile_something("auto"), compile_something("auto")) == (0, 1)
    (program,) = files(tmp_path / "rayserve_moe" / "programs")
    assert program.parent.name.startswith("cpu-"), "machines that share a directory may differ in their instructions"


def test_directories_do_not_mix(tmp_path):
    assert compile_something(str(tmp_path / "a")) == 0
    assert compile_something(str(tmp_path / "b")) == 0
    assert compile_something(str(tmp_path / "a")) == 1
    assert len(files(tmp_path / "a")) == len(files(tmp_path / "b")) == 1


def test_a_cache_that_jax_has_already_stays_in_charge_of_auto(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    try:
        compile_something("auto")
        assert not (tmp_path / "ours").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_a_damaged_file_costs_compiling_again(tmp_path):
    compile_something(str(tmp_path))
    (program,) = files(tmp_path)
    program.write_bytes(program.read_bytes()[:50])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        assert compile_something(str(tmp_path)) == 0


def test_what_an_interrupted_process_left_is_written_anew(tmp_path):
    compile_something(str(tmp_path))
    (program,) = files(tmp_path)
    program.write_bytes(b"half of a pro")
    program.with_name(program.name.removesuffix("-cache") + "-atime").unlink()
    assert compile_something(str(tmp_path)) == 0
    assert compile_something(str(tmp_path)) == 1


def test_a_directory_that_was_asked_for_and_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"compile_cache .*file"):
        compile_something(str(tmp_path / "file"))


def test_without_a_directory_of_the_user_everything_is_compiled(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_something("auto") == compile_something("auto") == 0
    assert "compiled programs are not kept" in caplog.text


def test_accelerators_are_told_apart_by_jax_and_share_a_directory(tmp_path):
    compile_something(str(tmp_path), platform="tpu")
    assert [program.parent.name for program in files(tmp_path)] == ["tpu"]


def test_cpu_processes_that_work_together_keep_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert compile_something(str(tmp_path)) == compile_something(str(tmp_path)) == 0
    assert files(tmp_path) == []
