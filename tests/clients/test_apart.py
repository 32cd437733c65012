"""Clients whose packages do not go with those of this one: each from an environment of its own, as a process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "apart"
LONGEST_S = 600


def run(name: str, program: str, *arguments: str) -> str:
    """Run a program of a client's environment; returns what it writes."""
    path = ROOT / f".venv-clients-{name}" / "bin" / program
    if not path.exists():
        pytest.skip("`make clients` installs it")
    quiet = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([path, *arguments], check=False, capture_output=True, text=True, timeout=LONGEST_S, env=quiet)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["litellm"])
def test_a_client_gets_what_it_asks_for(url: str, name: str) -> None:
    run(name, "python", str(SCRIPTS / f"ask_{name}.py"), url)
