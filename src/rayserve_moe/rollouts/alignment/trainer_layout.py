"""Conversion of samples' routing to a trainer's replay array: padded `[batch, seq, layers, k]`, with masks.

The row of a token belongs to the forward pass over it and is in the same column. The last token of a sample was never
fed: its column has a filler, like padding, and the replay mask is False there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.replay.encoding.ranges import presence
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout


@dataclass(frozen=True)
class Convention:
    """A trainer's expected array."""

    dtype: Callable[[int], type[np.integer]]
    """Element type by number of experts."""
    filler: str
    """Values where a row is absent: `rotating` (legal ids, evenly spread), `zeros` or `minus_one`."""
    last_row: str
    """Filler of the last token; also `previous`, a copy of the row before."""
    takes_missing: bool
    """True if samples with missing rows are accepted."""


@dataclass(frozen=True)
class Sample:
    """A sample with its routing."""

    token_ids: Sequence[int]
    """Prompt and response."""
    prompt_len: int
    routing: RoutedExperts
    """Rows from position 0."""


@dataclass(frozen=True)
class TrainerBatch:
    """A padded batch with masks, bool [batch, seq] each."""

    routed_experts: np.ndarray
    """[batch, seq, layers, k]."""
    replay_mask: np.ndarray
    """Rows to replay."""
    attention_mask: np.ndarray
    """Tokens."""
    prompt_mask: np.ndarray
    response_mask: np.ndarray


def _narrowest_signed(num_experts: int) -> type[np.integer]:
    return np.int8 if num_experts <= 2**7 else np.int16 if num_experts <= 2**15 else np.int32


def _narrowest_unsigned(num_experts: int) -> type[np.integer]:
    return np.uint8 if num_experts <= 2**8 else np.uint16


CONVENTIONS = {
    "slime": Convention(lambda _: np.int32, "rotating", "rotating", takes_missing=False),
    "verl": Convention(lambda _: np.int16, "zeros", "zeros", takes_missing=True),
    "nemo_rl": Convention(_narrowest_signed, "minus_one", "minus_one", takes_missing=True),
    "prime_rl": Convention(_narrowest_unsigned, "zeros", "previous", takes_missing=False),
}


def to_trainer_layout(
    samples: Sequence[Sample],
    layout: RoutingLayout,
    *,
    convention: str,
    padding: str = "right",
    seq_len: int | None = None,
    hidden_layers: bool = True,
) -> TrainerBatch:
    """Convert samples for a trainer. Raises ValueError if a sample does not fit or misses rows that the trainer needs.

    `padding` is `right`, `left`, or `between` (prompts end, and responses begin, in the same column). `seq_len`
    defaults to the longest sample. The layer axis has all hidden layers (zeros in layers without routing), or only the
    MoE layers.
    """
    chosen = CONVENTIONS[convention]
    columns, width = _columns(samples, padding, seq_len)
    ids, replay = _fillers(len(samples), width, layout, chosen), np.zeros((len(samples), width), np.bool_)
    tokens, prompt = np.zeros_like(replay), np.zeros_like(replay)
    for i, (sample, first) in enumerate(zip(samples, columns, strict=True)):
        present = _present_rows(sample, layout, chosen)
        count = len(present)
        ids[i, first : first + count][present] = sample.routing.rows[present]
        replay[i, first : first + count] = present
        tokens[i, first : first + len(sample.token_ids)] = True
        prompt[i, first : first + sample.prompt_len] = True
        if chosen.last_row == "previous" and 0 < count < len(sample.token_ids):
            ids[i, first + count] = ids[i, first + count - 1]
    if hidden_layers and len(layout.layer_ids) < layout.num_hidden_layers:
        wide = np.zeros((*ids.shape[:2], layout.num_hidden_layers, layout.top_k), ids.dtype)
        wide[:, :, list(layout.layer_ids)] = ids
        ids = wide
    return TrainerBatch(ids, replay, tokens, prompt, tokens & ~prompt)


def _columns(samples: Sequence[Sample], padding: str, seq_len: int | None) -> tuple[list[int], int]:
    """Return the column of every sample's first token, and the number of columns."""
    lengths = [len(sample.token_ids) for sample in samples]
    prompts = [sample.prompt_len for sample in samples]
    widest_prompt = max(prompts, default=0)
    if padding == "between":
        ends = [widest_prompt - prompt + length for prompt, length in zip(prompts, lengths, strict=True)]
        firsts = [widest_prompt - prompt for prompt in prompts]
    else:
        ends, firsts = lengths, [0] * len(samples)
    width = max(ends, default=0) if seq_len is None else seq_len
    if width < max(ends, default=0):
        raise ValueError(f"a sample needs {max(ends)} columns, but seq_len is {width}")
    if padding == "left":
        firsts = [width - length for length in lengths]
    elif padding not in ("right", "between"):
        raise ValueError("padding must be right, left or between")
    return firsts, width


def _fillers(batch: int, width: int, layout: RoutingLayout, convention: Convention) -> np.ndarray:
    shape, dtype = (batch, width, *layout.row_shape), convention.dtype(layout.num_experts)
    if layout.num_experts - 1 > np.iinfo(dtype).max:
        raise ValueError(f"this trainer's {np.dtype(dtype).name} cannot hold the ids of {layout.num_experts} experts")
    if convention.filler == "rotating":
        turning = np.arange(width * layout.top_k).reshape(width, 1, layout.top_k) % layout.num_experts
        return np.broadcast_to(turning, shape).astype(dtype)
    return np.full(shape, -1 if convention.filler == "minus_one" else 0, dtype)


def _present_rows(sample: Sample, layout: RoutingLayout, convention: Convention) -> np.ndarray:
    """Return a mask of the rows of a sample that hold data. Raises ValueError unless every fed token has a row."""
    routing, num_tokens = sample.routing, len(sample.token_ids)
    if routing.rows.shape[1:] != layout.row_shape:
        raise ValueError("a sample has rows of another model")
    if routing.start:
        raise ValueError(f"the rows of a sample begin at position {routing.start}: join its turns first")
    if len(routing.rows) not in (num_tokens - 1, num_tokens):
        raise ValueError(f"a sample of {num_tokens} tokens has {len(routing.rows)} rows")
    if not 0 <= sample.prompt_len <= num_tokens:
        raise ValueError(f"a sample of {num_tokens} tokens has a prompt of {sample.prompt_len}")
    if routing.missing and not convention.takes_missing:
        raise ValueError(f"a sample has no rows for positions {list(routing.missing)}, which this trainer cannot skip")
    return presence(routing)
