"""Placing of an adapter's matrices on the tensors of the served model's checkpoint, for every layout of adapters.

Every pair finds its tensors by its module's name and its shapes, or the whole adapter is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from rayserve_moe.checkpoints.adapters.additions import Addition, MergedTensors
from rayserve_moe.checkpoints.adapters.config import AdapterConfig
from rayserve_moe.checkpoints.adapters.experts import EXPERTS, ExpertShapes, expert_pairs
from rayserve_moe.checkpoints.adapters.pairs import AdapterPart, parts_of_adapter
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.names import SpecTree, tensor_name, tensor_places, walk
from rayserve_moe.model.param_spec import ParamSpec

_LAYER = re.compile(r"(?:(.*)\.)?layers\.([0-9]{1,9})\.(.+)")
_DECODERS = (None, "model", "backbone", "language_model", "language_model.model", "model.language_model")
"""Names of the module that holds the layers of a language model; encoders of images have others."""
_HEAD = "lm_head"
_ROLES = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("o",),
    "gate_proj": ("shared_gate", "dense_gate"),
    "up_proj": ("shared_up", "dense_up"),
    "down_proj": ("shared_down", "dense_down"),
    "gate": ("router",),
    "router": ("router",),
}
"""Roles that the last part of a module's name may stand for, if no tensor has the module's name."""
Key = tuple[int | None, str]
"""Layer, None outside of layers, and the name within it without `.weight`."""


@dataclass(frozen=True)
class AdapterTarget:
    """Rows of a tensor of the checkpoint that an adapter changes."""

    tensor: str
    spec: ParamSpec
    rows: np.ndarray | None = None
    """Rows of the tensor; None for all of them."""


def merged_tensors(
    config: AdapterConfig, tensors: Mapping[str, np.ndarray], *, tree: SpecTree, rules: Mapping[str, str]
) -> MergedTensors:
    """Return the additions of an adapter to the tensors that `rules` name for the parameters of a tree.

    Raises CheckpointError with the name of a tensor that has no place in the model, has another shape or rank than the
    model and the adapter's config say, or belongs to a matrix that is served in 8 bits.
    """
    additions: dict[str, list[Addition]] = {}
    dtypes: dict[str, np.dtype] = {}
    for name, target, addition in placed_additions(config, tensors, tree=tree, rules=rules):
        if target.spec.is_quantized:
            raise CheckpointError(
                f"tensor {name}: {target.tensor} is served in {target.spec.dtype}, and its sum with an "
                "adapter would be rounded to 8 bits: set expert_dtype auto"
            )
        additions.setdefault(target.tensor, []).append(addition)
        dtypes[target.tensor] = jax.numpy.dtype(target.spec.dtype)
    return MergedTensors(additions, dtypes)


def placed_additions(
    config: AdapterConfig, tensors: Mapping[str, np.ndarray], *, tree: SpecTree, rules: Mapping[str, str]
) -> Iterator[tuple[str, AdapterTarget, Addition]]:
    """Yield the additions of an adapter with their targets, each with the name of a tensor of the adapter.

    Raises CheckpointError with the name of a tensor that has no place in the model, or has another shape or rank than
    the model and the adapter's config say.
    """
    model, claimed = _Model(tree, rules), dict[tuple[str, int | None, int], str]()
    for part in parts_of_adapter(tensors):
        for target, addition in model.additions_of(part, config):
            for claim in _claims(target, addition):
                if (other := claimed.setdefault(claim, part.name)) != part.name:
                    raise CheckpointError(f"tensor {part.name}: {other} adapts the same matrix of {target.tensor}")
            yield part.name, target, addition


def _claims(target: AdapterTarget, addition: Addition) -> Iterator[tuple[str, int | None, int]]:
    """Yield what an addition changes: tensor, expert, and first row."""
    first = 0 if target.rows is None else int(target.rows[0])
    experts = range(max(1, target.spec.num_experts)) if addition.expert is None else (addition.expert,)
    yield from ((target.tensor, expert, first) for expert in experts)


class _Model:
    """The tensors of a checkpoint as targets of adapters."""

    def __init__(self, tree: SpecTree, rules: Mapping[str, str]) -> None:
        self._rules = rules
        self._places = tensor_places(tree, rules)
        self._tensors = {_key_of(name): name for name in self._places}
        self._specs: dict[str, list[ParamSpec]] = {}
        for _, spec in walk(tree):
            if not spec.is_scale:
                self._specs.setdefault(spec.role, []).append(spec)

    def additions_of(self, part: AdapterPart, config: AdapterConfig) -> Iterator[tuple[AdapterTarget, Addition]]:
        """Yield the additions of a pair with their targets."""
        layer, rest = _key_of(part.module)
        up = self._spec("expert_up", layer)
        if up is not None and layer is not None and (self._names_experts(layer, rest) or EXPERTS.search(rest)):
            yield from self._expert_additions(part, config, layer)
        else:
            target = self._target(part, layer, rest)
            yield target, _plain_addition(part, config, target)

    def _names_experts(self, layer: int, rest: str) -> bool:
        """Return True for the name of a tensor of all experts, whatever its family calls it."""
        tensor = self._tensors.get((layer, rest))
        return tensor is not None and self._places[tensor][0].spec.file.has_all_experts

    def _expert_additions(
        self, part: AdapterPart, config: AdapterConfig, layer: int
    ) -> Iterator[tuple[AdapterTarget, Addition]]:
        specs = {role: self._spec(f"expert_{role}", layer) for role in ("gate", "up", "down")}
        found = {role: spec for role, spec in specs.items() if spec is not None}
        up, inner = found["up"], _num_outputs(found["up"])
        halves = _halves(found.get("gate", up), up, inner)
        shapes = ExpertShapes(up.num_experts, _num_outputs(found["down"]), inner, halves)
        names: dict[str, str] = {}
        for role, spec in found.items() if up.file.has_all_experts else ():
            name = _key_of(self._name(spec, layer, 0))[1]
            names[name] = "gate_up" if name in names else role
        for pair in expert_pairs(part, config, shapes=shapes, names=names, rest=_key_of(part.module)[1]):
            if (spec := found.get(pair.role)) is None:
                raise CheckpointError(f"tensor {part.name}: the experts of this model have no {pair.role}")
            for expert in range(up.num_experts) if pair.expert is None else (pair.expert,):
                target = AdapterTarget(self._name(spec, layer, expert), spec, _rows(spec))
                in_all = spec.file.has_all_experts
                at = None if in_all and pair.expert is None else expert
                a, b = (each if at is None else _one(each, expert) for each in (pair.a_NRI, pair.b_NOR))
                yield (
                    target,
                    Addition(a, b, pair.scale, target.rows, at if in_all else None, is_in_out=_is_in_out(spec)),
                )
                if at is None:
                    break

    def _target(self, part: AdapterPart, layer: int | None, rest: str) -> AdapterTarget:
        """Return the target of a module outside of experts: by its name, or by its role in the layer."""
        if (tensor := self._tensors.get((layer, rest))) is not None:
            return AdapterTarget(tensor, self._places[tensor][0].spec)
        for role in _ROLES.get(rest.rpartition(".")[2], ()):
            spec = self._spec(role, layer)
            if spec is not None and layer is not None and ("shared" in rest) == role.startswith("shared"):
                return AdapterTarget(self._name(spec, layer, 0), spec, _rows(spec))
        tied = ": the head of this model is its embedding" if rest == _HEAD else ""
        raise CheckpointError(f"tensor {part.name}: the model has no matrix {part.module}{tied}")

    def _spec(self, role: str, layer: int | None) -> ParamSpec | None:
        """Return the parameter of a role that has a layer, or None."""
        return next((spec for spec in self._specs.get(role, ()) if layer in spec.layers), None)

    def _name(self, spec: ParamSpec, layer: int, expert: int) -> str:
        at = (spec.layers.index(layer), expert) if spec.num_experts else (spec.layers.index(layer),)
        return tensor_name(spec, at, rules=self._rules)


def _plain_addition(part: AdapterPart, config: AdapterConfig, target: AdapterTarget) -> Addition:
    """Return the addition of a pair to a matrix outside of experts. Raises CheckpointError for other shapes."""
    a, b, name = part.pair.a, part.pair.b, config.name_of(part.module)
    rank = config.rank_of(name)
    outputs, inputs = target.spec.file_shape[-2:] if len(target.spec.file_shape) > 1 else (0, 0)
    outputs = outputs if target.rows is None else len(target.rows)
    if target.spec.role == "embedding" or not outputs or len(target.spec.file_shape) != 2:
        raise CheckpointError(f"tensor {part.name}: {target.tensor} is no matrix that adapters change")
    if (a.shape, b.shape) != ((rank, inputs), (outputs, rank)):
        raise CheckpointError(
            f"tensor {part.name}: A {list(a.shape)} and B {list(b.shape)} of {part.module}, expected "
            f"[{rank}, {inputs}] and [{outputs}, {rank}]: rank {rank} by the adapter's config"
        )
    return Addition(a[None], b[None], config.scale_of(name), target.rows)


def _key_of(name: str) -> Key:
    """Return the layer of a tensor or module and its name within the layer, without `.weight`."""
    plain = name.removesuffix(".weight")
    found = _LAYER.fullmatch(plain)
    if found and found[1] in _DECODERS:
        return int(found[2]), found[3]
    return None, plain.removeprefix("language_model.")


def _one(matrices: np.ndarray, expert: int) -> np.ndarray:
    """Return the matrix of an expert, or the one that all share, alone in its stack."""
    at = expert % len(matrices)
    return matrices[at : at + 1]


def _num_outputs(spec: ParamSpec) -> int:
    return spec.filled_shape[spec.column_dim]


def _halves(gate: ParamSpec, up: ParamSpec, inner: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of gate and up in a matrix of both: as files fuse them, otherwise its two halves."""
    if gate.file.has_all_experts and (gate.file.period or gate.file.repeat_width > 1):
        return gate.columns_in_file(0, inner), up.columns_in_file(0, inner)
    return np.arange(inner), np.arange(inner, 2 * inner)


def _rows(spec: ParamSpec) -> np.ndarray | None:
    """Return the rows of a parameter in its tensor, each once; None if it has all of them."""
    rows = np.unique(spec.columns_in_file(0, _num_outputs(spec)))
    return None if len(rows) == spec.num_file_columns else rows


def _is_in_out(spec: ParamSpec) -> bool:
    return not spec.file.transposed and spec.column_dim != 0
