"""What loads of a checkpoint look like as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import spread
from benchmarks.markdown import markdown_table

TITLES = {
    "disk, one thread": "local directory, one thread",
    "disk, all cores": "local directory",
    "memory": "object store in the same process",
    "http, 8 at once": "HTTP, 8 ranges at once",
    "http, 64 at once": "HTTP",
    "host 0 of 2": "HTTP, first of two hosts",
    "host 1 of 2": "HTTP, second of two hosts",
    "cut": "HTTP, killed after half of the bytes",
    "resumed": "the next process",
    "kept": "a third one",
}


def loading(measured: Mapping[str, Any]) -> str:
    """Render loads by where the checkpoint lies: seconds, bytes over the network, reads at once, most memory."""
    rows = [
        [
            TITLES[name],
            spread(run["seconds"] for run in runs),
            f"{runs[0]['tensor_bytes'] / 1e6:,.0f}" if "tensor_bytes" in runs[0] else "-",
            str(max(run["most_at_once"] for run in runs)) if "most_at_once" in runs[0] else "-",
            spread(run["cpu_s"] for run in runs) if "cpu_s" in runs[0] else "-",
            spread(run["peak_bytes"] / run["share_bytes"] for run in runs) if "share_bytes" in runs[0] else "-",
        ]
        for name, runs in measured["runs"].items()
    ]
    heading = ["from", "s", "MB of tensors sent", "ranges at once", "CPU, s", "most memory / share"]
    facts = (
        f"{measured['num_bytes'] / 1e6:,.0f} MB of tensors, {measured['expert_bytes'] / 1e6:,.0f} of them experts; "
        f"{measured['rate'] / 1e6:.0f} MB/s per connection; "
        f"{measured['machine']['cores']} cores."
    )
    return f"{facts}\n\n{markdown_table(heading, rows)}"
