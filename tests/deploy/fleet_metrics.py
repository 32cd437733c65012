"""Metrics that only a fleet has: of its journal, and of its replicas."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from rayserve_moe.serving.metrics import JournalMetrics, merged
from tests.support.serving.journal_server import OwnJournal


def metrics_of_a_fleet() -> list[Metric]:
    """Return those of one replica that has a journal, and nothing else."""
    journal = OwnJournal()
    try:
        client = journal.client(1)
        try:
            return merged({"a": list(JournalMetrics(client, model="tiny").collect())})
        finally:
            client.link.stop()
    finally:
        journal.end()
