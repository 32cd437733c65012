"""The doctor's report: what it finds, what it never prints, and when nothing could be served."""

from __future__ import annotations

import json
import os
import socket

import pytest

from rayserve_moe.cli import main
from rayserve_moe.execution import native_levels
from rayserve_moe.serving.start import doctor_checks


@pytest.fixture
def report(capsys, monkeypatch, tmp_path):
    """Call the command with a fresh environment; returns the exit status and the findings by name."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "HF_", "RAYSERVE_MOE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(*options):
        status = main(["doctor", "--json", *options])
        found = json.loads(capsys.readouterr().out)
        assert found["can_serve"] == (status == 0)
        return status, {finding["name"]: finding for finding in found["findings"]}

    return call


def test_a_machine_that_runs_these_tests_can_serve(report):
    status, found = report()
    assert status == 0
    assert {"versions", "processor", "accelerators", "memory", "disk", "network", "environment"} == {
        finding["section"] for finding in found.values()
    }
    assert "jax 0." in found["packages"]["text"] and "ray 2." in found["packages"]["text"]


@pytest.mark.parametrize(("name", "value"), [("RAY_ADDRESS", "auto"), ("RAY_AUTH_MODE", "disabled")])
def test_variables_with_which_serve_refuses_are_faults(report, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    status, found = report()
    assert status == 1 and found[name]["state"] == "fault"


def test_a_long_folder_of_ray_is_a_fault(report, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "long" / "x" / "y"))
    status, found = report()
    assert status == 1 and found["RAY_TMPDIR"]["state"] == "fault"


def test_a_missing_package_and_little_memory_are_faults(report, monkeypatch):
    monkeypatch.setattr(doctor_checks, "requires", lambda _: ["jax~=0.10", "no-such-package>=1", 'x; extra == "y"'])
    monkeypatch.setattr(doctor_checks, "MIN_MEMORY_BYTES", 1 << 60)
    monkeypatch.setattr(doctor_checks, "MIN_DISK_BYTES", 1 << 62)
    status, found = report()
    assert status == 1 and found["missing"]["text"].startswith("no-such-package: ")
    assert found["memory"]["state"] == found["caches"]["state"] == "fault"


def test_a_port_that_is_taken_is_noted_with_its_owner(report):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, found = report("--port", str(port))
    assert status == 0 and found[f"port {port}"]["state"] == "note"
    assert f"taken by process {os.getpid()}" in found[f"port {port}"]["text"]


def test_a_processor_without_kernels_is_noted(report, monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name : old\nflags : sse2\n")
    monkeypatch.setattr(native_levels, "CPUINFO", cpuinfo)
    monkeypatch.setattr(native_levels, "processor_flags", lambda _: {"sse2"})
    status, found = report()
    assert status == 0 and found["native kernels"]["state"] == "note" and "float32" in found["native kernels"]["text"]


def test_no_secret_is_printed(capsys, monkeypatch, tmp_path):
    secrets = {
        "HF_TOKEN": "s3cret-a", "RAYSERVE_MOE_API_KEY": "s3cret-b", "RAYSERVE_MOE_ADMIN_API_KEY": "s3cret-c",
        "RAY_AUTH_TOKEN": "s3cret-d", "RAYSERVE_MOE_JOURNAL_KEY": "s3cret-e", "JAX_COMPILATION_CACHE_DIR": "gs://u:s3cret-f@x",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for options in ([], ["--json"]):
        main(["doctor", *options])
        said = capsys.readouterr().out
        assert "s3cret" not in said and str(tmp_path / "home") not in said and "RAYSERVE_MOE_API_KEY" in said


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_out_of_range_is_wrong_use(capsys, port):
    assert main(["doctor", "--port", port]) == 2
    assert "--port must lie in" in capsys.readouterr().err
