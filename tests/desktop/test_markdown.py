"""What models write is shown, and does nothing else."""

import time

import pytest

pytest.importorskip("nh3")

from pykvq.desktop.markdown import to_blocks, without_reasoning


def html(text):
    return "".join(to_blocks(text))


def test_markdown_becomes_html_by_blocks():
    blocks = to_blocks(
        "# Title\n\nSome *text*.\n\n- a\n- b\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    assert len(blocks) == 5
    assert "<em>text</em>" in blocks[1]
    assert blocks[2].count("<li>") == 2
    assert 'class="codehilite"' in blocks[3]
    assert '<span class="nb">print</span>' in blocks[3]
    assert "<td>2</td>" in blocks[4]


def test_only_the_last_block_changes_while_a_text_grows():
    text = "One.\n\n```python\nx = 1\n\ny = 2\n```\n\n- a\n\n- b\n\nLast"
    before = to_blocks(text)
    after = to_blocks(text + " words")
    assert before[:-1] == after[:-1]
    assert len(before) == len(after) == 4


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "![x](http://example.com/leak.png)",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "<a href='javascript:alert(1)'>x</a>",
        "<iframe src=//example.com></iframe>",
        "<style>body{display:none}</style>",
        "<think><script>alert(1)</script></think>",
        "<tool_call></details><script>alert(1)</script></tool_call>",
        '```x"onmouseover=alert(1)\n<script>\n```',
        "<svg onload=alert(1)>",
        "</div></body><h1>gone</h1>",
    ],
)
def test_hostile_answers_are_text(text):
    shown = html(text).lower()
    for tag in (
        "<script",
        "<img",
        "<iframe",
        "<style",
        "<svg",
        "</body",
        'href="javascript',
        'href="data',
        "onmouseover=",
    ):
        assert tag not in shown
    assert shown.count("<div") == shown.count("</div")


def test_very_long_answers_are_shown_in_part_and_that_is_said():
    blocks = to_blocks("A line of text.\n\n" * 20_000)
    assert sum(map(len, blocks)) < 400_000
    assert blocks[-1] == "<p><em>… 140,000 more characters: copy the message to see all</em></p>"


def test_links_do_not_tell_where_they_come_from():
    assert 'rel="noopener noreferrer"' in html("[x](https://example.com)")


def test_reasoning_and_tool_calls_are_folded():
    (first, second, third) = to_blocks('<think>Let me *see*.</think>\nYes.\n\n<tool_call>{"name": "f"}</tool_call>')
    assert first.startswith("<details><summary>Reasoning</summary>")
    assert "Yes." in second
    assert "Tool call" in third
    assert to_blocks("<think>not yet at the end")[0].startswith("<details>")
    assert without_reasoning("<think>x</think>\n\nYes.") == "Yes."


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}<|eom_id|>', 0),
        ('Let me look.\n\n<|python_tag|>weather.call(city="Rome")', 1),
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]</s>', 0),
        ('One moment.\n\n[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', 1),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', 0),
        ('[{"name": "weather", "arguments": {"city": "Rome"}}]\n', 0),
    ],
)
def test_calls_as_llama_3_and_mistral_write_them_are_folded(text, before):
    blocks = to_blocks(text)
    assert len(blocks) == before + 1
    assert blocks[-1].startswith("<details><summary>Tool call</summary>")
    assert "Rome" in blocks[-1]
    assert "python_tag" not in "".join(blocks)
    assert "TOOL_CALLS" not in "".join(blocks)


@pytest.mark.parametrize(
    "text",
    [
        "Mistral writes [TOOL_CALLS] before a call.",
        '{"name": "Rome", "country": "Italy"}',
        '```json\n{"name": "weather", "parameters": {}}\n```',
        "[1, 2, 3]",
        "[link](https://example.com) and {braces}",
    ],
)
def test_what_only_looks_like_a_call_is_not_folded(text):
    assert "<details>" not in html(text)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        "|" + "a|" * 4000 + "\n|" + "-|" * 4000 + "\n" + ("|" + "b|" * 4000 + "\n") * 10,
        "[" * 20000,
        "> " * 5000 + "x",
        "- " * 5000,
        "`" * 30000,
        "*a" * 9000,
        "<think>" * 5000,
        "[TOOL_CALLS]a" * 15000,
        "[" * 200_000,
        '{"a":' * 40_000,
    ],
    ids=[
        *("line", "table", "brackets", "quotes", "lists", "ticks", "stars", "thoughts"),
        *("calls", "deep list", "deep object"),
    ],
)
def test_large_answers_take_little_time(text):
    started = time.process_time()
    to_blocks(text)
    assert time.process_time() - started < 30  # what is quadratic in these takes minutes
