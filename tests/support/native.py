"""Tests of the native CPU kernels run where the machine can build and run them, and say why where it cannot."""

from __future__ import annotations

import pytest

from rayserve_moe.execution.native_library import NativeKernelsUnavailable, register_native_kernels


def need_native_kernels() -> None:
    """Skip, with the reason, on a machine without the kernels."""
    try:
        register_native_kernels()
    except NativeKernelsUnavailable as error:
        pytest.skip(f"no native CPU kernels: {error}")
