"""KL from bfloat16 of what 8 bits make of the next token: our experts in int8 or fp8, llama.cpp's matrices in Q8_0.

    python -m benchmarks.peers.narrow_kl [--size mid] [--sequences 4] [--tokens 32] [--peers DIR] [--out FILE.json]

Each side is held to itself in bfloat16, over all words of the vocabulary, after every prefix of random sequences; how
far the two sides are from each other in bfloat16 stands beside it. llama.cpp's server is asked for log-probs of one
token after each prefix. It has all matrices in Q8_0, attention's and the head's too; ours are those of experts alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, note, save
from benchmarks.peers.folders import add_peers_option, installed
from benchmarks.peers.process import PeerProcess, exit_on_termination
from benchmarks.peers.run import start
from benchmarks.peers.tables import narrow_kl as as_table
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.checkpoints.files import read_config
from tests.support.engine.host_runners import new_runner
from tests.support.models.full_logits import prompt_outputs_of

PEER = "llamacpp"
OURS = {"bfloat16": {}, "int8": {"expert_dtype": "int8"}, "fp8": {"expert_dtype": "fp8"}}


def our_log_probs(path: Path, sequences: list[list[int]], settings: dict[str, str]) -> np.ndarray:
    """Return log-probs of the token after every prefix, by the native kernels: float32 [sequences * T, V]."""
    runner = new_runner(path, dtype="bfloat16", cpu_kernels="native", num_pages=16, **settings)
    runner.load()
    compute = prompt_outputs_of(runner, longest=len(sequences[0]))
    return np.concatenate([np.asarray(jax.nn.log_softmax(compute(ids)[0], axis=-1)) for ids in sequences])


def their_log_probs(peer: PeerProcess, sequences: list[list[int]], *, vocab_size: int) -> np.ndarray:
    """Return `our_log_probs` of a peer, in float64."""
    prefixes = ([ids[: end + 1] for end in range(len(ids))] for ids in sequences)
    return np.concatenate([peer.log_probs(prompts, vocab_size=vocab_size) for prompts in prefixes])


def kl(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Return mean and largest KL of each row of `other` from `one`, in nats, and the share of other likeliest words."""
    wide, narrow = one.astype(np.float64), other.astype(np.float64)
    each = (np.exp(wide) * (wide - narrow)).sum(-1)
    return {
        "mean": float(each.mean()),
        "largest": float(each.max()),
        "other": float((one.argmax(-1) != other.argmax(-1)).mean()),
    }


def measure(size: str, sequences: list[list[int]], *, peers: Path) -> dict[str, dict[str, float]]:
    """Measure each comparison."""
    path, facts, theirs = checkpoint_of(size), installed(peers, PEER), dict[str, np.ndarray]()
    vocab_size = read_config(path)["vocab_size"]
    for dtype in ("bfloat16", "int8"):
        with start(PEER, path, peers=peers, facts=facts, experts=dtype) as peer:
            theirs[dtype] = their_log_probs(peer, sequences, vocab_size=vocab_size)
        note(f"llama.cpp in {dtype}: {len(theirs[dtype])} tokens")
    ours = {name: our_log_probs(path, sequences, settings) for name, settings in OURS.items()}
    return {
        "ours, experts in int8": kl(ours["bfloat16"], ours["int8"]),
        "ours, experts in fp8": kl(ours["bfloat16"], ours["fp8"]),
        "llama.cpp, all matrices in Q8_0": kl(theirs["bfloat16"], theirs["int8"]),
        "llama.cpp next to ours, both in bfloat16": kl(ours["bfloat16"], theirs["bfloat16"]),
    }


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="mid")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS / "narrow_kl.json")
    add_peers_option(parser)
    chosen = parser.parse_args()
    exit_on_termination()
    vocabulary = read_config(checkpoint_of(chosen.size))["vocab_size"]
    shape = (chosen.sequences, chosen.tokens)
    sequences = np.random.default_rng(0).integers(FIRST_PLAIN_ID, vocabulary, shape).tolist()
    compared = measure(chosen.size, sequences, peers=chosen.peers.resolve())
    result: dict[str, Any] = {"size": chosen.size, "tokens": chosen.sequences * chosen.tokens, "compared": compared}
    save({"narrow_kl": result}, chosen.out)
    print(as_table(result))


if __name__ == "__main__":
    main()
