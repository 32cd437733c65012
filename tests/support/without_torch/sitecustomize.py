"""Hides torch from a process and its children: `transformers` imports it where it is installed, for two CPU seconds.

Python runs this file at its start where PYTHONPATH names the folder (Makefile). Nothing but comparisons needs torch.
"""

from __future__ import annotations

import sys

sys.modules["torch"] = None  # ty: ignore[invalid-assignment]
