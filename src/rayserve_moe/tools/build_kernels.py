"""`python -m rayserve_moe.tools.build_kernels`: builds the native CPU kernels before the first start, or for a wheel.

Without options it builds the level of this processor, in the place that `serve` searches. `--all --into DIR` builds
every level of this kind of machine, linked so that a wheel can ship it to other machines.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.execution.native_levels import LEVELS, NativeKernelsUnavailable, choose_level
from rayserve_moe.execution.native_library import SHIPPED, build, find_or_build, requested_level

FAILED = 1
PORTABLE = ("-static-libstdc++", "-static-libgcc")
"""Linker options of a shipped library: it requires nothing of the machine except its C library."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the kernels and print the results; return 1 on failure, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="build_kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every level of this kind of machine, portably")
    parser.add_argument("--into", type=Path, help=f"directory (default with --all: {SHIPPED.name} beside the sources)")
    options = parser.parse_args(arguments)
    try:
        if options.all:
            into = options.into or SHIPPED
            into.mkdir(parents=True, exist_ok=True)
            for level in LEVELS.get(platform.machine(), ()):
                _say(level.name, lambda level=level: build(level, into, options=PORTABLE))
        else:
            level = choose_level(requested_level())
            into = options.into or default_cache_directory() / "native"
            _say(level.name, lambda: find_or_build(level, into))
    except NativeKernelsUnavailable as error:
        sys.stderr.write(f"native CPU kernels: {error}; XLA computes without them, more slowly\n")
        return FAILED
    return 0


def _say(name: str, build_library: Callable[[], Path]) -> None:
    sys.stdout.write(f"native CPU kernels ({name}) are built unless they exist: about half a minute\n")
    sys.stdout.flush()
    started = time.perf_counter()
    library = build_library()
    sys.stdout.write(f"native CPU kernels ({name}) in {time.perf_counter() - started:.0f} s: {library}\n")


if __name__ == "__main__":
    sys.exit(main())
