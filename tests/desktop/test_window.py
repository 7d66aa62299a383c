"""The window of its own: what pywebview is given, and what happens without it."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

pytest.importorskip("nicegui")

from desktop.running import COMMAND, wait_for

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a browser is named by BROWSER")

# a pywebview that notes what it is given, opens the page, and does as the test says
FAKE = """
import json, os, time, urllib.request
settings = {}
class _Window:
    def destroy(self):
        note(closed=True)
        os._exit(0)
def note(**values):
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(json.dumps(values) + "\\n")
def create_window(title, url, **options):
    note(title=title, url=url, settings=settings, **options)
    return _Window()
def start(func, arguments):
    what = os.environ["FAKE_DOES"]
    if what == "raise":
        raise RuntimeError("no toolkit\\nfor windows")
    if what == "abort":
        os.write(2, b"toolkit: a library is missing\\n")
        os.abort()
    url = json.loads(open(os.environ["FAKE_LOG"]).readline())["url"]
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    note(status=opener.open(url).status)
    if what == "stay":
        func(*arguments)
"""


class Started:
    """pykvq-desktop with a fake pywebview and a browser that notes what it is to open."""

    def __init__(self, folder, does, *, has_webview=True, display=":1"):
        package = folder / "fake"
        package.mkdir()
        if has_webview:
            (package / "webview.py").write_text(FAKE)
        browser = folder / "browser"
        browser.write_text(f'#!/bin/sh\necho "$1" >> {folder}/opened\n')
        browser.chmod(0o755)
        self.folder, self.log = folder, folder / "log"
        environment = {**os.environ, "HOME": str(folder), "PYKVQ_MODELS_DIR": str(folder), "BROWSER": str(browser)}
        environment |= {"FAKE_LOG": str(folder / "fake.log"), "FAKE_DOES": does, "PYTHONPATH": str(package)}
        environment.pop("WAYLAND_DISPLAY", None)
        environment["DISPLAY"] = display
        command = COMMAND
        if not has_webview:
            find = "importlib.util.find_spec"
            absent = "lambda name: None if name == 'webview' else real(name)"
            command = f"import importlib.util; real = {find}; {find} = {absent}; {command}"
        arguments = ["--port", "0", "--data-dir", str(folder / "data")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=log, env=environment)

    def noted(self):
        return [json.loads(line) for line in (self.folder / "fake.log").read_text().splitlines()]

    def opened(self):
        path = self.folder / "opened"
        wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
        return path.read_text().split()

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def start(tmp_path):
    started = []

    def start(does, **options):
        started.append(Started(tmp_path, does, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_the_window_gets_the_page_and_the_app_ends_with_it(start):
    app = start("leave")
    assert app.process.wait(60) == 0
    given, opened = app.noted()
    assert given["title"] == "pykvq"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=\S+", given["url"])
    assert given["settings"] == {"ALLOW_DOWNLOADS": True}, "chats can be exported"
    assert given["text_select"], "answers can be selected"
    assert opened["status"] == 200
    assert not (app.folder / "opened").exists()


def test_the_window_closes_with_the_app(start):
    app = start("stay")
    wait_for(lambda: (app.folder / "fake.log").exists() and len(app.noted()) == 2)
    arguments = [each.cmdline() for each in psutil.Process(app.process.pid).children()]
    assert arguments
    assert "token=" not in str(arguments), "others can read command lines"
    app.end()
    wait_for(lambda: app.noted()[-1] == {"closed": True}, 10)


@pytest.mark.parametrize(
    ("does", "options", "reason"),
    [
        ("raise", {}, "no toolkit for windows"),
        ("abort", {}, "toolkit: a library is missing"),
        ("leave", {"has_webview": False}, "pywebview is not installed"),
        pytest.param(
            "leave",
            {"display": ""},
            "there is no display",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="other systems always have one"),
        ),
    ],
)
def test_without_a_window_the_browser_is_opened_and_that_is_said_once(start, does, options, reason):
    app = start(does, **options)
    (address,) = app.opened()
    printed = re.search(r"http://\S+token=\S+", app.log.read_text())[0]
    assert address.partition("=")[0] == printed.partition("=")[0]
    assert address != printed, "others can read what a browser is started with"
    with httpx.Client(follow_redirects=True) as client:
        assert client.get(address).status_code == 200
    assert httpx.get(address).status_code == 403, "it opens once"
    assert httpx.get(printed).status_code == 303
    time.sleep(0.5)
    assert app.log.read_text().count("no window") == 1
    assert f"no window ({reason}): opening the browser" in app.log.read_text()
    app.end()
