"""Console output of a start."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rayserve_moe.observability.progress import PROGRESS_VARIABLE, Progress, report
from rayserve_moe.rollouts import batch_job
from rayserve_moe.serving.start import console
from rayserve_moe.serving.start.console import Console, ProgressLines, line_of, what_to_try
from rayserve_moe.serving.start.state import APPLICATION, PROGRESS, Plan


class Said(Console):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        self.lines.append(line.removeprefix("rayserve-moe serve: "))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / PROGRESS).touch()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / PROGRESS))
    return tmp_path


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress("compiling", 12, 39, "0 found on disk"), "compiling 12/39 (0 found on disk)"),
        (Progress("compiling", 12), "compiling 12"),
        (Progress("warming up"), "warming up"),
        (Progress("reading weights", 1_500_000, 30_000_000), "reading weights 1.5/30.0 MB"),
    ],
)
def test_a_report_is_one_short_line(progress: Progress, line: str) -> None:
    assert line_of(progress) == line


def test_a_stage_has_its_first_line_and_its_last_whatever_comes_between(folder: Path) -> None:
    """A stage of a thousand reports within a moment does not fill the console."""
    said = Said()
    lines = ProgressLines(folder, said)
    for number in range(1, 1001):
        report("compiling", number, total=1000)
        lines.look()
    assert said.lines == ["compiling 1/1000", "compiling 1000/1000"]


def test_a_stage_that_takes_long_is_said_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "BETWEEN_S", 0.0)
    said = Said()
    lines = ProgressLines(folder, said)
    for number in (1, 2, 2):
        report("compiling", number, total=3)
        lines.look()
    assert said.lines == ["compiling 1/3", "compiling 2/3"]


def test_once_it_serves_only_warnings_are_said(folder: Path) -> None:
    said = Said()
    lines = ProgressLines(folder, said)
    report("reading weights", 1, total=2)
    with (folder / PROGRESS).open("a", encoding="utf-8") as file:
        file.write('{"level": "WARNING", "message": "a host is lost"}\n')
    lines.look(is_serving=True)
    assert said.lines == ["warning: a host is lost"]


def test_the_last_lines_name_the_model_the_address_and_what_to_do_next(tmp_path: Path) -> None:
    application = {
        "name": "moe",
        "route_prefix": "/first",
        "import_path": APPLICATION,
        "args": {"model_path": "trained:calculator"},
    }
    plan = Plan(1, 1, 20_000, {"applications": [application]}, "http://127.0.0.1:8000", 1.0, 2.0)
    text = "\n".join(what_to_try(plan, tmp_path / "8000"))
    assert "calculator (trained:calculator)" in text
    assert "curl http://127.0.0.1:8000/first/v1/completions" in text and '"model": "calculator"' in text
    assert "http://127.0.0.1:8000/first/experts" in text
    assert "rayserve-moe chat --url http://127.0.0.1:8000/first" in text
    assert "Ctrl-C" in text and str(tmp_path / "logs-8000") in text
    plan = replace(plan, url="https://127.0.0.1:8000")
    assert "curl -k https://127.0.0.1:8000/first/v1/completions" in "\n".join(what_to_try(plan, tmp_path / "8000"))


@pytest.mark.parametrize("is_active", [True, False])
def test_programs_are_named_as_the_user_can_type_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_active: bool
) -> None:
    """The command's own folder is first in PATH for its processes, and in the user's only if they put it there."""
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", os.pathsep.join([str(own), *([str(own)] if is_active else []), str(tmp_path)]))
    arguments = {"name": "moe", "import_path": APPLICATION, "args": {"model_path": "trained:calculator"}}
    plan = Plan(1, 1, 20_000, {"applications": [arguments]}, "http://127.0.0.1:8000", 1.0, 2.0)
    lines = {line.split()[0]: line for line in what_to_try(plan, tmp_path / "8000")}
    before = "" if is_active else f"{own}/"
    assert lines["chat"].split(maxsplit=1)[1].startswith(f"{before}rayserve-moe chat")
    submit, job = lines["jobs"].split(maxsplit=1)[1].split(" -- ")
    assert submit.startswith(f"RAY_AUTH_MODE=token {before}ray job submit --address http://127.0.0.1:")
    parser = argparse.ArgumentParser()
    batch_job.add_arguments(parser)
    options = parser.parse_args(shlex.split(job)[2:])
    assert shlex.split(job)[:2] == ["rayserve-moe", "rollout"] and options.url == "http://127.0.0.1:8000"
