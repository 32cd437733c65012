"""Where the peers are installed, and what is known of each: `install` writes it, `run` reads it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rayserve_moe.config.load import default_cache_directory

FACTS = "peer.json"


def add_peers_option(parser: argparse.ArgumentParser) -> None:
    """Add the directory that has a folder for each peer."""
    default = default_cache_directory() / "peers"
    parser.add_argument("--peers", type=Path, default=default, help=f"directory of the peers' folders ({default})")


def installed(peers: Path, name: str) -> dict[str, Any]:
    """Return how a peer was built, under `build`, and its environment. SystemExit if it is missing."""
    facts = peers / name / FACTS
    if not facts.is_file():
        raise SystemExit(f"{name} is not in {peers}: python -m benchmarks.peers.install {name} --peers {peers}")
    return json.loads(facts.read_text(encoding="utf-8"))
