"""The estimate against published device times: constants are those of the fit, and points held out are near."""

from __future__ import annotations

import json
import statistics
from dataclasses import fields, replace

import pytest

from benchmarks.calibration import (
    FITTED,
    KEY,
    RESULTS,
    calibration,
    errors,
    estimated_us,
    fitted,
    kind_of,
    rates_of,
    ratios,
)
from benchmarks.calibration_points import POINTS
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.rates import AT_PEAK, PROMPT_ATTENTION, SPREADS, STRIDED_ATTENTION, calibrated

READINGS = json.loads(RESULTS.read_text(encoding="utf-8"))[KEY]
HELD_OUT = [point for point in POINTS if not point.is_fitted]
MAX_MEDIAN_ERROR = 0.15


def test_points_are_of_three_chips_and_most_are_held_out():
    assert len(POINTS) >= 12 and {point.chip for point in POINTS} == {"v5e", "v6e", "tpu7x"}
    assert len(HELD_OUT) > len(POINTS) / 2
    assert all(point.compiled in READINGS for point in POINTS if point.compiled)


def test_points_held_out_are_within_15_percent_and_nearer_than_at_peak():
    before, after = errors(HELD_OUT, READINGS, at_peak=True), errors(HELD_OUT, READINGS)
    assert statistics.median(after) < MAX_MEDIAN_ERROR < statistics.median(before)


def test_constants_are_those_of_the_fit():
    found, known = fitted(POINTS, READINGS), calibrated(CHIPS["v6e"])
    assert {name: getattr(found, name) for name in FITTED} == pytest.approx(
        {name: getattr(known, name) for name in FITTED}
    )


def test_spreads_are_those_of_the_points():
    by_kind = {kind: [point for point in POINTS if kind_of(point, READINGS) == kind] for kind in SPREADS}
    for kind, points in by_kind.items():
        found, spread = ratios(points, READINGS), SPREADS[kind]
        assert spread.min_ratio == pytest.approx(min(found), abs=0.01), kind
        if kind != PROMPT_ATTENTION:
            assert spread.max_ratio == pytest.approx(max(found), abs=0.01), kind
    stalls = calibrated(CHIPS["v6e"])
    strided = stalls.strided_stall / stalls.prompt_stall
    assert SPREADS[PROMPT_ATTENTION].max_ratio == pytest.approx(strided, abs=0.01), "as if heads were interleaved"
    assert by_kind[STRIDED_ATTENTION]


@pytest.mark.parametrize("name", FITTED)
def test_a_wrong_constant_is_found(name):
    """With a constant off by a half, the fit gives another one, and its points are estimated worse."""
    known = calibrated(CHIPS["v6e"])
    wrong = replace(known, **{name: getattr(known, name) * 1.5})
    kind, _ = FITTED[name]
    points = [point for point in POINTS if point.is_fitted and kind_of(point, READINGS) == kind]

    def error(rates) -> float:
        return sum(abs(estimated_us(one, READINGS, rates=rates) / one.published_us - 1) for one in points)

    assert error(wrong) > error(known)


def test_a_planted_error_of_the_formula_is_found():
    """Without the latency of copies, the estimate of small blocks is as wrong as it is at peak."""
    small = [point for point in HELD_OUT if point.kernel == "blocked product, 128 x 128 x 128"]
    without = [
        estimated_us(one, READINGS, rates=replace(rates_of(one), wait_s=0.0)) / one.published_us for one in small
    ]
    assert small and all(ratio < 0.5 for ratio in without)
    assert all(error < MAX_MEDIAN_ERROR for error in errors(small, READINGS))


def test_at_peak_nothing_waits():
    assert all(getattr(AT_PEAK, field.name) in (0.0, 1.0, False, 1.2e-6) for field in fields(AT_PEAK))


def test_kernels_without_a_reading_are_left_out_of_the_table():
    few = {name: reading for name, reading in READINGS.items() if not name.startswith("gmm_v2")}
    assert "gmm_v2" in calibration(READINGS) and "gmm_v2" not in calibration(few)
