"""What Llama has besides answers: adapters, drafts, prompt caches, the hub, filling gaps."""

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import gguf
import numpy as np
import pytest
from greedy import TIE_LOGITS, worst_gap

from pykvq import DownloadError, InvalidArgumentError, Llama, ModelFileError
from pykvq.prompt_cache import DiskCache, RamCache
from pykvq.speculative import PromptLookup

GREEDY = {"temperature": 0, "max_tokens": 24}
STORY = "A short story about a fox and a crow, who met on a hill one day. " * 8


def text_of(response):
    return response["choices"][0]["text"]


def write_adapter(path, rows=576, rank=4, seed=1):
    """A LoRA of the output projection of layer 0."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", rank)
    for name, shape in (("lora_a", (rank, rows)), ("lora_b", (576, rank))):
        values = random.normal(size=shape, scale=0.2).astype(np.float32)
        writer.add_tensor(f"blk.0.attn_output.weight.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_after(path, tokens, **values):
    with Llama(path, kv_quant="f16", n_ctx=256, **values) as model:
        model.eval(tokens)
        return model._engine.context.logits()


def test_an_adapter_changes_the_model_by_its_scale(smollm2_path, tmp_path):
    adapter = write_adapter(tmp_path / "lora.gguf")
    plain = logits_after(smollm2_path, [1, 504, 3575])
    none = logits_after(smollm2_path, [1, 504, 3575], lora_path=adapter, lora_scale=0.0)
    half = logits_after(smollm2_path, [1, 504, 3575], lora_path=adapter, lora_scale=0.5)
    full = logits_after(smollm2_path, [1, 504, 3575], lora_path=adapter)
    np.testing.assert_allclose(plain, none, atol=1e-3)
    assert 0.01 < np.abs(plain - half).max() < np.abs(plain - full).max()


def test_wrong_adapters_are_refused(smollm2_path, tmp_path):
    with pytest.raises(ModelFileError, match="not found"):
        Llama(smollm2_path, lora_path=tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="adapter"):
        Llama(smollm2_path, lora_path=smollm2_path)
    with pytest.raises(ModelFileError, match="cannot load the adapter"):
        Llama(smollm2_path, lora_path=write_adapter(tmp_path / "wide.gguf", rows=640))


@pytest.mark.parametrize("kv", ["f16", "ultra4"])
def test_a_draft_changes_the_speed_and_not_the_answer(smollm2_path, kv):
    prompt = "one two three four five six\n" * 6 + "one two three"
    with Llama(smollm2_path, kv_quant=kv, n_ctx=512, n_batch=32, n_threads=1, draft_model=PromptLookup()) as model:
        values = {"max_tokens": 24, "n_logprobs": 1}
        generation = model.start_generation(prompt, sampling=model.sampling_params(temperature=0), **values)
        pieces = list(generation)
        assert generation.result.n_accepted >= 3
        assert model.n_tokens <= len(generation.request.prompt) + 24
        # a stop string, and a new prompt afterwards
        assert text_of(model(prompt, stop=[" six"], **GREEDY)).strip() == "four five"
        assert text_of(model("The capital of France is", **GREEDY)).startswith(" Paris")
    with Llama(smollm2_path, kv_quant=kv, n_ctx=512, n_batch=32, n_threads=1) as model:
        # tokens that are checked together round differently
        assert worst_gap(model, generation.request.prompt, generation.result.tokens) < TIE_LOGITS
        alone = model(prompt, logprobs=1, temperature=0, max_tokens=5)["choices"][0]
    drafted = [entry.logprob for piece in pieces for entry in piece.logprobs]
    assert "".join(piece.text for piece in pieces).startswith(alone["text"])
    assert drafted[:5] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=0.2)


@pytest.mark.parametrize("make", [lambda _: RamCache(), DiskCache])
def test_a_prompt_cache_brings_back_what_was_computed(smollm2_path, tmp_path, make):
    with Llama(smollm2_path, kv_quant="ultra4", n_ctx=512) as model:
        model.set_cache(make(tmp_path))
        first = text_of(model(STORY, **GREEDY))
        model("Something else", max_tokens=1)
        generation = model.start_generation(STORY, max_tokens=24, sampling=model.sampling_params(temperature=0))
        assert "".join(piece.text for piece in generation) == first
        assert generation.result.n_reused > 100


def test_a_disk_cache_outlives_the_process_and_survives_damage(smollm2_path, tmp_path):
    with Llama(smollm2_path, kv_quant="f16", n_ctx=512) as model:
        model.set_cache(DiskCache(tmp_path))
        model(STORY, max_tokens=1)
    (path,) = tmp_path.glob("*.kvqstate")
    whole = path.read_bytes()
    for data, n_reused in ((whole, 100), (whole[:-100], 0)):
        path.write_bytes(data)
        with Llama(smollm2_path, kv_quant="f16", n_ctx=512) as model:
            model.set_cache(DiskCache(tmp_path))
            generation = model.start_generation(STORY, max_tokens=1)
            list(generation)
            assert (generation.result.n_reused > 100) == (n_reused > 0)
    # of another KV format: computed anew
    with Llama(smollm2_path, kv_quant="q8_0", n_ctx=512) as model:
        model.set_cache(DiskCache(tmp_path))
        assert model(STORY, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_caches_drop_what_was_not_used_for_longest(tmp_path):
    for cache in (RamCache(25), DiskCache(tmp_path, 25)):
        for i in range(4):
            cache.store([i, i, i], bytes(10))
        assert cache.cache_size == 20
    cache = RamCache(25)
    cache.store([1, 2, 3], b"a" * 10)
    cache.store([1, 2, 9], b"b" * 10)
    assert cache.find([1, 2, 3, 4], 0) == b"a" * 10
    assert cache.find([1, 2, 3, 4], 3) is None
    cache.store([5], b"c" * 10)
    assert cache.find([1, 2, 9], 2) is None


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as one small repository needs."""

    COMMIT = "0" * 40
    file = b""

    def do_HEAD(self):
        self.do_GET(head=True)

    def do_GET(self, head=False):
        if self.path.startswith("/api/models/me/model") and "/tree/" in self.path:
            body = b'[{"type": "file", "path": "m.q4.gguf", "size": %d, "oid": "1"}]' % len(self.file)
        elif self.path.startswith("/api/models/me/model"):
            body = b'{"id": "me/model", "sha": "%s", "siblings": [{"rfilename": "m.q4.gguf"}]}' % self.COMMIT.encode()
        elif self.path == "/me/model/resolve/main/m.q4.gguf":
            body = self.file
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in (("X-Repo-Commit", self.COMMIT), ("ETag", '"abc"'), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, *_arguments):
        pass


HUB_SCRIPT = """
import sys
from pykvq import Llama
for name in ("*q4.gguf", "m.q4.gguf", "*q8*", "x.gguf"):
    try:
        with Llama.from_pretrained("me/model", name, cache_dir=sys.argv[1], n_ctx=256, verbose=False) as llm:
            print(llm("The capital of France is", max_tokens=1, temperature=0)["choices"][0]["text"])
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_from_pretrained(smollm2_path, tmp_path):
    import subprocess
    import sys

    Hub.file = smollm2_path.read_bytes()
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", HUB_SCRIPT, str(tmp_path)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    server.shutdown()
    server.server_close()
    lines = output.splitlines()
    assert lines[:2] == [" Paris", " Paris"]
    assert lines[2] == "InvalidArgumentError '*q8*' matches no file of me/model: there is m.q4.gguf"
    assert lines[3].startswith("DownloadError cannot fetch x.gguf of me/model: ")


def test_sampling_needs_logits_of_the_tokens_there_are(llm):
    llm.reset()
    llm.eval(llm.tokenize("The capital of France is"))
    assert llm.detokenize([llm.sample(temp=0)]) == b" Paris"
    llm.reset()
    with pytest.raises(InvalidArgumentError, match="no logits to draw from: evaluate a token first"):
        llm.sample()


def test_looking_back_without_end_takes_no_memory(smollm2_path):
    with Llama(smollm2_path, n_ctx=256, last_n_tokens_size=2**31 - 1) as model:
        before = peak_memory()
        model("la la la", repeat_penalty=1.5, max_tokens=2)
        assert peak_memory() - before < 200e6


def peak_memory():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_filling_a_gap(qwen_path):
    with Llama(qwen_path, n_ctx=512, kv_quant="f16") as model:
        text = text_of(
            model("def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))\n", temperature=0, max_tokens=8)
        )
    assert text.startswith("a + b")


def test_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def fail(*_arguments, **_values):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DownloadError, match=r"cannot fetch m\.gguf of me/model: no route to the hub"):
        Llama.from_pretrained("me/model", "m.gguf", cache_dir=tmp_path)


# --- arguments that are wrong, or of NumPy's types


@pytest.mark.parametrize(
    "name",
    ["rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), 1e39], ids=repr)
def test_a_rotation_by_no_number_is_refused(smollm2_path, name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name}=.* is no finite 32-bit number"):
        Llama(smollm2_path, n_ctx=256, **{name: value})


@pytest.mark.parametrize("name", ["rope_freq_base", "rope_freq_scale"])
def test_a_rotation_by_a_negative_number_is_refused(smollm2_path, name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is -1: it must be a finite number from 0 on"):
        Llama(smollm2_path, n_ctx=256, **{name: -1.0})


def test_numbers_of_numpy(smollm2_path):
    sizes = {name: np.int64(64) for name in ("n_batch", "n_ubatch", "last_n_tokens_size")}
    with Llama(smollm2_path, n_ctx=np.int64(256), seed=np.int64(3), n_threads=np.int64(1), **sizes) as llm:
        first = text_of(llm.create_completion("Hello", max_tokens=np.int64(8)))
        llm.set_seed(np.int64(3))
        assert text_of(llm.create_completion("Hello", max_tokens=8)) == first
        seeded = [text_of(llm.create_completion("Hello", max_tokens=8, seed=seed)) for seed in (5, np.int64(5))]
        assert seeded[0] == seeded[1]


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (lambda _ids, scores: scores * np.nan, "returned 49152 logits of 49152 that are not a number"),
        (lambda _ids, scores: np.where(np.arange(len(scores)) == 5, np.nan, scores), "returned 1 logits"),
        (lambda _ids, scores: ["x"] * len(scores), "must return numbers"),
        (lambda _ids, _scores: None, "must return 49152 logits, got shape"),
    ],
)
def test_logits_processors_that_return_no_logits(llm, processor, text):
    with pytest.raises(InvalidArgumentError, match=text):
        llm.create_completion("Hi", max_tokens=2, logits_processor=processor)


def test_a_grammar_that_is_too_large_to_be_followed(llm):
    with pytest.raises(InvalidArgumentError, match=r"the grammar cannot be followed: .*Too many items"):
        llm.create_completion("Hi", max_tokens=8, grammar='root ::= "a"{1000000000}')


def test_sampling_of_another_type(llm):
    with pytest.raises(InvalidArgumentError, match=r"sampling must come from sampling_params\(\), got \{"):
        llm.start_generation("Hi", sampling={"temperature": 0})


def test_input_that_is_no_text_to_embed(smollm2_path):
    with Llama(smollm2_path, n_ctx=256, embedding=True) as llm:
        for wrong in (5, None, {"a": 1}):
            with pytest.raises(InvalidArgumentError, match="the input must be a text or a list of texts"):
                llm.create_embedding(wrong)
        assert len(llm.create_embedding("Hello")["data"]) == 1
