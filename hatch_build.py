"""The wheel's tag: of one kind of machine where it brings native kernels along (`make wheel`), else of any."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILT = Path("src/rayserve_moe/kernels/cpu_native/built")
NEEDED = re.compile(rb"GLIBC_2\.(\d+)")


class KernelsHook(BuildHookInterface):
    """Marks a wheel with libraries as one for machines of this kind, and for the C library that they were linked with.

    The libraries use no interface of Python's.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        libraries = list((Path(self.root) / BUILT).glob("*.so"))
        if self.target_name != "wheel" or not libraries:
            return
        minor = max(int(found) for library in libraries for found in NEEDED.findall(library.read_bytes()))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{minor}_{platform.machine()}"
