"""Settings of the HTTP edge."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.config.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS
from rayserve_moe.config.setting_fields import DAY_S
from rayserve_moe.config.setting_fields import choice as _choice
from rayserve_moe.config.setting_fields import number as _number


@dataclass(frozen=True)
class ServerSettings:
    """The HTTP edge."""

    api_key: str = ""
    """Bearer token that every route but `/health` and the empty page `/experts` asks for; empty for none."""
    admin_api_key: str = ""
    """Bearer token for what concerns all clients: weight updates, pauses, flushes, aborting everything; good for all
    other routes too. Empty: `api_key` is enough for these."""
    max_body_bytes: int = _number(16 << 20, (1, 1 << 30))
    """Longest request body."""
    max_intake_bytes: int = _number(256 << 20, (1, 1 << 40))
    """Bytes of bodies and prompts that are read, parsed and tokenized at once; what comes beyond is answered 429."""
    drain_timeout_s: float = _number(120.0, (0, DAY_S))
    """Seconds running requests get to finish at shutdown."""
    hand_over_after_s: float = _number(DAY_S, (0, DAY_S))
    """Seconds after which a replica that Serve stops ends requests that the journal keeps, so that clients resume them
    at another that runs; in any case it does 5 s before `drain_timeout_s` is over."""
    tool_call_parser: str = _choice("auto", "none", *TOOL_CALL_PARSERS)
    """How tool calls are read from answers of chats: `auto` by the tokenizer's `response_template`, else by the markers
    in the chat template; `none` leaves them in the content; or a parser by its name in vLLM or SGLang."""
    prefix_routing: str = _choice("auto", "on", "off")
    """`on`: requests go through routers that know which prefixes every replica has cached, one that `rayserve-moe
    scale` adds included; `auto` is that where there are several replicas at the start."""
    journal: str = _choice("auto", "on", "off")
    """`on`: requests that clients name outlive their replica, by a journal of what is committed; `auto` is that where
    there are several replicas at the start, and a journal."""
    journal_address: str = ""
    """`HOST:PORT` of the journal; the start command runs one, and says so by RAYSERVE_MOE_JOURNAL."""
    journal_key: str = ""
    """What replicas and the journal prove to each other that they know; the start command draws one."""
    journal_max_bytes: int = _number(1 << 30, (1 << 20, 1 << 40))
    """Memory of the journal that the start command runs: the oldest answers make way, then requests are not kept."""
    resume_ttl_s: float = _number(120.0, (0, DAY_S))
    """Seconds that a request can be resumed after its last byte was sent, or its connection or replica was lost."""
    reasoning_parser: str = _choice("auto", "none", *REASONING_PARSERS)
    """How reasoning is separated from the content of answers of chats, in the same way."""
    exclude_tools_when_tool_choice_none: bool = False
    """Keep tools from the chat template where `tool_choice` is none. What the model writes is content either way."""
