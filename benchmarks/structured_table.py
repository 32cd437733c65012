"""What structured output costs, and whether its answers are valid, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import milliseconds_per_step, rate, speed_ratio, spread
from benchmarks.markdown import markdown_table

MOST_KEYWORDS = 6
SIDES = {
    "constrained": "16 constrained",
    "mixed": "8 constrained beside 8 without",
}


def schema_suite(found: Mapping[str, Any]) -> str:
    """Render counts of accepted and refused schemas, of ends of answers, and of valid answers that stopped."""
    ends, refused = found["ends"], found["refused"]
    total, stopped = sum(ends.values()), ends["stop"]
    rows = [
        ["schemas accepted", f"{found['taken']} of {found['schemas']}"],
        ["refused, by keyword", _by_keyword(refused)],
        ["answers that ended by `stop`, valid", f"{stopped - len(found['invalid']):,} of {stopped:,}"],
        ["schemas that have such answers", f"{found['schemas_with_a_stop']}"],
        [
            "answers that ended by `length`",
            f"{ends.get('length', 0):,} of {total:,} ({ends.get('length', 0) / total:.0%})",
        ],
        ["answers that ended by `error`", f"{ends.get('error', 0):,}"],
    ]
    return markdown_table(["draft 2020-12", ""], rows)


def _by_keyword(refused: Mapping[str, int]) -> str:
    """Render the commonest keywords with how often each was named, and the others together."""
    ordered = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    named = [f"`{name}` {count}" for name, count in ordered[:MOST_KEYWORDS]]
    others = sum(count for _, count in ordered[MOST_KEYWORDS:])
    return ", ".join([*named, *([f"others {others}"] if others else [])])


def structured_output(measured: Mapping[str, Any]) -> str:
    """Render for each model and text, tokens per second without and with constraints."""
    rows = []
    for each in measured.values():
        runs, tokens = each["runs"], each["tokens"]
        plain = runs["plain"]
        for side, title in SIDES.items():
            rows.append(
                [
                    each["text"],
                    f"{each['ids']:,}",
                    title,
                    rate(tokens, plain),
                    rate(tokens, runs[side]),
                    speed_ratio(runs[side], plain),
                    spread(1e3 * run["seconds"] / run["steps"] for run in plain),
                    milliseconds_per_step(runs[side], ["mask"]),
                ]
            )
    heading = [
        "text",
        "ids",
        "streams",
        "tokens/s, unconstrained",
        "tokens/s",
        "ratio",
        "ms per plain step",
        "ms of masks per step",
    ]
    return markdown_table(heading, rows)


def hostile_schemas(measured: Mapping[str, Any]) -> str:
    """Render for each model the outcome of each schema, and the longest time without tokens of a stream beside it."""
    return "\n\n".join(_beside(model, found) for model, found in measured.items())


def _beside(model: str, found: Mapping[str, Any]) -> str:
    rows = [
        [name, each["outcome"], f"{each['answered_ms']:.0f}", spread(each["gaps_ms"])]
        for name, each in found["schemas"].items()
    ]
    quiet = ["none", "", "", spread(found["quiet_gaps_ms"])]
    heading = [f"schema ({model})", "answer", "after at most, ms", "longest gap of a stream beside it, ms"]
    return markdown_table(heading, [quiet, *rows])


def published_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the costs of text by tokenizer: p50, and p99 in parentheses."""
    heading = ["tokenizer", "ids", "opening, s", "table, s", "grammar, ms", "mask, us", "streamed token, us"]
    pairs = ("grammar_ms", "mask_us", "token_us")
    rows = [
        [name, f"{of['ids']:,}", of["open_s"], of["table_s"], *("{} ({})".format(*of[pair]) for pair in pairs)]
        for name, of in found.items()
    ]
    return markdown_table(heading, rows)
