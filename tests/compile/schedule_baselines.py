"""Baselines of the bundles that kernels take by libtpu's schedules: a file of them, and how it is written anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.dump import DumpFolder, dump_environment

Bundles = dict[str, int]
"""By case."""
TOLERANCE = 1.02
"""A change of the compiler's mood moves a schedule by less."""


@dataclass(frozen=True)
class ScheduleBaseline:
    """The committed figures of a module's cases for some chips: the module is run to compile them.

    `compile_all` compiles every case for a chip and reads each one's schedule from the dump.
    """

    module: str
    chips: Sequence[str]
    compile_all: Callable[[str, DumpFolder], Bundles]

    @property
    def path(self) -> Path:
        return Path(__file__).with_name(self.module.rpartition(".")[2]).with_suffix(".json")

    def committed(self) -> dict[str, Bundles]:
        """The committed figures by chip."""
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def compiled(self, chip: str) -> Bundles:
        """Compile in a process of its own, which loads libtpu anew."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", self.module, "--into", folder, chip]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    def slower(self, chip: str) -> dict[str, tuple[int, int]]:
        """Cases of a chip that take more bundles than its baseline: (committed, now) by case."""
        known = self.committed()[chip]
        return {name: (known[name], now) for name, now in self.compiled(chip).items() if now > known[name] * TOLERANCE}

    def main(self) -> None:
        """Write the figures of the named chips, or of all; with `--into FOLDER`, compile here and print them."""
        if sys.argv[1:2] == ["--into"]:
            folder = Path(sys.argv[2])
            set_environment_defaults(COMPILER_ENVIRONMENT | dump_environment(folder))
            use_host_alone()
            sys.stdout.write(json.dumps(self.compile_all(sys.argv[3], DumpFolder(folder))))
            return
        known = self.committed()
        for chip in sys.argv[1:] or self.chips:
            known[chip] = self.compiled(chip)
            self.path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
