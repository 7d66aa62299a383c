"""The app for those who do not see it, or have no mouse: axe-core's rules, and a walk by keyboard alone."""

import pytest

from desktop.running import load, prepared, running_app, wait_for_answer

pytest.importorskip("nicegui")

pytestmark = pytest.mark.slow

ANSWER = """# A title

Some *text* with [a link](https://example.com) and `code`.

```python
def add(a, b):
    return a + b  # the sum
```

| a | b |
|---|---|
| 1 | 2 |

<think>Let me see.</think>

> quoted
"""
PAGES = ("", "chat/1", "models", "cache", "fidelity", "server")
DIALOGS = {
    "chat/1": ('[aria-label="Settings of this chat"]', '[aria-label="Edit message"]'),
    "models": ("[data-open-load]",),
}


@pytest.fixture
def demo(tmp_path, smollm2_path):
    """The app with a chat and a model in its library."""
    models, folder = tmp_path / "models", tmp_path / "app"
    models.mkdir()
    folder.mkdir()
    (models / "demo.gguf").symlink_to(smollm2_path.resolve())
    prepared(folder, [ANSWER])
    with running_app(folder, models) as app:
        yield app


def serious(axe, page, where):
    """What axe-core finds that keeps people out."""
    found = axe.run(page).response["violations"]
    return [
        (
            where,
            each["id"],
            each["impact"],
            [(node["html"][:200], node["failureSummary"][-300:]) for node in each["nodes"]][:5],
        )
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violations(browser, demo, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme=scheme).new_page()
    page.goto(demo.address)
    load(page, demo, "demo", ctx=512)
    problems = []
    for path in PAGES:
        page.goto(demo.url + path)
        page.wait_for_selector("[aria-level='1']")
        page.wait_for_timeout(1500)
        problems += serious(axe, page, f"/{path}")
        for button in DIALOGS.get(path, ()):
            page.locator(button).first.click()
            page.wait_for_selector(".q-dialog .q-card")
            page.wait_for_timeout(1000)
            problems += serious(axe, page, f"/{path} {button}")
            page.keyboard.press("Escape")
            page.wait_for_selector(".q-dialog .q-card", state="detached")
    assert not problems, "\n".join(map(str, problems))


def focus(page, selector, key="Tab", most=80):
    """Presses a key until something that fits is focused, as one does without a mouse."""
    for _ in range(most):
        if page.evaluate("selector => document.activeElement?.matches(selector) ?? false", selector):
            return
        page.keyboard.press(key)
    pytest.fail(f"{selector} cannot be reached by {key}")


def test_load_chat_edit_and_branch_by_keyboard_alone(browser, demo):
    page = browser.new_context(viewport={"width": 1200, "height": 900}).new_page()
    page.goto(demo.address)
    page.wait_for_selector("[aria-level='1']")
    focus(page, 'a[aria-label="Models"]')
    page.keyboard.press("Enter")
    page.wait_for_url(f"{demo.url}models")
    page.wait_for_selector("[data-open-load]")
    focus(page, "[data-open-load]")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-load]:not([disabled])")
    focus(page, '[aria-label="Context"]')
    page.keyboard.press("Control+A")
    page.keyboard.type("512")
    focus(page, '[aria-label="Threads"]')
    page.keyboard.type("1")
    page.wait_for_selector("[data-load]:not([disabled])")
    focus(page, "[data-load]")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-loaded]:has-text(': loaded')", timeout=60_000)
    focus(page, 'a[aria-label="Chat"]')
    page.keyboard.press("Enter")
    page.wait_for_url(demo.url)
    page.wait_for_selector('[aria-label="Message"]:focus')
    focus(page, '[aria-label="Settings of this chat"]', "Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-save]")
    focus(page, '[aria-label="Most tokens"]')
    page.keyboard.type("20")
    focus(page, "[data-save]")
    page.keyboard.press("Enter")
    page.wait_for_selector(".q-dialog", state="detached")
    focus(page, '[aria-label="Message"]')
    page.keyboard.type("Say hello.")
    page.keyboard.press("Enter")
    wait_for_answer(page, 2)
    focus(page, '[aria-label="Edit message"]', "Shift+Tab")  # that of the answer
    page.keyboard.press("Shift+Tab")
    focus(page, '[aria-label="Edit message"]', "Shift+Tab")  # that of the question
    page.keyboard.press("Enter")
    page.wait_for_selector('[aria-label="Edited message"]:focus')
    page.keyboard.press("Control+A")
    page.keyboard.type("Say goodbye.")
    focus(page, "[data-save-edit]")
    page.keyboard.press("Enter")
    page.wait_for_selector("article [data-branch]:has-text('2 / 2')")
    wait_for_answer(page, 2)
    focus(page, '[aria-label="Branch before"]', "Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("article [data-branch]:has-text('1 / 2')")
    assert "Say hello." in page.locator("article").first.inner_text()
