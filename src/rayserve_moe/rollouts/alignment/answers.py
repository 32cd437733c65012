"""Decoding of routing from answers, for a single answer or all turns of a conversation.

The dialect is detected from the value, and the checksum is verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayserve_moe.replay.encoding import npy, packed
from rayserve_moe.replay.encoding.description import described, described_layout, described_shape
from rayserve_moe.replay.encoding.dialects import decode_json
from rayserve_moe.replay.encoding.gates import scale_in, with_gates
from rayserve_moe.replay.encoding.index import decode as decode_index
from rayserve_moe.replay.encoding.ranges import label_ranges, labels_of, missing_ranges, presence, routing_until
from rayserve_moe.replay.encoding.rollout import decode_rollout, routing_of_rollout
from rayserve_moe.replay.encoding.wire_rows import from_base64
from rayserve_moe.requests.records import INDEX, GateScale, IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.requests.row_parts import are_known, known_part, unknown_entries

_ID_BYTES = 4


def decode_answer(answer: Any, layout: RoutingLayout | None = None, *, choice: int = 0) -> RoutedExperts:
    """Return the routing of a choice of an answer, in any dialect. Raises ValueError if it is inconsistent.

    `answer` is the answer of any route, as parsed JSON or as the bytes of the binary dialect. Without a `layout` the
    answer must describe itself; with a `layout`, an answer of another model is rejected. An answer without
    `routed_experts_info` cannot be verified, and its missing rows are unknown.
    """
    if isinstance(answer, bytes | bytearray | memoryview):
        return _from_rollout(bytes(answer), layout, choice)
    part = _choice_of(answer, choice)
    description = _field(part, "routed_experts_info")
    value = _value_of(answer, part, description)
    if description is not None and not isinstance(description, Mapping):
        raise ValueError("routed_experts_info is not an object")
    if layout is None and description is None:
        raise ValueError("the answer does not describe its routing: pass the model's layout")
    start = _field(part, "routed_experts_start_len")
    layout_of_rows = layout or _described_layout(value, description or {})
    routing = decode_json(value, layout_of_rows, start=start if isinstance(start, int) else 0)
    if description is None:
        return routing
    _check_model(description, layout)
    verified = described(routing.rows, description)
    if isinstance(value, Mapping) and verified.start != routing.start:
        raise ValueError("routed_experts and routed_experts_info start at different positions")
    return _with_parts(verified, part)


def _from_rollout(body: bytes, layout: RoutingLayout | None, choice: int) -> RoutedExperts:
    header, rows = decode_rollout(body)
    part = _choice_of(header, choice)
    description = _field(part, "routed_experts_info")
    if not isinstance(description, Mapping) or not 0 <= choice < len(rows):
        raise ValueError("the rollout holds no routing of this choice")
    _check_model(description, layout)
    return _with_parts(routing_of_rollout(rows[choice], description, layout=layout), part)


def _with_parts(routing: RoutedExperts, part: Mapping) -> RoutedExperts:
    """Return the routing with the index rows and gates of a choice, if it has them."""
    return with_gates_of(with_index(routing, part)[0], part)[0]


def with_gates_of(routing: RoutedExperts, part: Mapping) -> tuple[RoutedExperts, GateScale | None]:
    """Return the routing with the gates of a choice, and their scale; unchanged, and None, if it has none.

    Raises: ValueError as `with_gates`.
    """
    description = _field(part, "router_gates_info")
    if not isinstance(description, Mapping):
        return routing, None
    return with_gates(routing, _field(part, "router_gates"), info=description), scale_in(description)


def with_index(routing: RoutedExperts, part: Mapping) -> tuple[RoutedExperts, IndexLayout | None]:
    """Return the routing with the index rows of a choice, and their layout; unchanged, and None, if it has none.

    Raises: ValueError if index rows do not match their description, or do not cover the rows of routing.
    """
    description = _field(part, "indexer_topk_info")
    if not isinstance(description, Mapping):
        return routing, None
    packed, layout = decode_index(_field(part, "indexer_topk"), description)
    start = description.get("start")
    first = routing.start - start if type(start) is int else -1
    if first < 0 or len(packed) < first + len(routing.rows):
        raise ValueError("indexer_topk does not have the positions of routed_experts")
    index = packed[first : first + len(routing.rows)]
    return replace(routing, parts={**routing.parts, INDEX: index}), layout


def _choice_of(answer: Any, choice: int) -> Mapping:
    """Return the choice's object from a whole answer, a list of answers, or the object itself."""
    parts: Any = [answer]
    if isinstance(answer, Mapping):
        parts = next((answer[name] for name in ("choices", "answers") if name in answer), parts)
    elif isinstance(answer, Sequence):
        parts = answer
    if not isinstance(parts, Sequence) or not 0 <= choice < len(parts) or not isinstance(parts[choice], Mapping):
        raise ValueError("the answer has no such choice")
    return parts[choice]


def _field(part: Mapping, name: str) -> Any:
    """Return a field from any place that routes use: the choice itself, `meta_info` or `sgl_ext`."""
    for holder in (part, part.get("meta_info"), part.get("sgl_ext")):
        if isinstance(holder, Mapping) and holder.get(name) is not None:
            return holder[name]
    return None


def _value_of(answer: Any, part: Mapping, description: Any) -> Any:
    """Return the value of `routed_experts`; in the nested dialect with the prompt's rows before it."""
    value = _field(part, "routed_experts")
    if value is None:
        missing = description.get("missing") if isinstance(description, Mapping) else None
        if missing:
            raise ValueError(f"routed_experts is null: rows are missing at positions {missing}")
        raise ValueError("the answer has no routed_experts: set return_routed_experts=true in the request")
    if not isinstance(value, list):
        return value
    if isinstance(description, Mapping) and described_shape(description)[0] == len(value):
        return value
    prompt = _field(part, "prompt_routed_experts")
    if prompt is None and isinstance(answer, Mapping):
        prompt = answer.get("prompt_routed_experts")
    if not isinstance(prompt, list):
        raise ValueError("the answer has routed_experts in nested lists, but no prompt_routed_experts")
    return prompt + value


def _described_layout(value: Any, description: Mapping) -> RoutingLayout:
    """Return the layout of an answer that describes itself; the number of hidden layers follows from the row size."""
    rows, _, top_k = described_shape(description)
    hidden = None
    if isinstance(value, Mapping):
        hidden = packed.packed_ids(value)[0].shape[1]
    elif isinstance(value, str):
        raw = from_base64(value)
        if raw.startswith(npy.MAGIC):
            hidden = npy.npy_ids(raw).shape[1]
        elif rows and top_k:
            hidden = len(raw) // (_ID_BYTES * rows * top_k)
    return described_layout(description, num_hidden_layers=hidden)


def _check_model(description: Mapping, layout: RoutingLayout | None) -> None:
    described = described_layout(description)
    if layout is not None and (described.layer_ids, described.num_experts) != (layout.layer_ids, layout.num_experts):
        raise ValueError("routed_experts_info describes another model")


def join_turns(turns: Sequence[RoutedExperts], *, with_placeholder: bool = False) -> RoutedExperts:
    """Return the rows of all turns, each at its position.

    If turns overlap, their rows must agree; a row that is missing in a turn is taken from another. A position that no
    turn reaches before a later turn begins is a gap. Raises ValueError for disagreeing rows and for gaps. With
    `with_placeholder` the last row of every turn, which is not computed yet, is dropped, so that the next turn provides
    it.
    """
    if not turns:
        raise ValueError("turns are empty")
    if with_placeholder:
        turns = [routing_until(turn, turn.start + len(turn.rows) - 1) for turn in turns]
    start, end = turns[0].start, max(turn.start + len(turn.rows) for turn in turns)
    like = turns[0].rows
    rows, present = np.zeros((end - start, *like.shape[1:]), like.dtype), np.zeros(end - start, np.bool_)
    source, version = np.full((2, end - start), "", object)
    parts: dict[str, np.ndarray] = {}
    reached = start
    for turn in turns:
        _check_fits(turn, like, start, reached)
        here = slice(turn.start - start, turn.start - start + len(turn.rows))
        given = presence(turn)
        _check_agrees(turn, rows[here], present[here] & given)
        fresh = given & ~present[here]
        first_seen = np.arange(turn.start, turn.start + len(turn.rows)) >= reached
        rows[here][fresh] = turn.rows[fresh]
        for name in turn.parts:
            values = parts.setdefault(name, unknown_entries(turn.parts[name], end - start))
            _join_part(turn, name, values[here])
        present[here] |= fresh
        for labels, ranges in ((source, turn.source), (version, turn.weight_version)):
            labelled = fresh | first_seen
            labels[here][labelled] = labels_of(ranges, turn.start, count=len(turn.rows))[labelled]
        reached = max(reached, turn.start + len(turn.rows))
    return RoutedExperts(
        rows,
        start,
        missing_ranges(present, start),
        label_ranges(source, start),
        label_ranges(version, start),
        parts,
    )


def _join_part(turn: RoutedExperts, name: str, values: np.ndarray) -> None:
    """Join the entries of a turn with those of earlier turns, which take precedence.

    Gates that were computed twice may differ in their last bits. Raises ValueError if index rows differ.
    """
    given = known_part(turn, name)
    assert given is not None, "a part of the turn"
    is_known, is_given = are_known(values), are_known(given)
    for place in np.flatnonzero(is_known & is_given).tolist() if name == INDEX else ():
        if given[place] != values[place]:
            raise ValueError(f"two turns disagree on the index row of position {turn.start + place}")
    values[~is_known] = given[~is_known]


def _check_fits(turn: RoutedExperts, like: np.ndarray, start: int, reached: int) -> None:
    if turn.rows.shape[1:] != like.shape[1:] or turn.rows.dtype != like.dtype:
        raise ValueError("turns have rows of different models")
    if turn.start < start:
        raise ValueError(f"a turn starts at position {turn.start}, before the first one at {start}")
    if turn.start > reached:
        raise ValueError(f"no turn has rows for positions {reached} to {turn.start - 1}")


def _check_agrees(turn: RoutedExperts, before: np.ndarray, both: np.ndarray) -> None:
    differs = both & (before != turn.rows).any(axis=(1, 2))
    if differs.any():
        raise ValueError(f"two turns disagree on the row of position {turn.start + int(np.argmax(differs))}")


def served_layout(model_info: Mapping[str, Any]) -> RoutingLayout:
    """Return the layout of the rows of a server from its answer to `/model_info`."""
    return RoutingLayout(
        num_hidden_layers=model_info["num_hidden_layers"],
        layer_ids=tuple(model_info["moe_layer_ids"]),
        num_experts=model_info["num_experts"],
        top_k=model_info["num_experts_per_tok"],
    )
