"""Twenty requests that a model should answer with a call, and what the call must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_INTEGER = {"type": "integer"}

TOOLS = [
    _tool("get_weather", "Get the current weather in a city", city={**_TEXT, "description": "Name of the city"}),
    _tool("add", "Add two numbers", a=_NUMBER, b=_NUMBER),
    _tool("multiply", "Multiply two numbers", a=_NUMBER, b=_NUMBER),
    _tool("send_email", "Send an email", to={**_TEXT, "description": "Address"}, subject=_TEXT),
    _tool("set_timer", "Set a timer", minutes=_INTEGER),
    _tool("translate", "Translate a text", text=_TEXT, language={**_TEXT, "description": "Target language"}),
]


def _has(**expected: Any) -> Callable[[dict[str, Any]], bool]:
    def check(arguments: dict[str, Any]) -> bool:
        return all(_matches(arguments.get(name), value) for name, value in expected.items())

    return check


def _matches(found: Any, expected: Any) -> bool:
    return expected.lower() in str(found).lower() if isinstance(expected, str) else found == expected


# request, name of the function, check of its arguments
PROMPTS: list[tuple[str, str, Callable[[dict[str, Any]], bool]]] = [
    ("What is the weather in Paris?", "get_weather", _has(city="Paris")),
    ("Is it raining in Tokyo right now?", "get_weather", _has(city="Tokyo")),
    ("Tell me the current weather in Buenos Aires.", "get_weather", _has(city="Buenos Aires")),
    ("How warm is it in Cairo?", "get_weather", _has(city="Cairo")),
    ("Use a tool to add 17 and 25.", "add", _has(a=17, b=25)),
    ("What is 123 plus 456? Use the add function.", "add", _has(a=123, b=456)),
    ("Add 2.5 and 4.", "add", _has(a=2.5, b=4)),
    ("Please calculate the sum of 1000 and 1.", "add", _has(a=1000, b=1)),
    ("Multiply 6 by 7.", "multiply", _has(a=6, b=7)),
    ("What is 12 times 12? Use a function.", "multiply", _has(a=12, b=12)),
    ("Compute the product of 99 and 3.", "multiply", _has(a=99, b=3)),
    (
        "Send an email to ann@example.com with the subject Lunch.",
        "send_email",
        _has(to="ann@example.com", subject="Lunch"),
    ),
    ("Write to bob@example.org, subject: Report ready.", "send_email", _has(to="bob@example.org", subject="Report")),
    ("Email support@example.net with subject Broken link", "send_email", _has(to="support@example.net")),
    ("Set a timer for 10 minutes.", "set_timer", _has(minutes=10)),
    ("Start a 45 minute timer.", "set_timer", _has(minutes=45)),
    ("I need a timer for half an hour, 30 minutes.", "set_timer", _has(minutes=30)),
    ("Translate 'good morning' to French.", "translate", _has(text="good morning", language="French")),
    ("Translate the text 'thank you' into German.", "translate", _has(text="thank you", language="German")),
    ("How do you say 'hello' in Spanish? Use translate.", "translate", _has(text="hello", language="Spanish")),
]


def is_right(message: dict[str, Any], name: str, check: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether the first call of an answer is the one expected."""
    calls = message.get("tool_calls") or []
    return bool(calls) and calls[0]["function"]["name"] == name and check(json.loads(calls[0]["function"]["arguments"]))
