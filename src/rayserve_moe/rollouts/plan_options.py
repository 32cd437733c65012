"""Command line of `rayserve-moe plan-experts`, checked before the shards are read."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from rayserve_moe.balancing.placement import MAX_REDUNDANT
from rayserve_moe.balancing.traffic import CostRates

DEFAULT_BATCHES, DEFAULT_REDUNDANT = "8,32,128,1024", "0,16,32,64,128"
LAST, ANY = "last", "any"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("shards", type=Path, help="directory of a rollout job, or a single shard, with routing")
    add("--weight-version", default=LAST, help="rows of these weights, `any`, or `last`: of the last sample (default)")
    add("--today", type=Path, help="placement file of today (default: experts in their own order)")
    add("--url", default="", help="a running server whose placement is today's; its key in RAYSERVE_MOE_API_KEY")
    add("--ranks", type=int, default=0, help="devices that experts are divided over (default: as today)")
    add("--slices", type=int, default=1, help="slices that the devices are divided over")
    add("--redundant", default="", help=f"slots beyond the experts (default: {DEFAULT_REDUNDANT}, with --out as today)")
    add("--batch", default=DEFAULT_BATCHES, help="tokens of a step over all devices; --out is for the first")
    add("--max-rows", type=int, default=16384, help="rows of routing that are used, from all samples")
    add("--rates", default="", help="microseconds per slot read, row, row over ICI, row over DCN (default: v6e)")
    add("--out", type=Path, help="placement file to write, for `expert_placement` or --send")
    add("--send", action="store_true", help="have the server of --url move its experts there")
    add("--json", action="store_true", help="print every layer and rank as JSON")


def run(options: argparse.Namespace) -> int:
    """Check the arguments, then plan; return 0.

    Raises: ValueError for wrong use.
    """
    numbers_in(options.batch, "--batch", least=1)
    if options.redundant:
        numbers_in(options.redundant, "--redundant", least=0, most=MAX_REDUNDANT)
    rates_in(options.rates)
    if options.today and options.url:
        raise ValueError("give --today or --url, not both")
    if options.send and not options.url:
        raise ValueError("--send needs --url")
    if not (options.ranks > 0 or options.today or options.url):
        raise ValueError("give --ranks, or today's placement by --today or --url")
    if options.slices < 1 or options.max_rows < 1:
        raise ValueError("--slices and --max-rows must be greater than 0")
    return importlib.import_module("rayserve_moe.rollouts.plan_experts").run(options)


def numbers_in(text: str, option: str, *, least: int, most: int | None = None) -> list[int]:
    """Return comma-separated whole numbers. Raises ValueError, with the option, for others."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text}: not whole numbers separated by commas") from error
    if min(numbers) < least or (most is not None and max(numbers) > most):
        raise ValueError(f"{option} {text}: not in {least}..{'' if most is None else most}")
    return numbers


def rates_in(text: str) -> CostRates:
    """Return the rates of an option in microseconds; the default rates if it is empty. Raises ValueError."""
    if not text:
        return CostRates()
    try:
        slot, row, ici, dcn = (float(part) / 1e6 for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--rates {text}: not four numbers separated by commas") from error
    if min(slot, row, ici, dcn) < 0:
        raise ValueError(f"--rates {text}: a rate is negative")
    return CostRates(slot, row, ici, dcn)
