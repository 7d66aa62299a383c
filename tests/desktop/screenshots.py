"""Takes the pictures of docs/desktop.md: python tests/desktop/screenshots.py MODEL.gguf

Needs Chromium and the packages playwright and pillow.
"""

import io
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from desktop.running import CHROMIUM, load, running_app, send, wait_for_answer

TARGET = Path(__file__).parents[2] / "docs" / "desktop"
PAGES = {"chat": "chat/1", "models": "models", "cache": "cache", "fidelity": "fidelity", "server": "server"}
COLORS = 128
QUESTIONS = (
    "Tell a story about a lighthouse in three paragraphs.",
    "Show a short Python function that adds two numbers, and explain it in two sentences.",
    "What is the capital of France?",
)


def fill(page, app):
    """A chat, a measurement and a request, so that there is something to see."""
    load(page, app, "SmolLM2-135M", ctx=2048)
    page.goto(app.url)
    page.click('[aria-label="Settings of this chat"]')
    page.fill('[aria-label="System prompt"]', "You are a helpful assistant.")
    page.fill('[aria-label="Most tokens"]', "220")
    page.fill('[aria-label="Temperature"]', "0")
    page.click("[data-save]")
    for i, question in enumerate(QUESTIONS):
        send(page, question)
        wait_for_answer(page, 2 * i + 2)
    page.request.get(f"{app.url}v1/models")
    page.goto(f"{app.url}fidelity")
    page.wait_for_selector("text=SmolLM2-135M")
    page.fill('[aria-label="Tokens"]', "1024")
    page.fill('[aria-label="Texts"]', "1")
    page.click("[data-measure]")
    page.wait_for_selector("[data-fidelity=ultra4]", timeout=300_000)


def shoot(page, name):
    from PIL import Image

    page.wait_for_timeout(1800)
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.quantize(COLORS).save(TARGET / f"{name}.png", optimize=True)


def shoot_all(browser, app, suffix, **options):
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(app.address)
    for name, path in PAGES.items():
        page.goto(app.url + path)
        shoot(page, f"{name}-{suffix}")
    page.goto(f"{app.url}models")
    page.click("[data-open-load]")
    page.wait_for_selector("[data-needs]")
    shoot(page, f"load-{suffix}")
    context.close()


def main():
    from playwright.sync_api import sync_playwright

    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        models = Path(folder, "models")
        models.mkdir()
        (models / "SmolLM2-135M.gguf").symlink_to(Path(sys.argv[1]).resolve())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with running_app(Path(folder, "app"), models) as app:
            page = browser.new_page(viewport={"width": 1100, "height": 750})
            page.goto(app.address)
            fill(page, app)
            wide, narrow = {"width": 1100, "height": 750}, {"width": 400, "height": 750}
            shoot_all(browser, app, "light", viewport=wide, color_scheme="light")
            shoot_all(browser, app, "dark", viewport=wide, color_scheme="dark")
            shoot_all(browser, app, "narrow", viewport=narrow, color_scheme="light")
        browser.close()


if __name__ == "__main__":
    main()
