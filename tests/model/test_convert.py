"""Hugging Face models of random weights, made here with transformers, through llama.cpp's converter."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from hub_server import HubServer
from numpy.typing import NDArray
from tiny_models import TinyModel

from pykvq import InvalidArgumentError, LibraryError, Llama, ModelFileError, convert, quantize
from pykvq.calibration import find
from pykvq.cli import convert as convert_cli
from pykvq.model_file import read_model_file

needs_tools = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "sentencepiece")),
    reason="needs torch, transformers and sentencepiece: pip install '.[tools]'",
)
ARCHITECTURES = ("llama", "qwen2", "gemma")
N_VOCAB = 512
SIZES = {
    "vocab_size": N_VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
}
TOKENS = [1, *range(300, 360)]


def write_tokenizer(folder):
    """A SentencePiece model of 512 tokens, which all three converters read."""
    import sentencepiece

    words = [f"{a}{b}{c}" for a in "bdgklmnprst" for b in "aeiou" for c in "lmnrst"]
    lines = [" ".join(words[i : i + 7]) for i in range(len(words) - 7)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=N_VOCAB,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=True,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()


def write_model(arch, folder):
    import torch
    import transformers

    torch.manual_seed(7)
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    }[arch]
    model = model_class(config_class(**SIZES)).eval()
    folder.mkdir()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float().numpy()


@dataclass
class Original:
    """A Hugging Face model, the logits of all TOKENS as transformers computes them, and its conversion to F32."""

    folder: Path
    logits: NDArray[np.float32]
    gguf: Path


def make_original(arch, parent):
    reference = write_model(arch, parent / arch)
    convert.convert(parent / arch, parent / f"{arch}.gguf", "f32")
    assert sorted(path.name for path in parent.iterdir()) == [arch, f"{arch}.gguf"]
    return Original(parent / arch, reference, parent / f"{arch}.gguf")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def original(request, tmp_path_factory):
    return make_original(request.param, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "llama"
    write_model("llama", folder)
    return folder


def logits(path, kv_quant="f16"):
    with Llama(path, n_ctx=256, n_threads=1, kv_quant=kv_quant) as llm:
        context = llm._engine.context
        context.decode(TOKENS, 0, [True] * len(TOKENS))
        return np.stack([context.logits(i) for i in range(len(TOKENS))])


def relative_error(values, reference):
    return float(np.linalg.norm(values - reference) / np.linalg.norm(reference))


@pytest.mark.slow
@needs_tools
def test_logits_are_those_of_transformers(original, tmp_path):
    assert original.logits.std() > 0.3
    errors = {"f32": relative_error(logits(original.gguf), original.logits)}
    for name in ("f16", "bf16", "q8_0", "q4_k_m"):
        convert.convert(original.gguf, tmp_path / name, name)
        errors[name] = relative_error(logits(tmp_path / name), original.logits)
    print(original.folder.name, errors)
    assert errors["f32"] < 0.002
    assert errors["f16"] < 0.004
    assert errors["bf16"] < 0.03
    assert errors["q8_0"] < 0.05
    assert errors["q4_k_m"] < 0.5


@pytest.mark.slow
@needs_tools
def test_the_result_runs_with_tiers_and_in_every_type(original, tmp_path):
    text = "bal dem gir kol lun mas " * 150
    with Llama(original.gguf, vocab_only=True) as llm:
        assert llm.detokenize(llm.tokenize(text[:24])).decode().strip() == text[:24].strip()
    quantize.make_imatrix(original.gguf, text, tmp_path / "imatrix", n_chunk=256, n_threads=1)
    for name in quantize.quantize_types():
        out = tmp_path / "out.gguf"
        convert.convert(original.gguf, out, name, imatrix=tmp_path / "imatrix")
        with Llama(out, n_ctx=512, n_threads=1, kv_quant="ultra4") as llm:
            llm.eval(6 * TOKENS)  # more than the first tier holds
            assert llm.kv_info()["tiers"][1]["n_used"] > 0
            assert np.isfinite(llm._engine.context.logits()).all(), name


@pytest.mark.slow
@needs_tools
def test_a_folder_becomes_a_quantized_file(llama_folder, tmp_path):
    seen = set()
    convert.convert(llama_folder, tmp_path / "out.gguf", progress=lambda what, _done: seen.add(what))
    assert seen == {"converting", "quantizing"}
    assert "q4_K" in read_model_file(tmp_path / "out.gguf").weight_types
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.slow
@needs_tools
@pytest.mark.parametrize("number", SIGNALS, ids=str)
def test_an_interrupted_conversion_leaves_nothing_behind(llama_folder, tmp_path, number):
    command = [sys.executable, "-m", "pykvq.cli.convert", llama_folder, tmp_path / "out.gguf"]
    interrupt(command, tmp_path, number)


# stands in for the converter: it writes a part of its output and goes on for a long time
ENDLESS_CONVERTER = """
import sys, time
open(sys.argv[sys.argv.index("--outfile") + 1], "wb").write(bytes(1000))
time.sleep(600)
"""
CONVERT_WITH = """
import sys
from pathlib import Path
from pykvq import convert
from pykvq.cli.convert import main
convert.converter_path = lambda: Path(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("type_name", ["f16", "q4_k_m"])
@pytest.mark.parametrize("number", SIGNALS, ids=str)
def test_a_signal_ends_the_converter_too(tmp_path, number, type_name):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(bytes(2000))
    (tmp_path / "converter.py").write_text(ENDLESS_CONVERTER)
    converter = [sys.executable, "-c", CONVERT_WITH, tmp_path / "converter.py"]
    interrupt([*converter, source, out / "out.gguf", "--type", type_name], out, number)


def interrupt(command, folder, number):
    """Sends a signal once the converter runs: it must end, and leave nothing in the folder."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        deadline = time.monotonic() + 60
        while not any(path.suffix == ".log" for path in folder.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = wait_for_children(process.pid)
        process.send_signal(number)
        assert process.wait(60) == SIGNALS[number]
        assert process.stderr.read() == ""
    assert list(folder.iterdir()) == []
    assert not any(child.is_running() for child in children)


def wait_for_children(pid):
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return children


@pytest.mark.slow
@needs_tools
def test_a_damaged_model_is_one_line(llama_folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in llama_folder.iterdir():
        data = path.read_bytes()
        (copy / path.name).write_bytes(data[: len(data) // 2] if path.suffix == ".safetensors" else data)
    assert convert_cli.main([str(copy), str(tmp_path / "out.gguf")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pykvq-convert: error: llama.cpp's converter cannot convert")
    assert error.count("\n") == 1
    (copy / "config.json").write_text('{"architectures": ["NobodyForCausalLM"]}')
    assert convert_cli.main([str(copy), str(tmp_path / "out.gguf")]) == 1
    assert "NobodyForCausalLM" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_refusals(tmp_path, monkeypatch):
    out = tmp_path / "out.gguf"
    with pytest.raises(ModelFileError, match=r"has no config\.json"):
        convert.convert(tmp_path, out)
    with pytest.raises(ModelFileError, match="does not exist: give a folder, a GGUF file, or ORG/REPO"):
        convert.convert(tmp_path / "missing", out)
    with pytest.raises(InvalidArgumentError, match="unknown model type"):
        convert.convert(tmp_path, out, "q9")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="has no weights"):
        convert.convert(tmp_path, out)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelFileError, match=r"model\.safetensors' is a link to a file that does not exist: fetch"):
        convert.convert(tmp_path, out)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelFileError, match=r"model\.safetensors' is empty: fetch the model again"):
        convert.convert(tmp_path, out)
    (tmp_path / "link").symlink_to("gone")
    monkeypatch.chdir(tmp_path)
    for dangling in ("link", "./link", tmp_path / "link"):
        with pytest.raises(ModelFileError, match="is a link to what does not exist"):
            convert.convert(dangling, out)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    # a Python without torch
    monkeypatch.setattr(convert, "sys", type("sys", (), {"executable": isolated_python(tmp_path)}))
    with pytest.raises(LibraryError, match=r"the converter needs \w+: pip install 'pykvq\[tools\]'"):
        convert.convert(tmp_path, out)
    assert not out.exists()


def test_a_quantized_file_names_the_command_that_takes_it(tmp_path, capsys):
    source = TinyModel().write(tmp_path / "tiny.gguf")
    assert convert_cli.main([str(source), str(tmp_path / "q8.gguf"), "--type", "q8_0"]) == 0
    capsys.readouterr()
    assert convert_cli.main([str(tmp_path / "q8.gguf"), str(tmp_path / "out.gguf"), "--type", "q4_0"]) == 2
    error = capsys.readouterr().err
    assert "`pykvq-quantize IN OUT q4_0 --allow-requantize`" in error
    assert error.count("\n") == 1


def isolated_python(folder):
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    os.chmod(script, 0o755)
    return str(script)


@pytest.mark.slow
@needs_tools
def test_from_the_hub(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "cache"))
    files = {path.name: path.read_bytes() for path in llama_folder.iterdir()}
    with HubServer(files={**files, "README.md": b"no", "model.onnx": b"no"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        seen = set()
        convert.convert("org/repo", tmp_path / "out.gguf", "q8_0", progress=lambda what, _done: seen.add(what))
    assert seen >= {"fetching", "converting"}
    assert read_model_file(tmp_path / "out.gguf").architecture == "llama"
    fetched = tmp_path / "cache" / "models" / "hf" / "org" / "repo"
    assert sorted(path.name for path in fetched.iterdir()) == sorted(files)


def test_the_result_is_calibrated_and_tried(tmp_path, capsys):
    source, out = TinyModel().write(tmp_path / "tiny.gguf"), tmp_path / "out.gguf"
    command = [str(source), str(out), "--type", "q8_0", "--threads", "1", "--calibrate"]
    assert convert_cli.main([*command, "--kv", "ultra5"]) == 2
    assert not out.exists()
    capsys.readouterr()
    layers = "f16:128+q4_ve@k1=q8_0,v1=q8_0"
    assert convert_cli.main([*command, "--kv", f"ultra4, {layers}, f16"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["wrote", "wrote", "ultra4:", f"{layers}:", "f16:"]
    assert all("tokens of context take" in line for line in lines[2:])
    assert Path(find(out).path) == tmp_path / "out.kvq.gguf"
