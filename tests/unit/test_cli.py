"""pykvq-run in this process, on the fake library: exit code and exact text on both streams."""

import io
import json
import logging
import sys
import threading
import zipfile

import fake_native
import pytest
from fake_native import BOS, IM_END, IM_START

import pykvq
from pykvq.cli import run
from pykvq.cli.program import run_program


@pytest.fixture
def cli(lib, model_path, capsys, monkeypatch):
    """Runs the command; returns (exit code, stdout, stderr). ``stdin`` is the text typed."""

    def call(*arguments, stdin="", model=model_path):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = run.main([*([] if model is None else [str(model)]), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def chat_error(err):
    """The lines of an error in a chat, without the two of the start."""
    return [line for line in err.splitlines() if line.startswith("error: ")]


def test_one_prompt(cli, reply):
    reply("Paris.")
    code, out, err = cli("-p", "Capital?")
    assert (code, out) == (0, "Paris.\n")
    assert err.startswith("6 tokens, ")
    assert err.endswith(" tokens/s; KV 2.1 MiB, 0.27x of F16\n")
    assert err.count("\n") == 1


def test_json_is_one_object(cli, reply, model_path):
    reply("Pé")
    code, out, _ = cli("-p", "x", "--json", "--kv", "f16", "--ctx", 64)
    assert code == 0
    assert "Pé" in out
    answer = json.loads(out)
    assert list(answer) == ["text", "tokens", "prompt_tokens", "finish_reason", "timings", "kv_info", "model"]
    assert answer["tokens"] == [*"Pé".encode()]
    assert answer["prompt_tokens"] == 2
    assert answer["finish_reason"] == "stop"
    names = ["load_s", "prompt_n", "prompt_s", "prompt_tps", "gen_n", "gen_s", "gen_tps"]
    assert list(answer["timings"]) == names
    assert answer["timings"]["gen_n"] == 3
    assert answer["kv_info"]["kv_quant"] == "f16"
    assert answer["kv_info"]["n_ctx"] == 64
    assert answer["model"] == str(model_path)


def test_the_options_reach_the_sampler(cli, lib):
    cli("-p", "x", "--temp", 0.25, "--seed", 9)
    first = lib.sampler_params[-1]
    cli("-p", "x", "--temp", 0.25, "--seed", 9, "--no-calibrate", "--n-gpu-layers", 3, "--threads", 2)
    assert lib.sampler_params[-1] == first
    assert first["temperature"] == 0.25


def test_a_prompt_through_the_template(cli, lib, reply):
    reply("ok", end=IM_END)
    assert cli("-p", "Hi", "--chat", "--system", "Be kind")[:2] == (0, "ok\n")
    start = [BOS, IM_START, *b"system\nBe kind", IM_END, 10, IM_START, *b"user\nHi", IM_END, 10]
    assert lib.contexts[-1].tokens[: len(start)] == start


def test_the_length_of_an_answer(cli, reply):
    reply("a" * 1000)
    assert cli("-p", "x", "-n", 3)[1] == "aaa\n"
    reply("a" * 1000)
    assert cli("-p", "x")[1] == "a" * 256 + "\n"
    reply("a" * 1000)
    assert cli("-p", "x", "-n", -1, "--ctx", 500)[1] == "a" * 498 + "\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--kv", "ultra5"],
            "unknown KV format 'ultra5': use one of f16, bf16, q8_0, q4_0, q4_ve, q2_t, ultra4, ultra2",
        ),
        (["--kv", "f16+q4_ve"], "KV tier 'f16' of 'f16+q4_ve' needs a number of tokens, as in f16:128+q4_ve"),
        (["--ctx", "-1"], "--ctx -1 is out of range: give 0 (the model's training context) or 1 to 1073741824 tokens"),
        (["--ctx", "many"], "Invalid value for '--ctx'"),
        (["-n", "0"], "-n 0 is out of range: give -1 (until the context is full) or at least 1 token"),
        (["--temp", "-1"], "--temp -1.0 is out of range"),
        (["--temp", "nan"], "--temp nan is out of range"),
        (["--temp", "1e308"], "--temp 1e+308 is out of range: give 0 (greedy) to 1000000"),
        (["--seed", "-2"], "--seed -2 is out of range"),
        (["--threads", "0"], "--threads 0 is out of range: give 1 to 512"),
        (["--n-gpu-layers", "-2"], "--n-gpu-layers -2 is out of range"),
        (["--json"], "--json needs a prompt: add -p PROMPT"),
        (["-p", "x", "--system", "y"], "--system needs the chat template: add --chat"),
        (["--xyzzy"], "--xyzzy (see pykvq-run --help)"),
        (["more"], "more"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(cli, lib, arguments, text):
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("pykvq-run: error: ")
    assert text in err
    assert err.count("\n") == 1
    assert not lib.contexts


def test_a_failure_is_one_line_and_exit_code_1(cli, tmp_path):
    code, out, err = cli("-p", "x", model=tmp_path / "nothing.gguf")
    assert (code, out) == (1, "")
    assert err == f"pykvq-run: error: model file not found: '{tmp_path}/nothing.gguf'\n"


def test_a_defect_is_one_line_too(cli, lib, monkeypatch):
    monkeypatch.setattr(lib, "pykvq_model_desc", None)
    code, _, err = cli()
    assert code == 1
    assert err == "pykvq-run: error: TypeError: the first argument must be callable (--verbose shows where)\n"
    code, _, err = cli("--verbose")
    assert "Traceback" in err


def test_warnings_are_said_once_and_those_of_llama_cpp_not(capsys, monkeypatch):
    def compute() -> int:
        for name in ("pykvq", "pykvq", "pykvq.native"):
            logging.getLogger(name).warning("%s is slow", name)
        return 0

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for _ in range(2):
        assert run_program("pykvq-run", compute, []) == 0
        assert capsys.readouterr().err == "warning: pykvq is slow\n"


def test_a_prompt_that_does_not_fit(cli):
    code, _, err = cli("-p", "x" * 99, "--ctx", 50)
    assert code == 1
    assert "Requested tokens (100) exceed context window of 50" in err


def test_version_and_help(cli):
    assert cli("--version") == (0, f"pykvq-run {pykvq.__version__}\n", "")
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    for option in ("--ctx", "--kv", "-p", "-n", "--temp", "--seed", "--system", "--threads", "--json", "--verbose"):
        assert option in out
    for option in ("--n-gpu-layers", "--chat", "--no-calibrate"):
        assert option in out


def test_a_closed_pipe_is_silent(cli, reply, monkeypatch):
    class ClosedPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    reply("abc")
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    assert cli("-p", "x")[::2] == (1, "")


def test_ctrl_c_ends_a_single_answer_with_130(cli, lib, reply, monkeypatch):
    reply("abc" * 50)
    calls = []
    n_threads = threading.active_count()

    def write(text):
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "write", write)
    code, _, err = cli("-p", "x")
    assert (code, err) == (130, "")
    assert calls == ["a", "b", "c", "\n"]
    assert lib.contexts[-1].freed
    assert threading.active_count() == n_threads


# --- chat


def test_a_chat_remembers_and_reuses(cli, lib, reply):
    reply([*b"one", IM_END, *b"two"], end=IM_END)
    code, out, err = cli(stdin="first\n\nsecond\n")
    assert (code, out) == (0, "one\ntwo\n")
    lines = err.splitlines()
    assert lines[0].startswith("fake 1B F16 xxx")
    assert lines[1] == "context 4096 tokens, ultra4: KV 2.1 MiB, 0.27x of F16; /help lists the commands"
    assert lines[2] == "note: the model was trained on 2048 tokens and may lose the thread beyond them"
    assert [line.split(",")[0] for line in lines[3:]] == ["3 tokens", "3 tokens"]
    expected = [BOS, IM_START, *b"user\nfirst", IM_END, 10, IM_START, *b"assistant\none", IM_END, 10]
    assert lib.contexts[-1].tokens[: len(expected)] == expected
    # the second answer computes only what came after the first
    assert lib.decoded[4][0] > 0


def test_commands(cli, reply):
    reply("hi", end=IM_END)
    code, out, err = cli(stdin="hello\n/kv\n/help\n/nonsense\n/save\n/reset\n/quit\nnever reached\n")
    assert (code, out) == (0, "hi\n")
    assert "ratio: 0.265625\n" in err
    assert "/load FILE   go on with a chat from a file\n" in err
    assert chat_error(err) == [
        "error: unknown command /nonsense: /help lists them",
        "error: /save needs a file name: /save FILE",
    ]
    assert err.endswith("started over\n")


def test_reset_keeps_the_system_message(cli, lib, reply):
    reply([*b"a", IM_END, *b"b"], end=IM_END)
    assert cli("--system", "S", stdin="one\n/reset\ntwo\n")[1] == "a\nb\n"
    expected = [BOS, IM_START, *b"system\nS", IM_END, 10, IM_START, *b"user\ntwo", IM_END]
    assert lib.contexts[-1].tokens[: len(expected)] == expected


def test_save_and_load(cli, lib, reply, tmp_path):
    saved = tmp_path / "my chat.pykvq"
    reply("hi", end=IM_END)
    code, _, err = cli(stdin=f"hello\n/save {saved}\n")
    assert code == 0
    assert f"saved 2 messages and 27 tokens of KV cache to {saved}" in err
    tokens = list(lib.contexts[-1].tokens)
    lib.decoded.clear()
    reply("again", end=IM_END)
    code, out, err = cli(stdin=f"/load {saved}\nmore\n")
    assert (code, out) == (0, "again\n")
    assert "loaded 2 messages and 27 tokens of KV cache" in err
    # what the file brought is not computed again
    assert lib.decoded[0][0] == len(tokens)


def test_a_damaged_or_foreign_file_is_refused_and_the_chat_goes_on(cli, lib, reply, tmp_path):
    saved = tmp_path / "chat"
    reply("hi", end=IM_END)
    cli(stdin=f"hello\n/save {saved}\n")
    cut, flipped, text, other_zip = (tmp_path / name for name in ("cut", "flipped", "text", "zip"))
    raw = saved.read_bytes()
    cut.write_bytes(raw[:-30])
    flipped.write_bytes(raw.replace(b"FAKE", b"FAKF"))
    text.write_text("hello")
    with zipfile.ZipFile(other_zip, "w") as archive:
        archive.writestr("a.txt", "a")
    files = [tmp_path / "missing", tmp_path, cut, flipped, text, other_zip]
    reply([*b"one", IM_END, *b"two"], end=IM_END)
    script = "first\n" + "".join(f"/load {path}\n" for path in files) + "second\n"
    code, out, err = cli(stdin=script)
    assert (code, out) == (0, "one\ntwo\n")
    errors = chat_error(err)
    assert len(errors) == len(files)
    assert all(str(path) in error for path, error in zip(files, errors, strict=True))
    expected = [BOS, IM_START, *b"user\nfirst", IM_END, 10, IM_START, *b"assistant\none", IM_END]
    assert lib.contexts[-1].tokens[: len(expected)] == expected


def test_a_state_of_another_kind_is_refused_and_the_chat_goes_on(cli, lib, reply, tmp_path, monkeypatch):
    saved = tmp_path / "chat"
    reply("hi", end=IM_END)
    cli(stdin=f"hello\n/save {saved}\n")
    monkeypatch.setattr(
        lib, "pykvq_state_load", lambda *args: lib._fail(fake_native.FORMAT, "the state has K in q8_0, not q4_ve")
    )
    reply("ok", end=IM_END)
    _, out, err = cli(stdin=f"/load {saved}\nhello\n")
    assert out == "ok\n"
    assert chat_error(err) == ["error: the state has K in q8_0, not q4_ve"]


def test_save_does_not_overwrite_another_kind_of_file(cli, tmp_path):
    precious = tmp_path / "model.gguf"
    before = precious.read_bytes()
    _, _, err = cli(stdin=f"/save {precious}\n/save {tmp_path}/no/where\n")
    assert [line.split(":")[1].strip() for line in chat_error(err)] == [
        f"{precious} exists and is not a saved chat",
        f"cannot write to {tmp_path}/no (No such file or directory)",
    ]
    assert precious.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(cli, lib, reply, monkeypatch):
    from pykvq.cli import chat

    reply([*b"long answer"], end=IM_END)
    written = []

    def write(text):
        written.append(text)
        if len(written) == 4:
            lib.replies.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "write", write)
    code, _, err = cli(stdin="first\nsecond\n")
    assert code == 0
    assert "(stopped)\n" in err
    assert "".join(written).startswith("long\n")
    expected = [BOS, IM_START, *b"user\nfirst", IM_END, 10, IM_START, *b"assistant\nlong", IM_END, 10, IM_START]
    assert lib.contexts[-1].tokens[: len(expected)] == expected


def test_a_full_context_is_said_and_the_chat_goes_on(cli, reply):
    reply("y" * 500)
    _, out, err = cli("--ctx", 64, stdin="hello\nmore\n/reset\n")
    assert out == "y" * 39 + "\n"
    assert "the context is full: /reset starts over, or start with a larger --ctx\n" in err
    assert "error: the chat is too long: Requested tokens" in err
    assert err.endswith("started over\n")


def test_a_model_without_template_cannot_chat(cli, lib):
    lib.template = None
    code, out, err = cli(stdin="hello\n")
    assert (code, out) == (1, "")
    assert err.startswith("pykvq-run: error: ")
    assert "has no chat template" in err
    assert err.count("\n") == 1


def test_without_model_the_demo_model_is_fetched(cli, lib, reply, model_path, tmp_path, monkeypatch):
    from pykvq import catalog

    fetched = []

    def fetch(model, progress):
        fetched.append(model.file)
        return model_path

    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(catalog, "fetch", fetch)
    reply("ok")
    code, out, err = cli("-p", "x", model=None)
    assert (code, out) == (0, "ok\n")
    assert fetched == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    first = err.splitlines()[0]
    assert first == f"fetching the demo model SmolLM2 135M Instruct, Q4_1 (93 MB) into {tmp_path}/empty"


def test_no_work_is_done_for_a_wrong_command_line(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "empty"))
    assert cli("--kv", "ultra5", model=None)[0] == 2
    assert not (tmp_path / "empty").exists()
