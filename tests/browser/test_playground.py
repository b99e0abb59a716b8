"""The playground in Chromium: `make test-browser` installs it and runs these.

Without a browser they are skipped, visibly; where CI is set in the environment they fail instead.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.conftest import TEMPLATE, Running, serving
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec

pytestmark = pytest.mark.browser
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PROMPT = "class Stack:\n    def push(self, item):"
MISSING = "no chromium with chromedriver; `make test-browser` installs them"
if (BROWSER is None or DRIVER is None) and os.environ.get("CI") != "true":
    pytest.skip(MISSING, allow_module_level=True)

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    target = load_model("embedded:target")
    drafter = with_own_drafts(from_spec("portfolio(draft;prompt-lookup)", target))
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with serving(Engine(target, drafter, controller="fixed"), chat_template=template) as found:
        yield found


@pytest.fixture(scope="module")
def make_browser() -> Iterator[Callable[..., Any]]:
    opened: list[Any] = []
    assert BROWSER is not None, MISSING
    assert DRIVER is not None, MISSING

    def make(width: int = 1200, dark: bool = False) -> Any:
        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        dark_flags = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", *dark_flags):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        opened.append(browser)
        return browser

    yield make
    for browser in opened:
        browser.quit()


@pytest.fixture
def page(running: Running, make_browser: Callable[..., Any]) -> Any:
    browser = make_browser()
    opened(browser, running, "mode-text")
    return browser


def opened(browser: Any, running: Running, mode: str) -> None:
    """The page, once it knows the model, in a mode."""
    browser.get(running.url)
    wait(browser, lambda page: by_id(page, "model").text.startswith("Model "))
    by_id(browser, mode).click()


def by_id(page: Any, name: str) -> Any:
    return page.find_element(By.ID, name)


def wait(page: Any, done: Callable[[Any], Any], seconds: float = 30.0) -> Any:
    return WebDriverWait(page, seconds).until(done)


def write(page: Any, text: str) -> None:
    box = by_id(page, "prompt")
    box.clear()
    page.execute_script("arguments[0].value = arguments[1]", box, text)


def answered(page: Any) -> bool:
    """Whether an answer is there and nothing runs."""
    return bool(by_id(page, "answer").text) and not by_id(page, "stop").is_enabled()


def errors(page: Any) -> list[str]:
    return [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]


def test_an_answer_streams_coloured_by_where_its_tokens_came_from(running: Running, page: Any) -> None:
    write(page, PROMPT)
    by_id(page, "go").click()
    wait(page, answered)
    expected = Engine(running.engine.target).generate(PROMPT, SamplingParams(max_tokens=128)).text
    shown = page.execute_script("return document.getElementById('answer').textContent")
    assert shown.replace("\u00b7", " ").strip("\n") == (expected or "").strip("\n") or expected in shown
    tokens = by_id(page, "answer").find_elements(By.CSS_SELECTOR, "[tabindex]")
    assert len(tokens) > 10
    colours = {token.value_of_css_property("background-color") for token in tokens}
    assert len(colours) >= 2 and all(token.get_attribute("aria-label") for token in tokens)
    assert by_id(page, "legend").text and by_id(page, "stats").text and by_id(page, "bars").text
    assert not by_id(page, "error").text and errors(page) == []


def test_the_tree_of_a_step_is_shown_by_the_keyboard(page: Any) -> None:
    write(page, PROMPT)
    by_id(page, "go").click()
    wait(page, answered)
    first = by_id(page, "answer").find_element(By.CSS_SELECTOR, '[tabindex="0"]')
    first.send_keys(Keys.ARROW_RIGHT)
    for _ in range(6):
        page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert by_id(page, "tree").find_elements(By.CSS_SELECTOR, "svg text")
    page.switch_to.active_element.send_keys(Keys.ESCAPE)


def test_a_race_is_two_runs_with_the_same_text(page: Any) -> None:
    write(page, PROMPT)
    by_id(page, "race").click()
    wait(page, lambda page: "identical" in by_id(page, "race-result").text.lower(), 60)
    plain = page.execute_script("return document.getElementById('race-plain').textContent")
    drafted = page.execute_script("return document.getElementById('race-drafted').textContent")
    assert plain and drafted and not by_id(page, "error").text and errors(page) == []


def test_it_begins_in_chat_and_races_what_is_written_there(running: Running, make_browser: Callable[..., Any]) -> None:
    page = make_browser()
    page.get(running.url)
    wait(page, lambda page: by_id(page, "mode-chat").is_selected())
    assert by_id(page, "prompt-label").text == "Message"
    assert by_id(page, "prompt").get_attribute("value") == "Why is the sky blue? Explain it to a child."
    write(page, "Write a stack.")
    by_id(page, "race").click()
    wait(page, lambda page: "identical" in by_id(page, "race-result").text.lower(), 60)
    target = running.engine.target
    assert target.tokenizer is not None
    ids = target.tokenizer.chat([{"role": "user", "content": "Write a stack."}], template=TEMPLATE)
    expected = Engine(target).generate(list(ids), SamplingParams(max_tokens=128)).text or ""
    for lane in ("plain", "drafted"):
        shown = page.execute_script(f"return document.querySelector('#race-{lane} .tokens').textContent")
        assert shown == expected
    assert by_id(page, "prompt").get_attribute("value") == "Write a stack.", "it stays to be asked"
    by_id(page, "mode-text").click()
    page.execute_script("arguments[0].dispatchEvent(new Event('change'))", by_id(page, "api-key"))
    wait(page, lambda page: by_id(page, "model").text.startswith("Model "))
    assert by_id(page, "mode-text").is_selected(), "what was chosen stays"
    assert errors(page) == []


def test_it_asks_nobody_else_and_errors_are_told(running: Running, page: Any) -> None:
    page.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    box = by_id(page, "temperature")
    box.clear()
    box.send_keys("-1")
    write(page, PROMPT)
    by_id(page, "go").click()
    wait(page, lambda page: by_id(page, "error").text)
    messages = " ".join(entry["message"] for entry in page.get_log("performance"))
    hosts = set(re.findall(r'"url":"https?://([^/"]+)', messages))
    assert hosts == {running.url.removeprefix("http://")}


def test_question_answer_and_race_are_in_sight_at_once(running: Running, make_browser: Callable[..., Any]) -> None:
    """At 1280 x 900, before and behind a long answer; the race of that comes before numbers and trees."""
    page = make_browser(1280)
    metrics = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    opened(page, running, "mode-text")
    for _ in range(2):
        page.execute_script("window.scrollTo(0, 0)")
        for name in ("prompt", "go", "answer", "status", "race"):
            place = by_id(page, name).rect
            assert place["y"] + place["height"] <= 900, (name, place)
        assert by_id(page, "race").rect["y"] < by_id(page, "stats").rect["y"]
        write(page, PROMPT)
        by_id(page, "go").click()
        wait(page, answered)
    box = by_id(page, "answer")
    seen = "return [arguments[0].scrollTop + arguments[0].clientHeight, arguments[0].scrollHeight]"
    below, whole = page.execute_script(seen, box)
    assert whole - below < 5, "the end of the answer is in sight"


@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1200, True)])
def test_it_fits_narrow_and_dark_screens(
    running: Running, make_browser: Callable[..., Any], width: int, dark: bool, tmp_path: Path
) -> None:
    page = make_browser(width, dark)
    # Headless windows have a least width; the page itself is what has to be narrow.
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    opened(page, running, "mode-text")
    write(page, PROMPT)
    by_id(page, "go").click()
    wait(page, answered)
    wide = page.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    red = int(background.split("(")[1].split(",")[0])
    assert (red < 100) == dark
    page.save_screenshot(str(tmp_path / "page.png"))
