"""Fast fingers, lost connections and large data, in real Chromium."""

import signal
import sqlite3

import pytest

from desktop.running import add_a_thousand_conversations, begin_chat, load, running_app, send, wait_for_answer

pytest.importorskip("nicegui")

from pykvq.desktop.database import Database

pytestmark = pytest.mark.slow

DEBOUNCE_SECONDS = 0.1  # that the search field waits for more

LONG = "Write a very long story about a cat, in many chapters."


def stored(app, sql):
    database = sqlite3.connect(f"file:{app.folder / 'data' / 'pykvq.sqlite'}?mode=ro", uri=True)
    try:
        return database.execute(sql).fetchall()
    finally:
        database.close()


def test_a_double_send_sends_once_and_stop_send_stop_ends_each_answer_once(app, page):
    load(page, app, "demo", ctx=1024)
    begin_chat(page, app, Temperature=0, Most_tokens=400)
    page.fill('[aria-label="Message"]', LONG)
    page.evaluate("""() => { for (let i = 0; i < 3; i++) document.querySelector('[aria-label="Send"]').click(); }""")
    page.wait_for_url(f"{app.url}chat/1")
    page.wait_for_function("() => document.querySelectorAll('article').length === 2")
    assert stored(app, "SELECT count(*) FROM conversation") == [(1,)]
    page.fill('[aria-label="Message"]', "Another one, please.")
    page.press('[aria-label="Message"]', "Enter")  # while the first is being answered
    page.wait_for_selector("text=This chat is being answered")
    assert page.input_value('[aria-label="Message"]') == "Another one, please."
    for n_messages in (2, 4, 6):
        page.wait_for_function(
            "n => document.querySelectorAll('article')[n - 1]?.innerText.length > 80", arg=n_messages
        )
        page.evaluate(
            """() => { for (let i = 0; i < 3; i++) document.querySelector('[aria-label="Stop"]').click(); }"""
        )
        page.wait_for_selector(f"article >> nth={n_messages - 1} >> text=stopped")
        if n_messages < 6:
            send(page, LONG)
    assert (
        stored(app, "SELECT role, state FROM message ORDER BY id")
        == [
            ("user", "complete"),
            ("assistant", "stopped"),
        ]
        * 3
    )
    assert page.locator(".q-notification.bg-negative").count() == 0


def test_a_connection_that_breaks_while_an_answer_streams_loses_nothing(app, page):
    load(page, app, "demo", ctx=1024)
    begin_chat(page, app, Temperature=0, Most_tokens=200)
    send(page, LONG)
    page.wait_for_function("() => document.querySelectorAll('article')[1]?.innerText.length > 80")
    for _ in range(3):
        page.evaluate("() => window.socket.io.engine.close()")
        page.wait_for_function("() => window.socket.connected", timeout=30_000)
    wait_for_answer(page, 2)
    (answer,) = stored(app, "SELECT content FROM message WHERE role = 'assistant'")
    shown = page.locator("article").nth(1).locator(".text").inner_text()
    assert "".join(shown.split())[-100:] == "".join(answer[0].split())[-100:]
    page.fill('[aria-label="Message"]', "still works")
    assert page.url == f"{app.url}chat/1"


def test_an_answer_is_saved_when_the_app_is_asked_to_end(app, page, tmp_path):
    load(page, app, "demo", ctx=1024)
    begin_chat(page, app, Temperature=0)
    send(page, LONG)
    page.wait_for_function("() => document.querySelectorAll('article')[1]?.innerText.length > 200")
    app.process.send_signal(signal.SIGTERM)
    app.process.wait(30)
    ((content, state),) = stored(app, "SELECT content, state FROM message WHERE role = 'assistant'")
    assert len(content) > 100
    assert state == "stopped"


def test_a_preset_of_ones_own_is_saved_used_in_another_chat_and_deleted(app, page):
    begin_chat(page, app)
    page.click('[aria-label="Settings of this chat"]')
    page.fill('[aria-label="Temperature"]', "0.35")
    page.fill('[aria-label="Save these values as"]', "Calm")
    page.click("text=Save preset")
    page.wait_for_selector(".q-dialog .q-select:has-text('Calm')")
    page.goto(f"{app.url}")
    page.click('[aria-label="Settings of this chat"]')
    page.click(".q-dialog .q-select")
    page.click(".q-menu >> text=Calm")
    page.wait_for_function("""() => document.querySelector('[aria-label="Temperature"]').value === '0.35'""")
    page.click("text=Delete preset")
    page.wait_for_selector(".q-dialog .q-select:has-text('Own values')")
    assert stored(app, "SELECT value FROM setting WHERE name = 'sampling_presets'") == [("{}",)]


# when a search was written, and when the list changed last
WATCH = """() => {
    const field = document.querySelector('[aria-label="Search chats"]');
    field.addEventListener('input', () => { window.begun = performance.now(); window.changed = null; }, true);
    new MutationObserver(() => { window.changed = performance.now(); })
        .observe(document.querySelector('aside'), { childList: true, subtree: true, characterData: true }); }"""


def test_a_thousand_conversations_are_listed_and_searched_quickly_in_the_browser(tmp_path, browser):
    folder = tmp_path / "app"
    database = Database(folder / "data")
    add_a_thousand_conversations(database)
    database.close()
    with running_app(folder, tmp_path) as app:
        page = browser.new_context(viewport={"width": 1200, "height": 800}).new_page()
        page.goto(app.address)
        page.goto(f"{app.url}chat/500")
        page.wait_for_selector("[data-chat-link]")
        page.evaluate(WATCH)
        searches = {"chat 777": 1, "nowhere at all": 0, "word1999": 40, "chat 77": 11, "wo": 40}
        took = {search: [] for search in searches}
        for search, n_found in 3 * list(searches.items()):
            page.fill('[aria-label="Search chats"]', search)
            page.wait_for_function("n => document.querySelectorAll('[data-chat-link]').length === n", arg=n_found)
            page.wait_for_timeout(500)
            took[search].append(round(page.evaluate("() => window.changed - window.begun")))
        print(f"milliseconds from the last key to the list: {took}")
        assert all(min(each) < 1000 * (0.2 + DEBOUNCE_SECONDS) for each in took.values())
