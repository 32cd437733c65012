"""What a program that is compiled for several slices sends from one slice to another, over the data-centre network.

libtpu compiles a collective whose devices lie on several slices into one within each slice and a transfer through the
host, `send` and `recv` to a runtime of its own, which says what it does; all other collectives stay within a slice.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from rayserve_moe.tools.hlo_text import ProgramText

RUNTIME = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_FOR_OTHERS = {"ALL_GATHER", "ALL_REDUCE", "RAGGED_ALL_TO_ALL"}
"""Of these, all that is handed over can be for others; of the rest each slice has a part that is its own."""


@dataclass(frozen=True)
class Crossing:
    """One kind of transfer between slices: what a device hands over for each other slice, and how often in a run, at
    least.

    An exchange of ragged rows hands over its whole operand; its sizes at run time say how many rows are sent.
    """

    transfer: str
    shape: str
    num_bytes: int
    times: int
    is_least: bool


def crossings_of(program: ProgramText, *, num_slices: int) -> list[Crossing]:
    """All transfers between slices in a run of the program; like ones are added up."""
    counts: Counter[Crossing] = Counter()
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode != "send" or RUNTIME not in instruction.attributes:
            continue
        found, given = _TRANSFER.search(instruction.attributes), instruction.shapes[0]
        kind = found.group(1) if found else ""
        num_bytes = given.num_bytes if kind in _FOR_OTHERS else given.num_bytes // num_slices
        shape = f"{given.dtype}[{','.join(map(str, given.dims))}]"
        counts[Crossing(kind.lower().replace("_", "-"), shape, num_bytes, 0, execution.is_least)] += execution.times
    return [replace(kind, times=times) for kind, times in counts.items()]
