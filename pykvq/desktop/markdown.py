"""Answers as HTML that is safe to show: Markdown in blocks, of which only the last changes while an answer streams."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from html import escape
from typing import Any

import nh3
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from pykvq.tool_calls import is_bare_call

# longer blocks are shown as they are: a line of a megabyte is no Markdown
_MAX_BLOCK_CHARACTERS = 20_000
_MAX_SHOWN_CHARACTERS = 200_000
_MAX_HIGHLIGHTED_CHARACTERS = 20_000
_CODE_CLASSES = "codehilite"
# a pre can be reached by keyboard, since it may have to be scrolled
_ATTRIBUTES = {
    "a": {"href", "title"},
    "pre": {"class", "tabindex"},
    "code": {"class"},
    "span": {"class"},
    "ol": {"start"},
    "th": {"align"},
    "td": {"align"},
}
_TAGS = {
    *("p", "br", "hr", "h3", "h4", "h5", "h6", "em", "strong", "s", "blockquote", "ul", "ol", "li"),
    *("a", "pre", "code", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "div"),
}
# reasoning, and tool calls as Hermes' kin, Llama 3 and Mistral mark them
_FOLDED = re.compile(
    r"""<(?P<tag>think|thinking|reasoning|tool_call|tool_response)>(?P<text>.*?)(?:</(?P=tag)>|\Z)\s*
    | <\|python_tag\|>(?P<llama>.*?)(?:<\|eo[mt]_id\|>|\Z)\s*
    | \[TOOL_CALLS\](?=\s*(?:\[\s*\{|[\w.-]+\s*(?:\[ARGS\]|\{)))(?P<mistral>.*?)(?:</s>|\Z)\s*""",
    re.DOTALL | re.VERBOSE,
)
_FOLDED_TITLES = {"tool_call": "Tool call", "tool_response": "Result of a tool"}


def to_blocks(text: str) -> list[str]:
    """The HTML of a text, a string for each top-level block; reasoning and tool calls are folded."""
    shown = text[:_MAX_SHOWN_CHARACTERS]
    if is_bare_call(shown):
        return [_folded("tool_call", shown)]
    blocks: list[str] = []
    position = 0
    for match in _FOLDED.finditer(shown):
        blocks += _markdown_blocks(shown[position : match.start()])
        blocks.append(_folded(match["tag"] or "tool_call", match["text"] or match["llama"] or match["mistral"] or ""))
        position = match.end()
    blocks += _markdown_blocks(shown[position:])
    if len(text) > len(shown):
        blocks.append(f"<p><em>… {len(text) - len(shown):,} more characters: copy the message to see all</em></p>")
    return blocks


def without_reasoning(text: str) -> str:
    """An answer without its reasoning, which models do not want to see again."""
    return re.sub(r"<(think|thinking|reasoning)>.*?(</\1>|\Z)\s*", "", text, flags=re.DOTALL)


def _folded(tag: str, text: str) -> str:
    inner = "".join(_markdown_blocks(text)) if tag not in _FOLDED_TITLES else f"<pre>{escape(text.strip())}</pre>"
    return _clean(f"<details><summary>{_FOLDED_TITLES.get(tag, 'Reasoning')}</summary>{inner}</details>")


def _markdown_blocks(text: str) -> list[str]:
    return [_block_html(block) for block in _split(text)]


def _split(text: str) -> list[str]:
    """The sources of the top-level blocks."""
    if not text.strip():
        return []
    if max(map(len, text.split("\n"))) > _MAX_BLOCK_CHARACTERS:
        return [text]
    lines = text.split("\n")
    starts = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    return ["\n".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


@lru_cache(maxsize=4096)
def _block_html(block: str) -> str:
    if len(block) > _MAX_BLOCK_CHARACTERS:
        return f'<pre tabindex="0">{escape(block)}</pre>'
    return _clean(_parser().render(block))


def _clean(html: str) -> str:
    return nh3.clean(
        html,
        tags=_TAGS,
        attributes=_ATTRIBUTES,
        url_schemes={"http", "https", "mailto"},
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "highlight": _highlighted, "linkify": False})
    # a picture would be fetched from wherever the model says
    return parser.enable(["table", "strikethrough"]).disable(["image", "reference"])


def _highlighted(code: str, language: str, _attributes: str) -> str:
    body = escape(code)
    if language and len(code) <= _MAX_HIGHLIGHTED_CHARACTERS:
        with suppress(ClassNotFound):
            body = highlight(code, get_lexer_by_name(language), HtmlFormatter(nowrap=True))
    return f'<pre class="{_CODE_CLASSES}" tabindex="0"><code>{body}</code></pre>'


def code_css() -> str:
    """The style of highlighted code, for light and dark pages."""
    return f"{_css('default', '')}\n{_css('github-dark', '.body--dark ')}"


def _css(style: str, where: str) -> str:
    formatter: Any = HtmlFormatter(nobackground=True, style=style)
    return str(formatter.get_style_defs(f"{where}.{_CODE_CLASSES}"))
