import pytest

from desktop.running import CHROMIUM, running_app


@pytest.fixture(scope="module")  # Playwright runs an event loop as long as it lives
def browser():
    """Chromium, driven by Playwright."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def app(tmp_path, smollm2_path):
    """The app without a model loaded; the demo model and a cut one are in its library."""
    pytest.importorskip("nicegui")
    models = tmp_path / "models"
    models.mkdir()
    (models / "demo.gguf").symlink_to(smollm2_path.resolve())
    (models / "cut.gguf").write_bytes(smollm2_path.read_bytes()[:5_000_000])
    with running_app(tmp_path / "app", models) as app:
        yield app


@pytest.fixture
def page(browser, app):
    """A window of the app; no page may throw, or ask for anything outside."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: request.url.startswith(("http://127.0.0.1:", "data:", "blob:")) or problems.append(request.url),
    )
    page.goto(app.address)
    yield page
    context.close()
    assert problems == []
