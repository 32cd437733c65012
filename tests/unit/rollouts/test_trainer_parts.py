"""Parts of a rollout by trainer rank: their union is the whole, and no process holds more than its part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts import load
from rayserve_moe.rollouts import shards as shards_module
from rayserve_moe.rollouts.schema import Rollout
from rayserve_moe.rollouts.shards import RolloutDirectory
from rayserve_moe.rollouts.trainer_parts import CONTIGUOUS, ZIGZAG, TrainerRank, load_part

LAYOUT = RoutingLayout(num_hidden_layers=5, layer_ids=(1, 2, 4), num_experts=64, top_k=4)
LENGTHS = (1, 7, 8, 9, 30, 31, 64, 5, 100, 33, 2)
MESHES = [(1, 1), (2, 1), (1, 2), (3, 2), (2, 4), (16, 3)]


def rollout(number: int, length: int, *, missing: tuple[tuple[int, int], ...] = ()) -> Rollout:
    generator = np.random.default_rng(number)
    rows = generator.integers(0, 64, (length, 3, 4)).astype(np.uint8)
    return Rollout(
        prompt_id=f"p{number}",
        sample_index=0,
        weight_version="3",
        seed=number,
        prompt_ids=np.arange(1, dtype=np.int32),
        output_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -1.0, np.float32),
        logprob_versions=((1, 1 + length, "3"),),
        text="",
        finish_reason="length",
        routing=RoutedExperts(rows, 0, missing, (), ((0, length, "3"),)),
        layout=LAYOUT,
        prompt_fields=f'{{"number": {number}}}',
    )


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of several row groups each."""
    monkeypatch.setattr(shards_module, "GROUP_BYTES", 600)
    rollouts = [rollout(i, length, missing=((3, 5),) * (i == 4)) for i, length in enumerate(LENGTHS)]
    with RolloutDirectory(tmp_path / "job") as writer:
        for first in range(0, len(rollouts), 4):
            writer.write_rollouts(rollouts[first : first + 4])
    return tmp_path / "job"


@pytest.mark.parametrize("layout", [ZIGZAG, CONTIGUOUS])
@pytest.mark.parametrize(("num_data", "num_context"), MESHES)
def test_the_parts_are_the_whole(directory: Path, layout: str, num_data: int, num_context: int):
    whole = load(directory)
    found = [np.zeros(len(rows), int) for rows in whole.routing if rows is not None]
    for data_rank in range(num_data):
        for context_rank in range(num_context):
            part = load_part(directory, TrainerRank(data_rank, num_data, context_rank, num_context, layout))
            for place, sample in enumerate(part.samples):
                np.testing.assert_array_equal(part.output_ids[place], whole.output_ids[sample])
                np.testing.assert_array_equal(part.logprobs[place], whole.logprobs[sample])
                assert part.prompt_fields[place] == whole.prompt_fields[sample] == {"number": sample}
                own, rows = part.own[place], whole.routing[sample]
                assert own is not None and rows is not None
                np.testing.assert_array_equal(own.rows[own.known], rows[own.positions[own.known]])
                found[sample][own.positions[own.known]] += 1
                assert not own.rows[~own.known].any()
    for sample, counts in enumerate(found):
        is_missing = np.zeros(len(counts), bool)
        for first, last in whole.routing_missing[sample]:
            is_missing[first:last] = True
        np.testing.assert_array_equal(counts, np.where(is_missing, 0, 1))


def test_a_process_holds_its_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards_module, "GROUP_BYTES", 1 << 17)
    with RolloutDirectory(tmp_path / "job") as writer:
        writer.write_rollouts([rollout(i, 2000) for i in range(256)])
    total = sum(rows.nbytes for rows in load(tmp_path / "job").routing if rows is not None)
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        part = load_part(tmp_path / "job", TrainerRank(1, 8, 1, 2))
    finally:
        pa.set_memory_pool(before)
    assert part.num_row_bytes == pytest.approx(total / 16, rel=0.01)
    assert pool.max_memory() < total / 4


def test_zigzag_chunks_are_those_of_slime():
    """`chunk_size = ceil(T / 2n)`; rank r has chunks r and 2n - 1 - r."""
    for num_tokens in (1, 7, 8, 9, 31):
        size = (num_tokens + 2 * 3 - 1) // (2 * 3)
        for rank in range(3):
            chunks = [range(c * size, (c + 1) * size) for c in (rank, 2 * 3 - rank - 1)]
            positions = TrainerRank(0, 1, rank, 3).positions_of(num_tokens)
            assert positions.tolist() == [position for chunk in chunks for position in chunk]
    assert TrainerRank(0, 1, 1, 2, CONTIGUOUS).positions_of(5).tolist() == [3, 4, 5]
    assert TrainerRank().positions_of(3).tolist() == [0, 1, 2]


def test_samples_of_a_schedule(directory: Path):
    part = load_part(directory, TrainerRank(), samples=[10, 0, 6])
    assert part.samples == [0, 6, 10] and [len(ids) for ids in part.output_ids] == [1, 64, 2]
    assert load_part(directory, TrainerRank(), samples=[]).samples == []
    assert [TrainerRank(r, 4).samples_of(10) for r in range(4)] == [range(2), range(2, 5), range(5, 7), range(7, 10)]


def test_what_is_no_part_is_refused(directory: Path, tmp_path: Path):
    for ranks in ((2, 2, 0, 1), (0, 1, 1, 1), (-1, 1, 0, 1), (0, 0, 0, 1)):
        with pytest.raises(ValueError, match="is not in"):
            TrainerRank(*ranks)
    with pytest.raises(ValueError, match="neither"):
        TrainerRank(layout="ring")  # ty: ignore[invalid-argument-type]
    for samples in ([11], [-1]):
        with pytest.raises(ValueError, match=r"\[0, 11\)"):
            load_part(directory, TrainerRank(), samples=samples)
    with pytest.raises(ValueError, match="no shards"):
        load_part(tmp_path / "nowhere", TrainerRank())
    (shard, *_) = sorted((directory / "rollouts").glob("*.parquet"))
    raw = bytearray(shard.read_bytes())
    raw[200] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ValueError, match="damaged"):
        load_part(directory, TrainerRank())
