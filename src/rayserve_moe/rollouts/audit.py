"""`rayserve-moe audit`: send samples of a rollout to `/audit`, and report and chart the verdicts."""

from __future__ import annotations

import argparse
import html
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe.config.load import environment_setting
from rayserve_moe.replay.audit import PASSING, worst
from rayserve_moe.replay.encoding import DIALECTS, encode_gates, encode_index
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.alignment import served_layout
from rayserve_moe.rollouts.answers import Faulty, Unavailable, Unusable
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.records import Rollouts, decisions_of, index_layout_of, load

_CHANGES_LOGPROBS = {
    "temperature": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "custom_params": None,
}
"""Sampling parameters with the value under which log-probs of samples are the model's own."""
_MAX_LINES = 20
"""Failing samples that are printed."""
_NUM_BINS = 40
_CELL = (18, 14)
"""Width and height of a cell."""
_LEFT, _TOP = 60, 60
_STYLE = "font-family:system-ui,sans-serif;font-size:12px"
_LIGHT, _DARK = np.array([247, 247, 247]), np.array([178, 24, 43])


def run(options: argparse.Namespace) -> int:
    """Audit the samples, print and write the reports; return 0 if all pass and 1 otherwise.

    Raises: ValueError for shards and servers that do not fit together, and without an answer of the server.
    """
    try:
        return _run(options)
    except (Unavailable, Faulty, Unusable) as error:
        raise ValueError(f"{options.server}: {error}") from error


def _run(options: argparse.Namespace) -> int:
    rollouts = load(options.shards)
    chosen = _chosen(rollouts, version=options.weight_version, max_samples=options.max_samples)
    with_logprobs = not options.no_logprobs and _samples_at_temperature_1(options.shards)
    entries: list[dict[str, Any]] = []
    started = time.perf_counter()
    with BlockingRolloutClient(options.server, api_key=environment_setting("api_key")) as client:
        layout = _layout_of(client.model_info(), rollouts)
        for first in range(0, len(chosen), options.batch):
            batch = chosen[first : first + options.batch]
            samples = [
                sample_body(rollouts, sample, layout=layout, with_logprobs=with_logprobs, with_gates=options.gates)
                for sample in batch
            ]
            report = client.audit(
                samples, tie_tolerance=options.tie_tolerance, logprob_tolerance=options.logprob_tolerance
            )
            names = ({"prompt_id": rollouts.prompt_id[s], "sample_index": int(rollouts.sample_index[s])} for s in batch)
            entries += [name | entry for name, entry in zip(names, report["samples"], strict=True)]
    seconds = time.perf_counter() - started
    verdicts = [entry["verdict"] for entry in entries]
    summary = {
        "verdict": worst(verdicts),
        "verdicts": {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)},
        "weight_version": report["weight_version"],
        "moe_layer_ids": list(layout.layer_ids),
        "logprobs_audited": with_logprobs,
        "num_tokens": sum(entry["num_tokens"] for entry in entries),
        "seconds": round(seconds, 3),
    }
    _print(summary, entries)
    if options.out:
        _write(options.out, json.dumps(summary | {"samples": entries}, indent=1) + "\n", option="--out")
    if options.plot:
        _write(options.plot, chart(entries, layer_ids=layout.layer_ids, verdicts=summary["verdicts"]), option="--plot")
    return 0 if summary["verdict"] in PASSING else 1


def sample_body(
    rollouts: Rollouts, sample: int, *, layout: RoutingLayout, with_logprobs: bool, with_gates: bool = False
) -> dict[str, Any]:
    """Return a sample as an entry of `samples` of `/audit`.

    Raises: ValueError for a sample without rows, without requested gates, with missing ones, or of several weight
        versions.
    """
    routing = rollouts.routed_experts(sample)
    name = f"sample {rollouts.sample_index[sample]} of {rollouts.prompt_id[sample]}"
    if routing is None or routing.missing:
        raise ValueError(f"{name}: {'rows are missing' if routing else 'no routing'}, so it cannot be audited")
    labels = rollouts.table["logprob_weight_version"][sample].as_py()
    versions = {each["label"] for each in labels} | {label for _, _, label in routing.weight_version}
    if len(versions) > 1:
        raise ValueError(f"{name}: sampled by several weight versions, {sorted(versions)}")
    prompt, outputs = rollouts.prompt_ids[sample], rollouts.output_ids[sample]
    body = {
        "input_ids": [*prompt.tolist(), *outputs.tolist()],
        "prompt_len": len(prompt),
        "forced_routed_experts": DIALECTS["packed"].encode(routing, layout),
        "weight_version": next(iter(versions), rollouts.weight_version[sample]),
    }
    if with_logprobs:
        body["logprobs"] = rollouts.logprobs[sample].tolist()
    if (mask := decisions_of(rollouts, sample).sampling_mask) is not None:
        body["sampling_mask"] = mask.tolist()
    if with_gates:
        if (gates := encode_gates(routing)) is None:
            raise ValueError(f"{name}: gates are missing, so they cannot be forced")
        body["forced_router_gates"] = gates
    if routing.index is not None:
        body["forced_indexer_topk"] = _index_of(rollouts, sample, routing)
    return body


def _index_of(rollouts: Rollouts, sample: int, routing: RoutedExperts) -> Any:
    layout = index_layout_of(rollouts, sample)
    assert layout is not None, "index rows have a layout"
    return encode_index(routing, layout, form="packed")[0]


def _chosen(rollouts: Rollouts, *, version: str, max_samples: int) -> list[int]:
    """Return the samples to audit, evenly spaced if there are more than `max_samples`."""
    found = [i for i, own in enumerate(rollouts.weight_version) if version in ("", own)]
    if not found:
        versions = sorted(set(rollouts.weight_version))
        raise ValueError(f"no samples of weight version {version!r}: the shards have {versions}")
    if not max_samples or len(found) <= max_samples:
        return found
    return [found[int(place)] for place in np.linspace(0, len(found) - 1, max_samples)]


def _samples_at_temperature_1(shards: Path) -> bool:
    """Return False if the job's parameters change log-probs, so that they are not the model's own."""
    file = shards / "job.json"
    if not file.is_file():
        return True
    sampling = json.loads(file.read_bytes()).get("sampling", {})
    return all(sampling.get(name) in (None, {}, value) for name, value in _CHANGES_LOGPROBS.items())


def _layout_of(info: Mapping[str, Any], rollouts: Rollouts) -> RoutingLayout:
    """Return the server's layout of rows. Raises: ValueError if the shards have another."""
    layout = served_layout(info)
    layers = {tuple(each) for each in rollouts.table["layer_ids"].to_pylist() if each is not None}
    experts = set(rollouts.table["num_experts"].to_pylist()) - {None}
    if not layers:
        raise ValueError("the shards have no rows of routing")
    if layers != {layout.layer_ids} or experts != {layout.num_experts}:
        raise ValueError("the shards have other layers or experts than the served model")
    return layout


def _print(summary: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    rate = 1000 * summary["seconds"] / max(1, summary["num_tokens"])
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary["verdicts"].items())
    logprobs = "audited" if summary["logprobs_audited"] else "left out: not at temperature 1"
    lines = [
        f"{len(entries)} samples of weight version {summary['weight_version']}: {counts}",
        f"{summary['num_tokens']} tokens, {rate:.2f} s per 1,000; log-probs {logprobs}",
        *_failing_lines(entries),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _failing_lines(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    failing = [entry for entry in entries if entry["verdict"] not in PASSING]
    for entry in failing[:_MAX_LINES]:
        yield f"{entry['prompt_id']} sample {entry['sample_index']}: {entry['verdict']}{_place(entry)}"
    if len(failing) > _MAX_LINES:
        yield f"and {len(failing) - _MAX_LINES} more"


def _place(entry: Mapping[str, Any]) -> str:
    if (first := entry["first"]) is not None:
        shift = "" if entry["shift"] is None else f", rows of tokens {entry['shift']:+d}"
        margin = "more than any margin" if first["margin"] is None else f"margin {first['margin']:.3g}"
        experts = f"{first['claimed']}, the router's are {first['native']}"
        return f" from token {first['token']}, layer {first['layer']}: {experts}, {margin}{shift}"
    if entry["first_mask"] is not None:
        return f" at token {entry['first_mask']}"
    return f" from token {entry['first_logprob']}, by at most {entry['max_logprob_difference']} nats"


def chart(entries: Sequence[Mapping[str, Any]], *, layer_ids: Sequence[int], verdicts: Mapping[str, int]) -> str:
    """Return an SVG document with a cell per MoE layer and part of the samples, dark where most decisions differ."""
    counts = counts_of(entries, layer_ids=layer_ids)
    width, height = _LEFT + _NUM_BINS * _CELL[0] + 20, _TOP + len(layer_ids) * _CELL[1] + 40
    title = "Differing decisions: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    largest = counts.max(initial=0) or 1
    cells = [
        f'<rect x="{_LEFT + column * _CELL[0]}" y="{_TOP + row * _CELL[1]}" width="{_CELL[0]}" height="{_CELL[1]}" '
        f'fill="{_colour(counts[row, column] / largest)}"><title>layer {layer}: {counts[row, column]}</title></rect>'
        for row, layer in enumerate(layer_ids)
        for column in range(_NUM_BINS)
    ]
    labels = [
        f'<text x="{_LEFT - 8}" y="{_TOP + row * _CELL[1] + 11}" text-anchor="end" fill="#555">{layer}</text>'
        for row, layer in enumerate(layer_ids)
    ]
    bottom = _TOP + len(layer_ids) * _CELL[1] + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{_STYLE}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{_LEFT}" y="28" font-size="15" fill="#111">{html.escape(title)}</text>',
            f'<text x="{_LEFT}" y="{_TOP - 10}" fill="#555">layer by part of the sample; {largest} at most</text>',
            *labels,
            *cells,
            f'<text x="{_LEFT}" y="{bottom}" fill="#555">first token</text>',
            f'<text x="{width - 20}" y="{bottom}" text-anchor="end" fill="#555">last token</text>',
            "</svg>",
            "",
        ]
    )


def counts_of(entries: Sequence[Mapping[str, Any]], *, layer_ids: Sequence[int]) -> np.ndarray:
    """Return the differing decisions that reports list, int [MoE layers, parts of a sample]."""
    counts = np.zeros((len(layer_ids), _NUM_BINS), np.int64)
    row_of = {layer: row for row, layer in enumerate(layer_ids)}
    for entry in entries:
        for token, layer in entry["places"]:
            counts[row_of[layer], token * _NUM_BINS // entry["num_tokens"]] += 1
    return counts


def _colour(share: float) -> str:
    red, green, blue = (_LIGHT + (_DARK - _LIGHT) * share).round().astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _write(file: Path, text: str, *, option: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}") from error
