"""Every metric is declared once, stands in one group of its page, and has a short help text."""

from __future__ import annotations

import pytest

from rayserve_moe.observability import metric_texts
from rayserve_moe.observability.metric_texts import METRICS, MetricText
from rayserve_moe.serving import metrics
from tests.architecture import metrics_page

MAX_WORDS = 15


def test_names_are_declared_once_and_texts_are_short():
    assert len(METRICS) == len(metric_texts._DECLARED)
    assert [each.name for each in METRICS.values() if not 1 <= len(each.text.split()) <= MAX_WORDS] == []
    assert {each.sample.endswith("_total") for each in METRICS.values() if each.kind == "counter"} == {True}
    assert not any(each.name.endswith("_total") for each in METRICS.values())


def test_statistics_lead_to_declared_metrics():
    assert {*metrics.RENAMED.values(), *metrics.OF_JOURNAL.values()} <= METRICS.keys()
    shared = {name.removeprefix(f"{metrics.PREFIX}_") for name in metrics.SHARED}
    assert shared <= set(metrics.OF_JOURNAL.values())


def test_a_metric_outside_of_all_groups_and_one_in_two_are_errors(monkeypatch):
    monkeypatch.setitem(METRICS, "new", MetricText("new", "gauge", "a new number"))
    with pytest.raises(AssertionError, match="new"):
        metrics_page.page()
    monkeypatch.delitem(METRICS, "new")
    monkeypatch.setattr(metrics_page, "GROUPS", (*metrics_page.GROUPS, metrics_page.GROUPS[0]))
    with pytest.raises(AssertionError, match="one group"):
        metrics_page.page()


def test_replicas_that_do_not_answer_are_down():
    (up,) = metrics.merged({}, missing=["b"])
    assert up.documentation == METRICS["replica_up"].text
    assert [(sample.labels[metrics.REPLICA], sample.value) for sample in up.samples] == [("b", 0)]
