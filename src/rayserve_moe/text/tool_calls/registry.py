"""Selection of answer parsers by settings, or else by the markers in the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rayserve_moe.config.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS
from rayserve_moe.text.tool_calls import deepseek, gemma, hunyuan, kimi, minimax_m3
from rayserve_moe.text.tool_calls.deepseek import DEEPSEEK
from rayserve_moe.text.tool_calls.gemma import GEMMA
from rayserve_moe.text.tool_calls.harmony import CALL, CHANNEL, MARKERS
from rayserve_moe.text.tool_calls.hunyuan import HUNYUAN
from rayserve_moe.text.tool_calls.json_calls import HERMES, LLAMA
from rayserve_moe.text.tool_calls.kimi import KIMI
from rayserve_moe.text.tool_calls.minimax_m3 import MINIMAX_M3
from rayserve_moe.text.tool_calls.mistral import MISTRAL
from rayserve_moe.text.tool_calls.splitter import Thinking
from rayserve_moe.text.tool_calls.tagged_calls import GLM, MIMO, MINIMAX, QWEN_CODER
from rayserve_moe.text.tool_calls.tape import CallFormat

HARMONY, RESPONSE_TEMPLATE = "harmony", "response_template"
"""Formats that contain both reasoning and calls."""

CALL_FORMATS: Mapping[str, CallFormat] = {
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "glm": GLM,
    "hermes": HERMES,
    "hunyuan": HUNYUAN,
    "kimi": KIMI,
    "llama": LLAMA,
    "mimo": MIMO,
    "minimax": MINIMAX,
    "minimax_m3": MINIMAX_M3,
    "mistral": MISTRAL,
    "qwen_coder": QWEN_CODER,
    HARMONY: CallFormat({}, MARKERS),
    RESPONSE_TEMPLATE: CallFormat({}, ()),
}
THINKING: Mapping[str, Thinking] = {
    "think": Thinking(),
    "begun": Thinking(is_begun=True),
    "gemma": Thinking("<|channel>thought", "<channel|>", may_recur=True),
    "hunyuan": Thinking(*hunyuan.THINKING),
    "minimax_m3": Thinking(*minimax_m3.THINKING, may_recur=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    HARMONY: Thinking(*MARKERS[:2]),
    RESPONSE_TEMPLATE: Thinking(),
}

_Markers = tuple[tuple[str, tuple[str, ...]], ...]
_CALL_MARKERS: _Markers = (
    (HARMONY, (CHANNEL, CALL)),
    ("gemma", (gemma.BEGIN, gemma.QUOTE)),
    ("hunyuan", (hunyuan.SUFFIX, "<tool_calls", "<arg_key")),
    ("minimax_m3", (minimax_m3.NAMESPACE,)),
    ("kimi", (kimi.SECTION,)),
    ("deepseek", (deepseek.SECTION,)),
    ("minimax", ("<minimax:tool_call>",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama", ('"parameters": ', "ipython")),
)
_REASONING_MARKERS: _Markers = (
    (HARMONY, (CHANNEL, CALL)),
    ("gemma", ("<|channel>", "<channel|>")),
    ("hunyuan", (hunyuan.SUFFIX, "<think")),
    ("minimax_m3", minimax_m3.THINKING),
    ("mistral", ("[THINK]",)),
    ("think", ("</think>",)),
)
"""Formats with their markers; the first format with all its markers in the template is selected."""


class OutputFormat(NamedTuple):
    """Formats of a checkpoint's answers; None if unknown."""

    calls: str | None = None
    """Key of `CALL_FORMATS`."""
    reasoning: str | None = None
    """Key of `THINKING`."""


def output_format(
    template: str,
    *,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    has_response_template: bool = False,
) -> OutputFormat:
    """Return the parsers named by settings; `auto` prefers the tokenizer's own, then the chat template's."""
    is_own = has_response_template and {tool_call_parser, reasoning_parser} <= {"auto", "none"}

    def chosen(setting: str, names: Mapping[str, str], markers: _Markers) -> str | None:
        if setting != "auto":
            return names.get(setting)
        if is_own:
            return RESPONSE_TEMPLATE
        return next((name for name, all_of in markers if all(marker in template for marker in all_of)), None)

    return OutputFormat(
        chosen(tool_call_parser, TOOL_CALL_PARSERS, _CALL_MARKERS),
        chosen(reasoning_parser, REASONING_PARSERS, _REASONING_MARKERS),
    )
