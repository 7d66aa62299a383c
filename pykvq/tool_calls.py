"""Tool calls in an answer, as the model families write them, and as the OpenAI API wants them."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pykvq.text_stream import StopMatcher


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes a call: ``open`` + JSON + ``close``.

    The JSON is an object with "name" and ``arguments_key``, or a list of such objects.
    """

    name: str
    open: str
    close: str
    arguments_key: str = "arguments"
    # the markers are control tokens, which are hidden from text otherwise
    markers_are_special: bool = False
    # one pair of markers around all calls
    is_list: bool = False


HERMES = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>")
LLAMA_3 = ToolFormat("llama-3", "", "", arguments_key="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", markers_are_special=True, is_list=True)


def tool_format(template: str | None) -> ToolFormat:
    """The format of a model, told by its chat template; Hermes' for those that know none."""
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" not in source and ("<|python_tag|>" in source or "Environment: ipython" in source):
        return LLAMA_3
    return HERMES


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name and its arguments as JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def function_fields(self) -> dict[str, str]:
        """The "function" object."""
        return {"name": self.name, "arguments": self.arguments}

    def fields(self) -> dict[str, Any]:
        """An item of "tool_calls"."""
        return {"id": self.call_id, "type": "function", "function": self.function_fields()}


class ToolCallParser:
    """Takes an answer in pieces and tells text from tool calls.

    Args:
        format: how the model writes calls.
        names: the functions that there are. An answer that is nothing but the JSON of a call to one of them, bare or in
            a code block, counts as that call: smaller models leave the markers away.
        required: the answer is calls and nothing else. If its end is missing, the calls before it count.

    What may be a call is held back until it is known. A call that cannot be read is text.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], *, required: bool = False) -> None:
        self._format = format
        self._names = names
        self._required = required
        self._marker = format.open.strip()
        self._close = format.close.strip()
        self._finder = StopMatcher([self._marker] if self._marker else [])
        self._call = ""  # text since the opening marker
        self._bare: str | None = ""  # the whole answer while it may be a bare call; None once it is not
        self._n_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is sure to be shown, and the calls that are complete."""
        if self._bare is not None:
            self._bare += text
            if _may_be_bare(self._bare):
                return "", []
            text, self._bare = self._bare, None
        return self._split(text)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back."""
        if self._bare is not None:
            text, self._bare = self._bare, None
            calls = self._known(self._read_last(_without_fence(text)))
            if calls:
                return "", calls
            content, calls = self._split(text)
        else:
            content, calls = "", []
        if self._finder.matched:
            call = self._call
            self._call, self._finder = "", StopMatcher([self._marker])
            found = self._read_last(call)
            if found or (self._required and self._n_calls):
                return content, calls + found
            return content + self._marker + call, calls
        return content + self._shown(self._finder.finish()), calls

    def _read_last(self, text: str) -> list[ToolCall]:
        """The calls that the end of an answer is; if it must be calls, those before the place where it was cut."""
        found = _read_calls(text, self._format.arguments_key)
        return found or (_read_calls_before_cut(text, self._format.arguments_key) if self._required else [])

    def _split(self, text: str) -> tuple[str, list[ToolCall]]:
        content, calls = "", []
        while text:
            if not self._finder.matched:
                before, rest = _push_until_match(self._finder, text)
                content += self._shown(before)
                text = rest
                continue
            self._call += text
            text = ""
            end = self._call.find(self._close) if self._close else -1
            if end >= 0:
                body, text = self._call[:end], self._call[end + len(self._close) :]
                found = _read_calls(body, self._format.arguments_key)
                calls += found
                self._n_calls += len(found)
                if not found:
                    content += self._marker + body + self._close
                self._call, self._finder = "", StopMatcher([self._marker])
        return content, calls

    def _shown(self, text: str) -> str:
        # line breaks between calls are a part of the format
        return "" if self._n_calls and (self._required or not text.strip()) else text

    def _known(self, calls: list[ToolCall]) -> list[ToolCall]:
        return calls if all(call.name in self._names for call in calls) else []


def _push_until_match(finder: StopMatcher, text: str) -> tuple[str, str]:
    """Feeds text to a matcher: what it releases, and what comes after the match."""
    released = []
    for i, character in enumerate(text):
        released.append(finder.push(character))
        if finder.matched:
            return "".join(released), text[i + 1 :]
    return "".join(released), ""


_FENCE_LANGUAGES = ("", "json", "tool_call", "xml")
_FENCE = re.compile(r"```(?:json|tool_call|xml)?\s*(.*?)\s*(?:```\s*)?$", re.S)


def is_bare_call(text: str) -> bool:
    """Whether an answer is nothing but the JSON of calls without markers, as Llama 3 writes them."""
    return text.lstrip()[:1] in ("{", "[") and bool(_read_calls(text, LLAMA_3.arguments_key))


def _without_fence(text: str) -> str:
    match = _FENCE.match(text.strip())
    return match[1] if match else text


def _may_be_bare(text: str) -> bool:
    """Whether a text is the start of a JSON object or list of objects, maybe in a code block."""
    start = text.lstrip()
    if start.startswith("```"):
        language = re.match(r"[a-z_]*", start[3:])[0]  # type: ignore[index]
        rest = start[3 + len(language) :]
        if not rest:
            return any(known.startswith(language) for known in _FENCE_LANGUAGES)
        if language not in _FENCE_LANGUAGES:
            return False
        start = rest.lstrip()
    return start.startswith(("{", "[{")) or "[{".startswith(start) or "```".startswith(start)


_SEPARATORS = re.compile(r"[ \n\r\t;,]*")


def _read_calls(text: str, arguments_key: str) -> list[ToolCall]:
    """The calls that a text is, [] if it is anything else."""
    text = text.strip()
    if text.startswith("<function="):
        return _read_xml_calls(text)
    named = re.match(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*\})$", text, re.S)
    if named:
        text = json.dumps({"name": named[1]})[:-1] + f', "{arguments_key}": {named[2]}}}'
    values: list[Any] = []
    try:
        for value in _json_values(text):
            values += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):  # the latter for thousands of brackets
        return []
    calls = [_read_call(value, arguments_key) for value in values]
    return [] if None in calls else [call for call in calls if call is not None]


def _read_calls_before_cut(text: str, arguments_key: str) -> list[ToolCall]:
    """The complete calls at the start of a list of calls, with or without its bracket."""
    calls: list[ToolCall] = []
    with contextlib.suppress(ValueError, RecursionError):
        for value in _json_values(text.strip().removeprefix("[")):
            call = _read_call(value, arguments_key)
            if call is None:
                break
            calls.append(call)
    return calls


def _json_values(text: str) -> Iterator[Any]:
    """The JSON values that a text is, with spaces, commas or semicolons between; ValueError where it is none."""
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield value
        position = _SEPARATORS.match(text, position).end()  # type: ignore[union-attr]


def _read_call(value: Any, arguments_key: str) -> ToolCall | None:
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("function"), Mapping):
        value = value["function"]
    name = value.get("name")
    arguments = next((value[key] for key in (arguments_key, "arguments", "parameters") if key in value), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _read_xml_calls(text: str) -> list[ToolCall]:
    """Calls as Qwen3-Coder writes them: <function=NAME><parameter=KEY>VALUE</parameter>...</function>."""
    calls = []
    for name, body in re.findall(r"<function=([^>\s]+)>(.*?)</function>", text, re.S):
        arguments = {}
        for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", body, re.S):
            try:
                arguments[key] = json.loads(value)
            except ValueError:
                arguments[key] = value
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return calls
