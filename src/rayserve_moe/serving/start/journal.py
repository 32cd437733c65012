"""Process of the journal for requests that outlive their replica; the supervisor restarts it if it ends.

python -m rayserve_moe.serving.start.journal STATE_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from rayserve_moe.fleet import journal
from rayserve_moe.serving.start.processes import join_parent
from rayserve_moe.serving.start.state import Plan


def main() -> None:
    """Serve on the port of a plan until a signal ends the process."""
    join_parent()
    journal.main(options_of(Plan.read(Path(sys.argv[1]))))


def options_of(plan: Plan) -> list[str]:
    """Return the options of the journal; its key is in the environment."""
    bounds = (f"--max-bytes={plan.journal_max_bytes}", f"--ttl-s={plan.resume_ttl_s}")
    return [f"--port={plan.ports.journal}", *bounds]


if __name__ == "__main__":
    main()
