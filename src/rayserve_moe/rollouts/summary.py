"""Summary of a run of the job, as JSON and as text."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rayserve_moe.rollouts.shards import ERRORS, ROLLOUTS, RolloutDirectory

MAX_REASONS = 10
_NUMBER = re.compile(r"\d+")


@dataclass
class Tally:
    """Counts of this run of the job."""

    prompts: int = 0
    samples_done_before: int = 0
    samples_written: int = 0
    prompts_failed: int = 0
    prompts_failed_before: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    retries: int = 0
    sampling_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons of prompts that were given up, with `N` in place of every number."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    weight_versions: Counter[str] = field(default_factory=Counter)

    def count_failure(self, reason: str) -> None:
        """Count a prompt that is given up."""
        self.prompts_failed += 1
        self.reasons[_NUMBER.sub("N", reason)] += 1


def summary_of(
    tally: Tally, directory: RolloutDirectory, *, seconds: float, status: int, reason: str | None
) -> dict[str, Any]:
    """Return all counts of a run with its rate. `status` 0 means complete; otherwise `reason` explains why not.

    Of `seconds`, `sampling_s` passed since the source was ready. `reasons` has the most frequent reasons of failed
    prompts; the shards in `errors` have all of them.
    """
    return {
        "status": status,
        "reason": reason,
        "directory": str(directory.directory),
        **{name: dict(value) if isinstance(value, dict) else value for name, value in vars(tally).items()},
        "reasons": dict(tally.reasons.most_common(MAX_REASONS)),
        "seconds": round(seconds, 3),
        "sampling_s": round(tally.sampling_s, 3),
        "output_tokens_per_s": round(tally.output_tokens / tally.sampling_s, 1) if tally.sampling_s else 0.0,
        "shards": directory.num_shards[ROLLOUTS],
        "error_shards": directory.num_shards[ERRORS],
    }


def as_text(summary: dict[str, Any]) -> str:
    """Return a few lines for a log."""
    reasons = [f"  {count} given up: {reason}" for reason, count in summary["reasons"].items()]
    ends = ", ".join(f"{count} {name}" for name, count in sorted(summary["finish_reasons"].items())) or "none"
    lines = [
        "{samples_written} samples written, {samples_done_before} were there; ended by: {ends}",
        "{prompts} prompts, {prompts_failed} of them given up, {prompts_failed_before} earlier",
        "{reasons}",
        "{output_tokens} output tokens in {sampling_s:.1f} s: {output_tokens_per_s:.0f} per second; {retries} retries",
        "in {directory}",
        "complete" if summary["status"] == 0 else "not complete: {reason}",
    ]
    filled = {**summary, "ends": ends, "reasons": "\n".join(reasons)}
    return "\n".join(line for line in (line.format_map(filled) for line in lines) if line)
