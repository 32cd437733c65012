"""The TPU compiler in a test process: its environment is set before anything loads it."""

from __future__ import annotations

from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT

set_environment_defaults(COMPILER_ENVIRONMENT)
