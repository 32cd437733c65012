"""GRPO from start to end on this machine: a server of the calculator, its rollouts, a trainer that replays routing.

    pip install -e '.[grpo]'
    python -m examples.grpo --out DIRECTORY [--task chain] [--steps 60] [--asynchronous [--partial]] [--dtype float32]
    python -m examples.grpo --out DIRECTORY --tunix
    python -m examples.grpo --out DIRECTORY --model hybrid
    python -m examples.grpo --out DIRECTORY --ablation [--seeds 5]
    python -m examples.grpo --out DIRECTORY --kl-law RUN ...

Of `a#b=` the calculator answers the sum or the difference, as likely; the reward wants the sum. With `--task chain` its
answer is the first operand of the next turn's problem, and the reward wants the sum of all four. A run ends when the
held-out probability of the sum was above 0.92 twice and the last three batches were rewarded with more than 0.95. It
goes on where it was killed when the same command is given again. DIRECTORY gets metrics.jsonl, plots.png and plots.svg,
and the weights at the end as a checkpoint, `policy`.

With `--model hybrid` the policy is a calculator with gated delta layers (Qwen3.5). It is trained first, in some
minutes, unless the cache has it. Name the model for `--ablation` and `--kl-law` as well.

With `--tunix` samples and weights pass through the adapter of tunix' `Sampler` protocol; a lost server ends the run.

With `--ablation` each arm of `arms.ARMS` runs with each seed: what replay changes, beside controls that replay wrong
rows. DIRECTORY gets ablation.md, ablation.png and ablation.svg.

With `--kl-law` the saved policies of runs, one of every fifth step, are served and compared with the trainer on the
probe set, with replay and without. DIRECTORY gets kl_law.md and kl_law.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import jax

from examples.grpo.ablation import run_arms
from examples.grpo.arms import ARMS
from examples.grpo.evaluation import evaluation
from examples.grpo.kl_law import run_law
from examples.grpo.loop import METRICS, POLICIES, REWARDS, Parts, Row, Run, run_to_end
from examples.grpo.model import checkpoint_tensors, read_architecture, read_params, write_policy
from examples.grpo.objective import Objective
from examples.grpo.plots import draw
from examples.grpo.sampler import Sampler
from examples.grpo.server import PROGRAM, GrpoServer, ServerFailed, say
from examples.grpo.settings import (
    GrpoSettings,
    agree,
    make_room_for_several,
    model_directory,
    server_settings,
    settings_of,
)
from examples.grpo.tasks import GRPO_TASKS
from examples.grpo.trainer import compile_programs
from examples.grpo.tunix import TunixSampling
from rayserve_moe.config.load import default_cache_directory


def main() -> int:
    """Run, or go on with a run; a server that does not start is one line."""
    try:
        return train()
    except ServerFailed as error:
        sys.exit(f"error: {error}")


def train() -> int:
    """Run, or go on with a run."""
    options = parse_arguments()
    out = options.out.resolve()
    try:
        settings = settings_of(vars(options))
        if options.ablation or options.kl_law:
            make_room_for_several(out)
        else:
            agree(settings, out)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    server_cores: list[int] = []
    if options.one_core_each:
        *server_cores, own_core = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, {own_core})
    cache = default_cache_directory()
    jax.config.update("jax_compilation_cache_dir", str(cache / "grpo"))
    try:
        model = model_directory(settings, cache=cache)
        architecture = read_architecture(model)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    say(f"writing to {out}; the same command goes on after a kill")
    say("compiling the trainer's programs")
    programs = compile_programs(
        architecture, learning_rate=settings.learning_rate, objective=Objective(kl_weight=settings.kl_weight)
    )
    started = time.perf_counter()
    serving = server_settings(settings, model=model)
    server = Sampler(lambda: GrpoServer(serving, out, cores=server_cores))
    if options.kl_law:
        with server:
            print(run_law(server, options.kl_law, architecture, out=out))
        return 0
    with TunixSampling(server) if settings.tunix else server as sampler:
        evaluate = evaluation(architecture, settings.task)
        parts = Parts(sampler, programs, evaluate, architecture, read_params(model, architecture))
        if options.ablation:
            print(run_arms(parts, settings, num_seeds=options.seeds, out=out))
            return 0
        run = Run(parts, settings, out)
        run_to_end(run, report=lambda rows: plot(rows, out, task=settings.task, every=settings.probe_every))
    plot(run.rows, out, task=settings.task)
    write_policy(checkpoint_tensors(run.weights[run.version], architecture), out / "policy", model=model)
    print(summary(run.rows, seconds=time.perf_counter() - started))
    print("\n".join(where_it_is(out)))
    return 0


def where_it_is(out: Path) -> list[str]:
    """What a run has written, and how to serve its policy."""
    return [
        f"measured   {out / METRICS}",
        f"drawn      {out / 'plots.png'}, {out / 'plots.svg'}",
        f"policy     {out / 'policy'}",
        f"serve it   {PROGRAM} serve {out / 'policy'} --served-model-name grpo",
    ]


def plot(rows: list[Row], out: Path, *, task: str, every: int = 1) -> None:
    """Draw what there is, if the last step's number is a multiple of `every`."""
    if rows[-1]["step"] % every == 0:
        draw({"run": rows}, title=f"GRPO, task {task}", file=out / "plots")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = GrpoSettings()
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory of the run, a new one or that of a run to go on with")
    add("--steps", type=int, default=default.steps, help="at most so many")
    add("--seed", type=int, default=default.seed)
    add("--model", default=default.model, help="`hybrid`, or a directory, instead of the calculator of the package")
    add("--arm", choices=tuple(ARMS), default=default.arm, help="what is replayed: the rows that served, or controls")
    add("--task", choices=tuple(GRPO_TASKS), default=default.task, help="a sum in one turn, or a chain of three turns")
    add("--prompts", type=int, help="groups of a step; this and the next three are by default what suits the task")
    add("--group", type=int, help="samples of a prompt")
    add("--learning-rate", type=float)
    add("--kl-weight", type=float, help="of the distance to the policy before the run")
    add("--dtype", choices=("float32", "bfloat16"), default=default.dtype, help="the server's")
    add("--max-kl", type=float, default=default.max_kl, help="of a batch under replay, or it is refused")
    add("--asynchronous", action="store_true", help="draw the next samples while the trainer works")
    add("--partial", action="store_true", help="of an asynchronous run: push weights under samples, which go on")
    add("--tunix", action="store_true", help="sample and push by tunix' `Sampler` protocol")
    add("--one-core-each", action="store_true", help="hold server and trainer to a core each, to compare loops (Linux)")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--ablation", action="store_true", help="run all arms, each with every seed")
    several.add_argument(
        "--kl-law", type=Path, nargs="+", metavar="RUN", help="directories of runs whose policies are measured"
    )
    add("--seeds", type=int, default=5, help="of the ablation")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds should be 1 or more")
    for run in options.kl_law or ():
        if not any((run / POLICIES).glob("*.safetensors")):
            parser.error(f"--kl-law: {run} has no saved policies")
    for name, value in GRPO_TASKS[options.task].defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def summary(rows: list[Row], *, seconds: float) -> str:
    """The first and the last row in a few lines; the reward at the end is that of the last batches."""
    reward = statistics.fmean(row["reward"] for row in rows[1:][-REWARDS:])
    first, last = {**rows[1], **rows[0]}, {**rows[-1], "reward": reward}
    names = {
        "reward": "reward",
        "held_out": "held-out P(sum)",
        "differences": "- of 1-2 digits",
        "sums": "+ of 3 digits",
    }
    lines = [f"{last['step']} steps; this call took {seconds:.0f} s"]
    lines += [f"{said:18} {first[name]:.3f} -> {last[name]:.3f}" for name, said in names.items()]
    return "\n".join(lines)
