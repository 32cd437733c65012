"""Write the committed goldens: `python -m tests.parity.make_goldens`, from the repository root, with torch at hand."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tests.parity.cases import CASES, make_checkpoint, save_golden
from tests.parity.reference import run_reference

log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            golden = run_reference(case, make_checkpoint(case, Path(directory)))
            file = save_golden(case, golden)
            log.info(
                "%s: %d bytes, logits within %.1f .. %.1f, %d of %d router rows closer than 1e-5",
                file,
                file.stat().st_size,
                golden.logits.min(),
                golden.logits.max(),
                (golden.gaps < 1e-5).sum(),
                golden.gaps.size,
            )


if __name__ == "__main__":
    main()
