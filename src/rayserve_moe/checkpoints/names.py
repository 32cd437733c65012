"""Which tensor of a checkpoint fills which place of which parameter, and whether all of them are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from rayserve_moe.checkpoints.files import INDEX_FILE, SINGLE_FILE, CheckpointFiles
from rayserve_moe.checkpoints.header import DTYPES, CheckpointError
from rayserve_moe.model.parameters import ParamSpec

IGNORABLE = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")
"""Tensors that old exports carry and no model needs: they follow from the config."""

SpecTree = Mapping[str, "ParamSpec | SpecTree"]
"""Parameter specs by name, nested as deep as one likes; `model.parameters.parameter_specs` makes one."""

_LISTED = 3


@dataclass(frozen=True)
class TensorPlace:
    """The place of one tensor: parameter `path` of the tree, at `stack_index`: place among its layers, and expert."""

    path: tuple[str, ...]
    spec: ParamSpec
    stack_index: tuple[int, ...]


def walk(tree: SpecTree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ParamSpec]]:
    """Yield every parameter of a tree of any depth with its path, in the tree's order."""
    for key, node in tree.items():
        if isinstance(node, ParamSpec):
            yield (*path, key), node
        else:
            yield from walk(node, (*path, key))


def tensor_name(spec: ParamSpec, stack_index: tuple[int, ...], *, rules: Mapping[str, str]) -> str:
    """Name the tensor of a parameter at `stack_index` (place among its layers, expert) by the rule for its role."""
    layer = spec.layers[stack_index[0]] if spec.layers else None
    expert = stack_index[-1] if spec.num_experts else None
    return rules[spec.role].format(layer=layer, expert=expert)


def tensor_places(tree: SpecTree, rules: Mapping[str, str]) -> dict[str, TensorPlace]:
    """Map every tensor name the tree needs to its place."""
    places: dict[str, TensorPlace] = {}
    for path, spec in walk(tree):
        for stack_index in product(*(range(size) for size in spec.file_stack)):
            name = tensor_name(spec, stack_index, rules=rules)
            assert name not in places, f"two parameters claim the tensor {name}"
            places[name] = TensorPlace(path, spec, stack_index)
    return places


def verify(files: CheckpointFiles, tree: SpecTree, *, rules: Mapping[str, str]) -> None:
    """Check that the checkpoint holds exactly the tensors of the tree, in shape and in a floating dtype.

    CheckpointError lists a few of the missing, unexpected, misshapen or mistyped tensors with their counts. A stored
    head is tolerated where the tree ties it to the embedding.
    """
    places = tensor_places(tree, rules)
    has_head = any(place.spec.role == "head" for place in places.values())
    ignorable = IGNORABLE if has_head else (*IGNORABLE, rules.get("head", ""))
    problems = [
        _summary("missing", _missing(files, places)),
        _summary("unexpected", _unexpected(files, places, ignorable)),
        _summary("misshapen", _misshapen(files, places)),
        _summary("of a dtype that weights cannot have", _mistyped(files, places)),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError(f"{files.directory}: the checkpoint does not fit its config: {'; '.join(found)}")


def _summary(what: str, found: list[str]) -> str:
    if not found:
        return ""
    listed = ", ".join(found[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
    return f"{len(found)} tensor{'s' if len(found) > 1 else ''} {what}: {listed}"


def _missing(files: CheckpointFiles, places: Mapping[str, TensorPlace]) -> list[str]:
    index = SINGLE_FILE if files.directory / SINGLE_FILE in files.stamps else INDEX_FILE
    return [f"{name} (not in {index})" for name in places if name not in files.tensors]


def _unexpected(files: CheckpointFiles, places: Mapping[str, TensorPlace], ignorable: tuple[str, ...]) -> list[str]:
    return [
        f"{name} {list(entry.shape)} in {entry.file.name}"
        for name, entry in files.tensors.items()
        if name not in places and not any(fnmatchcase(name, pattern) for pattern in ignorable)
    ]


def _misshapen(files: CheckpointFiles, places: Mapping[str, TensorPlace]) -> list[str]:
    return [
        f"{name} in {entry.file.name} is {list(entry.shape)}, expected {list(place.spec.file_shape)}"
        for name, place in places.items()
        if (entry := files.tensors.get(name)) is not None and entry.shape != place.spec.file_shape
    ]


def _mistyped(files: CheckpointFiles, places: Mapping[str, TensorPlace]) -> list[str]:
    return [
        f"{name} in {entry.file.name} is {entry.dtype}, expected one of {', '.join(DTYPES)}"
        for name in places
        if (entry := files.tensors.get(name)) is not None and entry.dtype not in DTYPES
    ]
