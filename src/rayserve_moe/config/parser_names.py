"""Names of chat output parsers in vLLM and SGLang, with the format that each reads."""

from __future__ import annotations

from collections.abc import Mapping

TOOL_CALL_PARSERS: Mapping[str, str] = {
    "response_template": "response_template",
    "hf": "response_template",
    "hermes": "hermes",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_coder": "qwen_coder",
    "qwen3_xml": "qwen_coder",
    "mistral": "mistral",
    "deepseek_v3": "deepseek",
    "deepseekv3": "deepseek",
    "deepseek_v31": "deepseek",
    "deepseekv31": "deepseek",
    "glm": "glm",
    "glm45": "glm",
    "glm47": "glm",
    "ling3": "glm",
    "kimi_k2": "kimi",
    "llama3": "llama",
    "llama3_json": "llama",
    "openai": "harmony",
    "gpt-oss": "harmony",
    "minimax_m2": "minimax",
    "minimax-m2": "minimax",
}
REASONING_PARSERS: Mapping[str, str] = {
    "response_template": "response_template",
    "hf": "response_template",
    "qwen3": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "deepseek_v3": "think",
    "deepseek-v3": "think",
    "ling3": "think",
    "deepseek_r1": "begun",
    "deepseek-r1": "begun",
    "qwen3-thinking": "begun",
    "minimax_m2": "begun",
    "minimax": "begun",
    "mistral": "mistral",
    "openai_gptoss": "harmony",
    "gpt-oss": "harmony",
}
