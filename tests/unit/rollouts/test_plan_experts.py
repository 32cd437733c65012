"""Placements from the shards of a rollout: rows of the wanted weights alone, costs as they are, a file that serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.balancing.coactivation import TIE_FACTOR
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.balancing.placement_file import read_placement, write_placement
from rayserve_moe.balancing.planning import rank_loads
from rayserve_moe.cli import main
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.plan_experts import trace_of
from rayserve_moe.rollouts.records import load
from rayserve_moe.rollouts.schema import Rollout
from rayserve_moe.rollouts.shards import RolloutDirectory
from tests.unit.rollouts.test_records import rollout

LAYOUT = RoutingLayout(4, (1, 2, 3), num_experts=16, top_k=2)


def skewed(number: int, *, version: str = "7", num_rows: int = 40, layout: RoutingLayout = LAYOUT) -> Rollout:
    """A sample whose tokens choose experts i and i + 8 together, the first pairs far more often."""
    generator = np.random.default_rng(number)
    odds = 1 / np.arange(1, 9)
    pairs = generator.choice(8, (num_rows, layout.row_shape[0]), p=odds / odds.sum())
    rows = np.stack([pairs, pairs + 8], axis=-1).astype(layout.dtype)
    half = num_rows // 2
    versions = ((0, half, "6"), (half, num_rows, version))
    routing = RoutedExperts(rows, 0, ((3, 5),), ((0, num_rows, "computed"),), versions)
    return replace(
        rollout(number),
        weight_version=version,
        output_ids=np.zeros(num_rows - 2, np.int32),
        logprobs=np.zeros(num_rows - 2, np.float32),
        routing=routing,
        layout=layout,
    )


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    with RolloutDirectory(tmp_path / "job") as directory:
        directory.write_rollouts([skewed(number) for number in range(0, 20, 2)])
        directory.write_rollouts([skewed(20, version="8"), replace(rollout(22), layout=None, routing=None)])
        directory.write_rollouts([skewed(number) for number in range(24, 40, 2)])
    return tmp_path / "job"


def test_rows_are_those_of_the_wanted_weights_and_of_known_tokens(shards):
    rollouts = load(shards)
    assert len(trace_of(rollouts).rows) == 18 * 20 and trace_of(rollouts).weight_version == "7"
    assert len(trace_of(rollouts, version="8").rows) == 20
    assert len(trace_of(rollouts, version="6").rows) == 19 * 18, "two rows of each are missing"
    assert len(trace_of(rollouts, version="any").rows) == 19 * 38
    trace = trace_of(rollouts, max_rows=64)
    assert (len(trace.rows), trace.num_rows, trace.num_experts, trace.layer_ids) == (64, 360, 16, (1, 2, 3))
    with pytest.raises(ValueError, match="no rows of routing of weight version 9"):
        trace_of(rollouts, version="9")


def test_rows_of_neighbouring_places_come_from_other_samples(shards):
    trace, samples = trace_of(load(shards)), [skewed(number) for number in (*range(0, 20, 2), *range(24, 40, 2))]
    expected = np.stack([sample.routing.rows[20:40] for sample in samples], axis=1).reshape(-1, 3, 2)
    np.testing.assert_array_equal(trace.rows, expected)


def test_samples_of_other_models_are_not_mixed(tmp_path):
    other = replace(LAYOUT, num_experts=32)
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([skewed(0), skewed(2, layout=other)])
    with pytest.raises(ValueError, match="different models"):
        trace_of(load(tmp_path))


def test_the_command_prints_costs_and_writes_a_file_that_is_cheaper(tmp_path, capsys):
    shards = tmp_path / "job"
    with RolloutDirectory(shards) as directory:
        directory.write_rollouts([skewed(number, num_rows=400) for number in range(0, 20, 2)])
    today = tmp_path / "today.json"
    write_placement(today, identity_placement(3, 16, ep_size=4, num_redundant=4))
    out = tmp_path / "planned.json"
    command = ["plan-experts", str(shards), "--today", str(today), "--batch", "32,8", "--out", str(out)]
    command += ["--rates", "0.1,0.1,1,1"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layer_ids"] == [1, 2, 3] and told["weight_version"] == "7"
    named = {(each["name"], each["batch"]): each for each in told["placements"]}
    assert set(named) == {(name, batch) for name in ("today", "from counts", "from rows") for batch in (32, 8)}
    for each in named.values():
        assert np.shape(each["rank_rows"]) == (3, 4)
        assert (np.sum(each["rank_rows"], axis=1) == 2 * (told["rows"] // each["batch"] * each["batch"])).all()
    for batch in (32, 8):
        now, planned = named["today", batch], named["from rows", batch]
        assert np.sum(planned["seconds"]) <= TIE_FACTOR * np.sum(now["seconds"])
        assert np.mean(planned["distinct_ranks"]) < np.mean(now["distinct_ranks"])
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "weight version 7" in text and "layer 3: rank" in text
    planned = read_placement(out)
    assert (planned.num_slots, planned.ep_size) == (20, 4)
    tokens = np.array([np.bincount(trace_of(load(shards)).rows[:, i].reshape(-1), minlength=16) for i in range(3)])
    before = rank_loads(read_placement(today), tokens).max(axis=1)
    assert (rank_loads(planned, tokens).max(axis=1) <= before).all()


def test_sizes_that_do_not_fit_are_left_out_unless_they_are_named(shards, capsys):
    assert main(["plan-experts", str(shards), "--ranks", "4", "--batch", "8", "--json"]) == 0
    sizes = [each["num_slots"] for each in json.loads(capsys.readouterr().out)["placements"]]
    assert sorted(set(sizes)) == [16, 32, 48, 80, 144]
    assert main(["plan-experts", str(shards), "--ranks", "5", "--redundant", "0"]) == 2
    assert "16 experts do not spread over 5 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ranks"),
        (["--ranks", "4", "--batch", "0"], "--batch 0"),
        (["--ranks", "4", "--batch", "x"], "--batch x"),
        (["--ranks", "4", "--redundant", "129"], "--redundant 129"),
        (["--ranks", "4", "--rates", "1,2"], "--rates"),
        (["--ranks", "4", "--rates", "1,2,3,-4"], "negative"),
        (["--ranks", "4", "--send"], "--send needs --url"),
        (["--ranks", "4", "--slices", "3"], "3 slices"),
        (["--today", "absent.json"], r"absent.json"),
        (["--ranks", "4", "--weight-version", "9"], "weight version 9"),
        (["--ranks", "4", "--out", "absent/planned.json"], "absent is not a directory"),
        (["--ranks", "4", "--out", "."], "--out .: Is a directory"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: the server does not answer"),
    ],
)
def test_wrong_use_is_refused_with_what_is_wrong(shards, capsys, arguments, message):
    assert main(["plan-experts", str(shards), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_placement_of_another_model_is_refused(shards, tmp_path, capsys):
    write_placement(tmp_path / "other.json", identity_placement(2, 16, ep_size=4))
    assert main(["plan-experts", str(shards), "--today", str(tmp_path / "other.json")]) == 2
    assert "2 layers of 16 experts" in capsys.readouterr().err
