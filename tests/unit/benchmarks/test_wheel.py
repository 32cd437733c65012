"""What a wheel must hold, and that a file too many or too few is found."""

from __future__ import annotations

import subprocess
import zipfile

import pytest

from benchmarks import wheel

TRACKED = ["src/rayserve_moe/__init__.py", "src/rayserve_moe/engine/README.md", "tests/test_a.py"]
HELD = ["rayserve_moe/__init__.py", *(f"rayserve_moe-0.1.0.dist-info/{name}" for name in wheel.METADATA)]
KERNELS = f"{wheel.BUILT}kernels-avx2.so"


def test_only_files_of_the_package_are_expected():
    assert wheel.expected_files(TRACKED) == {"rayserve_moe/__init__.py"}


def test_a_wheel_with_exactly_the_expected_files_is_right():
    assert wheel.wrong_files([*HELD, KERNELS], wheel.expected_files(TRACKED)) == (set(), set())


@pytest.mark.parametrize("name", sorted(HELD))
def test_a_missing_file_is_found(name):
    missing, unexpected = wheel.wrong_files([each for each in HELD if each != name], wheel.expected_files(TRACKED))
    assert (len(missing), unexpected) == (1, set()) and name.endswith(*missing)


@pytest.mark.parametrize(
    "name", ["rayserve_moe/checkpoints/head/model.safetensors", "tests/test_a.py", "rayserve_moe-0.1.0.dist-info/notes"]
)
def test_an_unexpected_file_is_found(name):
    missing, unexpected = wheel.wrong_files([*HELD, name], wheel.expected_files(TRACKED))
    assert (missing, len(unexpected)) == (set(), 1) and name.endswith(*unexpected)


def test_a_wheel_with_a_wrong_file_is_refused(tmp_path):
    file = tmp_path / "rayserve_moe-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rayserve_moe/left_over.bin", b"")
    with pytest.raises(SystemExit, match=r"missing .*LICENSE.*unexpected .*left_over\.bin"):
        wheel.contents(file)


def test_the_package_under_version_control_has_native_sources_and_the_calculator_alone():
    listed = subprocess.run(["git", "ls-files", "src"], cwd=wheel.ROOT, check=True, capture_output=True, text=True)
    expected = wheel.expected_files(listed.stdout.split())
    assert "rayserve_moe/kernels/cpu_native/native.cc" in expected
    assert {name for name in expected if name.endswith(".safetensors")} == {
        "rayserve_moe/checkpoints/calculator/model.safetensors"
    }
