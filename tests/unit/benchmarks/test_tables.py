"""Figures follow from runs by definition, and tables hold what the result file holds."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks import table
from benchmarks.calculator_table import COMPUTED_BY
from benchmarks.engine import SIDES, WATCHED
from benchmarks.engine_runs import check_complete
from benchmarks.figures import (
    BUSY_LOAD,
    OUTSIDE,
    PARTS,
    milliseconds_per_step,
    paired_ratio,
    rate,
    speed_ratio,
    spread,
    step_parts,
)
from benchmarks.fleet_table import COMPARED
from benchmarks.routing_table import PAIRS
from benchmarks.sections import SECTIONS
from benchmarks.selection_table import MODES
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, prompts_of


def run_of(seconds: float, steps: int = 10) -> dict[str, float]:
    """A run half of whose time is on the device, a quarter in the other parts, a quarter outside."""
    shares = dict.fromkeys(PARTS, 1 / 16) | {"device": 1 / 2}
    return {"seconds": seconds, "steps": steps, **{f"{part}_s": share * seconds for part, share in shares.items()}}


def result_of(theirs: list[dict[str, float]]) -> dict:
    measured = {"workload": asdict(WORKLOADS["W4"]), "ours": [run_of(1.0), run_of(2.0)], "theirs": theirs}
    versions = {"jax": "1", "transformers": "2", "torch": "3"}
    machine = {"cpu": "Some CPU", "cores": 2, "device": "cpu", "load_before": 0.1, "versions": versions}
    return {
        "size": "tiny",
        "repeats": 2,
        "num_parameters": 2_000_000,
        "machine": machine,
        "ours": {"dtype": "float32", "devices": 2},
        "theirs": {"dtype": "bfloat16", "experts": "grouped_mm", "threads": 2} if theirs else None,
        "workloads": {"W4": measured},
    }


def sparse_context(kernel: str, *, seconds: float) -> dict:
    """A step of sparse attention at one context."""
    step = {"seconds": seconds, "hbm_bytes": 42e9}
    kernels = [{"name": kernel, "bundles": 100}]
    found = {"step": step, "num_layers": 3, "kernels": kernels, "share_of_roofline": 0.5}
    return {"needed_bytes": 50_000_000_000, **found}


def every_section() -> dict:
    """The smallest result of each kind."""
    w2 = {"name": "W2", "workload": asdict(WORKLOADS["W2"])}
    streams = {"seconds": 2.0, "first_token_s": [0.1, 0.2, 0.4]}
    http_cpu = dict.fromkeys(("host_worker", "replica", "proxy", "ray_daemons", "client"), 0.5)
    median = {"median": 2.0, "min": 1.0, "max": 3.0}
    wire = {"bytes": {"skewed": 4}, "encode_ms": [0.5], "decode_ms": [0.25, 0.5, 1.0]}
    ratios = dict.fromkeys(("greedy", "first", "even", "shares", "worst_even"), 1.125)
    group = {"cases": 5, **ratios, "duplicates": {"greedy": 7, "planned": 0}}
    drifted = dict.fromkeys(("stale", "after", "even", "worst_layer", "moved", "most_moved"), 0.0625)
    drafted = {
        "seconds": 2.0,
        "tokens": 8,
        "bound_seconds": 1.6,
        "drafts_of_steps": {"3": 2},
        "chains": 2,
        "accepted": 1,
    }
    loads = {"imbalance": 1.25, "kept_share": 0.75, "unfilled": 0.0}
    memory = dict.fromkeys(("peak", "temporaries", "limit"), 2_500_000_000)
    compiled = {"name": "decode", "memory": memory, "collectives": [], "copied_bytes": {}, "compile_s": 1.5}
    part = dict.fromkeys(("num_ops", "small_ops", "bundles", "hbm_bytes", "seconds", "peak_seconds"), 0.5)
    part |= {"min_seconds": 0.25, "max_seconds": 1.0}
    named = {"scope": "experts", "source": "", "name": "fusion.1"} | dict.fromkeys(
        ("times", "us", "peak_us", "bundles", "hbm_bytes"), 1
    )
    estimated = {
        "compiled_layers": 3, "layer": part, "step": part, "roofline": {"hbm_s": 0.25}, "bound": "hbm",
        "share_of_roofline": 0.5, "share_of_matrix_peak": 0.125, "ops_in_layer": [named],
    }  # fmt: skip
    compiled |= {"copied_activation_bytes": 4096, "ops_per_layer": 7}
    refused = {"name": "prefill", "memory": None, "error": "too large"}
    exchange = {"operation": "all-gather", "num_bytes": 500_000, "times": 3}
    whole = {
        "dp": 8, "tp": 2, "expert_dtype": "int8", "num_layers": 2, "weights_bytes": 2e9, "kv_pool_bytes": 2**16 * 4096,
        "error": "", "memory": memory, "copied_bytes": {}, "collectives": [exchange], "kernels": {"paged_attention": 1},
        "estimate": {"step": {"min_seconds": 0.008, "max_seconds": 0.02}, "roofline": {"hbm_s": 0.005}},
        "context": 4096,
    }  # fmt: skip
    placed = {"planner": "counts, shares", "batch": 8, "distinct_ranks": 1.5, "bytes": 4096.0}
    placed |= {"bytes_between_slices": 2048.0, "hottest": 1.03125, "hottest_of_batch": 1.25, "microseconds": 22.5}
    one = dict.fromkeys(("tokens_per_s", "first_token_s", "token_s", "memory_gb", "capacity_gb", "imbalance"), 1.0)
    one |= {"split": {"dp": 2, "tp": 4, "rows": 8}, "chips": 8, "served": 16}
    one |= {"exchange_share": 0.125, "eplb_headroom": 0.25}
    drawn = {
        "sizes": {"layers": 28}, "topology": "v6e:2x4", "planned_step_s": 0.003,
        "plans": {"v6e:2x4": {"16": one, "64": one}},
        "compiled": {"step": {"seconds": 0.004, "min_seconds": 0.003, "max_seconds": 0.005}, "bound": "hbm"},
    }  # fmt: skip
    too_large = whole | {"memory": None, "error": "no room"}
    operands = {"exchanged": ["bf16"], "gathered": ["s32"]}
    moved = {"bytes_per_token": {"rows": 57496.0}, "of_reference": 0.875, "operands": operands}
    moves = {"slots": 5, "steps": 9, "quiet_step_s": 0.25, "busy_step_s": 0.5, "longest_gap": 3, "longest_quiet_gap": 1}
    updated = {"update_s": 2.0, "swap_s": 0.5, "step_s": 0.25, "longest_quiet_s": 0.5, "longest_s": 0.75}
    counted = {"tokens": 50_000, "realised": [1.03125, 1.0], "promised": [1.0, 1.0]}
    size = {
        "commit": "abc", "lines": {"engine": {"files": 4, "lines": 1200}}, "server_lines": 1200, "one_importer": 7,
        "wide_classes": {"Sequence": 44},
        "completion": {"modules": 81, "functions": 416, "types_created": 24, "packages": ["serving"]},
    }  # fmt: skip
    conversation = {"seconds": 1.0, "prompt_tokens": 900, "computed": 303, "ideal": 300, "ideal_unpaged": 250}
    return {
        "workloads": result_of([])["workloads"],
        "host_us": {"16": dict.fromkeys(("schedule", "pack", "commit", "host"), median)},
        "sides": {**w2, "runs": {side: [run_of(2.0 if side == "no_overlap" else 1.0)] for side in SIDES}},
        "programs": {"plain": {"step_tokens": 528, "instructions": 900, "routing_arrays": 0}},
        "waits": {side: [{"seconds": 4.0, "steps": 10, "waited_s": 0.1, "waited_share": 0.025}] for side in WATCHED},
        "curve": {"64": [{**run_of(2.0), "tokens_sampled": 640.0}]},
        "conversations": {
            "num_conversations": 16, "num_turns": 8, "page_size": 16, "answer_tokens": 24, "runs": [conversation]
        },
        "router_time": {
            "num_replicas": 4, "page_size": 16,
            "rows": [{"kind": "text", "num_tokens": 1000, "p50_ms": 0.5, "p99_ms": 1.5}],
        },
        "fleet_conversations": {
            "size": "tiny", "replicas": 4, "sides": {
                side: [{"computed": computed, "tokens_s": 10.0, "ttft_p50_s": 0.1, "ttft_p99_s": 0.2}]
                for side, computed in (("one replica", 100.0), ("by prefix", 104.0))
            },
        },
        "fleet_overload": {
            "num_replicas": 2, "factor": 10.0, "seconds": 60.0, "peaks_s": [2.5, 2.0], "arrivals_s": 25.0,
            "goodput_of_peak": 0.875, "answers": {"completed": 10, "429": 1_200, "hang": 3, "reset": 4},
            "refused_p50_ms": None, "refused_worst_ms": 2.0, "health_calls": 100, "health_failed": 0, "health_slow": 1,
            "health_p50_ms": 1.0, "health_p99_ms": 2.0, "health_worst_ms": 3.0, "clients_late_p99_ms": 1.0,
            "clients_late_worst_ms": 2.0, "client_cpu_s": 1.5, "wall_s": 62.0,
            "resident": {"journal": {"start_mib": 50.0, "end_mib": 60.0, "second_half_mib_per_min": 0.25}},
        },
        "fleet_routing": {
            "num_requests": 100, "page_size": 128, "rows": [
                {"num_replicas": 2, "policy": "prefix", "recomputed": 1.04, "ttft_p50_s": 0.1, "ttft_p99_s": 1.2,
                 "busiest": 1.1}
            ],
        },
        "fleet_simulation": {
            "replica": "any", "asked": "chat", "ttft_s": 2.0, "tpot_s": 0.05,
            "rows": [
                {"num_replicas": 1000, "rate": 6.0, "seconds": 15.2, "policy": "prefix", "good_share": 0.875,
                 "hits": 0.5, "ttft_p50_s": 0.1, "ttft_p99_s": 1.2, "tpot_p50_s": 0.01, "tpot_p99_s": 0.02}
            ],
        },
        "agent_sessions": {
            "replica": "any",
            "rows": [
                {"load": "agents", "sessions": 250, "over_pool": 3.25, "order": "cached", "session_mean_s": 177.0,
                 "session_p99_s": 366.0, "goodput_s": 5.5, "ttft_p50_s": 0.56, "ttft_p99_s": 25.2, "ttft_max_s": 30.0,
                 "tokens_s": 1301.0, "hits": 0.771}
            ],
        },
        "agent_features": {
            "replica": "any", "until_s": 200.0,
            "rows": [
                {"ratio": 3.3, "way": "hints", "requests": 1250, "session_mean_s": 177.0, "goodput_s": 5.5,
                 "ttft_p50_s": 0.56, "ttft_p99_s": 25.2, "tokens_s": 1301.0, "hits": 0.875}
            ],
        },
        "served_pages": {
            "sessions": 16, "computed": 1024, "ideal": 1024, "bytes_per_token": 4096.0, "token_ratios": [1.0, 1.25],
        },
        "prefill_apart": {
            "replica": "any", "long": 24_576, "link_gb_s": 10.0,
            "rows": [
                {"load": "chats", "rate": 8.0, "every_s": 4.0, "way": way, "gap_p50_s": 0.05, "gap_p99_s": gap,
                 "goodput_s": 4.0, "ttft_p50_s": 0.07, "ttft_p99_s": 0.14, "long_ttft_s": seconds}
                for way, gap, seconds in (("quiet", 0.1, 0.0), ("mixed", 0.125, 0.9))
            ],
        },
        "prefill_served": {
            "size": "tiny",
            "kills": {"decode": {"kills": 20, "requests": 240, "lost": 0, "ids": 0, "rows": 0}},
            "runs": {
                "apart": [
                    {"num_long": number, "token_p50_s": gap, "token_p99_s": 2 * gap, "event_p99_s": gap, "long_s": 0.5}
                    for number, gap in ((0, 0.01), (4, 0.0125))
                ]
            },
        },
        "session_hints": {
            "replica": "any", "num_pages": 657, "edits": 0.125, "others": 4.0, "seeds": 2,
            "rows": [
                {"sessions": 60, "over_pool": 3.25, "hints": "final", "session_mean_s": 53.5, "goodput_s": 1.5,
                 "ttft_p50_s": 0.5, "ttft_p99_s": 2.5, "hits": 0.625}
            ],
        },
        "served_sessions": {
            "sessions": 24, "over_pool": 3.25,
            "rows": [
                {"side": side, "session_mean_s": seconds, "ttft_p99_s": 2.0, "tokens_s": 100.0, "hits": 0.625,
                 "equal": 1.0}
                for side, seconds in (("arrival", 8.0), ("cached", 6.0))
            ],
        },
        "fleet_validation": {
            "num_replicas": 2, "size": "small", "rate_s": 7.5,
            "real": {key: 2.0 for key, _ in COMPARED.values()}, "simulated": {key: 1.5 for key, _ in COMPARED.values()},
        },
        "delta_turns": {
            "num_conversations": 8, "num_turns": 100, "turn_tokens": 32,
            "runs": {side: [{"seconds": 2.0 if side == "whole" else 1.0}] for side in ("off", "delta", "whole")},
        },
        "decisions": {
            "num_prompts": 16, "prompt_len": 64, "num_new_tokens": 128,
            "runs": {"rows": [{"seconds": 1.0}], "gates_masks": [{"seconds": 1.25}]},
        },
        "routing_wire": {
            "rows": [1, 1, 1], "num_experts": 2, "overlap": {"skewed": 0.25}, "gather_ms": {"8192": [0.75]},
            "dialects": {"sglang": wire, "packed": wire | {"bytes": {"skewed": 1}}},
        },
        "rollout_reading": {
            "rows": [1000, 8, 2], "rollouts": 10_000, "bytes": {"shards": 2_000_000, "json": 9_000_000},
            "seconds": {"routing": [0.0625], "everything": [0.25], "json": [2.0]},
        },
        "audit": {
            "samples": 1000,
            "sides": {
                "native": {
                    "verdicts": {"right": 990, "numerics only": 5, "wrong rows": 5}, "tokens": 20_000,
                    "decisions": 100_000, "differing": 25, "max_logprob_difference": 0.015625,
                    "seconds": {"audit": 30.0, "scores": 24.0},
                }
            },
            "faults": {"one expert": {"samples": 200, "failing": 199, "located": 198}},
        },
        "teacher": {
            "tokens": 4096, "size": "tiny", "layers": 2, "width": 64,
            "seconds": {"scores": [2.0], "top": [2.5], "states": [3.0], "rows": [2.0], "all": [4.0]},
            "bytes": dict.fromkeys(("scores", "top", "states", "rows", "all"), 40_960),
        },
        "decision_paths": {
            "paths": {
                "stream": {"gates": {"equal": 1500, "missing": 20, "differing": 0}, "masks": {"equal": 48}},
                "drafts": {
                    "gates": {"equal": 3000, "missing": 0, "differing": 5},
                    "drafts": {"equal": 96, "accepted": 7},
                },
            },
        },
        "rollout_job": {
            "prompts": 64, "prompt_len": 32, "n": 4, "new_tokens": 64, "sums": False, "output_tokens": 16_384.0,
            "runs": {"engine": [{"seconds": 15.0}], "replica": [{"seconds": 15.0}], "server": [{"seconds": 16.0}]},
        },
        "sparse_prompts": {
            "glm-5.2@v5p:2x4x4": {
                "case": {"tensor": 4},
                "num_layers": 3,
                "contexts": {
                    "65536": {"step_ms": 20.0, "index_us": 1e3, "attention_us": 2e3, "xla_attention_us": 9e3}
                },
            }
        },
        "exchange_bytes": {
            "512": {"fused": moved}
        },
        "step_transports": {
            "sockets": [{"16_us": 250.0, "256_us": 500.0, "waiting_cpu_us": 125.0}],
        },
        "compile_gate": {
            "m@t": {"num_layers": 2, "programs": [compiled, refused]}
        },
        "step_estimate": {
            "decode": estimated
        },
        "calibration": {},
        "made_up": {"drawn": drawn},
        "published_rows": {"30B, 16 v6e, 16": one},
        "families": {
            "m@t": whole, "n@t": too_large
        },
        "balanced_selection": {
            "load_before": 0.1, "cores": 2, "drawn_skew": "zipf 1",
            "times": {"zipf 1": {"2.0": {"oracle_ms": [30.0], "device_ms": [5.0], "kept_share": 0.5, "unfilled": 3}}},
            "balance": {
                "zipf 1": {mode: {"1.0": [loads]} for mode in MODES}
            },
        },
        "sparse_contexts": {
            "glm-5.2@v5p:2x4x4": {
                "case": {"tensor": 4, "expert_dtype": "int8"}, "dp": 8, "limit_bytes": 102_800_000_000,
                "contexts": {
                    "2048": sparse_context("token_index", seconds=0.025),
                    "65536": sparse_context("chosen_attention", seconds=0.03),
                    "131072": {"needed_bytes": 110_250_000_000},
                },
            }
        },
        "expert_traffic": {
            "cases": [{"trace": "calculator", "ranks": 4, "redundant": 4, "slices": 2, "found": [placed]}],
            "plan": {"shape": [94, 128, 32, 32], "seconds": [0.5, 1.0]},
            "loads": {"all": {"cases": 3, "even": 1.03125, "shares": 1.0}},
        },
        "planner": {
            "load_before": 0.1, "readme": ratios, "drift": {"K2 ep64 R64": drifted | {"ms": [8.0]}},
            "quality": {
                "groups": {"R = 0": group, "all": group},
                "realised": {"hot": {"cases": 3, "mean": 1.03125, "worst_layer": 1.5}},
            },
            "seconds": {"K2 ep64 R64": {"ratio": 1.0, "first_ms": [3.0], "plan_ms": [5.0], "greedy_ms": [9.0]}},
        },
        "rebalance": {
            "layers": 48, "experts": 128, "redundant": 32, "devices": 8, "slots_per_step": 8, "runs": {"all": [moves]}
        },
        "weight_updates": {
            "bytes_per_device": 2_000_000, "runs": {"host": [updated]}
        },
        "realised_balance": {
            "devices": 4, "phases": {"before": counted}
        },
        "peers": {
            "facts": {"vllm": {
                "version": "1.2", "cores": [0, 1], "build": {"flags": ["-O3", "-mavx"]},
                "environment": {"LD_PRELOAD": "/a/libx.so:/b/liby.so"},
            }},
            "read_bytes_per_s": 25e9, "limits": {"1": 700.0, "16": 4000.0},
            "workloads": {
                name: {
                    "workload": asdict(WORKLOADS[name]),
                    "runs": {"ours": [{"seconds": 2.0}], "vllm": [{"seconds": 3.0}]},
                }
                for name in ("W1", "W3")
            },
        },
        "expert_reading": {
            "steps": 10, "read_bytes_per_s": [20e9, 20e9],
            "streams": {"1": {"bytes": 1_500_000_000, "seconds": [0.1, 0.1]}},
        },
        "speculation": {
            "4, 0.9": {"plain": [drafted | {"bound_seconds": 2.0}], **{key: [drafted] for key in ("1", "chosen")}}
        },
        "speculation_calculator": {"greedy": {"NGRAM, fixed": [drafted | {"plain_seconds": 2.0}]}},
        "calculator": {
            "tasks": {
                "sums": {"problems": 8, "right": dict.fromkeys(COMPUTED_BY, 7), "same": dict.fromkeys(COMPUTED_BY, 5)}
            },
            "runs": {side: [run_of(1.0 if side == "native" else 2.0)] for side in COMPUTED_BY},
        },
        "loading": {
            "num_bytes": 2_000_000, "expert_bytes": 1_000_000, "rate": 25e6,
            "machine": {"cores": 2, "load_before": 0.1},
            "runs": {"http, 64 at once": [
                {"seconds": 1.5, "cpu_s": 0.5, "tensor_bytes": 2_000_000, "most_at_once": 7, "share_bytes": 8,
                 "peak_bytes": 10},
            ]},
        },
        "invariance": {
            "equality": {
                "xla off": {"versions": 4, "tokens": 100_000, "differing": 250, "ratio_not_1": 240, "largest": 1e-6}
            },
            "cost": {"runs": {"W2": {
                f"{kernels} {side}": [run_of(seconds)]
                for kernels in ("native", "xla")
                for side, seconds in (("on", 2.0), ("off", 1.0))
            }}},
        },
        "bfloat16_routing": {
            "families": {"mixtral": {"token_layers": 8192, "differing": dict.fromkeys(PAIRS.values(), 0.0625)}}
        },
        "narrow_kl": {"size": "mid", "tokens": 8, "compared": {"ours": {"mean": 0.25, "largest": 1.0, "other": 0.5}}},
        "narrow_experts": {
            "calculator": {"fp8": dict.fromkeys(
                ("mean_kl", "largest_kl", "other_tokens", "other_sets", "right", "tokens", "token_layers"), 0.03125
            )},
        },
        "adapters": {"rank": 16, "parts": {
            "decode": {
                side: [run_of(seconds)]
                for side, seconds in dict.fromkeys(("off", "none", "one", "four", "half"), 2.0).items()
            } | {"eight": [run_of(2.5)]},
        }},
        "adapter_pushes": {
            "pushes": 4, "streams": 2, "answers": 8, "asked_again": 1, "generations_named": 3, "push_s": 0.5,
            "quiet_step_s": 0.25, "step_s": 0.25, "quiet_gaps": 1.5, "gaps": [1.0, 1.5, 2.0, 3.0],
            "gaps_in_steps": {"1": 60, "11": 4}, "steps": 64, "max_held": 2, "memory_bytes": [1e9, 1e9, 2e9],
        },
        "schema_suite": {
            "schemas": 4, "taken": 3, "bounded": 2, "refused": {"not": 1}, "ends": {"stop": 3, "length": 1},
            "schemas_with_a_stop": 2, "invalid": [],
        },
        "structured_output": {"calculator": {
            "text": "sums", "ids": 512, "tokens": 100,
            "runs": {
                side: [run_of(seconds) | {"mask_s": 0.1}]
                for side, seconds in (("plain", 1.0), ("constrained", 2.0), ("mixed", 1.25))
            },
        }},
        "hostile_schemas": {"calculator": {
            "quiet_gaps_ms": [1.0],
            "schemas": {"large": {"outcome": "400", "answered_ms": 7.0, "gaps_ms": [32.0]}},
        }},
        "published_text": {"qwen3": {
            "ids": 151_669, "open_s": 0.5, "table_s": 0.62, "grammar_ms": [4.0, 8.0], "mask_us": [27.0, 900.0],
            "token_us": [0.75, 2.5],
        }},
        "house": {"before": size, "after": size},
        "wheel": {
            "wheel_bytes": 6_700_000, "kernel_bytes": 8_000_000, "files": 538, "environment_bytes": 1_400_000_000,
            "install_s": 90.0, "first_answer_s": [31.0, 12.0],
        },
        "http": {
            **w2,
            "runs": {
                "engine": [{**streams, "cpu_s": {"engine": 3.0}}],
                "http": [{**streams, "seconds": 2.5, "cpu_s": http_cpu}],
            },
        },
    }  # fmt: skip


def test_a_spread_does_not_depend_on_order():
    assert spread([3.0, 1.0, 2.0]) == spread([1.0, 2.0, 3.0])
    assert str(spread([3.0, 1.0, 2.0])) == "2.00 (1.00-3.00)"


def test_a_rate_is_work_over_time():
    assert str(rate(100, [run_of(1.0), run_of(2.0), run_of(4.0)])) == "50.0 (25.0-100.0)"


def test_ratios_pair_neighbours_so_that_a_drift_of_the_machine_cancels():
    ours = [run_of(1.0), run_of(3.0), run_of(10.0)]
    ratio = speed_ratio(ours, [run_of(2 * run["seconds"]) for run in ours])
    assert (ratio.median, ratio.least, ratio.greatest) == (2.0, 2.0, 2.0)


def test_a_ratio_of_values_pairs_them_too():
    assert paired_ratio([2.0, 6.0], [1.0, 2.0]).median == 2.5


def test_time_per_step_adds_the_parts_asked_for():
    assert milliseconds_per_step([run_of(2.0)], ["device", "pack"]).median == pytest.approx(1e3 * 2.0 * (9 / 16) / 10)


def test_runs_without_a_neighbour_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        speed_ratio([run_of(1.0), run_of(1.0)], [run_of(1.0)])


def test_the_parts_of_a_step_are_the_whole_run():
    parts = step_parts([run_of(2.0, steps=4)])
    assert sum(share for _, share in parts.values()) == pytest.approx(1)
    assert sum(milliseconds for milliseconds, _ in parts.values()) == pytest.approx(500)
    assert parts["device"] == pytest.approx((250, 0.5))
    assert parts[OUTSIDE] == pytest.approx((125, 0.25))


def test_prompts_repeat_by_name_and_number_only():
    first = prompts_of("W3", 0, vocab_size=512)
    assert first == prompts_of("W3", 0, vocab_size=512) != prompts_of("W3", 1, vocab_size=512)
    assert [len(prompt) for prompt in first] == [512] * 16
    assert all(3 <= token < 512 for prompt in first for token in prompt)


def test_a_run_that_stopped_early_does_not_count():
    check_complete(16 * 64, WORKLOADS["W4"])
    with pytest.raises(RuntimeError, match="1023 tokens"):
        check_complete(16 * 64 - 1, WORKLOADS["W4"])


def test_every_row_of_a_table_is_as_wide_as_its_heading():
    for result in (result_of([run_of(2.0), run_of(4.0)]), result_of([])):
        for block in tables(result).split("\n\n")[1:]:
            assert len({(line.count("|"), len(line)) for line in block.splitlines()}) == 1


def test_the_table_names_the_peer_only_where_it_ran():
    compared, alone = tables(result_of([run_of(2.0), run_of(4.0)])), tables(result_of([]))
    assert "2.00 (2.00-2.00)" in compared
    assert "ours / theirs" in compared
    assert "ours / theirs" not in alone
    assert "not run" in alone


def test_every_kind_of_result_has_tables_as_wide_as_their_headings():
    results = every_section()
    assert set(results) == set(SECTIONS)
    for name, measured in results.items():
        for block in tables({name: measured}).split("\n\n"):
            assert len({(line.count("|"), len(line)) for line in block.splitlines()}) == 1, name


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("sides", "2.00 (2.00-2.00)"),
        ("waits", "2.50% (2.50%-2.50%)"),
        ("curve", "320 (320-320)"),
        ("invariance", "0.50 (0.50-0.50)"),
        ("conversations", "1.0100 (1.0100-1.0100)"),
        ("fleet_conversations", "1.040 (1.040-1.040)"),
        ("fleet_overload", "0.875"),
        ("fleet_overload", "| 7 "),
        ("fleet_overload", "+0.25"),
        ("fleet_routing", "1.040"),
        ("fleet_simulation", "87.5%"),
        ("agent_sessions", "77.1%"),
        ("session_hints", "62.5%"),
        ("served_sessions", "0.75 (0.75-0.75)"),
        ("agent_features", "1,250"),
        ("served_pages", "1.12 (1.00-1.25)"),
        ("prefill_apart", "| 1.25 "),
        ("prefill_served", "1.25 (1.25-1.25)"),
        ("prefill_served", "| 240 "),
        ("fleet_validation", "0.75"),
        ("router_time", "0.50"),
        ("http", "0.80 (0.80-0.80)"),
        ("delta_turns", "0.50 (0.50-0.50)"),
        ("decisions", "0.80 (0.80-0.80)"),
        ("routing_wire", "1 (0.250)"),
        ("exchange_bytes", "0.875"),
        ("step_transports", "250 (250-250)"),
        ("compile_gate", "2.50"),
        ("step_estimate", "50% (25% to 100%)"),
        ("calibration", "of these, of kernels without a point in the fit"),
        ("made_up", "| 0.75 "),
        ("published_rows", "1,476"),
        ("families", "0.500"),
        ("sparse_contexts", "does not fit"),
        ("sparse_contexts", "1.20"),
        ("families", "no room"),
        ("compile_gate", "too large"),
        ("programs", "528"),
        ("peers", "1.50 (1.50-1.50)"),
        ("peers", "vLLM: flags -O3 -mavx; LD_PRELOAD=libx.so:liby.so; on cores [0, 1]."),
        ("expert_reading", "0.75 (0.75-0.75)"),
        ("planner", "1.0312 (worst layer 1.5000)"),
        ("balanced_selection", "6.00 (6.00-6.00)"),
        ("host_us", "2.0 (1.0-3.0)"),
        ("rollout_reading", "32.0 (32.0-32.0)"),
        ("rollout_job", "0.94 (0.94-0.94)"),
        ("decision_paths", "| all       | 4,525 | 48    | 96     |"),
        ("decision_paths", "| differing | 5     | 0     | 0      |"),
        ("decision_paths", "| missing   | 20    | 0     | 0      |"),
        ("teacher", "1,024"),
        ("teacher", "1.25 (1.25-1.25)"),
        ("audit", "0.50%"),
        ("audit", "0.025%"),
        ("audit", "1.50"),
        ("audit", "1.25"),
        ("audit", "199"),
        ("rebalance", "0.50 (0.50-0.50)"),
        ("weight_updates", "3.00 (3.00-3.00)"),
        ("realised_balance", "1.56% (3.12%)"),
        ("calculator", "2.00 (2.00-2.00)"),
        ("calculator", "87.5%"),
        ("calculator", "| 2.00 (2.00-2.00) | 7                        | 3 "),
        ("bfloat16_routing", "6.25%"),
        ("narrow_experts", "3.12%"),
        ("narrow_kl", "2.5e-01"),
        ("adapters", "0.80 (0.80-0.80)"),
        ("adapter_pushes", "| 1.5, 3.0 "),
        ("adapter_pushes", "| 1.00, 2.00 GB "),
        ("adapter_pushes", "| 11 "),
        ("schema_suite", "1 of 4 (25%)"),
        ("structured_output", "0.50 (0.50-0.50)"),
        ("structured_output", "0.80 (0.80-0.80)"),
        ("hostile_schemas", "32.0 (32.0-32.0)"),
        ("house", "1,200 (4)"),
        ("published_text", "27.0 (900.0)"),
        ("loading", "1.25 (1.25-1.25)"),
        ("sparse_prompts", "50.0"),
        ("speculation", "0.80 (0.80-0.80)"),
        ("speculation_calculator", "1.50"),
        ("wheel", "31"),
    ],
)
def test_the_figure_that_counts_is_in_the_table(name, figure):
    assert figure in tables({name: every_section()[name]})


@pytest.mark.parametrize("place", [(), ("machine",), ("facts",), ("of", "a", "side")])
def test_a_busy_machine_is_named_wherever_its_load_stands(place):
    for load, is_busy in ((BUSY_LOAD, False), (BUSY_LOAD + 0.1, True)):
        found = tables({"curve": every_section()["curve"], "facts": nested(place, load)})
        assert found.startswith("**Busy machine**") == is_busy


def nested(place: tuple[str, ...], load: float) -> dict:
    return {place[0]: nested(place[1:], load)} if place else {"load_before": load}


def test_without_names_all_results_are_printed_and_what_is_no_result_is_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "b.json").write_text(json.dumps(result_of([])))
    (tmp_path / "a.json").write_text(json.dumps({"curve": every_section()["curve"]}))
    (tmp_path / "gate.json").write_text(json.dumps({"machine": {}, "programs_compiled": []}))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["table"])
    table.main()
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("### ")] == ["### a.json", "### b.json"]
    monkeypatch.setattr("sys.argv", ["table", str(tmp_path / "b.json")])
    table.main()
    assert capsys.readouterr().out.strip() == tables(result_of([]))
