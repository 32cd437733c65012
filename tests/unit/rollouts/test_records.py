"""Rollouts come back from a shard as they went in, as views."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayserve_moe.replay.index_rows import packed_index
from rayserve_moe.requests.columns import ragged
from rayserve_moe.requests.records import GateScale, IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.requests.row_parts import are_known
from rayserve_moe.rollouts.records import Rollouts, decisions_of, index_layout_of, load
from rayserve_moe.rollouts.schema import SCHEMA, Rollout
from rayserve_moe.rollouts.shards import RolloutDirectory, shard_files

FEW = RoutingLayout(4, (1, 2, 3), num_experts=16, top_k=2)
MANY = RoutingLayout(2, (0, 1), num_experts=384, top_k=3)


def rollout(number: int, *, layout: RoutingLayout | None = FEW, num_outputs: int = 6, missing: tuple = ()) -> Rollout:
    generator = np.random.default_rng(number)
    num_rows = 3 + max(0, num_outputs - 1)
    routing = None
    if layout is not None:
        rows = generator.integers(0, layout.num_experts, (num_rows, *layout.row_shape)).astype(layout.dtype)
        routing = RoutedExperts(rows, 0, missing, ((0, 2, "cached"), (2, num_rows, "computed")), ((0, num_rows, "7"),))
    return Rollout(
        f"prompt {number // 2}",
        number % 2,
        "7",
        2**32 - 1 - number,
        prompt_ids=generator.integers(0, 500, 3).astype(np.int32),
        output_ids=generator.integers(0, 500, num_outputs).astype(np.int32),
        logprobs=-generator.random(num_outputs).astype(np.float32),
        logprob_versions=((3, 3 + num_outputs, "7"),),
        text="wörds\n",
        finish_reason="length",
        routing=routing,
        layout=layout,
        num_cached_tokens=2,
        started_at=1.7e9 + number,
        elapsed_s=0.5,
    )


@pytest.mark.parametrize(
    "rollouts",
    [
        [rollout(0), rollout(1), rollout(2, num_outputs=1)],
        [rollout(0, layout=MANY), rollout(1, layout=None), rollout(2, layout=MANY, missing=((1, 3),))],
        [rollout(0, layout=None), rollout(1, num_outputs=0)],
        [rollout(number, layout=None) for number in range(3)],
    ],
)
def test_what_goes_in_comes_back(tmp_path: Path, rollouts: list[Rollout]) -> None:
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts(rollouts[:2])
        directory.write_rollouts(rollouts[2:] or [replace(rollouts[0], prompt_id="another")])
    loaded = load(tmp_path)
    for i, given in enumerate(rollouts):
        assert (loaded.prompt_id[i], loaded.sample_index[i]) == (given.prompt_id, given.sample_index)
        assert loaded.weight_version[i] == given.weight_version
        for name in ("prompt_ids", "output_ids", "logprobs"):
            found, wanted = getattr(loaded, name)[i], getattr(given, name)
            assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
        assert_same_routing(loaded.routed_experts(i), given.routing)
        assert (loaded.routing[i] is None) == (given.routing is None)
        assert loaded.routing_missing[i] == (given.routing.missing if given.routing else ())
        row = loaded.table.slice(i, 1).to_pylist()[0]
        assert (row["seed"], row["text"], row["finish_reason"]) == (given.seed, given.text, given.finish_reason)
        assert row["started_at"].timestamp() == given.started_at
        assert [tuple(entry.values()) for entry in row["logprob_weight_version"]] == list(given.logprob_versions)


INDEX = IndexLayout((0, 2), (0, 1, 2, 3), top_k=4)


def indexed(given: Rollout, *, missing: int | None = None) -> Rollout:
    """A rollout with index rows: every token sees itself alone."""
    assert given.routing is not None
    chosen = np.full((len(given.routing.rows), 2, 4), -1, np.int32)
    chosen[:, :, 0] = np.arange(len(chosen))[:, None]
    index = packed_index(chosen)
    if missing is not None:
        index[missing] = None
    return replace(given, routing=replace(given.routing, parts={"index": index}), index_layout=INDEX)


def test_index_rows_come_back_for_every_sparse_layer(tmp_path: Path) -> None:
    given = [indexed(rollout(0)), rollout(1), indexed(rollout(2), missing=3)]
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts(given)
    loaded = load(tmp_path)
    wanted = given[0].index_rows
    assert wanted is not None and wanted.shape == (8, 4, 4) and (wanted[:, :, 0] == np.arange(8)[:, None]).all()
    np.testing.assert_array_equal(loaded.index_rows(0), wanted)
    assert index_layout_of(loaded, 0) == INDEX and index_layout_of(loaded, 1) is None and loaded.index_rows(1) is None
    assert_same_routing(loaded.routed_experts(2), given[2].routing)
    assert given[2].index_rows is None
    with pytest.raises(ValueError, match="sample 2: 1 index rows are missing"):
        loaded.index_rows(2)


SCALE = GateScale("sigmoid", is_normalized=True, scale=2.5)


def decided(given: Rollout, *, missing: tuple[tuple[int, int], ...] = ()) -> Rollout:
    """A rollout with gates, masks of one to three ids, and drafts."""
    assert given.routing is not None
    gates, count = np.random.default_rng(5).random(given.routing.rows.shape, np.float32), len(given.output_ids)
    return replace(
        given,
        routing=replace(given.routing, parts={"gates": gates}, missing=missing),
        gate_scale=SCALE,
        sampling_mask=ragged([np.arange(1 + place % 3, dtype=np.int32) for place in range(count)]),
        sampling_logprobs=np.full(count, -0.25, np.float32),
        drafted=np.arange(count) % 2 == 0,
    )


def test_gates_masks_and_drafts_come_back(tmp_path: Path) -> None:
    given = [decided(rollout(0)), rollout(1), decided(rollout(2), missing=((1, 3),))]
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts(given)
    loaded = load(tmp_path)
    for sample in (0, 2):
        wanted = given[sample]
        found = decisions_of(loaded, sample)
        assert wanted.sampling_mask is not None and found.gate_scale == SCALE
        assert found.sampling_mask.tolist() == wanted.sampling_mask.tolist()
        np.testing.assert_array_equal(found.sampling_logprobs, wanted.sampling_logprobs)
        np.testing.assert_array_equal(found.drafted, wanted.drafted)
    np.testing.assert_array_equal(decisions_of(loaded, 0).router_gates, given[0].router_gates)
    assert decisions_of(loaded, 1) == (None,) * 5 and given[2].router_gates is None
    assert are_known(decisions_of(loaded, 2).router_gates).tolist() == [True, False, False] + [True] * 5
    altered = given[0].router_gates + 1
    place = loaded.table.schema.get_field_index("gates")
    raw = pa.chunked_array([[altered.tobytes(), None, altered.tobytes()]], pa.large_binary())
    with pytest.raises(ValueError, match="sample 0: gates were altered"):
        Rollouts(loaded.table.set_column(place, "gates", raw)).routed_experts(0)


def assert_same_routing(found: RoutedExperts | None, wanted: RoutedExperts | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.rows.dtype == wanted.rows.dtype and np.array_equal(found.rows, wanted.rows)
        assert replace(found, rows=NO_ROWS, parts={}) == replace(wanted, rows=NO_ROWS, parts={})
        assert (found.index is None) == (wanted.index is None)
        if found.index is not None:
            assert found.index.tolist() == wanted.index.tolist()


NO_ROWS = np.zeros(0)


def test_columns_are_read_alone_and_are_views(tmp_path: Path) -> None:
    given = [rollout(number) for number in range(6)]
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts(given)
    (shard,) = shard_files(tmp_path / "rollouts")
    loaded = load(shard, columns=["routing"])
    assert loaded.table.column_names == ["routing", "routing_shape", "routing_dtype"]
    owners = {id(base_of(rows)) for rows in loaded.routing if rows is not None}
    assert len(loaded) == 6 and len(owners) == 1, "one buffer serves all rows"
    assert not any(rows.flags.writeable for rows in loaded.routing if rows is not None)


@pytest.mark.parametrize("name", ["plain", "model=qwen3", "_scratch", ".hidden"])
def test_shards_keep_their_order_wherever_they_lie(tmp_path: Path, name: str) -> None:
    """What directories are called neither hides shards nor adds columns."""
    with RolloutDirectory(tmp_path / name) as directory:
        for number in range(12):
            directory.write_rollouts([rollout(number, num_outputs=1 + 300 * (number % 2))])
    loaded = load(tmp_path / name)
    assert loaded.table["seed"].to_pylist() == [rollout(number).seed for number in range(12)]
    assert loaded.table.schema.equals(SCHEMA)


def test_bad_shards_and_unknown_columns_are_refused(tmp_path: Path) -> None:
    with RolloutDirectory(tmp_path) as directory:
        for number in range(2):
            directory.write_rollouts([rollout(number)])
    with pytest.raises(ValueError, match="rooting"):
        load(tmp_path, columns=["rooting"])
    shard = shard_files(tmp_path / "rollouts")[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=shard.name):
        load(tmp_path)


def base_of(array: np.ndarray) -> object:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_altered_rows_are_noticed(tmp_path: Path) -> None:
    """One flipped bit of routing in the file is told by the checksum; the other samples are read all the same."""
    given = [rollout(number) for number in range(4)]
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts(given)
    (shard,) = shard_files(tmp_path / "rollouts")
    raw = bytearray(shard.read_bytes())
    place = raw.index(given[2].routing.rows.tobytes())
    raw[place + 5] ^= 1
    shard.write_bytes(raw)
    loaded = load(tmp_path, verify=False)
    with pytest.raises(ValueError, match="altered"):
        loaded.routed_experts(2)
    assert_same_routing(loaded.routed_experts(3), given[3].routing)


def test_altered_index_rows_are_noticed(tmp_path: Path) -> None:
    given = indexed(rollout(0))
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([given])
    (shard,) = shard_files(tmp_path / "rollouts")
    rows = b"".join(given.routing.index)
    shard.write_bytes(shard.read_bytes().replace(rows, rows[::-1]))
    loaded = load(tmp_path, verify=False)
    for read in (loaded.routed_experts, loaded.index_rows):
        with pytest.raises(ValueError, match="sample 0: index rows were altered"):
            read(0)


def test_the_schema_is_what_is_on_disk(tmp_path: Path) -> None:
    with RolloutDirectory(tmp_path) as directory:
        directory.write_rollouts([rollout(0)])
    (shard,) = shard_files(tmp_path / "rollouts")
    assert pq.read_schema(shard).equals(SCHEMA)
    assert (
        hashlib.sha256(pq.read_table(shard)["routing"][0].as_py()).digest()
        == hashlib.sha256(rollout(0).routing.rows.tobytes()).digest()
    )


def test_a_directory_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no shards"):
        load(tmp_path)
