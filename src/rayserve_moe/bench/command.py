"""Command `rayserve-moe bench`: sends load to a running server and reports latencies and throughput.

Options and the keys of results are named as in `vllm bench serve`. Exit status: 0, or 1 if a request failed.
"""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path

from rayserve_moe.config.load import environment_setting
from rayserve_moe.config.server_address import DEFAULT_URL, server_url

METRICS = ("ttft", "tpot", "itl", "e2el")
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
RANDOM, CUSTOM = "random", "custom"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", "--url", default="", help=f"URL of the server (default: {DEFAULT_URL})")
    server.add_argument("--host", default="127.0.0.1", help="in place of --base-url (default: %(default)s)")
    server.add_argument("--port", type=int, default=8000, help="in place of --base-url (default: %(default)s)")
    server.add_argument("--backend", choices=tuple(ENDPOINTS), default="openai", help="route: completions or chat")
    server.add_argument("--endpoint", default="", help="path of the route (default: the backend's)")
    server.add_argument("--model", default="", help="model to ask (default: the server's first)")
    server.add_argument("--api-key", default="", help="key of the server, or RAYSERVE_MOE_API_KEY")
    load = parser.add_argument_group(
        "load", "open loop with --request-rate, closed loop with --max-concurrency, or both"
    )
    load.add_argument("--num-prompts", type=int, default=1000, help="number of requests (default: %(default)s)")
    load.add_argument("--request-rate", type=float, default=math.inf, help="requests per second (default: all at once)")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; above, more even; below, burstier")
    load.add_argument("--max-concurrency", type=int, help="maximum requests in flight (default: no limit)")
    load.add_argument("--num-warmups", type=int, default=1, help="requests before, not counted (default: %(default)s)")
    load.add_argument("--timeout", type=float, default=6 * 3600.0, help="seconds of a request (default: %(default)g)")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--dataset-name", choices=(RANDOM, CUSTOM), help="default: custom with --dataset-path")
    prompts.add_argument(
        "--dataset-path", type=Path, help="JSONL: `prompt` or `messages`, and `output_tokens`, per line"
    )
    prompts.add_argument("--random-input-len", type=int, default=1024, help="tokens (default: %(default)s)")
    prompts.add_argument("--random-output-len", type=int, default=128, help="tokens (default: %(default)s)")
    prompts.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, 0 to 1")
    prompts.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all random prompts begin with")
    prompts.add_argument(
        "--custom-output-len", type=int, default=256, help="of lines without one (default: %(default)s)"
    )
    prompts.add_argument("--vocab-size", type=int, help="of random prompts (default: the server's)")
    prompts.add_argument("--seed", type=int, default=0, help="of random prompts and times (default: %(default)s)")
    prompts.add_argument("--ignore-eos", action="store_true", help="generate all tokens; always so for random prompts")
    prompts.add_argument("--temperature", type=float, help="default: 0")
    report = parser.add_argument_group("report")
    report.add_argument("--percentile-metrics", default=",".join(METRICS), help="default: %(default)s")
    report.add_argument("--metric-percentiles", default="50,90,99", help="default: %(default)s")
    report.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="bounds, such as ttft:200 tpot:50"
    )
    report.add_argument("--save-result", action="store_true", help="write the result as JSON")
    report.add_argument("--save-detailed", action="store_true", help="with the lengths and times of every request")
    report.add_argument("--result-dir", type=Path, default=Path(), help="default: the current directory")
    report.add_argument("--result-filename", default="", help="default: from model, rate and time")
    report.add_argument("--plot", type=Path, help="write latencies and tokens per second as an SVG chart")
    report.add_argument("--json", action="store_true", help="print the result as JSON in place of the table")
    report.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Check the arguments, then send the load; return the exit status of `bench.running.run`.

    Raises: ValueError for wrong arguments, and for a file that does not exist.
    """
    url = options.base_url or f"http://{options.host}:{options.port}"
    options.base_url = server_url(url)
    options.endpoint = options.endpoint or ENDPOINTS[options.backend]
    options.api_key = options.api_key or environment_setting("api_key")
    options.dataset_name = options.dataset_name or (CUSTOM if options.dataset_path else RANDOM)
    options.percentile_metrics = metrics_of(options.percentile_metrics)
    options.metric_percentiles = percentiles_of(options.metric_percentiles)
    options.goodput = bounds_of(options.goodput)
    _check_numbers(options)
    if options.dataset_name == CUSTOM and not (options.dataset_path and options.dataset_path.is_file()):
        raise ValueError(f"--dataset-path {options.dataset_path or ''}: no such file")
    for name, folder in (("--result-dir", options.result_dir), ("--plot", options.plot and options.plot.parent)):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{name} {folder}: no such directory")
    return importlib.import_module("rayserve_moe.bench.running").run(options)


def metrics_of(text: str) -> tuple[str, ...]:
    """Return the names of metrics in a list. Raises ValueError for an unknown name."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"--percentile-metrics {unknown[0]}: known metrics are {', '.join(METRICS)}")
    return names


def percentiles_of(text: str) -> tuple[float, ...]:
    """Return the percentiles in a list. Raises ValueError unless they are numbers in [0, 100]."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--metric-percentiles {text}: numbers separated by commas, such as 50,99") from error
    if not all(0 <= one <= 100 for one in found):
        raise ValueError(f"--metric-percentiles {text}: they lie in [0, 100]")
    return found


def bounds_of(pairs: list[str]) -> dict[str, float]:
    """Return the bounds in ms that a request must keep to count for goodput, by metric.

    Raises: ValueError unless they have the form `ttft:200`.
    """
    bounds = {}
    for pair in pairs:
        name, colon, number = pair.partition(":")
        known = [metric for metric in METRICS if metric != "itl"]
        if name not in known or not colon or not number.replace(".", "", 1).isdigit():
            raise ValueError(f"--goodput {pair}: METRIC:MILLISECONDS, with a metric of {', '.join(known)}")
        bounds[name] = float(number)
    return bounds


def _check_numbers(options: argparse.Namespace) -> None:
    least = {
        "num_prompts": 1, "num_warmups": 0, "random_input_len": 1, "random_output_len": 1, "random_prefix_len": 0,
        "custom_output_len": 1, "max_concurrency": 1, "vocab_size": 2, "seed": 0,
    }  # fmt: skip
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, found {value}")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be greater than 0, found {getattr(options, name):g}")
    if not 0 <= options.random_range_ratio < 1:
        raise ValueError(f"--random-range-ratio must lie in [0, 1), found {options.random_range_ratio:g}")
