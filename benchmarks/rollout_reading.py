"""Reading the routing of many rollouts: Parquet shards through `rollouts.load`, against base64 in JSON. No devices.

    python -m benchmarks.rollout_reading [--rollouts 10000] [--tokens 1000] [--repeats 7] [--out FILE.json]

Rows have 8 layers x top 2 of 8, as a small model has them, in both cases [rows, 8, 2] per rollout once they are read.
The JSON is one line per rollout with nothing but the field that clients of SGLang decode: base64 of int32. Both lie in
the page cache; sides take turns. `everything` reads all other columns besides, ids and log-probs among them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pybase64

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.sections import rollout_reading as as_table
from rayserve_moe.replay.encoding import encode_routed_experts
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts import Rollout, load
from rayserve_moe.rollouts.shards import RolloutDirectory

LAYOUT = RoutingLayout(num_hidden_layers=8, layer_ids=tuple(range(8)), num_experts=8, top_k=2)
PROMPT_TOKENS, ROLLOUTS_PER_SHARD, NUM_DISTINCT = 100, 1000, 50
Rows = list[np.ndarray]


def rollouts(count: int, num_tokens: int) -> Iterator[Rollout]:
    """Return random rollouts, `NUM_DISTINCT` different ones, of `num_tokens` fed tokens each."""
    generator = np.random.default_rng(0)
    shape = (NUM_DISTINCT, num_tokens, *LAYOUT.row_shape)
    rows = generator.integers(0, LAYOUT.num_experts, shape).astype(LAYOUT.dtype)
    ids = generator.integers(0, 256, (NUM_DISTINCT, num_tokens + 1)).astype(np.int32)
    logprobs = -generator.random((NUM_DISTINCT, num_tokens + 1 - PROMPT_TOKENS)).astype(np.float32)
    for i in range(count):
        kind = i % NUM_DISTINCT
        yield Rollout(
            f"prompt {i}",
            0,
            "0",
            0,
            prompt_ids=ids[kind, :PROMPT_TOKENS],
            output_ids=ids[kind, PROMPT_TOKENS:],
            logprobs=logprobs[kind],
            logprob_versions=((PROMPT_TOKENS, num_tokens + 1, "0"),),
            text="",
            finish_reason="length",
            routing=RoutedExperts(rows[kind], 0, (), ((0, num_tokens, "computed"),), ((0, num_tokens, "0"),)),
            layout=LAYOUT,
        )


def write(directory: Path, *, count: int, num_tokens: int) -> tuple[Path, Path]:
    """Write the same rollouts as shards and as lines of JSON."""
    shards, lines = directory / "shards", directory / "lines.jsonl"
    gathered: list[Rollout] = []
    with RolloutDirectory(shards) as place, lines.open("w", encoding="utf-8") as file:
        for rollout in rollouts(count, num_tokens):
            assert rollout.routing is not None, "made above"
            field = encode_routed_experts(rollout.routing, LAYOUT)
            file.write(json.dumps({"meta_info": {"routed_experts": field}}) + "\n")
            gathered.append(rollout)
            if len(gathered) == ROLLOUTS_PER_SHARD:
                place.write_rollouts(gathered)
                gathered = []
        if gathered:
            place.write_rollouts(gathered)
    return shards, lines


def read_shards(directory: Path) -> Rows:
    """Read routing alone, as a trainer that replays it reads it."""
    return [rows for rows in load(directory, columns=["routing"]).routing if rows is not None]


def read_everything(directory: Path) -> Rows:
    """Read all columns, and views of ids, log-probs and routing."""
    loaded = load(directory)
    assert len(loaded.prompt_ids) == len(loaded.output_ids) == len(loaded.logprobs), "one per sample"
    return [rows for rows in loaded.routing if rows is not None]


def read_lines(file: Path) -> Rows:
    """Parse every line, decode its base64, give it its shape."""
    with file.open("rb") as lines:
        fields = (json.loads(line)["meta_info"]["routed_experts"] for line in lines)
        return [np.frombuffer(pybase64.b64decode(field), "<i4").reshape(-1, *LAYOUT.row_shape) for field in fields]


def timed(call: Callable[[Path], Rows], path: Path, *, count: int, num_tokens: int) -> float:
    """Return seconds of one reading; RuntimeError where it is not all rows."""
    started = time.perf_counter()
    rows = call(path)
    seconds = time.perf_counter() - started
    if len(rows) != count or any(each.shape != (num_tokens, *LAYOUT.row_shape) for each in rows):
        raise RuntimeError("a reading did not give every row")
    return seconds


def check_same(shards: Path, lines: Path) -> None:
    """Refuse sides that differ in a row."""
    for ours, theirs in zip(read_shards(shards), read_lines(lines), strict=True):
        if not np.array_equal(ours, theirs):
            raise RuntimeError("the two hold different rows")


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "rollout_reading.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    sizes = {"count": arguments.rollouts, "num_tokens": arguments.tokens}
    with tempfile.TemporaryDirectory(prefix="rollouts-") as directory:
        shards, lines = write(Path(directory), **sizes)
        check_same(shards, lines)
        sides = {"routing": (read_shards, shards), "everything": (read_everything, shards), "json": (read_lines, lines)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(arguments.repeats):
            for name, (call, path) in sides.items():
                seconds[name].append(timed(call, path, **sizes))
            note(f"{repeat + 1}/{arguments.repeats}: json / shards {seconds['json'][-1] / seconds['routing'][-1]:.1f}")
        sizes_on_disk = {
            "shards": sum(file.stat().st_size for file in (shards / "rollouts").iterdir()),
            "json": lines.stat().st_size,
        }
    measured: dict[str, Any] = {
        "repeats": arguments.repeats,
        "machine": machine_facts(load_before),
        "rollouts": arguments.rollouts,
        "rows": [arguments.tokens, *LAYOUT.row_shape],
        "num_experts": LAYOUT.num_experts,
        "bytes": sizes_on_disk,
        "seconds": seconds,
    }
    print(as_table(measured))
    save({"rollout_reading": measured}, arguments.out)


if __name__ == "__main__":
    main()
