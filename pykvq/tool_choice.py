"""Tools in a request: what may be called, how the prompt tells the model, and the grammar that holds it to that."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pykvq.arguments import require_type
from pykvq.errors import InvalidArgumentError
from pykvq.tool_calls import ToolFormat

if TYPE_CHECKING:
    from pykvq.constraint import Constraint

Tool = Mapping[str, Any]
ToolChoice = str | Mapping[str, Any] | None

_logger = logging.getLogger("pykvq")

# for models whose chat template knows no tools
_INSTRUCTIONS = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request. ``required`` says that the answer must be calls, and nothing but calls."""

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions that may be called."""
        return tuple(tool["function"]["name"] for tool in self.tools)


def tool_use(tools: Sequence[Tool] | None, tool_choice: ToolChoice, parallel: bool = True) -> ToolUse | None:
    """The tools that may be called, None if none may.

    Args:
        tools: {"type": "function", "function": {"name", "description", "parameters"}} each.
        tool_choice: "auto" (None), "none", "required", or {"type": "function", "function": {"name": ...}}.
        parallel: whether several calls may be made.

    Raises:
        InvalidArgumentError: a tool or the choice has another form, or names a function that is not there.
    """
    require_type("tools", tools, Iterable, optional=True)
    checked = tuple(_checked_tool(i, tool) for i, tool in enumerate(tools or ()))
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else tool_choice.get("name")
        chosen = tuple(tool for tool in checked if tool["function"]["name"] == name)
        if not chosen:
            raise InvalidArgumentError(f"tool_choice names {name!r}, which is not among the tools")
        return ToolUse(chosen, required=True, parallel=False)
    if tool_choice not in (None, "none", "auto", "required"):
        raise InvalidArgumentError(
            f"tool_choice must be 'none', 'auto', 'required' or a function of the tools, got {tool_choice!r}"
        )
    if tool_choice == "required" and not checked:
        raise InvalidArgumentError("tool_choice 'required' needs tools")
    if not checked or tool_choice == "none":
        return None
    return ToolUse(checked, required=tool_choice == "required", parallel=parallel)


def _checked_tool(i: int, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise InvalidArgumentError(f'tools[{i}] must be {{"type": "function", "function": {{...}}}}, got {tool!r}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"tools[{i}] has no function name, found {name!r}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidArgumentError(f"tools[{i}]: the parameters of {name!r} must be a JSON schema, got {parameters!r}")
    return {"type": "function", "function": dict(function)}


def with_tool_prompt(messages: Sequence[Mapping[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: the tools in the system message, calls and results as text."""
    result = [_without_tool_fields(message) for message in messages]
    if use is None:
        return result
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in use.tools)
    instructions = _INSTRUCTIONS.format(tools=tools)
    if result and result[0]["role"] == "system":
        result[0] = {**result[0], "content": f"{result[0]['content']}\n\n{instructions}"}
        return result
    return [{"role": "system", "content": instructions}, *result]


def _without_tool_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    blocks = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join([*filter(None, [message.get("content")]), *blocks])
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have their arguments as an object: the API gives JSON text, templates write it out again."""
    return [_with_parsed_arguments(i, message) for i, message in enumerate(messages)]


def _with_parsed_arguments(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidArgumentError(f"messages[{i}]: a tool call must have a function with a name, got {call!r}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise InvalidArgumentError(
                    f"messages[{i}]: the arguments of {function['name']!r} are not JSON: {error}"
                ) from error
        parsed.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return {**message, "tool_calls": parsed}


def tool_constraint(use: ToolUse, format: ToolFormat) -> Constraint | None:
    """The grammar for an answer: calls only if they are required, else text in which every call is well formed.

    None where the format has no mark that a call begins, or a schema is beyond llguidance; the latter is logged.

    Raises:
        InvalidArgumentError: calls are required and a schema is not valid.
    """
    from pykvq.constraint import lark_constraint

    if not use.required and not format.open:
        return None
    try:
        return lark_constraint(_required_grammar(use, format) if use.required else _free_grammar(use, format))
    except InvalidArgumentError as error:
        if use.required:
            raise
        _logger.warning("the calls of this answer are not held to their schemas: %s", error)
        return None


def _required_grammar(use: ToolUse, format: ToolFormat) -> str:
    separator = '"\\n"' if format.close else '"; "'
    call = "one_call"
    if format.is_list:
        body = f'"[" {call} (", " {call})* "]"' if use.parallel else f'"[" {call} "]"'
        start = f"{json.dumps(format.open)} {body}"
    else:
        one = " ".join(filter(None, [_literal(format.open), call, _literal(format.close)]))
        start = f"{one} ({separator} {one})*" if use.parallel else one
    return f"%llguidance {{}}\nstart: {start}\n{_call_rule(use, format)}"


def _free_grammar(use: ToolUse, format: ToolFormat) -> str:
    trigger, rest = format.open.strip(), format.open[len(format.open.strip()) :]
    body = '"[" one_call (", " one_call)* "]"' if format.is_list else "one_call"
    call = " ".join(filter(None, ["opening", _literal(rest), body, _literal(format.close)]))
    many = f"({call})*" if use.parallel else f"({call})?"
    return (
        f"%llguidance {{}}\nstart: {many} text_end\n"
        f"opening[lazy]: TEXT {json.dumps(trigger)}\ntext_end: TEXT\nTEXT: /(.|\\n)*/\n{_call_rule(use, format)}"
    )


def _call_rule(use: ToolUse, format: ToolFormat) -> str:
    from pykvq.constraint import JSON_OPTIONS, closed_schema

    options = []
    for tool in use.tools:
        function = tool["function"]
        arguments = dict(closed_schema(function.get("parameters") or {"type": "object"}))
        definitions = {key: arguments.pop(key) for key in ("$defs", "definitions") if key in arguments}
        schema = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, format.arguments_key: arguments},
            "required": ["name", format.arguments_key],
            "additionalProperties": False,
            # keywords that llguidance does not know are passed over
            "x-guidance": {**JSON_OPTIONS, "lenient": True},
            **definitions,
        }
        options.append(f"%json {json.dumps(schema)}")
    rules = [f"call_{i}: {option}" for i, option in enumerate(options)]
    return "one_call: " + " | ".join(f"call_{i}" for i in range(len(options))) + "\n" + "\n".join(rules) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
