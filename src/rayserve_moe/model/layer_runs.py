"""Neighbouring layers of one kind, which one loop computes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from rayserve_moe.model.spec import ModelSpec


class LayerRun(NamedTuple):
    """Neighbouring layers of one kind: `first` counts all layers, `first_of_kind` those of that kind."""

    is_moe: bool
    first: int
    first_of_kind: int
    length: int


def layer_runs(spec: ModelSpec, cuts: tuple[int, ...] = ()) -> Iterator[LayerRun]:
    """Cut the layers into runs of one kind, of which none goes on behind one of the `cuts`."""
    first_of_kind = {True: 0, False: 0}
    kinds = ((i not in spec.dense_layer_ids, sum(cut <= i for cut in cuts)) for i in range(spec.num_layers))
    first = 0
    for (is_moe, _), run in groupby(kinds):
        length = sum(1 for _ in run)
        yield LayerRun(is_moe, first, first_of_kind[is_moe], length)
        first_of_kind[is_moe] += length
        first += length
