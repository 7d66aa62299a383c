"""A running pykvq-desktop, and a browser that looks at it."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = next((path for path in map(Path, ("/usr/bin/chromium", "/usr/bin/chromium-browser")) if path.exists()), None)
COMMAND = "import sys; from pykvq.desktop.command import main; sys.exit(main())"


class App:
    """The process; ``url`` is without the token, ``address`` with it."""

    def __init__(self, folder: Path, models: Path, command: str = COMMAND) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        environment = {**os.environ, "HOME": str(folder), "PYKVQ_CACHE_DIR": str(folder / "cache")}
        environment["PYKVQ_MODELS_DIR"] = str(models)
        arguments = ["--no-window", "--port", "0", "--data-dir", str(folder / "data")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=log, env=environment)
        wait_for(lambda: "token=" in self.log.read_text() or self.process.poll() is not None, 60)
        match = re.search(r"(http://\S+/)\?token=\S+", self.log.read_text())
        assert match, self.log.read_text()
        self.address, self.url = match[0], match[1]

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


@contextmanager
def running_app(folder: Path, models: Path, command: str = COMMAND):
    folder.mkdir(exist_ok=True)
    app = App(folder, models, command)
    try:
        yield app
    finally:
        app.kill()


def prepared(folder, answers, **fields):
    """The id of a conversation with these answers, in the data folder of an app that does not run."""
    from pykvq.desktop.conversations import Conversations
    from pykvq.desktop.database import Database

    database = Database(folder / "data")
    chats = Conversations(database)
    chat, last = chats.create("prepared", **fields), None
    for answer in answers:
        question = chats.add(chat.id, "user", "A question", parent=last)
        last = chats.add(chat.id, "assistant", answer, parent=question.id).id
    database.close()
    return chat.id


def add_a_thousand_conversations(database):
    """Of a hundred messages each; of 2,000 words 20 in each message."""
    from pykvq.desktop.conversations import Conversations

    chats, draw = Conversations(database), random.Random(7)
    words = [f"word{i}" for i in range(2000)]
    with database.transaction() as connection:
        for i in range(1000):
            chat, last = chats.create(f"chat {i}"), None
            for _ in range(100):
                cursor = connection.execute(
                    "INSERT INTO message (conversation, parent, role, content, state, created) "
                    "VALUES (?, ?, 'user', ?, 'complete', 0)",
                    (chat.id, last, " ".join(draw.choices(words, k=20))),
                )
                last = cursor.lastrowid
            chats.update(chat.id, head=last)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def load(page, app, model, kv="ultra4", ctx=None):
    """Loads a model by the load dialog. One thread waits for no other, however busy the machine is."""
    page.goto(f"{app.url}models")
    page.click(f'[data-model="{model}"] [data-open-load]')
    if ctx is not None:
        page.fill('[aria-label="Context"]', str(ctx))
    page.fill('[aria-label="Threads"]', "1")
    if kv != "ultra4":
        page.click(".q-dialog .q-select")
        page.click(f'.q-menu [role=option]:has-text("{kv}")')
    page.click("[data-load]:not([disabled])")
    page.wait_for_selector("[data-loaded]:has-text(': loaded')", timeout=60_000)


def begin_chat(page, app, **sampling):
    """Opens a new chat with sampling values by their labels, such as Most_tokens=20."""
    page.goto(app.url)
    page.click('[aria-label="Settings of this chat"]')
    for label, value in sampling.items():
        page.fill(f'[aria-label="{label.replace("_", " ")}"]', str(value))
    page.click("[data-save]")
    page.wait_for_selector(".q-dialog", state="detached")


def send(page, text):
    page.fill('[aria-label="Message"]', text)
    page.press('[aria-label="Message"]', "Enter")


def wait_for_answer(page, n_messages):
    """Until so many messages are there and the last one is complete."""
    page.wait_for_function(
        """n => document.querySelectorAll('article').length === n &&
             /first after|stopped|ended/.test(document.querySelectorAll('article')[n - 1].innerText) &&
             !document.querySelector('[data-key=stop]')?.checkVisibility()""",
        arg=n_messages,
        timeout=120_000,
    )
    return page.locator("article")
