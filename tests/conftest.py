"""The environment of the test process, set before anything imports jax, ray or transformers."""

from __future__ import annotations

import atexit
import gc
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import certifi

from rayserve_moe.serving.front.limits import FrontLimits, write_launcher
from rayserve_moe.serving.start.command import environment_of
from tests.support.cluster.ports import reserve_ports
from tests.support.session.kept_programs import program_folder, prune
from tests.support.session.scopes import place_of
from tests.support.session.xla_flags import compiled_once, process_flags


def few_certificates(directory: Path) -> dict[str, str]:
    """Return an environment in which an HTTP client reads one certificate, which takes 1 ms, not 140, which take 17.

    No client of a test connects by TLS.
    """
    path, end = directory / "certificate.pem", "-----END CERTIFICATE-----\n"
    path.write_text(certifi.contents().partition(end)[0] + end, encoding="ascii")
    return {"SSL_CERT_FILE": str(path)}


PORTS, RESERVATION = reserve_ports()
FOLDER = Path(tempfile.mkdtemp(prefix="moe-"))
"""Of HAProxy; the name is short because its sockets' names may not be long."""
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
atexit.register(RESERVATION.close)
# Of the process that starts the others: they, and all children, share it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    PROGRAMS = program_folder(FOLDER / "xla")
    prune(PROGRAMS)
    os.environ |= compiled_once(PROGRAMS)
# As the start command has it, on ports and with a token of this process's own.
os.environ |= environment_of(PORTS, os.environ, folder=FOLDER, jax_platforms="cpu", max_answer_s=120.0) | {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": process_flags(),
    **few_certificates(FOLDER),
}
write_launcher(
    Path(os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]),
    FrontLimits(PORTS.health, max_connections=400, max_connections_per_source=300),
)

import hypothesis
import pytest

from rayserve_moe.checkpoints.synthetic import write_checkpoint
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.core import CORE_CONFIG, NATIVE_CORE_CONFIG
from tests.support.models.families import FamilyCase
from tests.support.session.costs import Costs
from tests.support.session.hypothesis_examples import ALL, SAMPLED
from tests.support.session.kept_compilations import KeptCompilations
from tests.support.session.sampled_variants import leave_to_native_kernels, mark_others_slow
from tests.support.session.shared_contexts import SharedContexts
from tests.support.session.shared_programs import SharedPrograms
from tests.support.session.step_shapes import compile_fewest_shapes

SHARED_PROGRAMS = SharedPrograms()
SHARED_PROGRAMS.start()
SharedContexts().start()

hypothesis.settings.register_profile(
    "sampled", deadline=None, max_examples=SAMPLED, derandomize=bool(os.environ.get("CI"))
)
hypothesis.settings.register_profile("all", hypothesis.settings.get_profile("sampled"), max_examples=ALL)
hypothesis.settings.load_profile("sampled")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-kernels",
        choices=["xla", "native"],
        default="xla",
        help="what computes the core model: XLA in float32, or the native kernels in bfloat16",
    )

    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile all shapes of steps, programs as for users, for TPUs anew; try properties on all examples",
    )
    parser.addoption("--costs", type=int, metavar="N", help="show the N tests that take most CPU seconds")
    parser.addoption(
        "--part",
        metavar="I/N",
        help="run every Nth file only, or model of a file over models, in the order of names: N runs make the whole",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any program is compiled."""
    if num_shown := config.getoption("--costs"):
        config.pluginmanager.register(Costs(num_shown))
    if config.getoption("--optimized"):
        os.environ["XLA_FLAGS"] = process_flags(is_quick=False)
        hypothesis.settings.load_profile("all")
    else:
        compile_fewest_shapes()
        KeptCompilations(Path(os.environ["JAX_COMPILATION_CACHE_DIR"])).start()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests are all deselected, such as comparisons that import torch."""
    left_out = [name for name in ("parity", "published", "slow") if f"not {name}" in config.option.markexpr]
    if "slow" in left_out and config.getoption("--cpu-kernels") != "native":
        left_out.append("natively")
    if not left_out or not collection_path.match("test_*.py"):
        return None
    marked = rf"^pytestmark = \[?pytest\.mark\.({'|'.join(left_out)})\b"
    return bool(re.search(marked, collection_path.read_text(encoding="utf-8"), re.MULTILINE)) or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Have `-n` keep together what shares a cluster or an engine."""
    return import_module("tests.support.session.xdist_scheduling").Distribution(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Choose variants ahead of `-m`, and parts after it. With the native kernels only tests over the core model run:
    what they compute, no other test sees. Tests marked `natively` are slow over XLA's kernels."""
    mark_others_slow(items)
    if config.getoption("--cpu-kernels") != "native":
        leave_to_native_kernels(items)
    yield
    items.sort(key=lambda item: place_of(item.nodeid))
    if part := config.getoption("--part"):
        index, num_parts = map(int, part.split("/"))
        groups = sorted({_part_group(item) for item in items})
        chosen = {group for position, group in enumerate(groups) if position % num_parts == index % num_parts}
        config.hook.pytest_deselected(items=[item for item in items if _part_group(item) not in chosen])
        items[:] = [item for item in items if _part_group(item) in chosen]
    if config.getoption("--cpu-kernels") != "native":
        return
    others = [item for item in items if "is_native" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    for item in items:
        if marker := item.get_closest_marker("float32"):
            item.add_marker(pytest.mark.skip(reason=f"float32 only: {marker.args[0]}"))


def _part_group(item: pytest.Item) -> tuple[str, str]:
    """Return the group that a part runs whole: the tests of a file, split by model if the file has several."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    named = (params.get(name) for name in ("case", "served", "checkpoint"))
    model = next((value for value in named if isinstance(value, FamilyCase | str)), "")
    return str(item.path), model.name if isinstance(model, FamilyCase) else model


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while tests are imported: few imported objects are freed."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage seldom, and never among what was imported: tracing makes many objects and few circles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture
def programs_as_for_users() -> Iterator[None]:
    """Engine programs bypass jax's cache, so all of them are kept."""
    SHARED_PROGRAMS.stop()
    yield
    SHARED_PROGRAMS.start()


@pytest.fixture(scope="session")
def is_native(request: pytest.FixtureRequest) -> bool:
    """Whether the core model is computed by the native CPU kernels."""
    return request.config.getoption("--cpu-kernels") == "native"


@pytest.fixture(scope="session")
def kernel_settings(is_native: bool) -> dict[str, str]:
    """What is set for every engine over the core model: on several devices native kernels have to be asked for."""
    return {"cpu_kernels": "native"} if is_native else {}


@pytest.fixture(scope="session")
def core_checkpoint(tmp_path_factory: pytest.TempPathFactory, is_native: bool) -> Path:
    """The tiny model of `tests.support.models.core`, written once."""
    return _write(tmp_path_factory.mktemp("core") / "model", is_native=is_native, seed=3)


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory, is_native: bool) -> Path:
    """Other weights for the same model."""
    return _write(tmp_path_factory.mktemp("core") / "other", is_native=is_native, seed=4)


@pytest.fixture(scope="session")
def quick_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core model for tests that need an engine and no float32: steps of native kernels compile quickly."""
    return write_checkpoint(tmp_path_factory.mktemp("core") / "quick", NATIVE_CORE_CONFIG, seed=3)


def _write(path: Path, *, is_native: bool, seed: int) -> Path:
    if not is_native:
        return write_checkpoint(path, CORE_CONFIG, seed=seed, dtype="float32")
    need_native_kernels()
    return write_checkpoint(path, NATIVE_CORE_CONFIG, seed=seed)
