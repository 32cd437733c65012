"""Fields of a chat about tools, and about what becomes of reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import PlainValidator, WithJsonSchema, model_validator

from rayserve_moe.serving.schemas.field_types import RequestBody, fault

MAX_TOOLS = 1024
_LONGEST_NAME = 256


def _check_tools(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS or not all(map(_is_function, value)):
        raise fault(
            f"should be a list of at most {MAX_TOOLS} objects of type function, each with a function that has a name"
        )
    return value


def _is_function(tool: object) -> bool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        return False
    function = tool["function"]
    name, parameters = function.get("name"), function.get("parameters")
    is_named = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME
    return is_named and (parameters is None or isinstance(parameters, dict))


def _check_choice(value: object) -> str | dict[str, Any]:
    if isinstance(value, dict):
        function = value.get("function")
        if (
            value.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise fault("should name a function: {type: function, function: {name}}")
        return value
    if value not in _CHOICES:
        raise fault(f"should be one of {', '.join(_CHOICES)}, or name a function")
    return str(value)


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")


def _check_effort(value: object) -> str:
    if value not in EFFORTS:
        raise fault(f"should be one of {', '.join(EFFORTS)}")
    return str(value)


_CHOICES = ("none", "auto", "required")
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": _LONGEST_NAME},
        "parameters": {"type": ["object", "null"]},
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_TOOLS = {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}

ToolList = Annotated[list[dict[str, Any]], PlainValidator(_check_tools), WithJsonSchema(_TOOLS)]
Effort = Annotated[str, PlainValidator(_check_effort), WithJsonSchema({"enum": list(EFFORTS)})]
ToolChoice = Annotated[
    str | dict[str, Any],
    PlainValidator(_check_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_CHOICES)}, _NAMED]}),
]


class ToolFields(RequestBody):
    """Tools reach the template as they are; where the choice is none, no calls are read from the answer.

    `include_reasoning` false leaves reasoning out, `separate_reasoning` false leaves it in the content with its
    markers, and `stream_reasoning` false sends it at once, when it has ended.
    """

    tools: ToolList = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _forced_tools_are_offered(self) -> Self:
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise fault("`tool_choice` should be required only beside `tools`, and name one of them")
        return self

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which an answer must call one; none where it need not call any."""
        if isinstance(self.tool_choice, str):
            return self.tools if self.tool_choice == "required" else []
        name = self.tool_choice["function"]["name"]
        return [tool for tool in self.tools if tool["function"]["name"] == name]

    @property
    def reasoning_options(self) -> dict[str, Any]:
        """What the template is given by name for `reasoning_effort`; none switches thinking off too, as in vLLM."""
        if self.reasoning_effort is None:
            return {}
        return {"reasoning_effort": self.reasoning_effort} | (
            {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        )

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools whose calls are read from the answer."""
        return [] if self.tool_choice == "none" else self.tools
