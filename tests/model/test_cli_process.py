"""pykvq-run as a user runs it: a process of its own, with SmolLM2."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points

import pytest

COMMAND = [sys.executable, "-m", "pykvq.cli.run"]


def run(*arguments, stdin="", timeout=120, **environment):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


def test_the_command_is_installed():
    (entry,) = entry_points(group="console_scripts", name="pykvq-run")
    assert entry.value == "pykvq.cli.run:main"


def test_one_prompt(smollm2_path):
    done = run(smollm2_path, "-p", "The capital of France is", "-n", 4, "--temp", 0, "--kv", "ultra4", "--threads", 2)
    assert done.returncode == 0
    assert done.stdout.startswith(" Paris")
    assert done.stderr.count("\n") == 1
    assert "4 tokens, " in done.stderr
    assert "0.34x of F16" in done.stderr


def test_json(smollm2_path):
    done = run(smollm2_path, "-p", "The capital of France is", "-n", 8, "--temp", 0, "--kv", "f16", "--json")
    answer = json.loads(done.stdout)
    assert answer["tokens"] == [7042, 30, 198, 198, 504, 1797, 1918, 553]
    assert answer["text"].startswith(" Paris.\n\nThe")
    assert answer["prompt_tokens"] == answer["timings"]["prompt_n"] == 5
    assert answer["timings"]["gen_tps"] == pytest.approx(8 / answer["timings"]["gen_s"])
    assert answer["kv_info"]["ratio"] == 1.0


def test_a_scripted_chat_with_save_and_load(smollm2_path, tmp_path):
    saved = tmp_path / "chat"
    script = f"Name three colors.\n/save {saved}\n/kv\n/quit\n"
    done = run(smollm2_path, "--temp", 0, "-n", 24, "--system", "Answer briefly.", stdin=script)
    assert done.returncode == 0
    assert "Red" in done.stdout
    assert "kv_quant: ultra4" in done.stderr
    again = run(smollm2_path, "--temp", 0, "-n", 8, stdin=f"/load {saved}\nThank you.\n")
    assert again.returncode == 0
    assert "loaded 3 messages and " in again.stderr
    assert again.stdout.strip()
    # another cache format cannot take the state; the chat lives on
    other = run(smollm2_path, "--temp", 0, "-n", 8, "--kv", "q8_0", stdin=f"/load {saved}\nHello\n")
    assert other.returncode == 0
    (error,) = [line for line in other.stderr.splitlines() if line.startswith("error:")]
    assert "q4_ve" in error
    assert other.stdout.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_chat_at_a_terminal(smollm2_path, tmp_path):
    """Typed with line editing: Ctrl-C in an answer and at the prompt, Ctrl-D to leave."""
    import fcntl
    import pty
    import termios

    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYKVQ_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(
        [*COMMAND, str(smollm2_path), "--threads", "1", "--temp", "0"],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches the process through its terminal
        env=environment,
    ) as process:
        os.close(secondary)
        try:
            _talk(Screen(primary))
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(primary)
    assert "+Write a very long story about a fox.\n" in (tmp_path / "history").read_text()


def _talk(screen):
    prompt, accepted = "\x1b[?2004h", "\x1b[?2004l"
    screen.read_until("/help lists the commands")
    screen.read_until(prompt)
    screen.type("Write a very long story about a fox.\r")
    screen.read_until(accepted)
    time.sleep(1)
    screen.type("\x03")
    screen.read_until("(stopped)")
    screen.read_until("of F16")
    screen.read_until(prompt)
    screen.type("\x03")
    screen.read_until("/quit or Ctrl-D leaves")
    screen.read_until(prompt)
    screen.type("\x04")


class Screen:
    """What a program writes to a pseudo-terminal, read until something awaited appears."""

    def __init__(self, descriptor):
        self._descriptor = descriptor
        self._unread = ""

    def type(self, text):
        os.write(self._descriptor, text.encode())

    def read_until(self, text, timeout=30):
        deadline = time.monotonic() + timeout
        while text not in self._unread:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self._unread!r}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self._unread += os.read(self._descriptor, 65536).decode("utf-8", "replace")
        self._unread = self._unread.partition(text)[2]


def test_a_second_start_is_quick(smollm2_path):
    run(smollm2_path, stdin="/quit\n")
    started = time.perf_counter()
    assert run(smollm2_path, stdin="/quit\n").returncode == 0
    assert time.perf_counter() - started < 5


def test_a_reader_that_goes_away(smollm2_path):
    with subprocess.Popen(
        [*COMMAND, str(smollm2_path), "-p", "Once upon a time", "-n", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def interrupt_after_output(arguments, stdin):
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(stdin)
        process.stdin.flush()
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"Hello\n" if stdin else b"", timeout=120)
        return process.returncode, out, err.decode()


def test_ctrl_c_ends_a_single_answer_with_130(smollm2_path):
    code, _, err = interrupt_after_output([smollm2_path, "-p", "Once upon a time", "-n", -1], b"")
    assert (code, err) == (130, "")


def test_ctrl_c_stops_only_the_answer_of_a_chat(smollm2_path):
    arguments = [smollm2_path, "--temp", 0, "-n", 200]
    code, out, err = interrupt_after_output(arguments, b"Write a very long story about a fox.\n")
    assert code == 0
    assert "(stopped)" in err
    assert err.count("tokens/s; KV") == 2
    assert out.rstrip().count(b"\n") >= 1


def test_ctrl_c_is_served_inside_a_long_prompt(smollm2_path):
    process = subprocess.Popen(
        [*COMMAND, str(smollm2_path), "--ctx", "0", "-p", "word " * 8000, "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        time.sleep(3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        interrupted = time.perf_counter()
        assert process.wait(60) == 130
        assert time.perf_counter() - interrupted < 3
