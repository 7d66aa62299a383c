"""Grammars that an answer must follow: JSON schema, regular expression, Lark and GBNF, through llguidance."""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from pykvq.errors import InvalidArgumentError
from pykvq.runtime import FloatArray, Model

# models can go on with white space for ever, so it is one blank, or a line break with an indent
JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n[ \t]{0,20})?"}


@dataclass(frozen=True)
class Constraint:
    """A grammar in llguidance's form. Make one with the functions of this module."""

    grammar: str

    def start(self, model: Model) -> Matcher:
        """A matcher at the beginning of an answer.

        Raises:
            InvalidArgumentError: the grammar is wrong; the message says where.
        """
        return Matcher(model, self.grammar)


class Matcher:
    """Follows an answer through a grammar and says which tokens may come next."""

    def __init__(self, model: Model, grammar: str) -> None:
        self._tokenizer = _tokenizer(model)
        self._matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        self._mask = llguidance.numpy.allocate_token_bitmask(1, self._tokenizer.vocab_size)
        if self._matcher.is_error():
            raise InvalidArgumentError(f"the grammar is not valid: {_one_line(self._matcher.get_error())}")

    def mask(self, logits: FloatArray) -> FloatArray:
        """A copy of n_vocab logits with -inf for the tokens that the grammar forbids here."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error():
            raise InvalidArgumentError(f"the grammar cannot be followed: {_one_line(self._matcher.get_error())}")
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
        masked: FloatArray = np.where(allowed, logits, np.float32(-np.inf))
        return masked

    def accept(self, token: int) -> None:
        """Goes on with a token that the mask allowed.

        Raises:
            InvalidArgumentError: the grammar is too large to be followed, which may show late.
        """
        if not self._matcher.consume_token(token) and self._matcher.is_error():
            raise InvalidArgumentError(f"the grammar cannot be followed: {_one_line(self._matcher.get_error())}")


def json_schema_constraint(schema: Mapping[str, Any] | str) -> Constraint:
    """Answers that are JSON of a schema.

    Raises:
        InvalidArgumentError: the schema is not one, or uses what cannot be enforced.
    """
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(closed_schema(parsed))
        return _checked(llguidance.LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS), "the JSON schema")
    except RecursionError as error:
        raise InvalidArgumentError("the JSON schema is nested too deeply to be followed") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"the JSON schema is not valid: {_one_line(error)}") from error


def closed_schema(schema: Any) -> Any:
    """A schema whose objects have no properties but those it names, where it leaves that open.

    What follows it follows the schema too, and a model cannot go on inventing properties. llama.cpp does the same.
    """
    if isinstance(schema, list):
        return [closed_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    # the parts of an allOf describe one object together
    closed = {key: value if key == "allOf" else closed_schema(value) for key, value in schema.items()}
    opening = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref")
    if isinstance(closed.get("properties"), Mapping) and not any(key in closed for key in opening):
        closed["additionalProperties"] = False
    return closed


def json_object_constraint() -> Constraint:
    """Answers that are any JSON object."""
    return json_schema_constraint({"type": "object"})


def regex_constraint(pattern: str) -> Constraint:
    """Answers that match a regular expression (Rust syntax) as a whole."""
    return _checked(llguidance.LLMatcher.grammar_from_regex(pattern), "the regular expression")


def grammar_constraint(text: str) -> Constraint:
    """Answers of a context-free grammar, in GBNF as llama.cpp has it or in llguidance's Lark.

    Raises:
        InvalidArgumentError: it is neither; the message says where.
    """
    try:
        return _checked(llguidance.grammar_from("gbnf", text), "the grammar")
    except ValueError as error:
        raise InvalidArgumentError(f"the grammar is not valid: {_one_line(error)}") from error


def lark_constraint(text: str) -> Constraint:
    """Answers of a grammar in llguidance's Lark."""
    return _checked(llguidance.LLMatcher.grammar_from_lark(text), "the grammar")


@functools.lru_cache(maxsize=64)
def _checked(grammar: str, what: str) -> Constraint:
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise InvalidArgumentError(f"{what} is not valid: {_one_line(messages[0])}")
    return Constraint(grammar)


class _Vocabulary:
    """A model's tokens as llguidance's TokenizerWrapper wants them."""

    def __init__(self, model: Model) -> None:
        info = model.info
        # not the model itself: the tokenizer is kept for as long as the model lives
        self._model = weakref.ref(model)
        self.eos_token_id = info.token_eos
        self.bos_token_id = info.token_bos if info.token_bos >= 0 else None
        self.special_token_ids = [i for i in range(info.n_vocab) if model.is_control(i)]
        self.tokens = [model.token_bytes(i, special=True) for i in range(info.n_vocab)]

    def __call__(self, text: bytes | str) -> list[int]:
        model = self._model()
        if model is None:
            return []
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return model.tokenize(raw, add_special=False, parse_special=False)


_TOKENIZERS: weakref.WeakKeyDictionary[Model, llguidance.LLTokenizer] = weakref.WeakKeyDictionary()
_TOKENIZERS_LOCK = threading.Lock()


def _tokenizer(model: Model) -> llguidance.LLTokenizer:
    """The model's vocabulary for llguidance, built once a model (a second for 150,000 tokens)."""
    with _TOKENIZERS_LOCK:
        found = _TOKENIZERS.get(model)
        if found is None:
            vocabulary = _Vocabulary(model)
            ends = model.eog_tokens()
            wrapper = llguidance.TokenizerWrapper(vocabulary)
            found = llguidance.LLTokenizer(wrapper, n_vocab=model.info.n_vocab, eos_token=ends)
            _TOKENIZERS[model] = found
        return found


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
