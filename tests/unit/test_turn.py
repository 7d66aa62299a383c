"""Streams, threads and closing: one user of a context at a time, and none after the end."""

import gc
import threading
import time

import pytest

from pykvq import AbortedError, BusyError, ClosedError, Llama


def next_text(stream):
    return next(stream)["choices"][0]["text"]


def test_a_stream_that_is_closed_early_leaves_the_model_usable(llm, reply):
    reply("abcdef")
    stream = llm("x", max_tokens=None, stream=True)
    assert next_text(stream) == "a"
    stream.close()
    assert list(stream) == []
    reply("zz")
    assert llm("y")["choices"][0]["text"].endswith("zz")


def test_a_stream_that_is_dropped_gives_the_model_back_to_other_threads(llm, lib, reply):
    reply("abcdef")
    for _ in llm("x", max_tokens=None, stream=True):
        break
    reply("z")
    results = []
    thread = threading.Thread(target=lambda: results.append(llm("y")["choices"][0]["text"]))
    thread.start()
    thread.join(10)
    assert results == ["z"]


def test_a_later_call_in_the_same_thread_ends_the_stream_with_an_error(llm, lib, reply):
    reply("abcdef")
    stream = llm("x", max_tokens=None, stream=True)
    assert next_text(stream) == "a"
    reply("z")
    assert llm("y")["choices"][0]["text"] == "z"
    with pytest.raises(BusyError, match="a later call on the same model has ended this stream"):
        next(stream)


def test_two_streams_in_one_thread_do_not_mix(llm, lib, reply):
    reply("aaa")
    first = llm("x", stream=True)
    next(first)
    reply("bbb")
    second = llm("y", stream=True)
    assert next_text(second) == "b"
    with pytest.raises(BusyError):
        next(first)
    assert "".join(chunk["choices"][0]["text"] for chunk in second) == "bb"


def test_another_thread_waits_for_the_stream_to_end(llm, lib, reply):
    reply("abc")
    stream = llm("x", max_tokens=None, stream=True)
    next(stream)
    order = []

    def call():
        llm("y", max_tokens=1)
        order.append("call")

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    assert order == []
    assert len(list(stream)) == 3
    order.append("stream")
    reply("z")
    thread.join(10)
    assert order == ["stream", "call"]


def test_many_threads_get_their_own_answers(llm, lib):
    # the answer repeats the first letter of the prompt, whoever asks
    sampled = lib.pykvq_sampler_sample

    def repeat_prompt(sampler, context, i, token):
        sampled(sampler, context, i, token)
        token[0] = lib.contexts[-1].tokens[1]
        return 0

    lib.pykvq_sampler_sample = repeat_prompt
    wrong = []

    def ask(letter):
        for _ in range(20):
            text = llm(letter, max_tokens=5)["choices"][0]["text"]
            if text != letter * 5:
                wrong.append((letter, text))

    threads = [threading.Thread(target=ask, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_callback_must_not_call_the_model(llm, reply):
    reply("abc")
    with pytest.raises(BusyError, match="a callback must not call the model again"):
        llm("x", logits_processor=lambda ids, scores: llm("y"))
    reply("z")
    assert llm("y")["choices"][0]["text"].endswith("z")


def test_a_stream_may_move_between_threads(llm, reply):
    reply("abc")
    stream = llm("x", max_tokens=None, stream=True)
    texts = [next_text(stream)]
    thread = threading.Thread(target=lambda: texts.append(next_text(stream)))
    thread.start()
    thread.join(10)
    texts += [chunk["choices"][0]["text"] for chunk in stream]
    assert texts == ["a", "b", "c", ""]


def test_abort_ends_the_running_stream_and_nothing_else(llm, lib, reply):
    reply("abc")
    stream = llm("x", max_tokens=None, stream=True)
    next(stream)
    llm.abort()
    with pytest.raises(AbortedError):
        next(stream)
    llm.abort()  # with nothing running: the next call is not hit by it
    reply("z")
    assert llm("y")["choices"][0]["text"] == "z"


def test_close_while_streaming(llm, lib, reply):
    reply("abc")
    stream = llm("x", max_tokens=None, stream=True)
    next(stream)
    llm.close()
    assert lib.contexts[-1].freed
    assert lib.models_freed == 1
    with pytest.raises(ClosedError):
        next(stream)
    llm.close()
    for call in (lambda: llm("x"), lambda: llm.tokenize("x"), llm.kv_info, llm.reset, llm.save_state):
        with pytest.raises(ClosedError):
            call()


def test_close_waits_for_a_running_decode(llm, lib, reply):
    entered, leave = threading.Event(), threading.Event()

    def block():
        entered.set()
        assert leave.wait(10)
        assert not lib.contexts[-1].freed

    reply("abc")
    lib.before_decode = block
    errors = []

    def call():
        try:
            llm("x")
        except Exception as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert entered.wait(10)
    closer = threading.Thread(target=llm.close)
    closer.start()
    time.sleep(0.1)
    assert not lib.contexts[-1].freed
    leave.set()
    caller.join(10)
    closer.join(10)
    assert lib.contexts[-1].freed
    assert [type(error) for error in errors] in ([AbortedError], [ClosedError])


def test_close_wakes_waiting_threads(llm, reply):
    reply("abc")
    stream = llm("x", stream=True)
    next(stream)
    errors = []

    def call():
        try:
            llm("y")
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    llm.close()
    thread.join(10)
    assert len(errors) == 1


def test_everything_is_freed_without_close(lib, model_path):
    llm = Llama(model_path)
    stream = llm.generate([1, 2])
    next(stream)
    del llm, stream
    gc.collect()
    assert lib.contexts[-1].freed
    assert lib.models_freed == 1


def test_half_built_objects_are_collected_quietly(lib, model_path, capfd):
    for values in ({"kv_quant": "nothing"}, {"type_k": "iq4_nl"}):
        with pytest.raises(Exception):  # noqa: B017, PT011 (whatever it is, collecting must not print)
            Llama(model_path, **values)
    gc.collect()
    assert capfd.readouterr().err == ""
