"""What routing costs on the wire: bytes and time of every dialect, and gathering rows from the store. No devices.

    python -m benchmarks.routing_wire [--repeats 15] [--out FILE.json]

1000 tokens x 48 layers x top 8 of 128, routed in three ways: every expert alike, as a model does whose experts are not
equally popular, and the latter with neighbouring tokens that choose alike.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import load_before_start, machine_facts, save
from benchmarks.sections import routing_wire as as_table
from rayserve_moe.replay.encoding import DIALECTS
from rayserve_moe.replay.routing_store import RoutingStore
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

NUM_TOKENS, NUM_GATHERED, NUM_SLOTS, PAGE_SIZE = 1000, 8192, 131_072, 16
LAYOUT = RoutingLayout(num_hidden_layers=48, layer_ids=tuple(range(48)), num_experts=128, top_k=8)
RESULTS = Path(__file__).parent / "results"
SKEW, STICKINESS = 0.75, 0.5
"""Standard deviation of an expert's popularity in logits, and how much of a token's own taste the next one shares."""


def routings() -> dict[str, RoutedExperts]:
    """Return rows by the way in which they are routed: scores of popularity and of taste, the top k of their sum."""
    generator = np.random.default_rng(0)
    shape = (NUM_TOKENS, len(LAYOUT.layer_ids), LAYOUT.num_experts)
    popularity = SKEW * generator.standard_normal(shape[1:], np.float32)
    taste = generator.standard_normal(shape, np.float32)
    sticky = taste.copy()
    for t in range(1, NUM_TOKENS):
        sticky[t] = STICKINESS * sticky[t - 1] + (1 - STICKINESS**2) ** 0.5 * taste[t]
    scores = {"uniform": taste, "skewed": popularity + taste, "sticky": popularity + sticky}
    return {name: _routing(each) for name, each in scores.items()}


def overlap(routing: RoutedExperts) -> float:
    """Return share of its experts that a token has in common with the one before it, in the same layer."""
    before, after = routing.rows[:-1, :, :, None], routing.rows[1:, :, None, :]
    return float((before == after).any(axis=-1).mean())


def size_of(value: Any) -> int:
    """Return bytes of a value as it travels: binary as it is, JSON compact; text of base64 without its quotes."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return len(value["data"])
    return len(json.dumps(value, separators=(",", ":")))


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Return milliseconds of every repeat, after one that does not count."""
    call()
    spent = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - started))
    return spent


def measure_dialect(name: str, kinds: dict[str, RoutedExperts], repeats: int) -> dict[str, Any]:
    """Measure bytes for every kind of routing, and times for the skewed one."""
    dialect, routing = DIALECTS[name], kinds["skewed"]
    value = dialect.encode(routing, LAYOUT)
    return {
        "bytes": {kind: size_of(dialect.encode(each, LAYOUT)) for kind, each in kinds.items()},
        "encode_ms": timed(lambda: dialect.encode(routing, LAYOUT), repeats),
        "decode_ms": timed(lambda: dialect.decode(value, LAYOUT), repeats),
    }


def measure_gather(repeats: int) -> list[float]:
    """Measure milliseconds of reading rows of pages that lie anywhere in the store."""
    generator = np.random.default_rng(1)
    store = RoutingStore(LAYOUT, num_slots=NUM_SLOTS)
    pages = generator.permutation(NUM_SLOTS // PAGE_SIZE)[: NUM_GATHERED // PAGE_SIZE]
    slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()
    stamps = np.ones(NUM_GATHERED, np.int64)
    rows = generator.integers(0, LAYOUT.num_experts, (NUM_GATHERED, *LAYOUT.row_shape)).astype(LAYOUT.dtype)
    store.write(slots, stamps, rows=rows)
    return timed(lambda: store.read(slots, stamps), repeats)


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "routing_wire.json")
    arguments = parser.parse_args()
    load_before, kinds = load_before_start(), routings()
    measured = {
        "repeats": arguments.repeats,
        "machine": machine_facts(load_before),
        "rows": [NUM_TOKENS, *LAYOUT.row_shape],
        "num_experts": LAYOUT.num_experts,
        "overlap": {kind: round(overlap(each), 3) for kind, each in kinds.items()},
        "dialects": {name: measure_dialect(name, kinds, arguments.repeats) for name in DIALECTS},
        "gather_ms": {str(NUM_GATHERED): measure_gather(arguments.repeats)},
    }
    print(as_table(measured))
    save({"routing_wire": measured}, arguments.out)


def _routing(scores: np.ndarray) -> RoutedExperts:
    best = np.argpartition(-scores, LAYOUT.top_k, axis=-1)[..., : LAYOUT.top_k]
    order = np.argsort(-np.take_along_axis(scores, best, axis=-1), axis=-1)
    return RoutedExperts(np.take_along_axis(best, order, axis=-1).astype(LAYOUT.dtype))


if __name__ == "__main__":
    main()
