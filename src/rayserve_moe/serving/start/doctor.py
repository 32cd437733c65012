"""Command `rayserve-moe doctor`: what this machine has for serving, as a text for a bug report or as JSON.

It loads no array, cluster or web library, starts nothing, and prints no value of a key, token or password.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from rayserve_moe.serving.start.doctor_checks import CHECKS, FAULT, Finding

CANNOT_SERVE = 1
MARKS = {"ok": " ", "note": "!", FAULT: "X"}
"""First character of a line: notes are worth a look, with a fault nothing can be served."""
_LABEL_WIDTH = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--port", type=int, default=8000, help="HTTP port to look at (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if serving could not work here."""
    if not 0 < options.port < 2**16:
        raise ValueError(f"--port must lie in [1, {2**16 - 1}], found {options.port}")
    found = [finding for check in CHECKS for finding in check(options.port)]
    is_fit = all(finding.state != FAULT for finding in found)
    if options.json:
        text = json.dumps({"can_serve": is_fit, "findings": [asdict(finding) for finding in found]}, indent=2)
    else:
        text = "\n".join(report_lines(found))
    sys.stdout.write(text + "\n")
    return 0 if is_fit else CANNOT_SERVE


def report_lines(found: Iterable[Finding]) -> Iterator[str]:
    """Yield the report as text: a section per subject, then the verdict."""
    section, faults, num_sections = "", list[Finding](), 0
    for finding in found:
        if finding.section != section:
            section = finding.section
            num_sections += 1
            yield f"\n{section}" if num_sections > 1 else section
        if finding.state == FAULT:
            faults.append(finding)
        first = f"{MARKS[finding.state]} {finding.name:<{_LABEL_WIDTH - 1}} "
        width = max(80, min(120, shutil.get_terminal_size().columns))
        lines = textwrap.wrap(finding.text, width - len(first), break_long_words=False, break_on_hyphens=False)
        yield from (f"{first if number == 0 else ' ' * len(first)}{line}" for number, line in enumerate(lines or [""]))
    yield ""
    if faults:
        yield f"this machine cannot serve: {'; '.join(fault.name for fault in faults)} (lines with {MARKS[FAULT]})"
    else:
        yield f"this machine can serve; lines with {MARKS['note']} are worth a look"
