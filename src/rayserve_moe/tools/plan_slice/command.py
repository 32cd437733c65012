"""The work of `rayserve-moe plan-slice`: estimates of slices and settings for a model, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from rayserve_moe.config.derive import kv_dtype
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.config.settings import CacheSettings, SettingsError
from rayserve_moe.config.topology import possible_slices
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.chips import CHIPS, chip_of
from rayserve_moe.tools.estimate.rates import STEP_SPREAD
from rayserve_moe.tools.plan_slice.candidates import (
    WEIGHTS_DTYPE,
    Candidate,
    Split,
    candidate,
    eplb_headroom,
    splits,
    topologies,
)
from rayserve_moe.tools.plan_slice.made_up import resized, save_config
from rayserve_moe.tools.plan_slice.made_up_options import MIXERS, requested_sizes
from rayserve_moe.tools.plan_slice.options import Assumptions, Traffic, parse_traffic
from rayserve_moe.tools.presets import read_config
from rayserve_moe.tools.served_cases import ServedCase, case_of_config, devices_of, known_model

ESTIMATED = (
    "ESTIMATED, not measured: work at rates that published device times of other kernels support; a step is expected\n"
    f"within {STEP_SPREAD.min_ratio:.2f} to {STEP_SPREAD.max_ratio:.2f} of it. GB per device, ms per step, output "
    "tokens per second of the slice and per chip;\n* is the config, > what to take."
)
HEADINGS = (
    ("slice", "<12"), ("chips", ">5"), ("dp x tp", ">8"), ("rows", ">5"), ("red.", ">4"), ("imb.", ">5"),
    ("weights", ">8"), ("KV", ">6"), ("of GB", ">6"), ("decode", ">7"), ("prefill", ">8"), ("exchange", ">10"),
    ("served", ">6"), ("tok/s", ">8"), ("/chip", ">7"),
)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Print the plan and return 0. Raises ValueError for invalid options."""
    set_environment_defaults(COMPILER_ENVIRONMENT)
    use_host_alone()
    traffic, given = parse_traffic(options.traffic), _assumptions(options)
    case = case_of_config(options.config, topology=options.topology, model=options.model) if options.config else None
    if case is not None and options.prefill_tokens is None:
        given = replace(given, prefill_tokens=case.settings.scheduler.max_step_tokens)
    if case is not None and options.kv_cache_dtype is None:
        given = replace(given, kv_dtype=kv_dtype(case.settings.cache, dtype=WEIGHTS_DTYPE))
    if case is not None and options.expert_dtype is None:
        given = replace(given, expert_dtype=case.settings.experts.weight_dtype)
    spec = spec_from_config(case.model if case else _model_of(options))
    own = candidate(spec, split_of(case), traffic=traffic, given=given) if case else None
    found = {
        name: ranked(spec, slices, traffic=traffic, given=given) for name, slices in _slices(options, given).items()
    }
    if not own and not any(found.values()):
        raise ValueError("the model fits none of the slices: allow more with --max-chips or other --chips")
    if options.json:
        sys.stdout.write(json.dumps(_as_json(own, found, traffic=traffic, given=given), indent=2) + "\n")
    else:
        best = best_of(own, found, traffic=traffic)
        told = [*lines(own, found, top=options.top, best=best, is_of_config=case is not None)]
        if best is not None:
            told += [*facts(spec, best, traffic=traffic, given=given), *advice(best, traffic=traffic, given=given)]
        sys.stdout.write("\n".join(told) + "\n")
    return 0


def _model_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a model, or of one that is made up from its family, and write it if requested."""
    config = read_config(known_model(options.model or MIXERS[options.mixer]))
    sizes = requested_sizes(options)
    if sizes:
        config = resized(config, sizes)
    if options.save_config:
        save_config(config, options.save_config)
    return config


def split_of(case: ServedCase) -> Split:
    """Return the split that a config serves with. Raises ValueError if it spans several slices."""
    parallel = case.settings.parallel
    if parallel.num_slices > 1:
        raise ValueError(f"{case.name} spans {parallel.num_slices} slices; a plan covers a single slice")
    num_devices, dp = len(devices_of(case.topology)), parallel.data_parallel_size
    if num_devices % dp:
        raise ValueError(f"data_parallel_size {dp} does not divide the {num_devices} devices of {case.topology}")
    rows = case.settings.scheduler.max_running_requests
    return Split(case.topology, dp, num_devices // dp, case.settings.experts.num_redundant, rows)


def ranked(spec: ModelSpec, slices: Sequence[str], *, traffic: Traffic, given: Assumptions) -> list[Candidate]:
    """Return the splits that fit: first those that serve all requests at once, then by tokens per second and chip."""
    every = (candidate(spec, split, traffic=traffic, given=given) for name in slices for split in splits(spec, name))
    return sorted(filter(None, every), key=lambda one: (one.served < traffic.concurrency, -one.per_chip))


def lines(
    own: Candidate | None,
    found: dict[str, list[Candidate]],
    *,
    top: int,
    best: Candidate | None = None,
    is_of_config: bool = False,
) -> Iterator[str]:
    """Yield the plan for a terminal: the config or that it does not fit, then a table per generation."""
    yield ESTIMATED
    if own:
        yield from ("", _header(), _row(own, mark="*"))
    elif is_of_config:
        yield "\nThe config does not fit its own slice or does not divide there: compile-check reports which."
    for name, candidates in found.items():
        yield from ("", _header() if candidates else f"{name}: the model fits none of the slices")
        shown = Counter[str]()
        for one in candidates:
            shown[one.split.topology] += 1
            if shown[one.split.topology] <= top or one is best:
                yield _row(one, mark=">" if one is best else " ")


def best_of(own: Candidate | None, found: Mapping[str, Iterable[Candidate]], *, traffic: Traffic) -> Candidate | None:
    """Return the candidate to take, or None if there is none.

    With a config it is of the config's own slice, otherwise of any slice. Those that serve all requests at once come
    first, then those with the most tokens per second and chip.
    """
    every = [one for candidates in found.values() for one in candidates]
    on_slice = [one for one in every if own is None or one.split.topology == own.split.topology]
    return min(on_slice or every, key=lambda one: (one.served < traffic.concurrency, -one.per_chip), default=None)


def facts(spec: ModelSpec, one: Candidate, *, traffic: Traffic, given: Assumptions) -> Iterator[str]:
    """Yield what a request and a device see of a candidate: latency, memory, exchange, and unequal experts."""
    low, high = STEP_SPREAD.min_ratio, STEP_SPREAD.max_ratio
    first_s, token_s = one.first_token_s(traffic), one.token_s
    yield ""
    yield (
        f"A request: first token after {first_s * low * 1e3:,.0f} to {first_s * high * 1e3:,.0f} ms if alone, then "
        f"{token_s * low * 1e3:.1f} to {token_s * high * 1e3:.1f} ms per token with all requests."
    )
    used = one.weights_gb + one.kv_gb
    decode, prefill = (f"{cost.link_s / cost.seconds:.0%}" for cost in (one.decode, one.prefill))
    yield (
        f"Memory: {used:.1f} of {one.capacity_gb:.1f} GB. Exchange: links are busy for {decode} of a decode step, "
        f"{prefill} of a prefill step."
    )
    gain = eplb_headroom(spec, one, traffic=traffic, given=given)
    yield (
        f"Experts: the fullest device has {one.imbalance:.2f} of the mean; without replicas, perfect balance would add "
        f"{gain:.1%} tok/s."
    )


def settings_of(one: Candidate, *, traffic: Traffic, given: Assumptions) -> dict[str, object]:
    """Return the settings that serve a candidate, for `args` of a config or as options of `serve MODEL`."""
    version, _, topology = one.split.topology.partition(":")
    tpu = possible_slices(topology, version)[0]
    settings: dict[str, object] = {
        "tpu_version": tpu.version,
        "tpu_topology": tpu.topology,
        "tpu_chips_per_host": tpu.chips_per_host,
        "num_hosts": tpu.num_hosts,
        "data_parallel_size": one.split.dp,
        "max_model_len": traffic.length,
        "max_running_requests": one.split.rows,
        "max_step_tokens": given.prefill_tokens,
    }
    if one.split.redundant:
        settings |= {"num_redundant_experts": one.split.redundant, "enable_eplb": True}
    if given.kv_dtype != "bfloat16":
        settings["kv_cache_dtype"] = "fp8"
    if given.expert_dtype != "auto":
        settings["expert_dtype"] = given.expert_dtype
    return settings


def advice(one: Candidate, *, traffic: Traffic, given: Assumptions) -> Iterable[str]:
    """Yield the lines after the tables: which row, why, and its settings to paste."""
    serves_all = one.served == traffic.concurrency
    how_many = "all requests" if serves_all else f"{one.served} of {traffic.concurrency} requests"
    settings = settings_of(one, traffic=traffic, given=given)
    yield ""
    yield f"Take the row with >: {how_many} at once, and the most tokens per second and chip. Under `args`:"
    yield ""
    yield from (f"    {name}: {str(value).lower() if value is True else value}" for name, value in settings.items())


def _header() -> str:
    return "  " + " ".join(f"{name:{width}}" for name, width in HEADINGS)


def _row(one: Candidate, *, mark: str = " ") -> str:
    split = one.split
    cells = (
        split.topology, one.chips, f"{split.dp} x {split.tp}", split.rows, split.redundant, f"{one.imbalance:.2f}",
        f"{one.weights_gb:.1f}", f"{one.kv_gb:.1f}", f"{one.capacity_gb:.1f}", f"{one.decode.seconds * 1e3:.1f}",
        f"{one.prefill.seconds * 1e3:.1f}", one.decode.backend, one.served, f"{one.tokens_per_s:,.0f}",
        f"{one.per_chip:,.0f}",
    )  # fmt: skip
    return f"{mark} " + " ".join(f"{cell:{width}}" for cell, (_, width) in zip(cells, HEADINGS, strict=True))


def _slices(options: argparse.Namespace, given: Assumptions) -> dict[str, list[str]]:
    """Return the considered slices by generation. Raises ValueError for an unknown slice."""
    if options.topology:
        chip_of(options.topology)
        devices_of(options.topology)
        return {options.topology: [options.topology]}
    try:
        return {name: list(topologies(name, max_chips=given.max_chips)) for name in options.chips.split(",")}
    except SettingsError as error:
        raise ValueError(f"--chips: known chips: {', '.join(CHIPS)}; {error}") from error


def _assumptions(options: argparse.Namespace) -> Assumptions:
    prefill_tokens = options.prefill_tokens or 1024
    for name, value in (("prefill-tokens", prefill_tokens), ("max-chips", options.max_chips), ("skew", options.skew)):
        if not (value > 0 or (name == "skew" and value == 0)):
            raise ValueError(f"--{name} {value} is not positive")
    cache = CacheSettings(kv_dtype=options.kv_cache_dtype or "auto")
    pages = kv_dtype(cache, dtype=WEIGHTS_DTYPE)
    return Assumptions(
        prefill_tokens,
        kv_dtype=pages,
        expert_dtype=options.expert_dtype or "auto",
        skew=options.skew,
        max_chips=options.max_chips,
    )


def _as_json(
    own: Candidate | None, found: dict[str, list[Candidate]], *, traffic: Traffic, given: Assumptions
) -> dict[str, Any]:
    named = {name: [_flat(one) for one in candidates] for name, candidates in found.items()}
    return {
        "estimated": True,
        "traffic": asdict(traffic),
        "assumptions": asdict(given),
        "config": _flat(own) if own else None,
        "candidates": named,
    }


def _flat(one: Candidate) -> dict[str, Any]:
    seconds = {f"{name}_s": getattr(one, name).seconds for name in ("decode", "prefill")}
    seconds |= {f"{name}_at_peak_s": getattr(one, name).peak_seconds for name in ("decode", "prefill")}
    plain = {each.name: getattr(one, each.name) for each in fields(one)}
    steps = {name: asdict(getattr(one, name)) for name in ("decode", "prefill")}
    return plain | {"split": asdict(one.split)} | steps | seconds | {"tokens_per_s_and_chip": one.per_chip}
