"""`python -m examples.grpo`: sees that the extra `grpo` is installed, and runs the command."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

NEEDED = ("matplotlib", "optax")
INSTALL = "pip install -e '.[grpo]'"


def main() -> int:
    """Run the command; exits with the line that installs what is missing."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"error: {' and '.join(missing)} not installed. Install the extra `grpo`: {INSTALL}")
    return import_module("examples.grpo.command").main()


if __name__ == "__main__":
    sys.exit(main())
