"""Answers that try to break the page, or are very long, in real Chromium."""

import json

import pytest

from desktop.running import COMMAND, prepared, running_app, wait_for

pytest.importorskip("nicegui")

pytestmark = pytest.mark.slow

HOSTILE = [
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>",
    "[click](javascript:window.pwned=3) ![x](http://example.com/x.png)",
    "</div></article><h1>gone</h1><style>* { display: none !important }</style>",
    "|" + "a|" * 400 + "\n|" + "-|" * 400 + "\n" + ("|" + "b|" * 400 + "\n") * 30,
    "x" * 1_000_000,
    "{{ constructor.constructor('window.pwned = 4')() }} <div v-html='1' @click='window.pwned = 5'>x</div>",
    "<think>" * 3000,
]
BOXES = """() => [...document.querySelectorAll('article')].map(a => {
    const box = a.getBoundingClientRect(); return [Math.round(box.left), Math.round(box.width)]; })"""


def test_a_hostile_answer_changes_nothing_but_its_own_bubble(tmp_path, browser):
    folder = tmp_path / "app"
    folder.mkdir()
    chat = prepared(folder, [*HOSTILE, "The end."])
    with running_app(folder, tmp_path) as app:
        page = browser.new_context(viewport={"width": 1000, "height": 800}).new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        page.goto(app.address)
        page.goto(f"{app.url}chat/{chat}")
        page.wait_for_function("n => document.querySelectorAll('article').length === n", arg=2 * len(HOSTILE) + 2)
        for link in page.query_selector_all("article a"):
            link.click()
        assert page.evaluate("() => window.pwned") is None
        assert (
            page.evaluate("() => document.querySelectorAll('article script, article img, article style').length") == 0
        )
        boxes = page.evaluate(BOXES)
        assert len({tuple(box) for box in boxes}) == 1, "all bubbles have one place and width"
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("article").last.locator(".text").inner_text() == "The end."
        page.fill('[aria-label="Message"]', "still works")
        assert [url for url in asked if not url.startswith((app.url, "data:", "blob:"))] == []


# notes when each token came, beside what the window shows
TIMED = f"""
import json, os, time
from pykvq.desktop import answer
take, times = answer.Answer._take, []
def timed(self, chunk):
    take(self, chunk)
    times.append((time.time(), self.n_tokens))
    if len(times) > 1990:
        open(os.environ["HOME"] + "/times.json", "w").write(json.dumps(times))
answer.Answer._take = timed
{COMMAND}
"""
WATCH = """() => { window.shown = []; new MutationObserver(() => {
    const match = /([\\d,]+) tokens/.exec([...document.querySelectorAll('article')].at(-1)?.innerText ?? '');
    if (match) window.shown.push([Date.now() / 1000, Number(match[1].replace(',', ''))]);
}).observe(document.body, { childList: true, subtree: true, characterData: true }); }"""


def test_the_page_keeps_up_with_2000_tokens_and_rests_afterwards(tmp_path, browser, smollm2_path):
    import psutil

    from desktop.running import load, send

    folder, models = tmp_path / "app", tmp_path / "models"
    folder.mkdir()
    models.mkdir()
    (models / "demo.gguf").symlink_to(smollm2_path.resolve())
    endless = {"temperature": 0.8, "max_tokens": 2000, "seed": 1, "logit_bias": {"2": -100, "0": -100}}
    chat = prepared(folder, [], sampling=endless)
    with running_app(folder, models, TIMED) as app:
        page = browser.new_context(viewport={"width": 1000, "height": 800}).new_page()
        page.goto(app.address)
        load(page, app, "demo", ctx=4096)
        page.goto(f"{app.url}chat/{chat}")
        page.evaluate(WATCH)
        send(page, "Tell a long story, with a list and some code.")
        page.wait_for_selector("article >> text=ended at the limit", timeout=180_000)
        wait_for(lambda: (folder / "times.json").exists())
        came = json.loads((folder / "times.json").read_text())
        shown = page.evaluate("() => window.shown")
        delays = sorted(next((when for when, m in shown if m >= n), 1e12) - then for then, n in came)
        median, worst = delays[len(delays) // 2], delays[-1]
        print(f"{len(delays)} chunks, delays: median {median:.3f} s, 99 % {delays[-20]:.3f} s, most {worst:.3f} s")
        assert median < 0.1
        process = psutil.Process(app.process.pid)
        process.cpu_percent()
        page.wait_for_timeout(5000)
        idle = process.cpu_percent()
        print(f"idle: {idle:.1f} % of a core")
        assert idle < 2
