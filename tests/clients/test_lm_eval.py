"""lm-eval over `/v1/completions`: what it scores and generates is what the engine says in process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayserve_moe import Engine
from tests.clients.conftest import client_package, logprobs_of

client_package("lm_eval")

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def test_two_local_tasks(url: str, engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    model_arguments = {
        "model": "m",
        "base_url": f"{url}/v1/completions",
        "tokenizer": checkpoint,
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenized_requests": True,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model_arguments.items())]
    command += ["--tasks", "toy_mc,toy_gen", "--include_path", "tests/lm_eval_tasks"]
    command += ["--output_path", str(tmp_path), "--log_samples"]
    environment = os.environ | OFFLINE | {"HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    check_likelihoods(samples_of(tmp_path, "toy_mc"), engine)
    check_generations(samples_of(tmp_path, "toy_gen"), engine)


def samples_of(directory: Path, task: str) -> list[dict]:
    (file,) = directory.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(samples) == len((ROOT / f"tests/lm_eval_tasks/{task}.jsonl").read_text().splitlines())
    return samples


def check_likelihoods(samples: list[dict], engine: Engine) -> None:
    """Each choice's log-likelihood is the sum of its tokens' log-probs, and whether greedy decoding would say it."""
    encode = engine.tokenizer.encode
    for sample in samples:
        for arguments, responses in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = encode(arguments["arg_0"]), encode(arguments["arg_1"])
            likelihood, is_greedy = float(responses[0][0]), str(responses[0][1]) == "True"
            assert likelihood == pytest.approx(
                sum(logprobs_of(engine, context + continuation)[len(context) :]), abs=1e-3
            )
            answer = engine.generate(input_ids=context, max_new_tokens=len(continuation), temperature=0)
            assert is_greedy == (answer["output_ids"] == continuation)


def check_generations(samples: list[dict], engine: Engine) -> None:
    """Greedy text up to the stop string is the engine's own."""
    for sample in samples:
        (arguments,) = sample["arguments"].values()
        ids = engine.tokenizer.encode(arguments["arg_0"])
        answer = engine.generate(input_ids=ids, max_new_tokens=12, temperature=0, stop=["\n"])
        assert sample["resps"] == [[answer["text"]]]
