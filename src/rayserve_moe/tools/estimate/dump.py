"""The folder that libtpu dumps schedules to: how to request them, and a program's schedules by op."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rayserve_moe.tools.estimate.bundles import Schedule, read_schedule
from rayserve_moe.tools.hlo_text import Instruction, ProgramText

_FILE = re.compile(r"^\d+-(.+)-\d+-final_bundles\.txt$")
_NOT_OPS = re.compile(r"-schedule-analysis_|^\d+-(?:<|TLP-)")


class NoScheduleError(ValueError):
    """A program was compiled without a dump of its schedules; the message gives the fix."""


def dump_environment(folder: Path) -> dict[str, str]:
    """Return the environment that makes libtpu dump the final schedule of every op; libtpu reads it when it loads."""
    label = "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    return {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {label}"}


@dataclass(frozen=True)
class DumpFolder:
    """A folder to which schedules are dumped, program after program; a program's schedules are taken at once."""

    path: Path
    _taken: set[str] = field(default_factory=set, repr=False)

    def pass_over(self) -> None:
        """Exclude the present files from the next `take`."""
        self._taken.update(file.name for file in self.path.iterdir())

    def take(self) -> dict[str, str]:
        """Return the schedules written since the last call, text by op name. Raises NoScheduleError if none exist."""
        files = [file for file in sorted(self.path.iterdir()) if file.name not in self._taken]
        self.pass_over()
        named = {file: _FILE.match(file.name) for file in files if not _NOT_OPS.search(file.name)}
        found = {name.group(1): file.read_text("utf-8", "replace") for file, name in named.items() if name}
        if not found:
            raise NoScheduleError(
                f"libtpu wrote no schedules to {self.path}: it was loaded before the dump was requested, "
                "or LIBTPU_INIT_ARGS has another value"
            )
        return found


@dataclass(frozen=True)
class Schedules:
    """Schedules of a program's ops. libtpu dumps equal ops once, so an op may have the schedule of its twin."""

    program: ProgramText
    texts: Mapping[str, str] = field(repr=False)
    _read: dict[str, Schedule] = field(default_factory=dict, repr=False)

    def of(self, instruction: Instruction) -> Schedule | None:
        """Return the schedule of an op, or None without a schedule (scalar code between ops, and instructions without
        code).
        """
        name = instruction.name
        if name not in self.texts:
            if not _may_have_a_twin(instruction):
                return None
            name = self._twins.get(self._likeness(instruction), "")
        if name and name not in self._read:
            self._read[name] = read_schedule(self.texts[name])
        return self._read.get(name)

    def _likeness(self, instruction: Instruction) -> tuple[object, ...]:
        """Return the key that ops with a common schedule share: opcode, shapes, and the same of their fused parts."""
        parts = tuple((part.opcode, part.shapes) for part in self.program.fused(instruction))
        return (instruction.opcode, instruction.shapes, parts)

    @cached_property
    def _twins(self) -> dict[tuple[object, ...], str]:
        return {
            self._likeness(instruction): instruction.name
            for instructions in self.program.computations.values()
            for instruction in instructions
            if instruction.name in self.texts
        }


def _may_have_a_twin(instruction: Instruction) -> bool:
    is_scalar = all(shape.num_elements == 1 for shape in instruction.shapes)
    return instruction.opcode in ("fusion", "custom-call") or not is_scalar
