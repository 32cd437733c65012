"""Tables of `python -m benchmarks.fleet_routing` and of the other benchmarks of fleets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kill_clients import HANG, RESET
from benchmarks.markdown import markdown_table


def fleet_routing(measured: Mapping[str, Any]) -> str:
    """Render policies by number of replicas."""
    heading = ("replicas", "policy", "computed / one cache", "TTFT p50, s", "TTFT p99, s", "busiest / mean")
    rows = [
        (
            row["num_replicas"],
            row["policy"],
            f"{row['recomputed']:.3f}",
            f"{row['ttft_p50_s']:.3f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['busiest']:.2f}",
        )
        for row in measured["rows"]
    ]
    title = f"{measured['num_requests']} requests and more, pages of {measured['page_size']}, on simulated time"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def router_time(measured: Mapping[str, Any]) -> str:
    """Render milliseconds by kind of body."""
    heading = ("body", "tokens", "p50, ms", "p99, ms")
    rows = [
        (row["kind"], f"{row['num_tokens']:,}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}")
        for row in measured["rows"]
    ]
    title = f"{measured['num_replicas']} replicas, pages of {measured['page_size']}"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


COMPARED = {
    "TTFT p50, ms": ("ttft_p50_s", 1e3),
    "TTFT p99, ms": ("ttft_p99_s", 1e3),
    "between events p50, ms": ("gap_p50_s", 1e3),
    "between events p99, ms": ("gap_p99_s", 1e3),
    "time per token p50, ms": ("tpot_p50_s", 1e3),
    "time per token p99, ms": ("tpot_p99_s", 1e3),
    "tokens/s of a replica": ("tokens_s", 1.0),
    "prompt tokens found cached": ("hits", 1.0),
}


def fleet_validation(measured: Mapping[str, Any]) -> str:
    """Render what a fleet did beside what its simulation did."""
    real, simulated = measured["real"], measured["simulated"]
    rows = [
        (name, f"{scale * real[key]:.3g}", f"{scale * simulated[key]:.3g}", f"{simulated[key] / real[key]:.2f}")
        for name, (key, scale) in COMPARED.items()
    ]
    title = f"{measured['num_replicas']} replicas, {measured['size']} model, {measured['rate_s']:.1f} requests/s"
    return f"**{title}**\n\n{markdown_table(('', 'served', 'simulated', 'ratio'), rows)}"


def fleet_simulation(measured: Mapping[str, Any]) -> str:
    """Render policies by number of replicas and rate."""
    heading = (
        "replicas",
        "requests/s each",
        "for s",
        "policy",
        "good",
        "TTFT p50, s",
        "p99",
        "ms/token p50",
        "p99",
        "cached",
    )
    rows = [
        (
            f"{row['num_replicas']:,}",
            f"{row['rate']:g}",
            f"{row['seconds']:.0f}",
            row["policy"],
            f"{row['good_share']:.1%}",
            f"{row['ttft_p50_s']:.3f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{1e3 * row['tpot_p50_s']:.1f}",
            f"{1e3 * row['tpot_p99_s']:.1f}",
            f"{row['hits']:.1%}",
        )
        for row in measured["rows"]
    ]
    bounds = f"good: first token in {measured['ttft_s']:g} s, others in {1e3 * measured['tpot_s']:g} ms on average"
    title = f"{measured['replica']}, {measured['asked']}; {bounds}; on simulated time"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def agent_sessions(measured: Mapping[str, Any]) -> str:
    """Render orders of admission by load and number of sessions."""
    heading = (
        *("load", "sessions", "tokens / pool", "order", "session, s", "session p99", "good/s"),
        *("TTFT p50, s", "p99", "longest", "tokens/s", "cached"),
    )
    rows = [
        (
            row["load"],
            f"{row['sessions']:,}",
            f"{row['over_pool']:.1f}",
            row["order"],
            f"{row['session_mean_s']:.0f}",
            f"{row['session_p99_s']:.0f}",
            f"{row['goodput_s']:.2f}",
            f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p99_s']:.1f}",
            f"{row['ttft_max_s']:.1f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['hits']:.1%}",
        )
        for row in measured["rows"]
    ]
    title = f"{measured['replica']}; good: first token in 2 s, others in 50 ms on average; on simulated time"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def agent_features(measured: Mapping[str, Any]) -> str:
    """Render sessions with each feature, by the ratio of their tokens to the pool."""
    heading = (
        *("tokens / pool", "way", "requests", "session, s", "good/s"),
        *("TTFT p50, s", "p99", "tokens/s", "cached"),
    )
    rows = [
        (
            f"{row['ratio']:.1f}",
            row["way"],
            f"{row['requests']:,}",
            f"{row['session_mean_s']:.0f}",
            f"{row['goodput_s']:.2f}",
            f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p99_s']:.1f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['hits']:.1%}",
        )
        for row in measured["rows"]
    ]
    title = (
        f"{measured['replica']}, the first {measured['until_s']:g} s; good: first token in 2 s, others in 50 ms on "
        "average; on simulated time"
    )
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def prefill_apart(measured: Mapping[str, Any]) -> str:
    """Render gaps of chats beside long prompts, by load and way."""
    heading = (
        *("load", "requests/s", "a long prompt every", "way", "gap p50, ms", "p99", "p99 / quiet", "good/s"),
        *("TTFT p50, s", "p99", "long prompt, s"),
    )
    quiet = {(row["load"], row["rate"], row["every_s"]): row for row in measured["rows"] if row["way"] == "quiet"}
    rows = [
        (
            row["load"],
            f"{row['rate']:g}",
            f"{row['every_s']:g} s",
            row["way"],
            f"{row['gap_p50_s'] * 1e3:.1f}",
            f"{row['gap_p99_s'] * 1e3:.1f}",
            f"{row['gap_p99_s'] / quiet[row['load'], row['rate'], row['every_s']]['gap_p99_s']:.2f}",
            f"{row['goodput_s']:.2f}",
            f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['long_ttft_s']:.1f}" if row["long_ttft_s"] else "-",
        )
        for row in measured["rows"]
    ]
    title = (
        f"two replicas of {measured['replica']}, long prompts of {measured['long']:,} tokens, "
        f"{measured['link_gb_s']:g} GB/s between them; good: first token in 2 s, others in 50 ms on average; on "
        "simulated time"
    )
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def prefill_served(measured: Mapping[str, Any]) -> str:
    """Render times of streams with long prompts divided by those without, of mixed replicas and of roles."""
    heading = (
        *("replicas", "ms/token p50 / quiet", "p99 / quiet", "p99 between events / quiet"),
        *("quiet p50, ms", "quiet p99, ms", "long prompt, s"),
    )
    rows = []
    for name, runs in measured["runs"].items():
        quiet, beside = ([row for row in runs if bool(row["num_long"]) is has] for has in (False, True))
        pairs = list(zip(quiet, beside, strict=True))
        parts = ("token_p50_s", "token_p99_s", "event_p99_s")
        ratios = [[b[part] / a[part] for a, b in pairs] for part in parts]
        rows.append(
            (
                name,
                *(f"{statistics.median(part):.2f} ({min(part):.2f}-{max(part):.2f})" for part in ratios),
                *(f"{statistics.median(row[part] for row in quiet) * 1e3:.1f}" for part in parts[:2]),
                f"{statistics.median(row['long_s'] for row in beside):.2f}",
            )
        )
    gaps = f"**two replicas, {measured['size']} model**\n\n{markdown_table(heading, rows)}"
    if not measured["kills"]:
        return gaps
    killed = [(role, *map(str, seen.values())) for role, seen in measured["kills"].items()]
    return f"{gaps}\n\n{markdown_table(('killed', 'times', 'requests', 'lost', 'other ids', 'other rows'), killed)}"


def served_pages(measured: Mapping[str, Any]) -> str:
    """Render second turns whose pages were evicted, the traffic, and others' steps beside it."""
    heading = (
        "sessions",
        "computed tokens",
        "ideal",
        "ratio",
        "bytes per token",
        "ms/token of others / without copies",
    )
    ratios = measured["token_ratios"]
    row = (
        str(measured["sessions"]),
        f"{measured['computed']:,}",
        f"{measured['ideal']:,}",
        f"{measured['computed'] / measured['ideal']:.3f}",
        f"{measured['bytes_per_token']:,.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
    )
    return markdown_table(heading, [row])


def session_hints(measured: Mapping[str, Any]) -> str:
    """Render hints about sessions by number of sessions."""
    heading = ("sessions", "live / pool", "hints", "session, s", "good/s", "TTFT p50, s", "p99", "cached")
    rows = [
        (
            f"{row['sessions']:,}",
            f"{row['over_pool']:.1f}",
            row["hints"],
            f"{row['session_mean_s']:.1f}",
            f"{row['goodput_s']:.2f}",
            f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p99_s']:.2f}",
            f"{row['hits']:.1%}",
        )
        for row in measured["rows"]
    ]
    title = (
        f"{measured['replica']}, {measured['num_pages']:,} pages; {measured['edits']:.0%} of turns edit the history, "
        f"beside {measured['others']:g} chats/s without hints; {measured['seeds']} seeds, on simulated time"
    )
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def fleet_conversations(measured: Mapping[str, Any]) -> str:
    """Render what each side computed; repeats are compared with those of the first side."""
    one = [run["computed"] for run in next(iter(measured["sides"].values()))]
    heading = ("", "prompt tokens computed", "/ one replica", "tokens/s", "TTFT p50, ms", "TTFT p99, ms")
    rows = [(side, *_conversations_row(runs, one)) for side, runs in measured["sides"].items()]
    title = f"{measured['replicas']} replicas, {measured['size']} model"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"


def _conversations_row(runs: Sequence[Mapping[str, float]], one: Sequence[float]) -> tuple[str, ...]:
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratios = [run["computed"] / alone for run, alone in zip(runs, one, strict=True)]
    return (
        f"{medians['computed']:,.0f}",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        f"{medians['tokens_s']:,.0f}",
        f"{1e3 * medians['ttft_p50_s']:.0f}",
        f"{1e3 * medians['ttft_p99_s']:.0f}",
    )


def fleet_overload(found: Mapping[str, Any]) -> str:
    """Render what became of requests, then the memory of each part."""
    answers = found["answers"]
    rows = [
        ("peak before, answers/s", f"{found['peaks_s'][0]:.2f}"),
        ("peak after, answers/s", f"{found['peaks_s'][1]:.2f}"),
        ("arrivals/s", f"{found['arrivals_s']:.1f}"),
        ("goodput / peak", f"{found['goodput_of_peak']:.3f}"),
        *((f"answers: {kind}", f"{number:,}") for kind, number in sorted(answers.items())),
        ("cut off or never answered", sum(answers.get(kind, 0) for kind in (HANG, RESET))),
        ("429 after, p50, ms", f"{found['refused_p50_ms'] or 0:.0f}"),
        ("429 after, worst, ms", f"{found['refused_worst_ms']:,.0f}"),
        ("calls of /health", f"{found['health_calls']:,}"),
        ("failed calls", found["health_failed"]),
        ("calls slower than 100 ms", found["health_slow"]),
        *((f"/health {name}, ms", f"{found[f'health_{name}_ms']:.1f}") for name in ("p50", "p99", "worst")),
        *((f"clients late, {name}, ms", f"{found[f'clients_late_{name}_ms']:,.1f}") for name in ("p99", "worst")),
        ("CPU of the clients, s", f"{found['client_cpu_s']:.1f}"),
        ("duration, s", f"{found['wall_s']:.0f}"),
    ]
    resident = [
        (part, *(f"{one[key]:.0f}" for key in ("start_mib", "end_mib")), f"{one['second_half_mib_per_min']:+.2f}")
        for part, one in found["resident"].items()
    ]
    title = f"{found['num_replicas']} replicas, {found['factor']:g} times the peak for {found['seconds']:.0f} s"
    title += ", a core left to the clients" if found.get("leaves_core") else ""
    memory = markdown_table(("memory", "start, MiB", "end, MiB", "MiB per minute in the second half"), resident)
    return f"**{title}**\n\n{markdown_table(('', 'measured'), rows)}\n\n{memory}"


def served_sessions(measured: Mapping[str, Any]) -> str:
    """Render each side's medians, and ratios to the first side in the same repeat."""
    by_side: dict[str, list[Mapping[str, Any]]] = {}
    for row in measured["rows"]:
        by_side.setdefault(row["side"], []).append(row)
    first = next(iter(by_side.values()))

    def against_first(runs: Sequence[Mapping[str, Any]], key: str) -> str:
        ratios = [run[key] / base[key] for run, base in zip(runs, first, strict=True)]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    heading = ("side", "session, s", "/ first", "TTFT p99, s", "/ first", "tokens/s / first", "cached", "equal prompts")
    rows = [
        (
            side,
            f"{statistics.median(run['session_mean_s'] for run in runs):.1f}",
            against_first(runs, "session_mean_s"),
            f"{statistics.median(run['ttft_p99_s'] for run in runs):.1f}",
            against_first(runs, "ttft_p99_s"),
            against_first(runs, "tokens_s"),
            f"{statistics.median(run['hits'] for run in runs):.1%}",
            f"{min(run['equal'] for run in runs):.1%}",
        )
        for side, runs in by_side.items()
    ]
    title = f"{measured['sessions']} sessions, {measured['over_pool']:g} times the tokens of the pool"
    return f"**{title}**\n\n{markdown_table(heading, rows)}"
