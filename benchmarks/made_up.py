"""Plans for models that do not exist, compiled to see how near the plans are.

    python -m benchmarks.made_up [--compile] [--only NAME] [--out FILE.json]

Sizes are drawn at random from those that published models have. Each model is planned on slices of three generations.
With `--compile` the decode step of each is compiled too, by `rayserve-moe compile-check --estimate` in a process of its
own, which takes a minute or more; a compiled step is kept until then.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown_table
from rayserve_moe.config.load import set_environment_defaults
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.compile_check import COMPILER_ENVIRONMENT, use_host_alone
from rayserve_moe.tools.estimate.rates import STEP_SPREAD
from rayserve_moe.tools.plan_slice.candidates import Candidate, eplb_headroom
from rayserve_moe.tools.plan_slice.command import ranked
from rayserve_moe.tools.plan_slice.made_up import resized, save_config
from rayserve_moe.tools.plan_slice.made_up_options import MIXERS
from rayserve_moe.tools.plan_slice.options import Assumptions, Traffic
from rayserve_moe.tools.plan_slice.step_cost import StepTokens, step_cost
from rayserve_moe.tools.presets import read_config
from rayserve_moe.tools.served_cases import devices_of

KEY = "made_up"
RESULTS = Path(__file__).parent / "results" / "made_up.json"
SLICES = ("v6e:2x4", "v6e:4x4", "v5p:2x2x2", "tpu7x:2x2x1")
PROMPT, OUTPUT, CONCURRENCY = 1024, 1024, (16, 64, 256, 1024)
SEQUENCES, CONTEXT = 16, 1024
"""Sequences of a data rank in the compiled step, and tokens of context of each."""
DRAWN = {
    "gqa": {"layers": (28, 40, 56), "width": (2048, 3072, 4096), "kv_heads": (4, 8), "heads": (32, 64),
            "experts": (64, 128, 192), "top_k": (4, 6, 8), "expert_width": (768, 1024, 1536)},
    "delta": {"layers": (24, 32, 40), "width": (2048, 3072, 4096), "experts": (128, 256), "top_k": (6, 8, 10),
              "expert_width": (512, 768, 1024)},
    "mla": {"layers": (24, 32, 40), "width": (2048, 4096, 5120), "heads": (32, 64), "experts": (64, 128, 256),
            "top_k": (4, 6, 8), "expert_width": (768, 1024, 1536)},
}  # fmt: skip
"""Sizes to draw from, by mixer."""


@dataclass(frozen=True)
class MadeUp:
    """A model with drawn sizes, and the slice that its step is compiled for."""

    mixer: str
    seed: int
    topology: str

    @property
    def sizes(self) -> dict[str, int]:
        """Return the drawn sizes."""
        rng = random.Random(self.seed)
        return {name: rng.choice(sizes) for name, sizes in DRAWN[self.mixer].items()}

    def config(self) -> dict[str, Any]:
        """Return the config of the model."""
        return resized(read_config(MIXERS[self.mixer]), self.sizes)


MODELS = {
    "gqa, seed 1": MadeUp("gqa", 1, "v6e:2x4"),
    "delta, seed 2": MadeUp("delta", 2, "v6e:2x4"),
    "mla, seed 3": MadeUp("mla", 3, "v6e:4x4"),
    "delta, seed 5": MadeUp("delta", 5, "v6e:4x4"),
    "gqa, seed 6": MadeUp("gqa", 6, "v5p:2x2x2"),
}
"""Numbers of ops of a plan (`plan_slice.step_cost`) were set with the second in view; it has not seen later ones."""


def planned(made_up: MadeUp) -> dict[str, Any]:
    """Return the best split of each slice by requests at once, and the headroom of expert balance at the most."""
    spec = spec_from_config(made_up.config())
    found: dict[str, Any] = {}
    for topology in SLICES:
        rows = {}
        for requests in CONCURRENCY:
            traffic = Traffic(PROMPT, OUTPUT, requests)
            candidates = ranked(spec, [topology], traffic=traffic, given=Assumptions())
            if candidates:
                rows[str(requests)] = _figures(candidates[0], traffic=traffic)
                headroom = eplb_headroom(spec, candidates[0], traffic=traffic, given=Assumptions())
                rows[str(requests)] |= {"eplb_headroom": headroom}
        if rows:
            found[topology] = rows
    return found


def _figures(one: Candidate, *, traffic: Traffic) -> dict[str, Any]:
    return {
        "split": asdict(one.split),
        "chips": one.chips,
        "served": one.served,
        "memory_gb": one.weights_gb + one.kv_gb,
        "capacity_gb": one.capacity_gb,
        "tokens_per_s": one.tokens_per_s,
        "first_token_s": one.first_token_s(traffic),
        "token_s": one.token_s,
        "exchange_share": one.decode.link_s / one.decode.seconds,
        "imbalance": one.imbalance,
    }


def step_of_plan(made_up: MadeUp) -> float:
    """Return the plan's seconds of the step that is compiled: one data rank per device."""
    devices = devices_of(made_up.topology)
    model = model_config(
        spec_from_config(made_up.config()), plan_for(devices, data_size=len(devices)), experts=ExpertSettings()
    )
    return step_cost(model, StepTokens(SEQUENCES, CONTEXT), topology=made_up.topology).seconds


def compiled(made_up: MadeUp) -> dict[str, Any]:
    """Compile the decode step; returns what is kept of its estimate. RuntimeError with the last line of the error."""
    with tempfile.TemporaryDirectory() as folder:
        save_config(made_up.config(), folder)
        served = ["--model", folder, "--topology", made_up.topology, "--batch", str(SEQUENCES)]
        sizes = ["--context", str(CONTEXT), "--page-size", "128", "--programs", f"decode_{SEQUENCES}"]
        command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", *served, *sizes, "--estimate", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError((done.stderr.strip() or "no report").splitlines()[-1])
    (program,) = json.loads(done.stdout)["programs"]
    if program["error"]:
        raise RuntimeError(program["error"])
    return {name: program["estimate"][name] for name in ("step", "roofline", "bound")}


def made_up_tables(models: Mapping[str, Any]) -> str:
    """Return the plans of each model, and plans beside compiled steps."""
    sizes = list(dict.fromkeys(size for found in models.values() for size in found["sizes"]))
    drawn = [[name, *(str(found["sizes"].get(size, "")) for size in sizes)] for name, found in models.items()]
    heading = ["model and slice", "split, rows", "requests", "tok/s", "tok/s and chip", "first token, ms"]
    heading += ["a token, ms", "GB of a device", "exchange", "fullest device", "EPLB could add"]
    parts = [markdown_table(["model", *(size.replace("_", " ") for size in sizes)], drawn)]
    parts.append(markdown_table(heading, [row for name, found in models.items() for row in _rows(name, found)]))
    near = [_near(name, found) for name, found in models.items() if "compiled" in found]
    titles = ["compiled decode step of", "slice", "plan, ms", "compiled, ms", "plan / compiled", "bound"]
    return "\n\n".join([*parts, markdown_table(titles, near)])


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[list[str]]:
    for topology, rows in found["plans"].items():
        requests, one = list(rows.items())[-2 if len(rows) > 1 else -1]
        split = one["split"]
        yield [
            f"{name}: {topology}",
            f"{split['dp']} x {split['tp']}, {split['rows']}",
            f"{one['served']} of {requests}",
            _range(one["tokens_per_s"] / STEP_SPREAD.max_ratio, one["tokens_per_s"] / STEP_SPREAD.min_ratio),
            f"{one['tokens_per_s'] / one['chips']:,.0f}",
            _range(*(one["first_token_s"] * 1e3 * ratio for ratio in asdict(STEP_SPREAD).values())),
            _range(*(one["token_s"] * 1e3 * ratio for ratio in asdict(STEP_SPREAD).values()), digits=1),
            f"{one['memory_gb']:.1f} of {one['capacity_gb']:.1f}",
            f"{one['exchange_share']:.0%}",
            f"{one['imbalance']:.2f}",
            f"{one['eplb_headroom']:.0%}",
        ]


def _range(low: float, high: float, *, digits: int = 0) -> str:
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def _near(name: str, found: Mapping[str, Any]) -> list[str]:
    step, planned_s = found["compiled"]["step"], found["planned_step_s"]
    shown = f"{step['seconds'] * 1e3:.2f} ({step['min_seconds'] * 1e3:.1f} to {step['max_seconds'] * 1e3:.1f})"
    ratio = planned_s / step["seconds"]
    return [name, found["topology"], f"{planned_s * 1e3:.2f}", shown, f"{ratio:.2f}", found["compiled"]["bound"]]


def main() -> None:
    """Plan every model, writing the result file after each; then print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the steps anew")
    parser.add_argument("--only", choices=list(MODELS), action="append", help="may be given more than once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    set_environment_defaults(COMPILER_ENVIRONMENT)
    use_host_alone()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {KEY: {}}
    for name in arguments.only or MODELS:
        one = MODELS[name]
        found = {"sizes": one.sizes, "mixer": one.mixer, "topology": one.topology, "plans": planned(one)}
        found["planned_step_s"] = step_of_plan(one)
        before = known[KEY].get(name, {})
        kept = (
            {"compiled": compiled(one)} if arguments.compile else {k: before[k] for k in ("compiled",) if k in before}
        )
        known[KEY][name] = found | kept
        known[KEY] = {model: known[KEY][model] for model in MODELS if model in known[KEY]}
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(made_up_tables(known[KEY]))


if __name__ == "__main__":
    main()
