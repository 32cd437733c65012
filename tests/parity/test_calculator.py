"""The calculator in transformers: loaded strictly, as right as over HTTP, and the same logits; needs torch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples.calculator.accuracy import TASKS
from examples.calculator.batches import question_batch
from examples.calculator.export import read_weights
from examples.calculator.network import score
from examples.calculator.problems import held_out_problems
from rayserve_moe.checkpoints.model_path import TRAINED

torch = pytest.importorskip("torch", reason="the live comparison needs torch: `make parity`")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

DIRECTORY = TRAINED["calculator"]
ENOUGH = {"sums of 1-2 digits": 0.995, "sums of 3 digits": 0.95}
MOST_TOKENS = 6


def strictly_loaded(dtype):
    torch.set_num_threads(1)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        DIRECTORY, dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
    )
    assert not any(loading.values()), loading
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DIRECTORY, padding_side="left", local_files_only=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENOUGH)
def test_held_out_sums_are_right(tokenizer, name, dtype):
    """Greedy by the checkpoint's own generation config, which ends at the newline."""
    (task,) = [task for task in TASKS if task.name == name]
    problems = held_out_problems(task, limit=1000)
    asked = tokenizer([problem.prompt for problem in problems], padding=True, return_tensors="pt")
    with torch.no_grad():
        written = strictly_loaded(dtype).generate(**asked, max_new_tokens=MOST_TOKENS)
    said = tokenizer.batch_decode(written[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    ends = (written[:, asked["input_ids"].shape[1] :] == tokenizer.eos_token_id).any(dim=1).tolist()
    right = [end and text in problem.answers for text, end, problem in zip(said, ends, problems, strict=True)]
    assert np.mean(right) >= ENOUGH[name]


def test_the_trained_function_is_that_of_transformers():
    weights, spec = read_weights(DIRECTORY)
    problems = held_out_problems(TASKS[3], limit=64)
    batch = question_batch(problems, 0, width=16)
    ours = jax.jit(lambda: score(weights, batch.ids_BT, batch.segments_BT, spec=spec, places=1024).logits_BTV)()
    with torch.no_grad():
        theirs = strictly_loaded("float32")(
            torch.from_numpy(batch.ids_BT.astype(np.int64)), use_cache=False
        ).logits.numpy()
    is_read = batch.segments_BT >= 0
    np.testing.assert_allclose(np.asarray(ours)[is_read], theirs[is_read], rtol=0, atol=2e-4)
