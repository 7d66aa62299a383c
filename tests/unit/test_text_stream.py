import random

import pytest

from pykvq import InvalidArgumentError
from pykvq.text_stream import GraphemeStream, StopMatcher, Utf8Stream, stop_strings


def decode_in_pieces(data, cuts):
    stream = Utf8Stream()
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


@pytest.mark.parametrize("text", ["naïve", "你好世界", "👩‍👩‍👧 ok", "a\u0301\U0001f600z"])
def test_no_piece_splits_a_code_point(text):
    data = text.encode()
    pieces = decode_in_pieces(data, range(1, len(data)))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_unfinished_bytes_become_a_replacement_character_only_at_the_end():
    stream = Utf8Stream()
    assert stream.push("é😀".encode()[:-1]) == "é"
    assert stream.is_inside_code_point
    assert stream.finish() == "\ufffd"


def test_any_cut_of_any_bytes_decodes_as_the_whole():
    rng = random.Random(7)
    alphabet = [0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xED, 0xA0]
    for _ in range(3000):
        data = bytes(rng.choice(alphabet) for _ in range(rng.randint(0, 9)))
        cuts = sorted(rng.sample(range(len(data) + 1), k=min(3, len(data))))
        assert "".join(decode_in_pieces(data, cuts)) == data.decode("utf-8", "replace")


def stream_through(stops, pieces):
    matcher = StopMatcher(stops)
    out = [matcher.push(piece) for piece in pieces]
    return [*out, matcher.finish()], matcher.matched


def test_no_part_of_a_stop_string_leaks():
    pieces, matched = stream_through(["<|end|>"], ["Hel", "lo<", "|e", "nd|", "> more"])
    assert pieces == ["Hel", "lo", "", "", "", ""]
    assert matched


def test_a_false_start_is_released():
    pieces, matched = stream_through(["</stop>"], ["a </", "st", "rong> b"])
    assert pieces == ["a ", "", "</strong> b", ""]
    assert not matched


def test_a_held_end_is_released_when_the_text_ends():
    assert stream_through(["###"], ["x #", "#"]) == (["x ", "", "##"], False)


def test_a_repeated_beginning_is_still_found():
    # after "aab" fails, "ab" is still the start of a match
    assert stream_through(["aabc"], list("xaaabc!"))[0] == ["x", "", "", "a", "", "", "", ""]


def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_cut():
    for pieces in (["abcd"], ["ab", "cd"], list("abcd")):
        out, matched = stream_through(["abcd", "bc"], pieces)
        assert "".join(out) == "a"
        assert matched


def test_any_cut_gives_the_same_text():
    rng = random.Random(3)
    for _ in range(3000):
        text = "".join(rng.choice("abc") for _ in range(rng.randint(0, 12)))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        assert "".join(stream_through(stops, pieces)[0]) == expected


def test_stop_argument_forms():
    assert stop_strings(None) == ()
    assert stop_strings("a") == ("a",)
    assert stop_strings(["a", "b"]) == ("a", "b")


@pytest.mark.parametrize("wrong", ["", ["a", ""], [3]])
def test_stop_strings_that_are_none(wrong):
    with pytest.raises(InvalidArgumentError, match="at least one character"):
        stop_strings(wrong)


EMOJI = ["👩‍👩‍👧", "🇩🇪", "👍🏽", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "😀", "🎉"]


@pytest.mark.parametrize("text", [*EMOJI, "a" + "".join(EMOJI) + "b", "🇩🇪🇫🇷🇮🇹", "日本語 é\n"])
def test_what_is_one_character_to_a_reader_comes_at_once(text):
    stream = GraphemeStream()
    pieces = [stream.push(character) for character in text] + [stream.finish()]
    assert "".join(pieces) == text
    for emoji in EMOJI:
        assert sum(piece.count(emoji) for piece in pieces) == text.count(emoji)


def test_text_without_emoji_passes_at_once():
    stream = GraphemeStream()
    text = "Grüße, 日本語, ॐ, x² and\ttabs\n"
    assert [stream.push(character) for character in text] == list(text)
    assert stream.finish() == ""


def test_a_run_of_joiners_is_not_held_for_ever():
    stream = GraphemeStream()
    assert len("".join(stream.push("\u200d") for _ in range(100))) > 50
