"""The step-time estimate against device times that others have published.

    python -m benchmarks.calibration [--compile] [--wheels DIR [--download]] [--fit]

Prints kernel, chip, shape, published time, and the estimate at the peaks of the specification and as calibrated. The
readings of compiled kernels are kept in a result file; `--compile` makes them anew, each in a process of its own, which
takes seconds. Peers' kernels come from their wheels in `--wheels`, where `--download` puts them; without one, a kernel
is skipped by name and keeps its last reading. `--fit` prints the constants that fit the points marked for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration_kernels import download
from benchmarks.calibration_points import POINTS, Point
from benchmarks.markdown import markdown_table
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.program_ops import Op
from rayserve_moe.tools.estimate.rates import (
    AT_PEAK,
    ATTENTION,
    COLLECTIVE,
    CONSTANTS,
    COPY,
    KERNEL,
    PRODUCT,
    PROMPT_ATTENTION,
    STRIDED_ATTENTION,
    Rates,
    calibrated,
)
from rayserve_moe.tools.estimate.step_time import OpPrice

RESULTS = Path(__file__).parent / "results" / "calibration.json"
KEY = "calibration"
WHEELS = Path.home() / ".cache" / "rayserve_moe" / "peer-wheels"

Readings = Mapping[str, Mapping[str, float]]
"""Bundles, waits and copies of compiled kernels, by kernel (`bundles.Spent`)."""


def op_of(point: Point, readings: Readings, *, at_peak: bool = False) -> Op:
    """Return a published run as an op of a program. Raises KeyError if its kernel has no reading.

    `at_peak` bounds collectives by the narrowest cut alone.
    """
    found = readings[point.compiled] if point.compiled else {}
    scale, chip = point.scale, CHIPS[point.chip]
    link_s = point.received_bytes / point.links / chip.link_bytes if point.links else 0.0
    is_kernel = not point.compiled or not point.compiled.startswith(("copy", "product"))
    return Op(
        point.kernel,
        "",
        "",
        bundles=point.core_us * 1e-6 * chip.clock_hz or found.get("bundles", 0.0) * scale,
        hbm_bytes=point.hbm_bytes or (found.get("hbm_bytes") or 0.0) * scale,
        link_s=link_s * (point.cut_share if at_peak else 1.0),
        kind=point.kind,
        lead_bundles=found.get("lead_bundles", 0.0) if is_kernel else 0.0,
        num_waits=found.get("num_waits", 0.0) if is_kernel else 0.0,
        visits=point.visits or found.get("visits", 1.0) * scale,
        matrix_ops=point.matrix_ops or found.get("matrix_ops", 0.0) * scale,
        num_peers=4 if point.kind == COLLECTIVE else 1,
    )


def estimated_us(point: Point, readings: Readings, *, rates: Rates) -> float:
    """Return the estimate of a published run."""
    price = OpPrice(op_of(point, readings, at_peak=rates == AT_PEAK), CHIPS[point.chip], rates)
    return 1e6 * (price.seconds + price.overhead_s)


def rates_of(point: Point) -> Rates:
    """Return the calibrated rates of a point's chip."""
    return calibrated(CHIPS[point.chip])


def kind_of(point: Point, readings: Readings) -> str:
    """Return the kind of a point; a product is what matrix units bound."""
    return OpPrice(op_of(point, readings), CHIPS[point.chip], rates_of(point)).kind


def ratios(points: Sequence[Point], readings: Readings) -> list[float]:
    """Return published time / calibrated estimate of each point."""
    return [point.published_us / estimated_us(point, readings, rates=rates_of(point)) for point in points]


def errors(points: Sequence[Point], readings: Readings, *, at_peak: bool = False) -> list[float]:
    """Return |estimate / published time - 1| of each point."""
    return [
        abs(estimated_us(point, readings, rates=AT_PEAK if at_peak else rates_of(point)) / point.published_us - 1)
        for point in points
    ]


FITTED = {
    "hbm_share": (COPY, np.arange(0.80, 0.95, 0.01)),
    "matrix_share": (PRODUCT, np.arange(0.80, 1.0, 0.01)),
    "wait_s": (KERNEL, np.arange(0.0, 1.01e-6, 0.05e-6)),
    "exposed_share": (ATTENTION, np.arange(0.0, 1.01, 0.05)),
    "prompt_stall": (PROMPT_ATTENTION, np.arange(1.0, 2.5, 0.05)),
    "strided_stall": (STRIDED_ATTENTION, np.arange(1.0, 2.5, 0.05)),
    "collective_s": (COLLECTIVE, np.arange(1e-6, 30e-6, 1e-6)),
}
"""Fields of `Rates`, the kind of points that each is fitted to, and its grid; earlier fields hold for later ones."""


def fitted(points: Sequence[Point], readings: Readings) -> Rates:
    """Return the rates with the least squares of log(estimate / published) over the points of the fit."""
    best = rates_of(points[0])
    for name, (kind, grid) in FITTED.items():
        some = [point for point in points if point.is_fitted and kind_of(point, readings) == kind]

        def loss(rates: Rates, some: Sequence[Point] = some) -> float:
            logs = (np.log(estimated_us(one, readings, rates=rates) / one.published_us) for one in some)
            return sum(log**2 for log in logs)

        best = min((replace(best, **{name: float(value)}) for value in grid), key=loss)
    return best


def calibration(readings: Readings) -> str:
    """Return the tables: every point, the spread of each kind, errors before and after, and the constants."""
    known = [point for point in POINTS if not point.compiled or point.compiled in readings]
    rows = [list(_row(point, readings)) for point in known]
    heading = [
        "kernel",
        "chip",
        "shape",
        "published, us",
        "at peak, us",
        "ratio",
        "calibrated, us",
        "ratio",
        "used for",
    ]
    parts = [markdown_table(heading, rows), markdown_table(_SPREAD_HEADING, list(_spreads(known, readings)))]
    parts.append(markdown_table(_ERROR_HEADING, list(_errors(known, readings))))
    constants = [[constant.name, f"{constant.value:g}", constant.unit, constant.source] for constant in CONSTANTS]
    return "\n\n".join([*parts, markdown_table(["constant", "value", "unit", "published by"], constants)])


def _row(point: Point, readings: Readings) -> Iterator[str]:
    yield from (point.kernel, point.chip, point.shape, f"{point.published_us:,.1f}")
    for rates in (AT_PEAK, rates_of(point)):
        estimate = estimated_us(point, readings, rates=rates)
        yield from (f"{estimate:,.1f}", f"{estimate / point.published_us:.2f}")
    yield "fit" if point.is_fitted else "test"


_SPREAD_HEADING = ["kind", "points", "published / calibrated, minimum", "median", "maximum"]
_ERROR_HEADING = ["points", "number", "median error at peak", "median error calibrated", "largest error calibrated"]


def _spreads(points: Sequence[Point], readings: Readings) -> Iterator[list[str]]:
    kinds = [kind_of(point, readings) for point in points]
    for kind in dict.fromkeys(kinds):
        found = ratios([point for point, its in zip(points, kinds, strict=True) if its == kind], readings)
        yield [kind, str(len(found)), *(f"{of(found):.2f}" for of in (min, statistics.median, max))]


def _errors(points: Sequence[Point], readings: Readings) -> Iterator[list[str]]:
    in_fit = {(point.kernel, point.chip) for point in points if point.is_fitted}
    groups = {
        "of the fit": [point for point in points if point.is_fitted],
        "held out": [point for point in points if not point.is_fitted],
        "of these, of kernels without a point in the fit": [
            point for point in points if (point.kernel, point.chip) not in in_fit
        ],
    }
    for name, some in groups.items():
        before, after = errors(some, readings, at_peak=True), errors(some, readings)
        shown = (statistics.median(before), statistics.median(after), max(after))
        yield [name, str(len(some)), *(f"{value:.0%}" for value in shown)]


def compiled(known: dict[str, Any], *, wheels: Path) -> dict[str, Any]:
    """Return the readings made anew; a kernel that does not compile keeps its last reading, and is named."""
    for name in dict.fromkeys(point.compiled for point in POINTS if point.compiled):
        with tempfile.TemporaryDirectory() as dump:
            command = [sys.executable, "-m", "benchmarks.calibration_kernels", name, dump, str(wheels)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(f"{name}: {(done.stderr.strip() or 'no reading').splitlines()[-1]}\n")
        else:
            known[name] = json.loads(done.stdout)
    return known


def main() -> None:
    """Read the kernels if asked to, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="read the schedules of all kernels anew")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of peers' wheels")
    parser.add_argument("--download", action="store_true", help="download the peers' wheels first")
    parser.add_argument("--fit", action="store_true", help="print the constants that fit")
    arguments = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8"))[KEY] if RESULTS.exists() else {}
    if arguments.download:
        arguments.wheels.mkdir(parents=True, exist_ok=True)
        download(arguments.wheels)
    if arguments.compile:
        known = compiled(known, wheels=arguments.wheels)
        RESULTS.write_text(json.dumps({KEY: known}, indent=1) + "\n", encoding="utf-8")
    print(calibration(known))
    if arguments.fit:
        print(fitted([point for point in POINTS if not point.compiled or point.compiled in known], known))


if __name__ == "__main__":
    main()
