"""The estimate against published device times: constants are those of the fit, and points held out are near."""

from __future__ import annotations

import json
import statistics
import subprocess
from dataclasses import fields, replace

import pytest

from benchmarks.calibration import (
    FITTED,
    KEY,
    RESULTS,
    calibration,
    compiled,
    errors,
    estimated_us,
    fitted,
    kind_of,
    rates_of,
    ratios,
)
from benchmarks.calibration_kernels import NoWheelError, unpacked
from benchmarks.calibration_points import POINTS
from benchmarks.estimate_table import STEP_RATIOS
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.rates import (
    AT_PEAK,
    CONSTANTS,
    PROMPT_ATTENTION,
    SPREADS,
    STEP_SPREAD,
    STRIDED_ATTENTION,
    calibrated,
)

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


def test_every_constant_names_its_source_and_is_used():
    known = {constant.name: constant for constant in CONSTANTS}
    assert all(constant.source for constant in CONSTANTS)
    for chip in CHIPS.values():
        rates = calibrated(chip)
        micro = {"wait_us": rates.wait_s * 1e6, "collective_us": rates.collective_s * 1e6}
        used = {name: micro.get(name, getattr(rates, name, None)) for name in known}
        assert used == pytest.approx({name: constant.value for name, constant in known.items()})


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


STEPS = json.loads((RESULTS.parent / "step_estimate.json").read_text(encoding="utf-8"))["step_estimate"]


@pytest.mark.parametrize("name", STEPS)
def test_ranges_of_compiled_steps_are_those_of_whole_steps(name):
    """Ranges of steps that were not compiled, and of those with a time at peak alone, hold for compiled steps."""
    step = STEPS[name]["step"]
    assert step["min_seconds"] >= step["seconds"] * STEP_SPREAD.min_ratio
    assert step["max_seconds"] <= step["seconds"] * STEP_SPREAD.max_ratio
    if "decode" in name:
        low, high = STEP_RATIOS
        assert step["peak_seconds"] * low <= step["min_seconds"] * 1.02
        assert step["max_seconds"] <= step["peak_seconds"] * high


def test_the_calibrated_bound_is_never_exceeded():
    """No step is estimated faster than the hardware allows."""
    assert all(max(found["roofline"].values()) < found["step"]["min_seconds"] for found in STEPS.values())


def test_a_kernel_without_its_wheel_is_skipped_by_name_and_keeps_its_reading(monkeypatch, tmp_path, capsys):
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        is_peer = command[3].startswith("gmm_v2")
        return subprocess.CompletedProcess(command, int(is_peer), '{"bundles": 7.0}', "Traceback\nskipped: no wheel")

    monkeypatch.setattr(subprocess, "run", refuse)
    found = compiled(dict(READINGS), wheels=tmp_path)
    assert found["copy on v6e"] == {"bundles": 7.0}
    assert all(found[name] == READINGS[name] for name in READINGS if name.startswith("gmm_v2"))
    skipped = capsys.readouterr().err.splitlines()
    assert skipped == [f"{name}: skipped: no wheel" for name in READINGS if name.startswith("gmm_v2")]


def test_a_missing_wheel_is_named_with_the_option_that_gets_it(tmp_path):
    with pytest.raises(NoWheelError, match=rf"tpu-inference==[\d.]+ is not in {tmp_path}; --download"):
        unpacked(tmp_path)
