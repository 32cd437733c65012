"""What each part of a result file looks like as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.adapter_pushes import adapter_pushes
from benchmarks.adapters import adapters
from benchmarks.balance_tables import expert_traffic, realised_balance, rebalance
from benchmarks.calculator_table import calculator
from benchmarks.calibration import calibration
from benchmarks.estimate_table import step_estimate
from benchmarks.families import families
from benchmarks.figures import (
    HOST_PARTS,
    OUTSIDE,
    PARTS,
    Run,
    Spread,
    milliseconds_per_step,
    paired_ratio,
    rate,
    speed_ratio,
    spread,
    step_parts,
    steps_per_second,
)
from benchmarks.fleet_table import (
    agent_features,
    agent_sessions,
    fleet_conversations,
    fleet_overload,
    fleet_routing,
    fleet_simulation,
    fleet_validation,
    prefill_apart,
    prefill_served,
    router_time,
    served_pages,
    served_sessions,
    session_hints,
)
from benchmarks.gate_table import compile_gate
from benchmarks.house_table import house
from benchmarks.invariance_table import invariance
from benchmarks.loading_table import loading
from benchmarks.made_up import made_up_tables
from benchmarks.markdown import markdown_table
from benchmarks.narrow_table import narrow_experts
from benchmarks.peers.tables import expert_reading, narrow_kl, peers
from benchmarks.planner_table import planner
from benchmarks.published_rows import published_rows
from benchmarks.rollout_tables import audit, decision_paths, rollout_job, rollout_reading, teacher
from benchmarks.routing_table import bfloat16_routing
from benchmarks.selection_table import balanced_selection
from benchmarks.sparse_contexts import sparse_contexts
from benchmarks.sparse_prompts import sparse_prompts
from benchmarks.speculation_table import speculation, speculation_calculator
from benchmarks.structured_table import hostile_schemas, published_text, schema_suite, structured_output
from benchmarks.weight_table import weight_updates
from benchmarks.wheel import wheel
from benchmarks.workloads import Workload

SIDE_TITLES = {
    "plain": "default: overlap on, no routing",
    "no_overlap": "overlap off",
    "routing_unasked": "routing captured, unrequested",
    "routing_returned": "routing returned to all",
}
SIDE_RATIOS = {
    "overlap on / off": ("plain", "no_overlap"),
    "routing returned / no routing": ("routing_returned", "plain"),
    "routing returned / unrequested": ("routing_returned", "routing_unasked"),
}
DELTA_TITLES = {
    "off": "no routing",
    "unasked": "routing captured, unrequested",
    "delta": "each turn returns the rows that are new",
    "whole": "each turn returns all rows",
}
DECISION_TITLES = {
    "rows": "rows alone, no gates in the programs",
    "unasked": "rows alone, gates captured",
    "gates": "and gates",
    "masks": "and sampling masks",
    "gates_masks": "and gates and masks",
}
CPU_TITLES = {
    "engine": "this process",
    "host_worker": "host worker",
    "replica": "replica",
    "proxy": "proxy",
    "ray_daemons": "Ray's daemons",
    "client": "clients",
}


def throughput(workloads: Mapping[str, Any]) -> str:
    """Render rates of each workload beside transformers', and where a step's time goes."""
    rows = []
    with_peer = any(measured["theirs"] for measured in workloads.values())
    for name, measured in workloads.items():
        workload, ours, theirs = Workload(**measured["workload"]), measured["ours"], measured["theirs"]
        row = [name, workload, rate(workload.total_new_tokens, ours), rate(workload.total_prompt_tokens, ours)]
        if with_peer:
            row += [rate(workload.total_new_tokens, theirs), speed_ratio(ours, theirs)]
        rows.append(row)
    heading = ["", "workload", "output tokens/s", "prompt tokens/s"]
    rates = markdown_table(heading + ["transformers, output tokens/s", "ours / theirs"] * with_peer, rows)
    return f"{rates}\n\n{_steps({name: measured['ours'] for name, measured in workloads.items()})}"


def host_time(points: Mapping[str, Any]) -> str:
    """Render microseconds of host work per decode step, by the number of running sequences."""
    rows = [
        [count, *(parts[part]["median"] for part in HOST_PARTS), "{median} ({min}-{max})".format(**parts["host"])]
        for count, parts in points.items()
    ]
    return markdown_table(["running", *(f"{part}, us per step" for part in HOST_PARTS), "together"], rows)


def sides(measured: Mapping[str, Any]) -> str:
    """Render one workload on engines with different settings: rates, ratios, and where a step's time goes."""
    workload, runs = Workload(**measured["workload"]), measured["runs"]
    rates = markdown_table(
        [f"{measured['name']}: {workload}", "output tokens/s", "host time, ms per step"],
        [
            [SIDE_TITLES[side], rate(workload.total_new_tokens, each), milliseconds_per_step(each, HOST_PARTS)]
            for side, each in runs.items()
        ],
    )
    ratios = markdown_table(
        ["output tokens/s", "ratio"],
        [[title, speed_ratio(runs[ours], runs[theirs])] for title, (ours, theirs) in SIDE_RATIOS.items()],
    )
    return f"{rates}\n\n{ratios}\n\n{_steps(runs)}"


def programs(facts: Mapping[str, Any]) -> str:
    """Render the routing in compiled steps."""
    rows = [
        [SIDE_TITLES[side], each["step_tokens"], each["instructions"], each["routing_arrays"]]
        for side, each in facts.items()
    ]
    return markdown_table(
        ["largest compiled step", "tokens", "instructions", "arrays of all routing ids in the program"], rows
    )


def waits(watched: Mapping[str, Sequence[Run]]) -> str:
    """Render how long the devices were idle because the host had not started the next step."""
    rows = [
        [
            SIDE_TITLES[side],
            _percent(spread(run["waited_share"] for run in runs)),
            spread(1e6 * run["waited_s"] / run["steps"] for run in runs),
        ]
        for side, runs in watched.items()
    ]
    return markdown_table(["devices wait for the host", "share of the time", "us per step"], rows)


def curve(points: Mapping[str, Sequence[Run]]) -> str:
    """Render decoding by the number of running sequences."""
    rows = [
        [
            count,
            spread(run["tokens_sampled"] / run["seconds"] for run in runs),
            spread(1e3 * run["seconds"] / run["steps"] for run in runs),
            milliseconds_per_step(runs, HOST_PARTS),
            spread(1e6 * sum(run[f"{part}_s"] for part in HOST_PARTS) / run["tokens_sampled"] for run in runs),
        ]
        for count, runs in points.items()
    ]
    heading = ["running", "tokens/s", "step, ms", "host time, ms per step", "host time, us per token"]
    return markdown_table(heading, rows)


def conversations(measured: Mapping[str, Any]) -> str:
    """Render prompt tokens computed against those that had to be."""
    runs = measured["runs"]
    title = f"{measured['num_conversations']} conversations x {measured['num_turns']} turns"
    row = [
        title,
        spread(run["prompt_tokens"] for run in runs),
        spread(run["computed"] for run in runs),
        _to_4_digits(paired_ratio((r["computed"] for r in runs), (r["ideal"] for r in runs))),
        _to_4_digits(paired_ratio((r["computed"] for r in runs), (r["ideal_unpaged"] for r in runs))),
    ]
    ideal = f"of the ideal in pages of {measured['page_size']}"
    return markdown_table(["", "prompt tokens", "computed", ideal, "of the ideal without pages"], [row])


def delta_turns(measured: Mapping[str, Any]) -> str:
    """Render conversations with routing returned in different ways, beside a server that captures none."""
    runs = measured["runs"]
    count = measured["num_conversations"] * measured["num_turns"]
    rows = [
        [DELTA_TITLES[side], rate(count, each), speed_ratio(each, runs["off"]) if side != "off" else ""]
        for side, each in runs.items()
    ]
    title = f"{measured['num_conversations']} conversations x {measured['num_turns']} turns"
    return markdown_table([f"{title} of {measured['turn_tokens']} tokens", "turns/s", "of those without routing"], rows)


def decisions(measured: Mapping[str, Any]) -> str:
    """Render rows with further decisions in the binary form, beside rows alone of a server without gates."""
    runs, count = measured["runs"], measured["num_prompts"] * measured["num_new_tokens"]
    rows = [
        [DECISION_TITLES[side], rate(count, each), speed_ratio(each, runs["rows"]) if side != "rows" else ""]
        for side, each in runs.items()
    ]
    title = f"{measured['num_prompts']} x {measured['prompt_len']} in / {measured['num_new_tokens']} out"
    return markdown_table([title, "tokens/s", "of rows alone"], rows)


def http(measured: Mapping[str, Any]) -> str:
    """Render streams over HTTP beside the same streams in one process, and the CPU time of all who took part."""
    workload, runs = Workload(**measured["workload"]), measured["runs"]
    first = {side: [statistics.median(run["first_token_s"]) for run in each] for side, each in runs.items()}
    rows = [
        [
            "tokens/s",
            *(rate(workload.total_new_tokens, runs[side]) for side in ("engine", "http")),
            speed_ratio(runs["http"], runs["engine"]),
        ],
        [
            "time to first token p50, ms",
            *(spread(1e3 * s for s in first[side]) for side in ("engine", "http")),
            paired_ratio(first["http"], first["engine"]),
        ],
    ]
    rates = markdown_table([f"{measured['name']}: {workload}", "engine", "over HTTP", "over HTTP / engine"], rows)
    spent = [
        [CPU_TITLES[part], side, spread(run["cpu_s"][part] for run in each)]
        for side, each in runs.items()
        for part in sorted(each[0]["cpu_s"], key=list(CPU_TITLES).index)
    ]
    return f"{rates}\n\n{markdown_table(['CPU seconds of a run', 'side', ''], spent)}"


def step_transports(runs: Mapping[str, Any]) -> str:
    """Round trips to two hosts, and CPU time per step while these wait, by transport."""
    titles = {
        "16_us": "16 sequences, us",
        "256_us": "256 sequences, us",
        "waiting_cpu_us": "CPU of a step of 2 ms, us",
    }
    rows = [[name, *(spread(run[figure] for run in each) for figure in titles)] for name, each in runs.items()]
    return markdown_table(["round trip to two hosts", *titles.values()], rows)


def exchange_bytes(by_tokens: Mapping[str, Any]) -> str:
    """Render bytes that leave a device per token and MoE layer, by backend, beside the reference."""
    kinds = {"rows": "rows and results", "gathered": "gathered", "summed": "sums"}
    rows = [
        [
            tokens,
            backend,
            *(f"{counted['bytes_per_token'].get(kind, 0):,.0f}" for kind in kinds),
            f"{counted['of_reference']:.3f}",
            "; ".join(counted["operands"].get("exchanged", counted["operands"]["gathered"])),
        ]
        for tokens, by_backend in by_tokens.items()
        for backend, counted in by_backend.items()
    ]
    heading = ["tokens per device", "backend", *kinds.values(), "of top-k rows out and back", "operands"]
    return markdown_table(heading, rows)


def routing_wire(measured: Mapping[str, Any]) -> str:
    """Render bytes of every dialect against the field of the sglang dialect, times, and the store."""
    dialects, kinds = measured["dialects"], list(measured["overlap"])
    rows = [
        [
            name,
            *(
                f"{each['bytes'][kind]:,} ({each['bytes'][kind] / dialects['sglang']['bytes'][kind]:.3f})"
                for kind in kinds
            ),
            _to_2_digits(spread(each["encode_ms"])),
            _to_2_digits(spread(each["decode_ms"])),
        ]
        for name, each in dialects.items()
    ]
    tokens, layers, top_k = measured["rows"]
    title = f"{tokens} x {layers} x top {top_k} of {measured['num_experts']}"
    sizes = [f"{kind} ({share:.0%} as the token before): bytes" for kind, share in measured["overlap"].items()]
    gathers = [[count, _to_2_digits(spread(each))] for count, each in measured["gather_ms"].items()]
    wire = markdown_table([title, *sizes, "encode, ms", "decode, ms"], rows)
    return f"{wire}\n\n{markdown_table(['rows gathered from the store', 'ms'], gathers)}"


def _steps(runs_by_name: Mapping[str, Sequence[Run]]) -> str:
    rows = []
    for name, runs in runs_by_name.items():
        cells = [f"{milliseconds:.2f} ({share:.1%})" for milliseconds, share in step_parts(runs).values()]
        rows.append([SIDE_TITLES.get(name, name), steps_per_second(runs), *cells])
    return markdown_table(["", "steps/s", *(f"{part}, ms per step" for part in (*PARTS, OUTSIDE))], rows)


def _percent(shares: Spread) -> str:
    return f"{shares.median:.2%} ({shares.least:.2%}-{shares.greatest:.2%})"


def _to_2_digits(times: Spread) -> str:
    return f"{times.median:.2f} ({times.least:.2f}-{times.greatest:.2f})"


def _to_4_digits(ratio: Spread) -> str:
    return f"{ratio.median:.4f} ({ratio.least:.4f}-{ratio.greatest:.4f})"


SECTIONS: dict[str, Callable[[Any], str]] = {
    "workloads": throughput,
    "host_us": host_time,
    "sides": sides,
    "programs": programs,
    "waits": waits,
    "curve": curve,
    "conversations": conversations,
    "fleet_conversations": fleet_conversations,
    "fleet_overload": fleet_overload,
    "fleet_routing": fleet_routing,
    "agent_sessions": agent_sessions,
    "session_hints": session_hints,
    "served_sessions": served_sessions,
    "agent_features": agent_features,
    "served_pages": served_pages,
    "prefill_apart": prefill_apart,
    "prefill_served": prefill_served,
    "fleet_simulation": fleet_simulation,
    "fleet_validation": fleet_validation,
    "router_time": router_time,
    "delta_turns": delta_turns,
    "decisions": decisions,
    "http": http,
    "routing_wire": routing_wire,
    "rollout_reading": rollout_reading,
    "rollout_job": rollout_job,
    "audit": audit,
    "decision_paths": decision_paths,
    "teacher": teacher,
    "exchange_bytes": exchange_bytes,
    "step_transports": step_transports,
    "compile_gate": compile_gate,
    "step_estimate": step_estimate,
    "calibration": calibration,
    "made_up": made_up_tables,
    "published_rows": published_rows,
    "families": families,
    "sparse_contexts": sparse_contexts,
    "sparse_prompts": sparse_prompts,
    "planner": planner,
    "rebalance": rebalance,
    "expert_traffic": expert_traffic,
    "realised_balance": realised_balance,
    "weight_updates": weight_updates,
    "balanced_selection": balanced_selection,
    "peers": peers,
    "expert_reading": expert_reading,
    "narrow_kl": narrow_kl,
    "calculator": calculator,
    "speculation": speculation,
    "speculation_calculator": speculation_calculator,
    "bfloat16_routing": bfloat16_routing,
    "narrow_experts": narrow_experts,
    "adapters": adapters,
    "adapter_pushes": adapter_pushes,
    "invariance": invariance,
    "house": house,
    "loading": loading,
    "schema_suite": schema_suite,
    "structured_output": structured_output,
    "hostile_schemas": hostile_schemas,
    "published_text": published_text,
    "wheel": wheel,
}
"""By the key of a result file under which the figures lie, in the order of the tables."""
