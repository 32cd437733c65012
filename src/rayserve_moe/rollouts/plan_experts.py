"""The work of `rayserve-moe plan-experts`: what placements cost on the rows of a rollout, and a placement file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe.balancing.coactivation import ServedGroup, loads_of, plan_from_rows
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement, lowered_redundancy
from rayserve_moe.balancing.placement_file import placement_as_json, placement_in, read_placement, write_placement
from rayserve_moe.balancing.planner import lower_bound, plan
from rayserve_moe.balancing.traffic import CostRates, traffic_of
from rayserve_moe.config.load import environment_setting
from rayserve_moe.rollouts.answers import Faulty, Unavailable, Unusable
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.plan_options import ANY, DEFAULT_REDUNDANT, LAST, numbers_in, rates_in
from rayserve_moe.rollouts.records import Rollouts, load

MAX_ROWS, BLOCK = 16384, 1024
"""Rows that a plan uses, and rows that stay together then: of tokens at about the same position."""
COLUMNS = ("weight_version", "routing", "routing_missing", "routing_weight_version", "num_experts", "layer_ids")
TODAY, COUNTS, ROWS = "today", "from counts", "from rows"
HEADINGS = (
    ("placement", "<11"), ("slots", ">6"), ("batch", ">6"), ("hot/mean", ">9"), ("hot/bound", ">10"),
    ("worst", ">7"), ("ranks/token", ">12"), ("rows out", ">9"), ("far", ">6"), ("us/layer", ">9"),
)  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """Rows of routing of a weight version."""

    rows: np.ndarray
    """Experts, [tokens, layers, k]. Neighbours come from different samples."""
    num_experts: int
    layer_ids: tuple[int, ...]
    weight_version: str
    num_rows: int
    """Rows that the shards have."""


@dataclass(frozen=True)
class Costed:
    """A placement, and what the rows cost under it in steps of `batch` tokens."""

    name: str
    batch: int
    placement: ExpertPlacement
    loads: np.ndarray
    """Rows by rank, [layers, ranks]."""
    bound: np.ndarray
    """Lower bound of the hottest rank's rows, [layers]."""
    distinct_ranks: np.ndarray
    """Ranks that compute a token, [layers]."""
    remote_ranks: np.ndarray
    """Other ranks than its own that compute a token, [layers]."""
    rows_out: np.ndarray
    """Rows of a token that leave its rank, [layers]: in small steps one for each other rank."""
    far_rows: np.ndarray
    """Rows of a token that leave its slice, [layers]."""
    seconds: np.ndarray
    """Estimated time of a layer, [layers]."""

    @property
    def imbalance(self) -> np.ndarray:
        """Return the hottest rank over the mean, [layers]."""
        return self.loads.max(axis=1) / np.maximum(self.loads.mean(axis=1), 1e-300)


def run(options: argparse.Namespace) -> int:
    """Print the costs, write and send what is wanted; return 0.

    Raises ValueError for what does not fit together, for a file that cannot be written, and without an answer of the
    server.
    """
    try:
        return _run(options)
    except (Unavailable, Faulty, Unusable) as error:
        raise ValueError(f"{options.url}: {error}") from error


def _run(options: argparse.Namespace) -> int:
    if options.out and not options.out.parent.is_dir():
        raise ValueError(f"--out {options.out}: {options.out.parent} is not a directory")
    if options.out and options.out.is_dir():
        raise ValueError(f"--out {options.out}: Is a directory")
    trace = trace_of(load(options.shards, columns=COLUMNS), version=options.weight_version, max_rows=options.max_rows)
    today = _today(options, trace)
    batches, rates = numbers_in(options.batch, "--batch", least=1), rates_in(options.rates)
    redundant = _redundant(options, today)
    found = list(costs(trace, today, redundant=redundant, batches=batches, num_slices=options.slices, rates=rates))
    if options.json:
        print_json(found, trace)
    else:
        print_table(found, trace)
    if options.out or options.send:
        chosen = next(one for one in found if one.name == ROWS and one.batch == batches[0])
        if options.out:
            _write(options.out, chosen.placement, weight_version=trace.weight_version)
        if options.send:
            with BlockingRolloutClient(options.url, api_key=environment_setting("api_key")) as client:
                client.place_experts(placement_as_json(chosen.placement, weight_version=trace.weight_version))
    return 0


def _write(file: Path, placement: ExpertPlacement, *, weight_version: str) -> None:
    try:
        write_placement(file, placement, weight_version=weight_version)
    except OSError as error:
        raise ValueError(f"--out {file}: {error.strerror}") from error


def place_from_rows(directory: Path, *, url: str, batch: int) -> int:
    """Plan from the last weight version's rows of a job, and move the experts of a server there while it answers.

    Experts of all replicas go to the same placement. Returns its version. Raises ValueError without rows, and the
    client's errors.
    """
    trace = trace_of(load(directory, columns=COLUMNS), max_rows=MAX_ROWS)
    with BlockingRolloutClient(url, api_key=environment_setting("api_key")) as client:
        today = placement_in(client.expert_placement())
        _check_sizes(today, trace)
        group = ServedGroup(today.ep_size, today.num_redundant, batch)
        planned = plan_from_rows(trace.rows, group, num_experts=trace.num_experts, today=today)
        answer = client.place_experts(placement_as_json(planned, weight_version=trace.weight_version))
    return int(answer["version"])


def trace_of(rollouts: Rollouts, *, version: str = LAST, max_rows: int = 1 << 62) -> Trace:
    """Return the rows that were computed under a weight version, `any`, or `last`: that of the last sample.

    Rows of the same position in different samples are neighbours, as in the steps of a server. If there are more than
    `max_rows`, blocks at even distances are taken. Raises ValueError without such rows.
    """
    if not len(rollouts):
        raise ValueError("the shards have no samples")
    version = rollouts.weight_version[-1] if version == LAST else version
    kept, places, num_experts, layer_ids = [], [], set(), set()
    experts, layers = (rollouts.table[name].to_pylist() for name in ("num_experts", "layer_ids"))
    for sample, rows in enumerate(rollouts.routing):
        if rows is None:
            continue
        is_used = _used_rows(rollouts, sample, len(rows), version=version)
        if not is_used.any():
            continue
        kept.append(rows[is_used])
        places.append(np.flatnonzero(is_used))
        num_experts.add(experts[sample])
        layer_ids.add(tuple(layers[sample]))
    if not kept:
        raise ValueError(f"the shards have no rows of routing of weight version {version}")
    if len(num_experts) > 1 or len(layer_ids) > 1:
        raise ValueError("the shards have samples of different models")
    order = np.argsort(np.concatenate(places), kind="stable")
    order = _blocks(order, max_rows)
    return Trace(np.concatenate(kept)[order], num_experts.pop(), layer_ids.pop(), version, sum(map(len, places)))


def _used_rows(rollouts: Rollouts, sample: int, num_rows: int, *, version: str) -> np.ndarray:
    """Return the rows of a sample that are known and of a version, bool [rows]."""
    is_used = np.ones(num_rows, np.bool_)
    if version != ANY:
        is_used[:] = False
        for first, last, label in rollouts.routing_versions[sample]:
            is_used[first:last] |= label == version
    for first, last in rollouts.routing_missing[sample]:
        is_used[first:last] = False
    return is_used


def _blocks(order: np.ndarray, max_rows: int) -> np.ndarray:
    """Return at most `max_rows` of `order`, in blocks at even distances."""
    if len(order) <= max_rows:
        return order
    num_blocks = max(1, max_rows // BLOCK)
    size = min(BLOCK, max_rows)
    begins = np.linspace(0, len(order) - size, num_blocks).astype(int)
    return np.concatenate([order[begin : begin + size] for begin in begins])


def costs(
    trace: Trace,
    today: ExpertPlacement,
    *,
    redundant: Sequence[int],
    batches: Sequence[int],
    num_slices: int = 1,
    rates: CostRates,
) -> Iterator[Costed]:
    """Yield what today's placement costs, and those planned from counts and from rows, for every size and batch."""
    load = loads_of(trace.rows, trace.num_experts)
    ep_size = today.ep_size

    def costed(name: str, placement: ExpertPlacement, *, batch: int) -> Costed:
        traffic = traffic_of(placement, trace.rows, batch=batch, num_slices=num_slices)
        return Costed(
            name,
            batch,
            placement,
            traffic.loads,
            lower_bound(load.astype(np.float64), ep_size=ep_size, num_redundant=placement.num_redundant),
            traffic.distinct_ranks,
            traffic.remote_ranks,
            traffic.rows_out,
            traffic.far_rows,
            traffic.seconds(rates, batch=batch, num_ranks=ep_size),
        )

    for batch in batches:
        yield costed(TODAY, today, batch=batch)
    for number in redundant:
        by_counts = plan(load, ep_size=ep_size, num_redundant=number)
        for batch in batches:
            group = ServedGroup(ep_size, number, batch, num_slices)
            by_rows = plan_from_rows(trace.rows, group, num_experts=trace.num_experts, rates=rates, today=today)
            yield costed(COUNTS, by_counts, batch=batch)
            yield costed(ROWS, by_rows, batch=batch)


def _today(options: argparse.Namespace, trace: Trace) -> ExpertPlacement:
    """Return today's placement: of a file, of a server, or experts in their own order."""
    if options.today:
        today = read_placement(options.today)
    elif options.url:
        with BlockingRolloutClient(options.url, api_key=environment_setting("api_key")) as client:
            today = placement_in(client.expert_placement())
    else:
        redundant = -trace.num_experts % options.ranks
        return identity_placement(
            len(trace.layer_ids), trace.num_experts, ep_size=options.ranks, num_redundant=redundant
        )
    _check_sizes(today, trace)
    if options.ranks not in (0, today.ep_size):
        raise PlacementError(f"today's placement has {today.ep_size} ranks, not {options.ranks}")
    return today


def _check_sizes(today: ExpertPlacement, trace: Trace) -> None:
    """Raise PlacementError if the rows are of another model than today's placement."""
    if (today.num_layers, today.num_experts) != (len(trace.layer_ids), trace.num_experts):
        raise PlacementError(
            f"today's placement has {today.num_layers} layers of {today.num_experts} experts, "
            f"the rows {len(trace.layer_ids)} of {trace.num_experts}"
        )


def _redundant(options: argparse.Namespace, today: ExpertPlacement) -> list[int]:
    """Return the numbers of redundant slots to plan for, as they fit the ranks; the first is for the file."""
    if not options.redundant and (options.out or options.send):
        return [today.num_redundant]
    wanted = numbers_in(options.redundant or DEFAULT_REDUNDANT, "--redundant", least=0)
    fitting: list[int] = []
    for number in wanted:
        try:
            lowered = lowered_redundancy(today.num_experts, ep_size=today.ep_size, wanted=number)
        except PlacementError:
            if options.redundant:
                raise
            continue
        if lowered not in fitting:
            fitting.append(lowered)
    return fitting or [today.num_redundant]


def print_table(found: Sequence[Costed], trace: Trace) -> None:
    """Print a line per placement and batch, means over layers, then the hottest rank of each layer."""
    out = sys.stdout.write
    out(
        f"{len(trace.rows)} of {trace.num_rows} rows of weight version {trace.weight_version}, "
        f"{len(trace.layer_ids)} layers of {trace.num_experts} experts; times are estimates\n"
    )
    out(" ".join(f"{name:{form}}" for name, form in HEADINGS) + "\n")
    for one in found:
        cells = (
            one.name, one.placement.num_slots, one.batch, f"{one.imbalance.mean():.3f}",
            f"{(one.loads.max(axis=1) / one.bound).mean():.3f}", f"{one.imbalance.max():.3f}",
            f"{one.distinct_ranks.mean():.2f}", f"{one.rows_out.mean():.2f}", f"{one.far_rows.mean():.2f}",
            f"{1e6 * one.seconds.mean():.1f}",
        )  # fmt: skip
        out(" ".join(f"{cell:{form}}" for cell, (_, form) in zip(cells, HEADINGS, strict=True)) + "\n")
    today, planned = found[0], next(one for one in found if one.name == ROWS)
    out(f"\nhottest rank by layer, {planned.placement.num_slots} slots, batch {planned.batch}:\n")
    for layer, layer_id in enumerate(trace.layer_ids):
        parts = [
            f"rank {one.loads[layer].argmax()} at {one.imbalance[layer]:.3f}, {one.distinct_ranks[layer]:.2f} ranks"
            for one in (today, planned)
        ]
        out(f"layer {layer_id}: {parts[0]} -> {parts[1]}\n")


def print_json(found: Sequence[Costed], trace: Trace) -> None:
    """Print every layer and rank of all placements."""
    placements = [
        {
            "name": one.name,
            "batch": one.batch,
            "num_slots": one.placement.num_slots,
            "rank_rows": one.loads.tolist(),
            "bound": one.bound.tolist(),
            "distinct_ranks": one.distinct_ranks.tolist(),
            "remote_ranks": one.remote_ranks.tolist(),
            "rows_out": one.rows_out.tolist(),
            "far_rows": one.far_rows.tolist(),
            "seconds": one.seconds.tolist(),
        }
        for one in found
    ]
    content: dict[str, Any] = {"weight_version": trace.weight_version, "layer_ids": list(trace.layer_ids)}
    sys.stdout.write(json.dumps({**content, "rows": len(trace.rows), "placements": placements}) + "\n")
