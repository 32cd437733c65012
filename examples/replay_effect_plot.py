"""Draw the result of `examples.replay_effect`: a named one beside its file, the committed one into docs/figures.

python -m examples.replay_effect_plot [examples/replay_effect.json]      with torch, and matplotlib: the extra `bench`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.plots import PAGES, draw
from examples.replay_effect import chart


def main() -> None:
    """Draw one result file."""
    result = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("replay_effect.json")
    out = result.with_suffix(".svg") if sys.argv[1:] else PAGES / "replay_effect.svg"
    draw(chart(json.loads(result.read_text(encoding="utf-8"))["points"]), out)


if __name__ == "__main__":
    main()
