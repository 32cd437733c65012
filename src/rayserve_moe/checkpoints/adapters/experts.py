"""The layouts of experts' adapters: each becomes pairs of one role with a matrix per expert, or one for all experts."""

# N experts, or 1 if all share a matrix   E experts   R rank   I inputs   O outputs   D model width   F expert width

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from rayserve_moe.checkpoints.adapters.config import AdapterConfig
from rayserve_moe.checkpoints.adapters.pairs import AdapterPart
from rayserve_moe.checkpoints.header import CheckpointError

EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
"""Matches the name of the experts of a layer, or of a part of them."""
_PART = re.compile(r"(?:.*\.)?experts(?:\.([0-9]{1,9}))?(?:\.([a-z_0-9]+))?")
_PARAMETERS = {"gate_up": "gate_up_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_ROLE_OF = {
    "gate_up_proj": "gate_up",
    "gate_up_proj_moe": "gate_up",
    "w13": "gate_up",
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "down_proj_moe": "down",
    "w2": "down",
}
"""Roles of matrices by their names in trainers."""
_WRAPPED = ".base_layer"
"""End of the name of PEFT's inner wrapper, of experts with adapters of two parameters."""


class ExpertShapes(NamedTuple):
    """Sizes of the experts of a layer."""

    num_experts: int
    width: int
    """D."""
    inner: int
    """F."""
    halves: tuple[np.ndarray, np.ndarray]
    """Rows of gate and of up in a matrix of both."""

    def of(self, role: str) -> tuple[int, int]:
        """Return inputs and outputs of a role."""
        if role == "down":
            return self.inner, self.width
        return self.width, self.inner * (2 if role == "gate_up" else 1)


class ExpertPair(NamedTuple):
    """The matrices of gate, up or down."""

    role: str
    a_NRI: np.ndarray
    b_NOR: np.ndarray
    scale: float
    expert: int | None
    """The only expert; None for all of them."""


def expert_pairs(
    part: AdapterPart, config: AdapterConfig, *, shapes: ExpertShapes, names: Mapping[str, str], rest: str
) -> Iterator[ExpertPair]:
    """Yield the pairs of a part of an adapter, gate and up apart.

    `rest` is the module within its layer. `names` are the roles of tensors that hold all experts, by their names in the
    checkpoint, for families with names of their own. Raises CheckpointError for a layout that is not known.
    """
    is_fused = rest.endswith(("experts", f"experts{_WRAPPED}"))
    if is_fused:
        role, expert = _fused_role(part, config, shapes), None
        a_NRI, b_NOR = _unfused(part, shapes.num_experts)
        parameter = f"{part.module.removesuffix(_WRAPPED)}.{_PARAMETERS[role]}"
    else:
        role, expert = _named_role(part, names, rest)
        parameter = config.name_of(part.module)
        if expert is not None and expert >= shapes.num_experts:
            raise _fault(part, f"the model has {shapes.num_experts} experts")
        is_parameter = parameter != part.module and part.pair.a.ndim == 2 and expert is None
        a_NRI, b_NOR = _unfused(part, shapes.num_experts) if is_parameter else _stacked(part, expert)
    _check(part, role, a_NRI, b_NOR, rank=config.rank_of(parameter), shapes=shapes)
    scale = config.scale_of(parameter)
    if role != "gate_up":
        yield ExpertPair(role, a_NRI, b_NOR, scale, expert)
        return
    rank = b_NOR.shape[2]
    starts = (0, rank) if a_NRI.shape[1] == 2 * rank else (0, 0)
    for half, start, rows in zip(("gate", "up"), starts, shapes.halves, strict=True):
        yield ExpertPair(half, a_NRI[:, start : start + rank], b_NOR[:, rows], scale, expert)


def _fused_role(part: AdapterPart, config: AdapterConfig, shapes: ExpertShapes) -> str:
    """Return the role of PEFT's matrices of all experts, whose names do not say it.

    The inputs of A and the outputs of B never fit both; `target_parameters`, if any, must agree.
    """
    found = part.pair.a.shape[-1], part.pair.b.shape[0] if part.pair.b.ndim == 2 else part.pair.b.shape[-2]
    role = next((role for role in ("gate_up", "down") if shapes.of(role) == found), "")
    if not role:
        expected = " or ".join(f"{shapes.of(role)} of {_PARAMETERS[role]}" for role in ("gate_up", "down"))
        raise _fault(part, f"inputs and outputs are {found}, expected {expected}")
    parameter = f"{part.module.removesuffix(_WRAPPED)}.{_PARAMETERS[role]}"
    if config.target_parameters and not config.names_parameter(parameter):
        raise _fault(
            part, f"its shapes are of {_PARAMETERS[role]}, which target_parameters {config.target_parameters} lacks"
        )
    return role


def _named_role(part: AdapterPart, names: Mapping[str, str], rest: str) -> tuple[str, int | None]:
    """Return the role that a module's name says, and its expert, None for all experts."""
    if rest in names:
        return names[rest], None
    found = _PART.fullmatch(rest)
    role = _ROLE_OF.get(found[2] or "") if found else None
    if found is None or role is None:
        raise _fault(part, f"the experts have no matrix {rest}")
    return role, None if found[1] is None else int(found[1])


def _unfused(part: AdapterPart, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices of PEFT's pair: experts are outermost in the rows of A, ranks in the columns of B."""
    a, b = part.pair
    if a.ndim == 3:
        return _stacked(part, None)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] % num_experts or a.shape[0] != b.shape[1]:
        raise _fault(
            part, f"A {list(a.shape)} and B {list(b.shape)} are not [experts x rank, in] and [out, rank x experts]"
        )
    rank = a.shape[0] // num_experts
    a_ERI = a.reshape(num_experts, rank, a.shape[1])
    return a_ERI, b.reshape(b.shape[0], rank, num_experts).transpose(2, 0, 1)


def _stacked(part: AdapterPart, expert: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices of a pair per expert: both [rank, in] and [out, rank], or these stacked over experts."""
    a, b = part.pair
    if a.ndim == b.ndim == 2 and expert is not None:
        return a[None], b[None]
    if a.ndim != 3 or b.ndim != 3 or expert is not None:
        raise _fault(part, f"A {list(a.shape)} and B {list(b.shape)} are not of a known layout")
    return a, b


def _check(
    part: AdapterPart, role: str, a_NRI: np.ndarray, b_NOR: np.ndarray, *, rank: int, shapes: ExpertShapes
) -> None:
    """Raise CheckpointError unless both matrices have the sizes of the model and the rank of the config."""
    inputs, outputs = shapes.of(role)
    ranks = (rank, 2 * rank) if role == "gate_up" else (rank,)
    expected = a_NRI.shape[1] in ranks and a_NRI.shape[2] == inputs and b_NOR.shape[1:] == (outputs, rank)
    if not expected or not {len(a_NRI), len(b_NOR)} <= {1, shapes.num_experts}:
        raise _fault(
            part,
            f"matrices of experts are {list(a_NRI.shape)} and {list(b_NOR.shape)}, expected [{shapes.num_experts} or 1,"
            f" {rank}, {inputs}] and [{shapes.num_experts} or 1, {outputs}, {rank}], rank {rank} by the config",
        )


def _fault(part: AdapterPart, reason: str) -> CheckpointError:
    return CheckpointError(f"tensor {part.name}: {reason}")
