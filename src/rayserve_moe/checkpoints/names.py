"""Mapping of checkpoint tensors to parameters, and verification that the checkpoint has exactly these tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

import numpy as np

from rayserve_moe.checkpoints.files import INDEX_FILE, SINGLE_FILE, CheckpointFiles
from rayserve_moe.checkpoints.header import DTYPES, CheckpointError
from rayserve_moe.model.param_spec import ParamSpec

IGNORABLE = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")
"""Tensors in old exports that follow from the config, so no model needs them."""

SpecTree = Mapping[str, "ParamSpec | SpecTree"]
"""Parameter specs by name, nested to any depth; built by `model.parameters.parameter_specs`."""

Places = Mapping[str, tuple["TensorPlace", ...]]

_LISTED = 3


@dataclass(frozen=True)
class TensorPlace:
    """The place that a tensor fills: all of the layer's slots if the tensor holds all experts."""

    path: tuple[str, ...]
    """Parameter of the tree."""
    spec: ParamSpec
    stack_index: tuple[int, ...]
    """Index among the parameter's layers, and expert."""


def walk(tree: SpecTree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ParamSpec]]:
    """Yield every parameter of a tree of any depth with its path, in the tree's order."""
    for key, node in tree.items():
        if isinstance(node, ParamSpec):
            yield (*path, key), node
        else:
            yield from walk(node, (*path, key))


def tensor_name(spec: ParamSpec, stack_index: tuple[int, ...], *, rules: Mapping[str, str]) -> str:
    """Return the tensor name of a parameter at `stack_index` (index among its layers, expert) by its role's rule."""
    layer = spec.layers[stack_index[0]] if spec.layers else None
    expert = stack_index[-1] if spec.num_experts else None
    return rules[spec.role].format(layer=layer, expert=expert)


def tensor_places(tree: SpecTree, rules: Mapping[str, str]) -> dict[str, tuple[TensorPlace, ...]]:
    """Map every tensor name that the tree needs to the places that it fills, one per parameter cut out of it."""
    places: dict[str, list[TensorPlace]] = {}
    for path, spec in walk(tree):
        if spec.is_scale:
            continue
        for stack_index in product(*(range(size) for size in spec.file_stack)):
            name = tensor_name(spec, stack_index, rules=rules)
            places.setdefault(name, []).append(TensorPlace(path, spec, stack_index))
    names_by_paths = {tuple(place.path for place in of_tensor): name for name, of_tensor in places.items()}
    for name in names_by_paths.values():
        _check_partition(name, [place.spec for place in places[name]])
    return {name: tuple(of_tensor) for name, of_tensor in places.items()}


def _check_partition(name: str, specs: list[ParamSpec]) -> None:
    """Assert that every column of a tensor belongs to exactly one parameter."""
    assert len({spec.file_shape for spec in specs}) == 1, f"parameters disagree on the shape of {name}"
    taken = np.concatenate([np.unique(spec.columns_in_file(0, spec.filled_shape[spec.column_dim])) for spec in specs])
    assert len(taken) == len(np.unique(taken)), f"two parameters claim the tensor {name}"
    assert np.array_equal(np.sort(taken), np.arange(specs[0].num_file_columns)), f"no parameter holds all of {name}"


def verify(files: CheckpointFiles, tree: SpecTree, *, rules: Mapping[str, str], ignored: tuple[str, ...] = ()) -> None:
    """Check that the checkpoint holds exactly the tensors of the tree, in shape and in a floating dtype.

    Raises CheckpointError with counts and examples of missing, unexpected, misshapen or mistyped tensors. Tolerated are
    tensors that match a pattern of `ignored`, layers for multi-token prediction after the last layer, and a stored head
    if the tree ties it to the embedding.
    """
    places = tensor_places(tree, rules)
    ignorable = (*_ignorable(tree, rules, ignored), *_prediction_layers(files, tree, rules))
    problems = [
        _summary("missing", _missing(files, places)),
        _summary("unexpected", _unexpected(files, places, ignorable)),
        _summary("misshapen", _misshapen(files, places)),
        _summary("of a dtype that weights cannot have", _mistyped(files, places)),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError(f"{files.directory}: the checkpoint does not fit its config: {'; '.join(found)}")


def is_ignorable(name: str, tree: SpecTree, *, rules: Mapping[str, str], ignored: tuple[str, ...] = ()) -> bool:
    """Return True if no parameter needs a tensor but checkpoints of the family may hold it.

    Layers beyond the last one are ignorable: they predict further tokens.
    """
    if any(fnmatchcase(name, pattern) for pattern in _ignorable(tree, rules, ignored)):
        return True
    num_layers, prefix = _layers_of(tree, rules)
    found = re.match(rf"{re.escape(prefix)}(\d+)\.", name) if prefix else None
    return found is not None and int(found[1]) >= num_layers


def _ignorable(tree: SpecTree, rules: Mapping[str, str], ignored: tuple[str, ...]) -> tuple[str, ...]:
    has_head = any(spec.role == "head" for _, spec in walk(tree))
    return (*IGNORABLE, *ignored, *(() if has_head else (rules.get("head", ""),)))


def _prediction_layers(files: CheckpointFiles, tree: SpecTree, rules: Mapping[str, str]) -> list[str]:
    """Return patterns of the layers that predict further tokens (DeepSeek-V3, arXiv:2412.19437, 2.2); no step runs
    them.

    Their numbers follow the last layer; each has a projection of the embedding and the hidden state.
    """
    num_layers, prefix = _layers_of(tree, rules)
    numbered = (re.fullmatch(rf"({re.escape(prefix)}(\d+)\.)eh_proj\.weight", name) for name in files.tensors)
    return [f"{found[1]}*" for found in numbered if found and int(found[2]) >= num_layers]


def _layers_of(tree: SpecTree, rules: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of layers, and the prefix of layer numbers in tensor names; empty without a rule."""
    num_layers = 1 + max((layer for _, spec in walk(tree) for layer in spec.layers), default=-1)
    return num_layers, rules["attention_norm"].partition("{layer}")[0] if "attention_norm" in rules else ""


def _summary(fault: str, found: list[str]) -> str:
    if not found:
        return ""
    listed = ", ".join(found[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
    return f"{len(found)} tensor{'s' if len(found) > 1 else ''} {fault}: {listed}"


def _missing(files: CheckpointFiles, places: Places) -> list[str]:
    index = SINGLE_FILE if files.directory / SINGLE_FILE in files.stamps else INDEX_FILE
    return [f"{name} (not in {index})" for name in places if name not in files.tensors]


def _unexpected(files: CheckpointFiles, places: Places, ignorable: tuple[str, ...]) -> list[str]:
    return [
        f"{name} {list(entry.shape)} in {entry.file.name}"
        for name, entry in files.tensors.items()
        if name not in places and not any(fnmatchcase(name, pattern) for pattern in ignorable)
    ]


def _misshapen(files: CheckpointFiles, places: Places) -> list[str]:
    return [
        f"{name} in {entry.file.name} is {list(entry.shape)}, expected {list(of_tensor[0].spec.file_shape)}"
        for name, of_tensor in places.items()
        if (entry := files.tensors.get(name)) is not None and entry.shape != of_tensor[0].spec.file_shape
    ]


def _mistyped(files: CheckpointFiles, places: Places) -> list[str]:
    return [
        f"{name} in {entry.file.name} is {entry.dtype}, expected one of {', '.join(DTYPES)}"
        for name in places
        if (entry := files.tensors.get(name)) is not None and entry.dtype not in DTYPES
    ]
