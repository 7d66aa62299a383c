"""The app as its user sees it: real Chromium, a real model."""

import httpx
import pytest

from desktop.running import COMMAND, begin_chat, load, running_app, send, wait_for, wait_for_answer

pytestmark = pytest.mark.slow

# what has no name for a screen reader
UNNAMED = """all => all.filter(e => e.checkVisibility({ visibilityProperty: true }))
    .filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.closest('label')))
    .map(e => e.outerHTML)"""


def tier_numbers(page):
    return page.eval_on_selector_all(
        "[data-tier]",
        "rows => rows.map(row => Object.fromEntries([...row.querySelectorAll('[data-field]')]"
        ".map(cell => [cell.dataset.field, Number(cell.dataset.value)])))",
    )


def test_from_load_to_unload(app, page):
    load(page, app, "demo", ctx=1024)
    page.goto(app.url)
    page.click('[aria-label="Settings of this chat"]')
    page.click(".q-dialog .q-select")
    page.click(".q-menu >> text=Precise")
    page.fill('[aria-label="Most tokens"]', "160")
    page.click("[data-save]")
    send(page, "What is the capital of France?")
    articles = wait_for_answer(page, 2)
    assert len(articles.nth(1).locator(".text").inner_text()) > 10
    send(page, "And what is its river? " + "Answer in full sentences. " * 20)
    articles = wait_for_answer(page, 4)
    first_answers = articles.all_inner_texts()

    # stop an answer
    send(page, "Write a very long story about a cat, in many chapters.")
    page.wait_for_function("() => document.querySelectorAll('article')[5]?.innerText.length > 80", timeout=60_000)
    page.click('[aria-label="Stop"]')
    articles = wait_for_answer(page, 6)
    assert "stopped" in articles.nth(5).inner_text()

    # edit the first message: a branch, and the other one is kept
    articles.nth(0).locator('[aria-label="Edit message"]').click()
    page.fill('[aria-label="Edited message"]', "What is the capital of Italy?")
    page.click("text=Save and answer")
    articles = wait_for_answer(page, 2)
    assert articles.nth(1).inner_text() != first_answers[1]
    assert articles.nth(0).locator("[data-branch]").inner_text() == "2 / 2"
    articles.nth(0).locator('[aria-label="Branch before"]').click()
    page.wait_for_function("() => document.querySelectorAll('article').length === 6")
    assert page.locator("article").all_inner_texts()[1:4] == first_answers[1:]

    # reload, and find the conversation
    page.reload()
    page.wait_for_function("() => document.querySelectorAll('article').length === 6")
    page.wait_for_function("() => scrollY > 0 && scrollY + innerHeight >= document.documentElement.scrollHeight - 2")
    page.fill('[aria-label="Search chats"]', "very long story")
    page.wait_for_function("() => document.querySelectorAll('[data-chat-link]').length === 1")
    page.fill('[aria-label="Search chats"]', "nothing of that kind")
    page.wait_for_selector("text=Nothing found")

    # the cache view equals /kv
    page.goto(f"{app.url}cache")
    page.wait_for_selector("[data-tier]")
    kv = httpx.get(f"{app.url}kv").json()["models"]["demo"]
    assert kv["kv_quant"] == "ultra4"
    assert kv["tiers"][1]["n_used"] > 0
    names = ("n_used", "n_capacity", "n_bytes", "n_requantized")
    assert tier_numbers(page) == [{name: tier[name] for name in names} for tier in kv["tiers"]]

    # unload, and read why a damaged file cannot be loaded
    page.goto(f"{app.url}models")
    page.click("text=Unload")
    page.wait_for_selector("[data-loaded]", state="detached")
    assert httpx.get(f"{app.url}kv").json()["models"] == {}
    page.click('[data-model="cut"] [data-open-load]')
    page.wait_for_selector("[data-memory] .error")
    assert "cut.gguf" in page.inner_text("[data-memory] .error")
    assert page.is_disabled("[data-load]")


def test_the_openai_endpoint_is_on_the_same_port_and_can_be_switched_off(app, page):
    load(page, app, "demo", ctx=512)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert httpx.post(f"{app.url}v1/chat/completions", json=body, timeout=60).json()["model"] == "demo"
    page.goto(f"{app.url}server")
    page.wait_for_selector("[data-requests]:has-text('/v1/chat/completions')")
    page.fill('[aria-label="API key"]', "secret-key")
    page.get_by_role("button", name="Set", exact=True).click()
    wait_for(lambda: httpx.get(f"{app.url}v1/models").status_code == 401)
    assert httpx.get(f"{app.url}v1/models", headers={"Authorization": "Bearer secret-key"}).status_code == 200
    page.click("text=Other programs may use the model")
    wait_for(lambda: httpx.get(f"{app.url}v1/models").status_code == 503)
    assert "switched off" in httpx.get(f"{app.url}v1/models").json()["error"]["message"]


def test_what_does_not_fit_is_not_started_by_accident(browser, tmp_path, smollm2_path):
    models = tmp_path / "models"
    models.mkdir()
    (models / "demo.gguf").symlink_to(smollm2_path.resolve())
    small = "from pykvq.desktop import forecast; forecast.available_memory = lambda: 240 << 20; "
    with running_app(tmp_path / "app", models, small + COMMAND) as app:
        page = browser.new_page()
        page.goto(app.address)
        page.goto(f"{app.url}models")
        page.click('[data-model="demo"] [data-open-load]')
        page.fill('[aria-label="Context"]', "2048")
        page.wait_for_selector("[data-load]:not([disabled])")
        assert "240.0 MiB are free" in page.inner_text("[data-needs]")
        page.fill('[aria-label="Context"]', "8192")
        page.wait_for_selector("[data-memory]:has-text('This does not fit')")
        assert page.is_disabled("[data-load]")
        page.click("text=Load it even if it does not fit")
        page.click("[data-load]:not([disabled])")
        page.wait_for_selector("[data-loaded]:has-text(': loaded')", timeout=60_000)


def test_two_windows_on_one_conversation(app, page):
    load(page, app, "demo", ctx=1024)
    begin_chat(page, app, Most_tokens=40, Temperature=0)  # as long as they like, answers may end with the context
    send(page, "Say hello.")
    wait_for_answer(page, 2)
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_function("() => document.querySelectorAll('article').length === 2")
    send(other, "Count from one to thirty in words.")
    page.wait_for_function("() => document.querySelectorAll('article').length === 4")
    wait_for_answer(other, 4)
    wait_for_answer(page, 4)
    wait_for(lambda: page.locator("article").all_inner_texts() == other.locator("article").all_inner_texts(), 5)
    other.click("[data-chat-link] >> nth=0")
    other.hover(".chats .current")
    other.click('.chats [aria-label="More"]')
    other.click(".q-menu >> text=Rename")
    other.fill('[aria-label="Title"]', "Greetings")
    other.click("text=Save")
    page.wait_for_selector(".chats >> text=Greetings")
    other.click('.chats [aria-label="More"]')
    other.click(".q-menu >> text=Delete")
    page.wait_for_selector("text=Deleted: Greetings")
    page.click("text=Undo")
    page.wait_for_function("() => document.querySelectorAll('article').length === 4")


def test_an_answer_survives_kill_9(app, page, tmp_path, smollm2_path):
    load(page, app, "demo", ctx=2048)
    begin_chat(page, app, Temperature=0)
    send(page, "Say hello.")
    wait_for_answer(page, 2)
    send(page, "Write a very long story about a cat, in many chapters.")
    page.wait_for_function("() => document.querySelectorAll('article')[3]?.innerText.length > 900", timeout=60_000)
    before = page.locator("article").all_inner_texts()
    address = page.url
    app.kill()
    with running_app(app.folder, tmp_path / "models") as again:
        page.goto(again.address)
        page.goto(again.url + address.split("/", 3)[3])
        page.wait_for_function("() => document.querySelectorAll('article').length === 4")
        after = page.locator("article").all_inner_texts()
        assert after[:3] == before[:3]
        assert "interrupted when the app ended" in after[3]
        assert after[3][:300] == before[3][:300]


def test_fidelity_is_measured_cancelled_and_shown(app, page):
    page.goto(f"{app.url}fidelity")
    page.wait_for_selector(".q-field:has-text('demo')")
    page.fill('[aria-label="Tokens"]', "256")
    page.click("[data-measure]")
    page.click('[aria-label="End"]')
    page.wait_for_selector("[data-job=cancelled]", timeout=60_000)
    page.fill('[aria-label="Texts"]', "1")
    page.click("[data-measure]")
    page.wait_for_selector("[data-fidelity=ultra4]", timeout=120_000)
    assert page.locator("[data-fidelity]").count() == 4
    page.goto(f"{app.url}models")
    page.click('[data-model="demo"] [data-open-load]')
    page.wait_for_selector("[data-memory]:has-text('Measured on this model: KLD')")


def test_files_go_in_and_out(app, page, tmp_path):
    (tmp_path / "note.txt").write_text("The secret word is heron.")
    (tmp_path / "other.txt").write_text("The secret word is stork.")
    load(page, app, "demo", ctx=512)
    begin_chat(page, app, Most_tokens=20)
    for name in ("other.txt", "note.txt"):
        page.set_input_files("[data-attach] input[type=file]", tmp_path / name)
        page.wait_for_selector(f".q-chip:has-text('{name}')")
    page.click('.q-chip:has-text("other.txt") .q-chip__icon--remove')
    send(page, "What is the secret word?")
    page.wait_for_selector("article .q-chip:has-text('note.txt')")
    wait_for_answer(page, 2)
    with page.expect_download() as download:
        page.click('.chats [aria-label="More"]')
        page.click(".q-menu >> text=Export as JSON")
    saved = tmp_path / "chat.json"
    download.value.save_as(saved)
    assert "The secret word is heron." in saved.read_text()
    assert "stork" not in saved.read_text()
    with page.expect_file_chooser() as chooser:
        page.click('[aria-label="Import a chat"]')
    chooser.value.set_files(saved)
    page.wait_for_url(f"{app.url}chat/2")
    page.wait_for_selector("article .q-chip:has-text('note.txt')")


def test_keyboard_alone_and_400_pixels_are_enough(app, page):
    page.set_viewport_size({"width": 400, "height": 700})
    load(page, app, "demo", ctx=512)
    page.goto(app.url)
    page.wait_for_selector('[aria-label="Message"]:focus')
    page.keyboard.type("Say hello.")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{app.url}chat/1")
    wait_for_answer(page, 2)
    for path in ("", "models", "cache", "fidelity", "server"):
        page.goto(app.url + path)
        page.wait_for_selector("[aria-level='1']")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), path
        unnamed = page.eval_on_selector_all("button, a, input, textarea, [role=img]", UNNAMED)
        assert unnamed == [], path
    page.keyboard.press("Control+Shift+KeyO")
    page.goto(app.url)
    page.keyboard.press("Control+Shift+KeyO")
    page.wait_for_url(app.url)
