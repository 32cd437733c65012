"""Findings of `rayserve-moe doctor`, by subject. Each check takes the HTTP port and reads files and sockets only."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from rayserve_moe.config.load import (
    checkpoint_cache,
    default_cache_directory,
    environment_setting,
    inherited_environment,
    temporary_folder,
)
from rayserve_moe.execution import native_levels
from rayserve_moe.serving.start.ports import FIRST_PORT, StartError, choose_ports, is_free, owner_of
from rayserve_moe.serving.start.state import MAX_PATH_LENGTH, running_plans

FAULT, NOTE, OK = "fault", "note", "ok"
GB = 1e9
MIN_MEMORY_BYTES, MIN_DISK_BYTES = 2 << 30, 2 << 30
"""Less than this makes a start fail: Ray, a replica and its worker take 1.5 GB before the model."""
_FULL_SHARE = 0.95
"""Share of a disk from which on Ray refuses to write."""
_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)
_VARIABLES = re.compile(
    r"(JAX|XLA|LIBTPU|TPU|RAY|HF|HUGGINGFACE|RAYSERVE_MOE|TRANSFORMERS|TOKENIZERS|OMP|CUDA_VISIBLE)_\w+|XDG_CACHE_HOME"
)
_PUBLIC = frozenset({"RAY_AUTH_MODE"})
"""Variables with a secret's name and no secret value."""
_OTHERS = ("jaxlib", "libtpu", "uvicorn", "fastapi", "aiohttp", "starlette", "tokenizers", "gcsfs", "torch")


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    section: str
    name: str
    text: str
    state: str = OK
    """`ok`, `note` or `fault`; with a fault nothing can be served."""


def versions(_: int) -> Iterator[Finding]:
    """Yield versions of this package, of Python, and of the packages that it needs."""
    about = "versions"
    yield Finding(about, "rayserve-moe", _version("rayserve_moe"))
    is_new, is_linux = sys.version_info >= (3, 11), platform.system() == "Linux"
    text = f"{platform.python_version()}, {platform.python_implementation()}"
    yield Finding(about, "Python", text if is_new else f"{text}; 3.11 is needed", OK if is_new else FAULT)
    text = f"{platform.system()} {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield Finding(about, "system", text if is_linux else f"{text}; Linux is needed", OK if is_linux else FAULT)
    found = {name: _version(name) for name in _required()}
    missing = [name for name, number in found.items() if not number]
    found |= {name: _version(name) for name in _OTHERS}
    yield Finding(about, "packages", ", ".join(f"{name} {number}" for name, number in sorted(found.items()) if number))
    if missing:
        yield Finding(about, "missing", f"{', '.join(missing)}: install rayserve-moe anew", FAULT)


def _required() -> list[str]:
    """Return the names of the packages without which nothing runs."""
    try:
        stated = requires("rayserve_moe") or []
    except PackageNotFoundError:
        return []
    return [found[0] for line in stated if "extra ==" not in line and (found := re.match(r"[\w.-]+", line))]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def processor(_: int) -> Iterator[Finding]:
    """Yield the processor, the level of native kernels, and the dtype that follows."""
    about = "processor"
    cpuinfo = native_levels.CPUINFO
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    yield Finding(about, "model", f"{model}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable")
    requested = environment_setting("cpu_level") or native_levels.AUTO
    try:
        level = native_levels.choose_level(requested).name
    except native_levels.NativeKernelsUnavailable as error:
        yield Finding(about, "native kernels", f"not here: {error}; XLA computes, in float32, more slowly", NOTE)
        return
    built = sorted(default_cache_directory().glob(f"native/kernels-{level}-*.so"))
    shipped = sorted(Path(native_levels.__file__).parents[1].glob(f"kernels/cpu_native/built/kernels-{level}-*.so"))
    compilers = native_levels.find_compilers()
    where = "shipped" if shipped else f"built in {_short(built[-1].parent)}" if built else "built at the first start"
    if built or shipped or compilers:
        yield Finding(about, "native kernels", f"level {level}, {where}; `dtype: auto` is bfloat16 on one device")
    else:
        text = f"level {level} fits, but nothing is built and there is no C++ compiler; XLA computes, in float32"
        yield Finding(about, "native kernels", text, NOTE)
    shown = ", ".join(f"{name} ({_first_line(name)})" for name in compilers) or "none"
    yield Finding(about, "compiler", shown, OK if compilers or built or shipped else NOTE)


def _first_line(program: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
        return next(iter(done.stdout.splitlines()), "")
    return "does not run"


def accelerators(_: int) -> Iterator[Finding]:
    """Yield TPU chips and GPUs of this host, and the libraries for them."""
    about = "accelerators"
    chips = sorted(Path("/dev").glob("accel*")) or sorted(Path("/dev/vfio").glob("[0-9]*"))
    libtpu = _version("libtpu")
    text = f"{len(chips)} chips, libtpu {libtpu or 'not installed'}"
    needs = "; pip install 'rayserve_moe[tpu]'" if chips and not libtpu else ""
    yield Finding(about, "TPU", text + needs, NOTE if needs else OK)
    if gpus := list(Path("/dev").glob("nvidia[0-9]*")):
        plugin = next((number for name in ("13", "12") if (number := _version(f"jax-cuda{name}-plugin"))), "")
        text = f"{len(gpus)} cards, plugin of jax {plugin or 'not installed'}; used with `platform: gpu`"
        yield Finding(
            about, "GPU", text if plugin else f"{text}; pip install 'rayserve_moe[gpu]'", _noted(bool(plugin))
        )
    if chips:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        is_enough = locked == resource.RLIM_INFINITY or locked >= 68_719_476_736
        text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / GB:.1f} GB"
        yield Finding(about, "ulimit -l", text, OK if is_enough else NOTE)


def memory(_: int) -> Iterator[Finding]:
    """Yield memory and shared memory."""
    about = "memory"
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    is_enough = available >= MIN_MEMORY_BYTES
    text = f"{available / GB:.1f} GB available of {total / GB:.1f} GB"
    yield Finding(about, "memory", text if is_enough else f"{text}; a start takes 2 GB", OK if is_enough else FAULT)
    limit = Path("/sys/fs/cgroup/memory.max")
    with suppress(OSError, ValueError):
        allowed = int(limit.read_text())
        is_enough = allowed >= MIN_MEMORY_BYTES
        yield Finding(about, "container limit", f"{allowed / GB:.1f} GB", OK if is_enough else FAULT)
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm")
        text = f"{shared.free / GB:.1f} GB free of {shared.total / GB:.1f} GB"
        is_enough = shared.free > 1 << 28
        text = text if is_enough else f"{text}; Ray then uses its folder on disk"
        yield Finding(about, "/dev/shm", text, _noted(is_enough))


def disks(_: int) -> Iterator[Finding]:
    """Yield the folders that a start writes to, and their disks."""
    about = "disk"
    remote = checkpoint_cache("auto")
    folders = {"Ray's folder": temporary_folder(), "caches": default_cache_directory()}
    for name, folder in folders.items():
        place = next(one for one in (folder, *folder.parents) if one.exists())
        usage, is_ours = shutil.disk_usage(place), os.access(place, os.W_OK)
        share = usage.used / usage.total
        faults = [
            *(["not writable"] if not is_ours else []),
            *(["less than 2 GB are free"] if usage.free < MIN_DISK_BYTES else []),
            *([f"Ray writes nothing from {_FULL_SHARE:.0%} on"] if name != "caches" and share >= _FULL_SHARE else []),
        ]
        text = "; ".join([f"{_short(folder)}, {usage.free / GB:.1f} GB free of {usage.total / GB:.1f} GB", *faults])
        yield Finding(about, name, text, FAULT if faults else OK)
    cache = default_cache_directory()
    programs = sum(1 for file in cache.glob("**/executables/**/*") if file.is_file())
    yield Finding(about, "programs", f"{programs} compiled programs kept in {_short(cache)}")
    num_kept = sum(1 for _ in remote.glob("*")) if remote is not None else 0
    yield Finding(about, "checkpoints", f"{num_kept} remote checkpoints kept")
    yield from _hub()


def _hub() -> Iterator[Finding]:
    environment = inherited_environment()
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    models = sorted(one.name.removeprefix("models--").replace("--", "/") for one in hub.glob("models--*"))
    shown = ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
    has_token = bool(environment.get("HF_TOKEN")) or (home / "token").is_file()
    text = f"{_short(hub)}: {shown or 'no models'}; a token is {'set' if has_token else 'not set'}"
    is_offline = environment.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    yield Finding("disk", "Hub cache", f"{text}; HF_HUB_OFFLINE is set" if is_offline else text)


def network(port: int) -> Iterator[Finding]:
    """Yield ports, limits of connections, and servers of this user that run."""
    about = "network"
    plans = {}
    with suppress(OSError):
        plans = running_plans(temporary_folder() / f"rayserve-{os.getuid()}")
    for plan in plans.values():
        yield Finding(about, "running server", f"{plan.url}, process {plan.pid}")
    try:
        is_open = is_free(port)
        text = "free" if is_open else f"taken by {owner_of(port)}; serve with --port, or http_options.port of a config"
        yield Finding(about, f"port {port}", text, _noted(is_open))
    except OSError as error:
        yield Finding(about, f"port {port}", f"not for this user: {(error.strerror or '').lower()}", NOTE)
    try:
        chosen = choose_ports(port, claimed={plan.first_port for plan in plans.values()}, is_free=is_free)
        yield Finding(about, "other ports", f"{chosen.first} to {chosen.first + 99}")
    except StartError as error:
        yield Finding(about, "other ports", f"{error} ({FIRST_PORT} to 29999 are looked at)", FAULT)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    is_enough = most == resource.RLIM_INFINITY or most >= 4096
    text = "unlimited" if most == resource.RLIM_INFINITY else str(most)
    yield Finding(about, "ulimit -Hn", text if is_enough else f"{text}: fewer connections", _noted(is_enough))


def environment(_: int) -> Iterator[Finding]:
    """Yield variables of Ray, jax and this package; of secrets only that they are set."""
    about, variables = "environment", inherited_environment()
    faults = {}
    if variables.get("RAY_ADDRESS"):
        faults["RAY_ADDRESS"] = "set: `serve` starts a cluster of its own and refuses it; unset it"
    if (mode := variables.get("RAY_AUTH_MODE") or "token") != "token":
        faults["RAY_AUTH_MODE"] = f"{mode}: `serve` refuses to run without tokens; unset it"
    if len(str(temporary_folder() / f"rayserve-{os.getuid()}" / "65535")) > MAX_PATH_LENGTH:
        faults["RAY_TMPDIR"] = "too long for sockets below it: set a shorter folder, such as /tmp"
    yield from (Finding(about, name, text, FAULT) for name, text in faults.items())
    shown = [name for name in sorted(variables) if _VARIABLES.fullmatch(name) and name not in faults]
    for name in shown:
        is_secret = _SECRET.search(name) and name not in _PUBLIC
        yield Finding(about, name, ("set" if variables[name] else "empty") if is_secret else _masked(variables[name]))
    if not (shown or faults):
        yield Finding(about, "variables", "none of Ray, jax, Hugging Face or this package is set")


def _masked(value: str) -> str:
    """Return a value without passwords of URLs, and with the home folder as `~`."""
    return _short(re.sub(r"//[^/@\s]*@", "//***@", value))


def _short(path: object) -> str:
    home = str(Path.home())
    return re.sub(rf"(?<![\w/]){re.escape(home)}(?=/|$)", "~", str(path)) if home != "/" else str(path)


def _noted(is_fine: bool) -> str:
    return OK if is_fine else NOTE


Check = Callable[[int], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (versions, processor, accelerators, memory, disks, network, environment)
