"""Llama on the fake library: what is asked of the native side, and what is made of its answers."""

import fake_native
import numpy as np
import pytest
from fake_native import BOS, EOS, IM_END

import pykvq
from pykvq import (
    ChatTemplateError,
    ContextFullError,
    InvalidArgumentError,
    LibraryError,
    Llama,
    ModelFileError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from pykvq.native import check_abi

USER = [{"role": "user", "content": "Hi"}]


def text_of(chunks):
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def held(lib):
    return lib.contexts[-1].tokens


# --- loading


def test_the_parameters_reach_the_native_side(lib, model_path, monkeypatch):
    seen = {}
    create = lib.pykvq_context_create

    def spy(model, params, out):
        seen.update(k=fake_native.ffi.string(params.type_k), v=fake_native.ffi.string(params.type_v))
        seen.update(n_ctx=params.n_ctx, fa=params.flash_attn, threads=params.n_threads, batch=params.n_threads_batch)
        return create(model, params, out)

    monkeypatch.setattr(lib, "pykvq_context_create", spy)
    Llama(model_path, kv_quant="q8_0/q4_ve", n_ctx=0, flash_attn=True, n_threads=3).close()
    assert seen == {"k": b"q8_0", "v": b"q4_ve", "n_ctx": 2048, "fa": 1, "threads": 3, "batch": 3}


def test_a_missing_file_is_an_error_with_its_path(lib, tmp_path):
    with pytest.raises(ModelFileError, match=r"model file not found: .*nothing.gguf"):
        Llama(tmp_path / "nothing.gguf")


def test_a_file_of_another_kind_is_a_model_file_error(lib, tmp_path):
    (tmp_path / "x.gguf").write_text("hello")
    with pytest.raises(ModelFileError, match="no GGUF model"):
        Llama(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="NUL"):
        Llama("a\0b")


def test_a_context_that_fails_frees_the_model_and_its_error_is_one_line(lib, model_path):
    with pytest.raises(UnsupportedModelError, match=r"^type_k=iq4_nl does not go with this model$"):
        Llama(model_path, type_k="iq4_nl")
    assert lib.models_freed == 1


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"n_ctx": -1}, "n_ctx must be 0"),
        ({"n_batch": 0}, "n_batch must be between 1"),
        ({"kv_quant": "ultra5"}, "unknown KV format 'ultra5'"),
        ({"flash_attn": False}, r"f16:128\+q4_ve@auto needs flash attention"),
        ({"n_threads": 2**40}, "n_threads=1099511627776"),
        ({"n_threads": "two"}, "n_threads='two'"),
    ],
)
def test_wrong_values_are_refused(lib, model_path, values, text):
    with pytest.raises(InvalidArgumentError, match=text):
        Llama(model_path, **values)


def test_an_unknown_argument_is_a_type_error(llm, model_path):
    with pytest.raises(TypeError, match=r"temprature.*did you mean 'temperature'"):
        llm("x", temprature=1)
    with pytest.raises(UnsupportedArgumentError, match=r"^tfs_z=0\.5 is not supported by pykvq: .*use min_p"):
        llm("x", tfs_z=0.5)
    assert llm("x", tfs_z=1.0)
    with pytest.raises(TypeError, match="tempo"):
        llm.generate([1], tempo=3)


def test_a_library_of_another_abi_is_refused(lib):
    lib.abi_version = 7
    with pytest.raises(LibraryError, match="ABI version 7, this package needs 5"):
        check_abi(lib)


def test_the_package_exports_its_errors():
    assert issubclass(pykvq.ContextFullError, pykvq.PykvqError)
    assert set(pykvq.errors.__all__) < set(pykvq.__all__)
    assert pykvq.__version__


# --- completion


def test_a_completion_has_the_usual_shape(llm, reply, model_path):
    reply("Paris.")
    response = llm("The capital is ", max_tokens=50)
    assert response["id"].startswith("cmpl-")
    assert response["object"] == "text_completion"
    assert response["model"] == str(model_path)
    assert response["choices"] == [{"text": "Paris.", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert response["usage"] == {"prompt_tokens": 16, "completion_tokens": 6, "total_tokens": 22}


def test_bos_comes_exactly_once(llm, lib, reply):
    reply("a")
    llm("xy")
    assert held(lib)[:3] == [BOS, *b"xy"]
    reply("a")
    llm("<s>xy")
    assert held(lib)[:3] == [BOS, *b"xy"]
    reply("a")
    llm([*b"xy"])
    assert held(lib)[:2] == [*b"xy"]


def test_an_empty_prompt_starts_from_bos_or_is_refused(llm, lib, reply, monkeypatch):
    lib.add_bos = False
    reply("a")
    assert llm("")["usage"]["prompt_tokens"] == 1
    assert held(lib)[0] == BOS
    with pytest.raises(InvalidArgumentError, match="prompt is empty"):
        llm([])


def test_the_prompt_is_evaluated_in_pieces_of_n_batch(llm, lib, reply):
    reply("!")
    llm("x" * 39)
    assert [len(tokens) for _, tokens in lib.decoded] == [16, 16, 8, 1]


def test_the_answer_is_cut_at_max_tokens(llm, reply):
    reply("abcdef")
    response = llm("x", max_tokens=3)
    assert response["choices"][0]["text"] == "abc"
    assert response["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [None, 0, -1, 100000])
def test_an_answer_without_limit_ends_with_the_context(llm, lib, reply, max_tokens):
    reply("y" * 300)
    response = llm("x" * 199, max_tokens=max_tokens)
    assert response["usage"] == {"prompt_tokens": 200, "completion_tokens": 56, "total_tokens": 256}
    assert response["choices"][0]["finish_reason"] == "length"


def test_a_prompt_longer_than_the_context_names_both_numbers(llm):
    with pytest.raises(ContextFullError, match=r"Requested tokens \(301\) exceed context window of 256"):
        llm("x" * 300)
    with pytest.raises(ValueError, match=r"\(256\) exceed context window of 256"):
        llm("x" * 255, stream=True)


def test_streamed_text_is_the_same_as_the_whole(llm, reply):
    text = "Grüße 你好 👩‍👩‍👧 done"
    reply(text)
    chunks = list(llm("x", max_tokens=None, stream=True))
    assert text_of(chunks) == text
    assert chunks[-1]["choices"][0] == {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in chunks)
    reply(text)
    assert llm("x", max_tokens=None)["choices"][0]["text"] == text


def test_an_answer_that_ends_inside_a_code_point(llm, reply):
    reply("a😀".encode()[:3], end=None)
    assert llm("x", max_tokens=3)["choices"][0]["text"] == "a\ufffd"


def test_stop_strings_end_the_answer(llm, reply):
    reply("one</s top two")
    assert llm("x", max_tokens=None, stop=" two")["choices"][0] == {
        "text": "one</s top",
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
    }
    reply("one END two")
    chunks = list(llm("x", max_tokens=None, stop=["END"], stream=True))
    assert text_of(chunks) == "one "
    assert not any("E" in chunk["choices"][0]["text"] for chunk in chunks)


def test_echo_puts_the_prompt_first(llm, reply):
    reply("b")
    assert llm("a", echo=True)["choices"][0]["text"] == "ab"
    reply("b")
    assert text_of(llm([*b"a"], echo=True, stream=True)) == "ab"
    reply("")
    assert text_of(llm("a", echo=True, stream=True)) == "a"


def test_suffix_needs_a_model_that_fills_gaps(lib, model_path):
    lib.fim_tokens = (-1, -1, -1)
    with (
        Llama(model_path) as llm,
        pytest.raises(InvalidArgumentError, match="suffix needs a model with fill-in-the-middle tokens"),
    ):
        llm("a", suffix="b")


def test_the_middle_comes_after_prefix_and_suffix(llm, lib, reply):
    reply("x")
    response = llm("ab", suffix="cd", echo=True)
    assert held(lib)[:8] == [BOS, 1, *b"ab", 2, *b"cd", 3]
    assert response["choices"][0]["text"] == "abx"


def test_a_prompt_may_be_bytes(llm, reply):
    reply("b")
    assert llm("é".encode(), echo=True)["choices"][0]["text"] == "éb"


def test_several_answers(llm, lib, reply):
    reply("a")
    lib.replies.extend([*b"bc", EOS])
    response = llm("x", n=2, seed=5)
    assert [(choice["index"], choice["text"]) for choice in response["choices"]] == [(0, "a"), (1, "bc")]
    assert response["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert [params["seed"] for params in lib.sampler_params] == [5, 6]
    for n in (0, 129, 1.5, True):
        with pytest.raises(InvalidArgumentError, match="n must be"):
            llm("x", n=n)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_tokens": "5"}, "max_tokens must be a whole number, got '5'"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"temperature": "hot"}, "temperature must be 0 or more, got 'hot'"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"logit_bias": [1]}, "logit_bias must be a dict"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be a dict"),
        ({"stop": 3}, "stop must be"),
        ({"stop": [""]}, "at least one character"),
        ({"grammar": 5}, "grammar must be"),
        ({"logprobs": True}, "logprobs must be a whole number"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(llm, values, text):
    with pytest.raises(InvalidArgumentError, match=text):
        llm("x", **values)
    for prompt in (5, None, ["a"], [1.5], {}):
        with pytest.raises(InvalidArgumentError, match="prompt"):
            llm(prompt)


@pytest.mark.parametrize("prompt", [[1, 999], [-1]])
def test_tokens_outside_the_vocabulary_are_refused(llm, prompt):
    with pytest.raises(InvalidArgumentError, match="is not in the vocabulary, whose ids go from 0 to 259"):
        llm(prompt)


def test_text_that_is_not_unicode_is_refused(llm):
    with pytest.raises(InvalidArgumentError, match="not valid Unicode"):
        llm("a\udcff")


# --- log probabilities


def test_logprobs_of_a_completion(llm, reply):
    reply("ab")
    logprobs = llm("xyz", logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["text_offset"] == [3, 4]
    expected = 10 - np.log(np.exp(10) + fake_native.N_VOCAB - 1)
    assert logprobs["token_logprobs"] == pytest.approx([expected, expected])
    assert logprobs["top_logprobs"][0]["a"] == pytest.approx(expected)
    assert len(logprobs["top_logprobs"][0]) == 2


def test_logprobs_with_echo_cover_the_prompt(llm, lib, reply):
    reply("c")
    llm("ab")
    reply("cd")
    logprobs = llm("ab", logprobs=0, echo=True, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"][0] == pytest.approx(10 - np.log(np.exp(10) + 259))
    # without BOS nothing stands before the first token
    lib.add_bos = False
    reply("c")
    assert llm([*b"ab"], logprobs=0, echo=True)["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_streamed_logprobs_come_with_the_text_they_belong_to(llm, reply):
    reply("aé<b")
    chunks = [chunk["choices"][0] for chunk in llm("x", max_tokens=None, logprobs=0, stop="<c", stream=True)]
    got = [(chunk["text"], chunk["logprobs"]["tokens"]) for chunk in chunks[:-1]]
    assert got == [("a", ["a"]), ("é", ["bytes:\\xc3", "bytes:\\xa9"]), ("<b", ["<", "b"])]


def test_logprobs_of_tokens_that_the_stop_string_takes_away_are_left_out(llm, reply):
    reply("ab<c")
    logprobs = llm("x", max_tokens=None, logprobs=0, stop="<c")["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]


def test_logprobs_out_of_range(llm):
    with pytest.raises(InvalidArgumentError, match="logprobs must be between 0 and 100"):
        llm("x", logprobs=101)
    with pytest.raises(InvalidArgumentError, match="needs logprobs=True"):
        llm.create_chat_completion(USER, top_logprobs=2)


# --- sampling


def test_sampling_parameters_reach_the_native_side(llm, lib):
    llm("x", temperature=0.5, top_k=7, top_p=0.5, min_p=0.25, repeat_penalty=2.0, seed=11, logit_bias={"98": 20})
    params = lib.sampler_params[-1]
    assert params == {
        "seed": 11,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "penalty_last_n": 64,
        "repeat_penalty": 2.0,
        "logit_bias": {98: 20.0},
    }


def test_seeds_come_from_the_models_seed(llm, lib, model_path):
    def two_seeds(**values):
        with Llama(model_path, **values) as model:
            model("x")
            model("x")
        return [params["seed"] for params in lib.sampler_params[-2:]]

    first = two_seeds(seed=5)
    assert first == two_seeds(seed=5)
    assert first[0] != first[1]
    assert two_seeds() != two_seeds()


def test_logit_bias_and_processors_change_the_token(llm, reply):
    reply("aaa", end=None)
    assert llm("x", max_tokens=3, logit_bias={ord("b"): 50})["choices"][0]["text"] == "bbb"

    def double_first(ids, scores):
        assert ids[0] == BOS
        scores[ord("c")] = 99
        return scores

    reply("aaa", end=None)
    response = llm("x", max_tokens=2, logits_processor=[double_first])
    assert response["choices"][0]["text"] == "cc"
    with pytest.raises(InvalidArgumentError, match="must return 260 logits"):
        llm("x", logits_processor=lambda ids, scores: scores[:3])
    with pytest.raises(InvalidArgumentError, match="must be callables"):
        llm("x", logits_processor=[3])


def test_stopping_criteria_end_before_the_token_just_drawn(llm, reply):
    reply("abcdef")
    response = llm("x", max_tokens=None, stopping_criteria=[lambda ids, scores: len(ids) >= 4])
    assert response["choices"][0]["text"] == "ab"
    assert response["choices"][0]["finish_reason"] == "stop"


# --- chat


def test_a_chat_completion(llm, lib, reply):
    reply("Hello", end=IM_END)
    response = llm.create_chat_completion(USER)
    assert response["id"].startswith("chatcmpl-")
    assert response["object"] == "chat.completion"
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "logprobs": None}
    assert response["choices"] == [{**choice, "finish_reason": "stop"}]
    start = [BOS, fake_native.IM_START, *b"user\nHi", IM_END]
    assert held(lib)[: len(start)] == start


def test_chat_chunks(llm, reply):
    reply("Hé")
    chunks = list(llm.create_chat_completion(USER, stream=True, logprobs=True, top_logprobs=1))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant"},
        {"content": "H"},
        {"content": "é"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    content = chunks[2]["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["top_logprobs"][0]["bytes"] == [0xC3]


def test_a_model_without_template(lib, model_path, reply):
    lib.template = None
    no_template = pytest.raises(ChatTemplateError, match=r"no chat template: pass chat_template=.*without --chat")
    with Llama(model_path) as llm, no_template:
        llm.create_chat_completion(USER)
    reply("ok")
    with Llama(model_path, chat_template="{{ messages[0].content }}?") as llm:
        assert llm.create_chat_completion(USER)["usage"]["prompt_tokens"] == 4


# --- the rest


def test_tokens_and_text(llm):
    assert llm.tokenize(b"hi<|im_end|>", special=True) == [BOS, *b"hi", IM_END]
    assert llm.tokenize("hé", add_bos=False) == [*"hé".encode()]
    assert llm.detokenize([BOS, *b" hi"]) == b"hi"
    assert llm.detokenize([*b" hi"]) == b" hi"
    assert llm.detokenize([BOS, 65], special=True) == b"<s>A"
    assert (llm.token_bos(), llm.token_eos(), llm.token_eot(), llm.token_nl()) == (BOS, EOS, IM_END, 10)
    assert (llm.n_vocab(), llm.n_embd(), llm.n_ctx()) == (260, 4, 256)


def test_metadata_and_description_are_complete(llm):
    assert llm.metadata == {"general.name": "fake", "general.note": "ü" * 200}
    assert llm.description() == "fake 1B F16 " + "x" * 300


def test_kv_info(llm):
    info = llm.kv_info()
    assert info["kv_quant"] == "ultra4"
    assert info["tiers_spec"] == "f16:128+q4_ve"
    assert [(tier["type_k"], tier["bits_per_element"]) for tier in info["tiers"]] == [("f16", 16), ("q4_ve", 4.25)]
    assert info["bits_per_element"] == pytest.approx(4.25)
    assert info["ratio"] == pytest.approx(4.25 / 16)
    assert info["attention_route"] == "pykvq tiered flash attention (cpu)"
    assert info["n_ctx"] == 256


@pytest.mark.parametrize(
    ("kv_quant", "layers", "route"),
    [
        ("ultra4", (22, 0), "pykvq tiered flash attention (gpu, 22 layers)"),
        ("q4_ve", (22, 0), "pykvq flash attention (gpu, 22 layers)"),
        ("q8_0", (10, 0), "llama.cpp flash attention (gpu, 10 layers)"),
        ("ultra4", (0, 3), "pykvq tiered flash attention (cpu), for 3 layers on a GPU that does not compute it"),
    ],
)
def test_attention_route_on_a_gpu(lib, model_path, caplog, kv_quant, layers, route):
    lib.attention_layers = layers
    with Llama(model_path, kv_quant=kv_quant, n_ctx=256) as llm:
        assert llm.kv_info()["attention_route"] == route
    warnings = [record.message for record in caplog.records if "the GPU does not compute attention" in record.message]
    assert len(warnings) == (layers[1] > 0)


def test_kv_info_without_tiers(lib, model_path, monkeypatch):
    with Llama(model_path, kv_quant="q8_0", n_ctx=256) as llm:
        llm.eval([1, 2, 3])
        info = llm.kv_info()
        monkeypatch.setenv("PYKVQ_FLASH_ATTN", "ggml")
        assert llm.kv_info()["attention_route"] == "llama.cpp flash attention (cpu)"
    assert info["attention_route"] == "pykvq flash attention (cpu)"
    assert [(tier["type_v"], tier["n_used"], tier["n_capacity"]) for tier in info["tiers"]] == [("q8_0", 3, 256)]


def test_the_tiers_reach_the_native_side(lib, model_path, monkeypatch):
    seen = {}
    create = lib.pykvq_context_create

    def spy(model, params, out):
        tiers = [params.tiers[i] for i in range(params.n_tiers)]
        seen["tiers"] = [
            (fake_native.ffi.string(t.type_k), fake_native.ffi.string(t.type_v), t.n_tokens) for t in tiers
        ]
        seen.update(n_sink=params.n_sink, n_ubatch=params.n_ubatch)
        return create(model, params, out)

    monkeypatch.setattr(lib, "pykvq_context_create", spy)
    Llama(model_path, kv_quant="f16:32+q8_0/q4_ve:99+q2_t", n_ctx=8192, n_sink=7).close()
    assert seen["tiers"] == [(b"f16", b"f16", 32), (b"q8_0", b"q4_ve", 99), (b"q2_t", b"q2_t", 0)]
    assert (seen["n_sink"], seen["n_ubatch"]) == (7, 256)


def test_vocab_only(lib, model_path):
    with Llama(model_path, vocab_only=True) as llm:
        assert llm.tokenize("a", add_bos=False) == [97]
        with pytest.raises(InvalidArgumentError, match="vocab_only=True"):
            llm("a")
    assert not lib.contexts


def test_embeddings(lib, model_path):
    lib.pooled = True
    with Llama(model_path, embedding=True, n_ctx=64, n_batch=8) as llm:
        response = llm.create_embedding(["ab", "c" * 40])
        assert [entry["embedding"] for entry in response["data"]] == [[3, 0, 0, 4]] * 2
        assert response["usage"] == {"prompt_tokens": 3 + 8, "total_tokens": 11}
        assert llm.embed("ab", normalize=True) == pytest.approx([0.6, 0, 0, 0.8])
        with pytest.raises(InvalidArgumentError, match=r"1 to 8 tokens \(n_batch\), got 41"):
            llm.embed("c" * 40, truncate=False)
        lib.pooled = False
        assert llm.embed("ab")[1] == [97, 0, 0, 3]
        with pytest.raises(InvalidArgumentError, match="embedding=True"):
            llm("x")


def test_text_models_make_no_embeddings(llm):
    with pytest.raises(InvalidArgumentError, match="load it with embedding=True"):
        llm.embed("x")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"n_ctx": "8"}, "n_ctx must be a whole number, got '8'"),
        ({"n_batch": 1.5}, "n_batch must be a whole number"),
        ({"flash_attn": "yes"}, "flash_attn must be True or False"),
        ({"n_sink": "a"}, "n_sink must be a whole number"),
        ({"lora_path": 5}, "lora_path must be text or a path"),
        ({"lora_scale": "x"}, "lora_scale must be a number"),
        ({"chat_template": 5}, "chat_template must be text"),
        ({"draft_model": 5}, "draft_model must be callable"),
        ({"type_k": 99}, "type_k=99 is not a KV type"),
        ({"seed": "x"}, "seed must be a whole number"),
    ],
)
def test_load_arguments_of_a_wrong_type_are_refused(lib, model_path, values, text):
    with pytest.raises(InvalidArgumentError, match=text):
        Llama(model_path, **values)
    with pytest.raises(InvalidArgumentError, match="model_path must be text or a path"):
        Llama(5)


def test_methods_refuse_arguments_of_a_wrong_type(llm):
    calls = [
        lambda: llm.tokenize(5),
        lambda: llm.detokenize(5),
        lambda: llm.detokenize(["a"]),
        lambda: llm.eval(None),
        lambda: list(llm.generate(5)),
        lambda: llm.sample(top_k="x"),
        lambda: llm.set_seed("x"),
        lambda: llm.set_cache(5),
        lambda: llm.create_chat_completion(5),
        lambda: llm.create_chat_completion(USER, tools=5),
        lambda: llm.create_chat_completion(USER, functions=5),
        lambda: llm.create_chat_completion(USER, chat_template_kwargs=5),
        lambda: llm.create_chat_completion(USER, chat_template_kwargs={"messages": []}),
        lambda: llm.create_chat_completion(USER, chat_template_kwargs={"self": 1}),
        lambda: llm.create_chat_completion(USER, chat_template_kwargs={1: 2}),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call()


def test_kv_types_may_be_the_peers_numbers(lib, model_path):
    with Llama(model_path, type_k=8, type_v=np.int64(1)) as llm:
        assert llm.kv_info()["tiers_spec"] == "q8_0/f16"
