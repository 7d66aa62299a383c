"""Loading, information, state and the native wrappers, with SmolLM2."""

import logging
import os
import subprocess
import sys

import pytest

from pykvq import AbortedError, InvalidArgumentError, Llama, ModelFileError, OutOfMemoryError, StateError, native
from pykvq.kv_config import KV_TYPE_BITS
from pykvq.runtime import Model


def test_the_kv_types_are_those_of_the_library():
    ffi, lib = native.load()
    names = [ffi.string(lib.pykvq_kv_type_name(i)).decode() for i in range(lib.pykvq_kv_type_count())]
    bits = [
        8 * lib.pykvq_kv_type_block_bytes(name.encode()) / lib.pykvq_kv_type_block_size(name.encode()) for name in names
    ]
    assert dict(zip(names, bits, strict=True)) == KV_TYPE_BITS


def test_kv_info_reports_real_bytes(smollm2_path):
    with Llama(smollm2_path, kv_quant="q4_ve", n_ctx=8192) as llm:
        info = llm.kv_info()
        model = llm._model.info
    elements = 8192 * model.n_layer * model.n_head_kv * (model.head_dim_k + model.head_dim_v)
    assert info["kv_bytes_f16"] == 2 * elements
    assert info["ratio"] < 0.30
    assert info["kv_bytes"] == pytest.approx(elements * 4.25 / 8, rel=0.01)
    assert info["bits_per_element"] == pytest.approx(4.25, rel=0.01)
    assert info["compute_bytes"] > 0
    assert info["flash_attn"]
    assert info["attention_route"] == "pykvq flash attention (cpu)"


def test_a_device_that_is_not_there_is_named(smollm2_path):
    with pytest.raises(InvalidArgumentError, match="device is 'CUDA97': there is no such GPU; known are: "):
        Llama(smollm2_path, device="CUDA97", calibrate="never")
    with Llama(smollm2_path, device="none", n_gpu_layers=-1, n_ctx=256, calibrate="never") as llm:
        assert "(cpu)" in llm.kv_info()["attention_route"]


def test_information_about_the_model(llm):
    assert "general.architecture" in llm.metadata
    assert llm.metadata["general.architecture"] == "llama"
    assert "llama" in llm.description()
    assert llm.n_vocab() == 49152
    assert llm.n_ctx_train() == 8192
    assert (llm.token_bos(), llm.token_eos()) == (1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_to_load_its_own(smollm2_path):
    """It has the memory of its parent but none of the threads that compute."""
    code = f"""
import os, sys
from pykvq import ClosedError, Llama
llm = Llama({str(smollm2_path)!r}, kv_quant="f16", n_ctx=256)
llm("Once", max_tokens=2)
child = os.fork()
if child == 0:
    try:
        llm("Once", max_tokens=2)
    except ClosedError as error:
        print(error, flush=True)
    llm.close()
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(llm("Once", max_tokens=2)["usage"]["completion_tokens"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    told, *rest = result.stdout.splitlines()
    assert "made in another process, before a fork: create a new one here" in told
    assert rest == ["3", "2"]


def test_n_ctx_0_is_the_training_context(smollm2_path):
    with Llama(smollm2_path, n_ctx=0, kv_quant="q4_ve") as model:
        assert model.n_ctx() == 8192


@pytest.mark.parametrize("text", ["", "a", "Hello, world!\n", "naïve 你好 👩‍👩‍👧\t x" * 50, "<|im_end|>"])
def test_text_survives_tokenizing(llm, text):
    assert llm.detokenize(llm.tokenize(text)).decode() == text
    assert llm.detokenize(llm.tokenize(text, special=True), special=True).decode() == text


def test_special_tokens_are_read_only_on_request(llm):
    assert len(llm.tokenize("<|im_end|>", special=True)) == 1
    assert len(llm.tokenize("<|im_end|>")) > 1


def test_vocab_only(smollm2_path, llm):
    with Llama(smollm2_path, vocab_only=True) as vocabulary:
        assert vocabulary.tokenize("Hello you") == llm.tokenize("Hello you")


def test_a_state_goes_over_to_another_object(smollm2_path):
    prompt = "The capital of France is"
    with Llama(smollm2_path, kv_quant="q4_ve", n_ctx=512, n_threads=1) as model:
        model(prompt, temperature=0, max_tokens=4)
        state = model.save_state()
        n_tokens = model.n_tokens
        expected = model(prompt + " Paris.", temperature=0, max_tokens=8)["choices"][0]["text"]
    with Llama(smollm2_path, kv_quant="q4_ve", n_ctx=512, n_threads=1) as model:
        model("Something else entirely", max_tokens=2)
        model.load_state(state)
        assert model.n_tokens == n_tokens
        generation = model.start_generation(
            prompt + " Paris.", max_tokens=8, sampling=model.sampling_params(temperature=0)
        )
        assert "".join(piece.text for piece in generation) == expected
        assert generation.result.n_reused > 5


def test_a_wrong_state_is_refused_and_changes_nothing(smollm2_path, llm):
    with Llama(smollm2_path, kv_quant="q8_0", n_ctx=512) as other:
        other.eval([1, 2, 3])
        foreign = other.save_state()
    llm.reset()
    llm.eval(llm.tokenize("The capital of France is"))
    own = llm.save_state()
    damaged = bytearray(own)
    damaged[len(own) // 2] ^= 4
    for wrong in (foreign, bytes(damaged), own[:-1], own[: len(own) // 2], b"", b"PYKVQ-STATE-1\n"):
        with pytest.raises(StateError):
            llm.load_state(wrong)
    assert llm.n_tokens == 5
    assert llm("The capital of France is", temperature=0, max_tokens=1)["choices"][0]["text"] == " Paris"


def test_the_native_state_has_checks_of_its_own(llm):
    llm.reset()
    llm.eval([5, 6, 7])
    state = llm._engine.context.save_state()
    damaged = bytearray(state)
    damaged[-1] ^= 1
    with pytest.raises(StateError):
        llm._engine.context.load_state(bytes(damaged))
    llm._engine.context.load_state(state)


def test_progress_is_reported_and_can_stop_the_load(smollm2_path):
    seen = []
    Model(smollm2_path, progress=lambda value: seen.append(value)).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(AbortedError):
        Model(smollm2_path, progress=lambda value: value < 0.5)


def test_an_exception_in_progress_stops_the_load_and_is_not_lost(smollm2_path):
    def fail(value):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Llama(smollm2_path, progress=fail)


def test_native_lines_go_to_the_logger_when_verbose(smollm2_path, caplog):
    with caplog.at_level(logging.DEBUG, logger="pykvq"):
        Llama(smollm2_path, vocab_only=True, verbose=True).close()
        n_verbose = len(caplog.records)
        Llama(smollm2_path, vocab_only=True).close()
    assert n_verbose > 10
    assert len(caplog.records) == n_verbose
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_a_cache_that_does_not_fit_is_refused(smollm2_path):
    with pytest.raises(OutOfMemoryError, match="n_ctx"):
        Llama(smollm2_path, n_ctx=2**30)


@pytest.mark.parametrize("part", [0, 3, 4, 24, 4096, 2_000_000, -1])
def test_a_truncated_model_is_an_error(smollm2_path, tmp_path, part):
    path = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(part if part >= 0 else os.path.getsize(smollm2_path) - 1000))
    with pytest.raises(ModelFileError) as caught:
        Llama(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
