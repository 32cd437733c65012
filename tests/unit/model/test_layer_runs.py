"""Runs cover the layers in order, and a repeated pattern of kinds is one run."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.model import decoder_layers
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.layer_runs import LayerRun, layer_runs, periods
from rayserve_moe.model.spec import NO_PART, LayerSpec, ModelSpec
from tests.support.models.families import FAMILY_CASES, config_of

SPEC = next(spec_from_config(config_of(case)) for case in FAMILY_CASES if case.family == "qwen3_moe")
A, B = LayerSpec("gqa", "moe"), LayerSpec("gqa", "dense")
MIXER_ONLY, FFN_ONLY = LayerSpec("gqa", NO_PART), LayerSpec(NO_PART, "moe")


def spec_of(*layers: LayerSpec) -> ModelSpec:
    return replace(SPEC, layers=layers)


def runs_of(*layers: LayerSpec, cuts: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    return [(len(run.period), run.length) for run in layer_runs(spec_of(*layers), cuts)]


def numbers(run: LayerRun, index: int, number: int) -> tuple[int, int]:
    """Return the numbers of a layer of a period among all layers, and among those with its network."""
    own = run.period[index].ffn
    names = [kind.ffn for kind in run.period]
    of_ffn = run.first_of_ffn[own] + number * names.count(own) + names[:index].count(own)
    return run.first + number * len(run.period) + index, of_ffn


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_periods_expand_to_the_sequence(kinds: list[str]):
    found, first = [], 0
    for size, length in periods(kinds):
        assert length > 0 and (size == 1 or length > 1)
        found += kinds[first : first + size] * length
        first += size * length
    assert found == kinds


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), st.integers(2, 6))
def test_a_repeated_pattern_compiles_no_more_layers_than_it_has(pattern: list[str], times: int):
    found = periods(pattern * times)
    assert sum(size for size, _ in found) <= len(pattern)
    if len({*pattern}) == 1:
        assert found == [(1, len(pattern) * times)]


@given(st.integers(0, 5), st.integers(0, 60))
def test_two_kinds_in_a_row_are_two_runs(num_dense: int, num_moe: int):
    kinds = "d" * num_dense + "m" * num_moe
    assert periods(kinds) == [(1, len([*run])) for _, run in groupby(kinds)]


def test_a_hybrid_pattern_is_one_run():
    assert periods("aaab" * 10) == [(4, 10)]
    assert periods("d" + "aaab" * 10) == [(1, 1), (4, 10)]
    assert periods("aaab" * 3 + "aa") == [(4, 3), (1, 2)]


@given(st.lists(st.sampled_from([A, MIXER_ONLY, FFN_ONLY]), max_size=20))
def test_norms_ahead_of_networks_are_counted_over_the_layers_that_have_one(layers: list[LayerSpec]):
    spec = spec_of(A, *layers)
    for run in layer_runs(spec):
        for number in range(run.length):
            for index, kind in enumerate(run.period):
                layer = run.first + number * len(run.period) + index
                place = decoder_layers.place_of(run, index, jnp.int32(number))
                assert place.layer == layer
                if kind.ffn != NO_PART:
                    assert spec.layers_with_ffn()[int(place.of_norm)] == layer
                if kind.mixer != NO_PART:
                    assert spec.layers_with_mixer("gqa")[int(place.of_mixer)] == layer


@given(st.lists(st.sampled_from([A, B]), max_size=20), st.sets(st.integers(0, 21)))
def test_runs_are_the_layers_in_order_and_end_at_cuts(layers: list[LayerSpec], cuts: set[int]):
    found, spec = [], spec_of(A, *layers)
    for run in layer_runs(spec, tuple(cuts)):
        end = run.first + len(run.period) * run.length
        assert not {*range(run.first + 1, end)} & cuts
        for number in range(run.length):
            for index, kind in enumerate(run.period):
                layer, of_ffn = numbers(run, index, number)
                assert spec.layers[layer] == kind and spec.layers_with_ffn(kind.ffn)[of_ffn] == layer
                found.append(layer)
    assert found == [*range(spec.num_layers)]


def test_windows_do_not_part_layers():
    windowed = replace(A, window=8)
    assert runs_of(windowed, A, windowed, A) == [(1, 4)]
    assert runs_of(B, A, windowed, A, cuts=(2,)) == [(1, 1), (1, 1), (1, 2)]
