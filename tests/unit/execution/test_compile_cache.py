"""What is compiled once is found on disk at the next start, and a disk that fails never stops one."""

from __future__ import annotations

import pickle
import tomllib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rayserve_moe
from rayserve_moe.config.settings import (
    CacheSettings,
    CompileSettings,
    ModelSettings,
    ReplaySettings,
    SchedulerSettings,
    SettingsError,
)
from rayserve_moe.execution.programs import cache as compile_cache
from rayserve_moe.execution.programs.cache import KeptPrograms, kept_programs, program_key, without_cache_of_jax
from rayserve_moe.execution.programs.files import ProgramFiles
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.scheduling.step_plan import Chunks, StartReport, StepPlan, StepResult
from tests.support.kernels.native_kernels import need_native_kernels

pytestmark = pytest.mark.usefixtures("programs_as_for_users")
DIRECTORY = "executables/0-of-1"


def started(
    path: Path, cache: str, *, places: slice = slice(1), kernels: str = "off"
) -> tuple[StartReport, StepResult]:
    """Start a runner and decode one token, which lies in its pages after the same one before it."""
    settings = RunnerSettings(
        ModelSettings(path=str(path), max_model_len=32, dtype="bfloat16" if kernels == "native" else "float32"),
        SchedulerSettings(max_running_requests=2, max_step_tokens=32, decode_batch_sizes=(2,)),
        CacheSettings(num_pages=4),
        ReplaySettings(enabled=True),
        compile=CompileSettings(cache, cpu_kernels=kernels),
    )
    runner = HostRunner(settings, plan_for(jax.devices()[places]))
    report = runner.prepare(runner.load())
    pages = runner.state.pools["kv"][0]
    for step_id in range(2):
        place, one = np.full(1, step_id, np.intp), np.ones(1, np.intp)
        token, row = np.array([7], np.int32), np.zeros(1, np.intp)
        runner.execute(StepPlan(step_id, Chunks(row, place, one, token, np.array([True])), wants_routing=True))
    result = runner.execute(StepPlan(2))
    assert result is not None
    assert pages.is_deleted(), "the pool is donated, not copied"
    assert runner.num_compilations_since_start == 0
    return report, result


def plan_of(first: int = 0, number: int = 1) -> ParallelPlan:
    return plan_for(jax.devices()[first : first + number])


def scaled(x: jax.Array, *, factor: float, of: object = None) -> jax.Array:
    return jnp.sin(x) * factor


def compile_something(cache: str, *, factor: float = 2.0, plan: ParallelPlan | None = None) -> bool:
    """Have a small program, compiled where it is not kept; returns whether it was."""
    plan = plan or plan_of()
    kept, run = kept_programs(CompileSettings(cache), plan), partial(scaled, factor=factor)
    like = jax.ShapeDtypeStruct((3,), np.float32, sharding=plan.replicated())
    found = kept and kept.find(program_key(run, like))
    if not found:
        with without_cache_of_jax():
            compiled = jax.jit(run).lower(like).compile()
        if kept:
            kept.keep(program_key(run, like), compiled)
    array = jax.device_put(np.ones(3, np.float32), plan.replicated())
    np.testing.assert_allclose((found or compiled)(array), factor * np.sin(1.0), rtol=1e-6)
    return bool(found)


def files(directory: Path) -> list[Path]:
    return sorted((directory / DIRECTORY).iterdir())


@pytest.mark.parametrize(
    ("places", "kernels"),
    [
        pytest.param(slice(1), "native", id="one device"),
        pytest.param(slice(1), "off", id="one device, by XLA", marks=pytest.mark.slow),
        pytest.param(slice(2, 4), "off", id="others than the first", marks=pytest.mark.slow),
    ],
)
def test_a_second_start_finds_every_program_computes_the_same_and_says_what_took_time(
    places, kernels, core_checkpoint, tmp_path
):
    if kernels == "native":
        need_native_kernels()
    cold, fresh = started(core_checkpoint, str(tmp_path), places=places, kernels=kernels)
    warm, found = started(core_checkpoint, str(tmp_path), places=places, kernels=kernels)
    assert (cold.num_programs, cold.num_programs_found) == (10, 0), (
        "one decode shape, one mixed shape, deferred samples without evidence and with it, two updates, copies, "
        "counts, a probe and its gather"
    )
    assert (warm.num_programs, warm.num_programs_found) == (10, 10)
    assert len(files(tmp_path)) == 10
    assert found.token_ids == fresh.token_ids and found.logprobs == fresh.logprobs
    np.testing.assert_array_equal(found.routing, fresh.routing)
    for report in (cold, warm):
        assert report.num_pages == 4
        assert min(report.load_s, report.compile_s, report.compile_sum_s, report.first_run_s) > 0
        assert report.compile_sum_s >= report.compile_s / report.num_programs
    assert warm.compile_s < cold.compile_s


def test_nothing_is_kept_where_it_is_off(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not compile_something("off") and not compile_something("off")
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_the_user_is_taken_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (compile_something("auto"), compile_something("auto")) == (False, True)
    assert len(files(tmp_path / "rayserve_moe")) == 1


def test_directories_do_not_mix(tmp_path):
    assert not compile_something(str(tmp_path / "a"))
    assert not compile_something(str(tmp_path / "b"))
    assert compile_something(str(tmp_path / "a"))
    assert len(files(tmp_path / "a")) == len(files(tmp_path / "b")) == 1


def test_what_the_cache_of_jax_brings_is_not_kept(tmp_path):
    """On CPUs it can be written and loaded, and fails when it is called."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (str(tmp_path / "theirs"), 0.0), strict=True):
        jax.config.update(name, value)
    try:
        jax.jit(partial(scaled, factor=7.0)).lower(np.ones(3, np.float32)).compile()
        assert not compile_something(str(tmp_path), factor=7.0)
        assert compile_something(str(tmp_path), factor=7.0)
        assert jax.config.values["jax_enable_compilation_cache"], "it is put back"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_program_that_cannot_be_loaded_is_compiled_again_and_replaced(tmp_path, caplog):
    compile_something(str(tmp_path))
    (path,) = files(tmp_path)
    written = ProgramFiles(tmp_path / DIRECTORY, max_bytes=1 << 30)
    for payload in (b"no pickle", pickle.dumps((b"no program", None, None)), pickle.dumps(("too", "short"))):
        written.write(path.name, payload)
        assert not compile_something(str(tmp_path))
        assert "cannot be loaded, recompiling it" in caplog.text
        assert compile_something(str(tmp_path))
        caplog.clear()


CHANGES = {
    "source of a kernel": lambda patch: patch.setattr(compile_cache, "source_digest", lambda: "edited"),
    "flags of the compiler": lambda patch: patch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=true"),
    "threads of the compiler": lambda patch: patch.setenv("PJRT_NPROC", "7"),
    "version of jax": lambda patch: patch.setattr(jax, "__version__", "0.0.1"),
    "instructions of the CPU": lambda patch: patch.setattr(compile_cache, "_cpu_features", lambda: "flags: fpu"),
    "rank": lambda patch: patch.setattr(jax, "process_index", lambda: 1),
    "size of the group": lambda patch: patch.setattr(jax, "process_count", lambda: 2),
    "layout of programs on disk": lambda patch: patch.setattr(compile_cache, "FORMAT", -1),
}


def key_in(directory: Path) -> str:
    return KeptPrograms(ProgramFiles(directory / "programs", max_bytes=1), plan_of())._key("something")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_program_is_found_by_all_that_determines_it(change, tmp_path, monkeypatch):
    before = key_in(tmp_path)
    assert before == key_in(tmp_path)
    with monkeypatch.context() as patch:
        change(patch)
        assert key_in(tmp_path) != before
    assert key_in(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "value", "matters"), [("jax_use_magma", "on", True), ("jax_log_compiles", True, False)]
)
def test_settings_of_jax_determine_a_program_but_for_those_that_only_tell(name, value, matters, tmp_path):
    before, was = key_in(tmp_path), jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert (key_in(tmp_path) != before) == matters
    finally:
        jax.config.update(name, was)


def test_programs_are_told_apart_by_what_they_are_called_with_and_made_for():
    plans = {first_and_number: plan_of(*first_and_number) for first_and_number in ((0, 1), (1, 1), (0, 2))}
    like = {plan: jax.ShapeDtypeStruct((3,), np.float32, sharding=plan.replicated()) for plan in plans.values()}
    plan = plans[0, 1]
    signatures = [
        program_key(partial(scaled, factor=2.0), like[plan]),
        program_key(partial(scaled, factor=3.0), like[plan]),
        program_key(partial(scaled, factor=2.0, of=program_key), like[plan]),
        program_key(partial(scaled, factor=2.0, of=kept_programs), like[plan]),
        program_key(partial(scaled, factor=2.0), like[plans[0, 2]]),
        program_key(partial(scaled, factor=2.0), jax.ShapeDtypeStruct((4,), np.float32, sharding=plan.replicated())),
        program_key(partial(scaled, factor=2.0), jax.ShapeDtypeStruct((3,), np.int32, sharding=plan.replicated())),
        program_key(partial(scaled, factor=2.0), x=like[plan]),
    ]
    assert len(set(signatures)) == len(signatures)
    assert not any(" at 0x" in signature for signature in signatures), "an address is another one at the next start"


def test_devices_are_told_apart(tmp_path):
    assert not compile_something(str(tmp_path), plan=plan_of(0))
    assert not compile_something(str(tmp_path), plan=plan_of(1))
    assert compile_something(str(tmp_path), plan=plan_of(0)) and compile_something(str(tmp_path), plan=plan_of(1))


def test_the_source_covers_what_programs_are_built_from_and_no_more():
    """A package of a layer above `execution` cannot be in a program; an edit of it compiles nothing anew."""
    root = Path(rayserve_moe.__file__).parent
    packages = {path.name for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    left_out = set(compile_cache.PACKAGES_ABOVE)
    assert left_out < packages, "a package that was renamed"
    assert {"execution", "model", "kernels", "experts", "decoding", "parallel"} <= packages - left_out
    contracts = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contracts[0]["layers"]]
    own = next(number for number, layer in enumerate(layers) if "execution" in layer)
    above = {package for layer in layers[:own] for package in layer}
    assert {"cli", "serving", "cluster"} < above
    assert above <= {name.removesuffix(".py") for name in left_out}


@pytest.mark.parametrize("problem", ["a file in its place", "others can write to it"])
def test_a_directory_that_was_asked_for_and_cannot_be_used_is_refused(problem, tmp_path, monkeypatch, caplog):
    if problem == "a file in its place":
        (tmp_path / "rayserve_moe").touch()
    else:
        (tmp_path / "rayserve_moe" / DIRECTORY).mkdir(parents=True)
        (tmp_path / "rayserve_moe" / DIRECTORY).chmod(0o777)
    with pytest.raises(SettingsError, match=r"compile_cache .*rayserve_moe"):
        compile_something(str(tmp_path / "rayserve_moe"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not compile_something("auto") and not compile_something("auto")
    assert "compiled programs are not kept" in caplog.text
