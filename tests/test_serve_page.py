"""The page, as a person meets it in Chromium: with a mouse, a keyboard, a phone, in the dark, and with a token."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs pip install 'taskgraft[serve]'")
pytest.importorskip("playwright.sync_api", reason="the page is driven by playwright: pip install playwright")

from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright

import taskgraft as tg
from taskgraft.serving.engine import Engine
from taskgraft.serving.guard import Tokens

from page_server import CHROMIUM, server_of
from serving import engine_on, grafted, reader, readers

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")

TEXT = "the film was lovely and we saw it again"
HOSTILE = '<img src=x onerror="window.hacked=1">'
NAMES = ("mood", "topic", "flags", "stars", "nli", "entities", "where")
WIDTHS = {"phone": 360, "desktop": 1280}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Tasks of all kinds, and one whose files are broken."""
    folder = tmp_path_factory.mktemp("store")
    backbone, store = reader(), tg.Store(folder)
    made = readers(backbone)
    for name in NAMES:
        store.put(made[name])
    store.put(grafted(backbone, "markup", tg.HeadOnly(), tg.Head("classification", (HOSTILE, "<b>calm</b>"))))
    store.put(made["mood"], "torn")
    record = folder / "torn" / "graft.json"
    record.write_bytes(record.read_bytes()[:100])
    with engine_on(folder, backbone) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with server_of(engine) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page in a browser of its own, with all that it asked for and complained of."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page, self.url = context.new_page(), url
        self.requests: list[Request] = []
        self.complaints: list[str] = []
        self.page.set_default_timeout(15_000)
        context.on("request", lambda request: self.requests.append(request))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)

    def open(self) -> Page:
        self.page.goto(self.url)
        return self.page

    def ask(self, text: str, *names: str, pair: str | None = None) -> Page:
        """Open the page, ask, and wait for the answers."""
        page = self.open()
        page.fill("#text", text)
        for name in names:
            page.check(f"#picker [data-name={name}]")
        if pair is not None:
            page.fill("#pair", pair)
        page.click("#go")
        expect(page.locator("#cards article")).to_have_count(len(names))
        return page

    def asked(self) -> list[Any]:
        return [request.post_data_json for request in self.requests if request.url.endswith("/v1/predict")]

    def expect_complaint(self, pattern: str) -> None:
        """The browser itself complains of statuses that are errors, and of a network that is down."""
        found = [one for one in self.complaints if re.search(pattern, one)]
        assert found, self.complaints
        self.complaints = [one for one in self.complaints if one not in found]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Holds servers of a test's own, which outlive its visits: pages ask them each second."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def visits(browser: Browser, stack: ExitStack) -> Iterator[Any]:
    """Makes visits; each must end without a complaint in the console, and without a request to anyone else."""
    made: list[Visit] = []

    def visit(url: str, **options: Any) -> Visit:
        made.append(Visit(browser.new_context(**options), url))
        return made[-1]

    yield visit
    for one in made:
        one.page.context.close()
        assert not one.complaints
        assert [request.url for request in one.requests if not request.url.startswith(f"{one.url}/")] == []


def card(page: Page, name: str) -> Any:
    return page.locator("#cards article", has=page.get_by_role("heading", name=name, exact=True))


def percent(share: float) -> str:
    assert 0.001 <= share <= 0.999, "what is printed as it is"
    return f"{100 * share:.1f} %"


def wider_than_the_screen(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


# -- what there is


def test_the_tasks_and_the_server_are_shown(visits: Any, url: str, engine: Engine) -> None:
    page = visits(url).open()
    expect(page.get_by_role("heading", level=1)).to_have_text("taskgraft")
    expect(page.locator("#backbone")).to_have_text(engine.library.find("mood").record["backbone"]["name"])
    row = page.get_by_role("row", name=re.compile("^topic "))
    record = engine.library.find("topic").record
    expect(row.get_by_role("cell")).to_contain_text(
        ["7 classes", "", f"{record['parameters']:,}", "kB", "1", "on disk", "Try"]
    )
    broken = page.get_by_role("row", name=re.compile("^torn "))
    expect(broken).to_contain_text(re.compile(r"Broken\. graft\.json of graft 'torn' is not JSON .*: copy the graft"))
    expect(page.get_by_role("checkbox", name="torn")).to_be_disabled()
    expect(page.locator("#held")).to_have_text("9 tasks")
    expect(page.locator("#waiting")).to_have_text("0")


def test_a_score_stands_with_what_was_measured(visits: Any, stack: ExitStack, tmp_path: Path) -> None:
    backbone = reader()
    metrics = {"score": 0.875, "split": "test", "test": {"accuracy": 0.875, "macro_f1": 0.5}}
    made = grafted(backbone, "mood", tg.HeadOnly(), tg.Head("classification", ("bad", "good")))
    tg.Store(tmp_path).put(tg.Graft(**{**vars(made), "metrics": metrics}))
    engine = stack.enter_context(engine_on(tmp_path, backbone))
    url = stack.enter_context(server_of(engine))
    page = visits(url).open()
    expect(page.get_by_role("row", name=re.compile("^mood ")).get_by_role("cell").nth(1)).to_have_text("0.875 accuracy")


def test_figures_follow_the_server(visits: Any, url: str) -> None:
    page = visits(url).ask(TEXT, "mood", "stars")
    expect(page.locator("#p99")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(page.locator("#rate")).not_to_have_text("0")
    line = page.get_by_role("img", name=re.compile(r"Answers per second over the last minute: [\d.]+ now"))
    expect(line.locator("path")).to_have_attribute("d", re.compile(r"^M\d+ [\d.]+L"))
    expect(page.get_by_role("img", name=re.compile(r"Latency over the last minute.*ms now"))).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^mood "))).to_contain_text("in memory")


def test_many_tasks_come_in_pages_and_are_found_by_name(visits: Any, stack: ExitStack, tmp_path: Path) -> None:
    backbone = reader()
    graft = grafted(backbone, "one", tg.HeadOnly(), tg.Head("regression"))
    tg.Store(tmp_path).put(graft)
    for number in range(129):
        shutil.copytree(tmp_path / "one", tmp_path / f"t{number:03}")
    engine = stack.enter_context(engine_on(tmp_path, backbone))
    url = stack.enter_context(server_of(engine))
    page = visits(url).open()
    rows, choices = page.locator("#tasks tbody tr"), page.locator("#picker li:has(input)")
    expect(rows).to_have_count(100)
    expect(page.locator("#tasks [data-count]")).to_have_text("100 of 130 tasks")
    page.locator("#tasks [data-more]").click()
    expect(rows).to_have_count(130)
    expect(page.locator("#tasks [data-more]")).to_be_hidden()
    expect(page.get_by_role("button", name="Try t099")).to_be_focused()
    page.fill("#task-search", "t12")
    expect(rows).to_have_count(9)
    page.fill("#task-search", "nothing")
    expect(page.locator("#tasks [data-count]")).to_have_text("No task begins with “nothing”.")

    expect(choices).to_have_count(20)
    page.locator("#picker [data-more]").click()
    expect(choices).to_have_count(40)
    page.check("#picker [data-name=t003]")
    page.fill("#pick-search", "t128")
    expect(choices).to_have_count(1)
    page.check("#picker [data-name=t128]")
    expect(page.locator("#picked li")).to_contain_text(["t003", "t128"])
    page.get_by_role("button", name="Drop t128").click()
    expect(page.get_by_role("checkbox", name="t128")).not_to_be_checked()
    expect(page.locator("#picked li")).to_contain_text(["t003"])


def test_a_search_that_was_slow_does_not_replace_a_later_one(visits: Any, url: str) -> None:
    page, held = visits(url).open(), []
    names = page.locator("#tasks tbody th")
    expect(names).to_have_count(9)
    page.route(re.compile("limit=100&prefix=m$"), lambda route: held.append(route))
    with page.expect_request(re.compile("limit=100&prefix=m$")):
        page.fill("#task-search", "m")
    page.fill("#task-search", "mo")
    expect(names).to_have_text(["mood"])
    with page.expect_response(re.compile("limit=100&prefix=m$")):
        held[0].continue_()
    page.wait_for_timeout(200)
    expect(names).to_have_text(["mood"])


def test_a_task_that_comes_is_shown_without_a_reload(visits: Any, stack: ExitStack, tmp_path: Path) -> None:
    backbone = reader()
    engine = stack.enter_context(engine_on(tmp_path, backbone))
    url = stack.enter_context(server_of(engine))
    page = visits(url).open()
    expect(page.locator("#tasks [data-count]")).to_have_text(re.compile("There are no tasks yet: train one"))
    engine.put(grafted(reader(), "late", tg.HeadOnly(), tg.Head("regression")))
    page.get_by_role("button", name="Try late").click()
    expect(page.get_by_role("checkbox", name="late")).to_be_checked()
    expect(page.locator("#text")).to_be_focused()


# -- answers


def test_several_tasks_answer_from_one_request(visits: Any, url: str, engine: Engine) -> None:
    names = ["mood", "topic", "flags", "stars", "entities"]
    visit = visits(url)
    page = visit.ask(TEXT, *names)
    assert [[one["task"] for one in body["questions"]] for body in visit.asked()] == [names]
    expect(page.locator("#took")).to_have_text(re.compile(r"^5 answers in [\d.]+ m?s, from one request$"))
    mood, topic, flags, stars, entities = engine.predict([(name, TEXT) for name in names])

    assert mood.probabilities and topic.probabilities and flags.probabilities and entities.tags
    expect(card(page, "mood").locator(".headline")).to_have_text(str(mood.label))
    expect(card(page, "mood").locator(".chosen")).to_have_text(f"{mood.label}{percent(mood.probability or 0)}")

    likely = sorted(topic.probabilities, key=lambda label: -topic.probabilities[label])
    bars = card(page, "topic").locator("li:visible")
    expect(bars).to_have_text([re.compile(f"^{label}") for label in likely[:5]])
    width = card(page, "topic").locator(".track > span").first.evaluate("bar => bar.style.inlineSize")
    assert float(width.rstrip("%")) == pytest.approx(100 * topic.probabilities[likely[0]], abs=0.01)
    card(page, "topic").get_by_role("button", name="All 7 classes").click()
    expect(bars).to_have_text([re.compile(f"^{label}") for label in likely])
    card(page, "topic").get_by_role("button", name="Top 5 only").click()
    expect(bars).to_have_count(5)

    given = sorted(flags.labels or [], key=lambda label: -flags.probabilities[label])
    assert given, "some labels are given"
    expect(card(page, "flags").locator(".headline")).to_have_text(", ".join(given))
    expect(card(page, "flags").locator(".chosen .label")).to_have_text(given)
    expect(card(page, "flags")).to_contain_text("The line is at 50 %")
    assert float(card(page, "stars").locator(".headline").inner_text().replace("\N{MINUS SIGN}", "-")) == pytest.approx(
        stars.value, abs=5e-4
    )
    words = card(page, "entities").locator(".word")
    wanted = [word if tag == "O" else f"{word} {tag}" for word, tag in zip(TEXT.split(), entities.tags, strict=True)]
    assert set(entities.tags) > {"O"}, "some words have a tag, and some have none"
    assert [" ".join(one.split()) for one in words.all_text_contents()] == wanted
    spoken = page.locator("#spoken").inner_text()
    assert spoken.startswith("5 answers in ") and f"mood: {mood.label}, {percent(mood.probability or 0)}" in spoken


def test_a_second_text_is_asked_for_by_tasks_that_read_pairs(visits: Any, url: str, engine: Engine) -> None:
    context = next(
        text
        for number in range(1, 9)
        if (text := "\U0001f600" * number + " the shop was bad and the phone is very lovely today")
        and (engine.predict([("where", "it was", text)])[0].start or 0) > number
    )
    answer = engine.predict([("where", "it was", context)])[0]
    visit = visits(url)
    page = visit.open()
    expect(page.locator("#pair")).to_be_hidden()
    page.check("#picker [data-name=mood]")
    expect(page.locator("#pair")).to_be_hidden()
    page.check("#picker [data-name=where]")
    expect(page.locator("#pair-why")).to_have_text("Read by where.")
    page.fill("#text", "it was")
    page.click("#go")
    expect(page.locator("#wrong")).to_have_text("Write the second text too. Read by where.")
    expect(page.locator("#pair")).to_be_focused()
    page.fill("#pair", context)
    page.click("#go")
    expect(card(page, "where").locator("mark")).to_have_text(str(answer.answer))
    expect(card(page, "where").locator(".context")).to_have_text(context)
    assert [["pair" in one for one in body["questions"]] for body in visit.asked()] == [[False, True]]


def test_a_task_that_writes_is_quoted(visits: Any, url: str) -> None:
    visit = visits(url)
    written = {"task": "mood", "version": 3, "kind": "text", "answer": "two\nlines"}
    visit.page.route("**/v1/predict", lambda route: route.fulfill(json={"answers": [written]}))
    page = visit.ask(TEXT, "mood")
    assert page.locator("blockquote").text_content() == "two\nlines"
    expect(card(page, "mood")).to_contain_text("version 3")


def test_text_and_labels_are_never_markup(visits: Any, url: str) -> None:
    page = visits(url).ask(HOSTILE, "markup", "entities", "where", pair=f"{HOSTILE} was good")
    expect(card(page, "markup").locator(".label")).to_contain_text([re.compile("calm|img"), re.compile("calm|img")])
    assert HOSTILE in card(page, "markup").inner_text() and "<b>calm</b>" in card(page, "markup").inner_text()
    expect(card(page, "where")).to_contain_text(HOSTILE)
    assert page.locator("main img, main b").count() == 0
    assert page.evaluate("window.hacked") is None


# -- what can go wrong


def test_what_is_missing_is_said_where_it_is(visits: Any, url: str) -> None:
    visit = visits(url)
    page = visit.open()
    page.click("#go")
    expect(page.get_by_role("alert").filter(has_text="Write a text first.")).to_be_visible()
    expect(page.locator("#text")).to_be_focused()
    page.fill("#text", TEXT)
    page.click("#go")
    expect(page.locator("#wrong")).to_have_text("Pick at least one task.")
    assert visit.asked() == []


def test_a_task_that_left_says_so_in_its_place(visits: Any, stack: ExitStack, tmp_path: Path) -> None:
    backbone = reader()
    for name in ("leaves", "stays"):
        tg.Store(tmp_path).put(grafted(backbone, name, tg.HeadOnly(), tg.Head("regression")))
    engine = stack.enter_context(engine_on(tmp_path, backbone))
    url = stack.enter_context(server_of(engine))
    page = visits(url).ask(TEXT, "leaves", "stays")
    engine.remove("leaves")
    page.click("#go")
    expect(card(page, "leaves").locator(".error")).to_contain_text("There is no task 'leaves'")
    expect(card(page, "stays").locator(".headline")).to_be_visible()
    expect(page.locator("#took")).to_contain_text("1 answer and 1 error in")
    expect(page.get_by_role("checkbox", name="leaves")).to_have_count(0)  # the list has noticed


def test_a_server_that_has_too_much_to_do(visits: Any, url: str, engine: Engine) -> None:
    visit = visits(url)
    page = visit.ask(TEXT, "mood")
    before, engine.waiting = engine.waiting, engine.most_waiting
    try:
        page.click("#go")
        expect(page.locator("#wrong")).to_have_text(
            re.compile(r"^The server has more to do than it can take: ask again in \d+ seconds?\.$")
        )
    finally:
        engine.waiting = before
    visit.expect_complaint("429")
    page.click("#go")
    expect(page.locator("#wrong")).to_be_empty()


def test_a_server_that_does_not_answer(visits: Any, url: str) -> None:
    visit = visits(url)
    page = visit.ask(TEXT, "mood")
    page.context.set_offline(True)
    page.click("#go")
    expect(page.locator("#wrong")).to_contain_text("The server does not answer: it may have been stopped")
    expect(page.locator("#notice")).to_contain_text("Trying again each second.")
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_empty()
    page.click("#go")
    expect(page.locator("#wrong")).to_be_empty()
    visit.expect_complaint("ERR_INTERNET_DISCONNECTED")


def test_a_token_is_asked_for_and_kept_for_the_tab(visits: Any, stack: ExitStack, engine: Engine) -> None:
    url = stack.enter_context(server_of(engine, tokens=Tokens.of(["right"])))
    visit = visits(url)
    page = visit.open()
    expect(page.locator("#token-why")).to_contain_text("This server answers only to those who have a token.")
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#token-why")).to_contain_text("The server refused this token")
    page.get_by_label("Token", exact=True).fill("right")
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("row", name=re.compile("^mood "))).to_be_visible()
    expect(page.locator("#token-form")).to_be_hidden()
    page.reload()
    expect(page.get_by_role("row", name=re.compile("^mood "))).to_be_visible()
    expect(page.locator("#token-form")).to_be_hidden()
    assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]") == [["right"], []]
    visit.expect_complaint("401")
    stranger = visits(url)
    expect(stranger.open().locator("#token-form")).to_be_visible()
    stranger.expect_complaint("401")


# -- for everybody


def test_the_theme_follows_the_system_until_it_is_chosen(visits: Any, url: str) -> None:
    def lightness(page: Page) -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765

    page = visits(url, color_scheme="dark").open()
    assert lightness(page) < 0.2
    page.get_by_role("button", name="Light theme").click()
    assert lightness(page) > 0.9
    page.reload()
    assert lightness(page) > 0.9
    page.get_by_role("button", name="Dark theme").click()
    assert lightness(page) < 0.2
    assert lightness(visits(url, color_scheme="light").open()) > 0.9


def test_a_phone_never_scrolls_sideways(visits: Any, url: str) -> None:
    long = "w" * 300
    page = visits(url, viewport={"width": 360, "height": 640}).ask(long, *NAMES, "markup", pair=long)
    assert wider_than_the_screen(page) <= 0
    beyond = "element => element.getBoundingClientRect().right > innerWidth + 1"
    everything = "[...document.querySelectorAll('header *, main *:not(thead, thead *)')]"
    cut = page.evaluate(f"{everything}.filter({beyond}).map(element => element.outerHTML.slice(0, 80))")
    assert cut == []


def test_a_keyboard_is_enough(visits: Any, url: str) -> None:
    page = visits(url).open()
    expect(page.get_by_role("checkbox", name="mood")).to_be_visible()

    def tab_to(selector: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        pytest.fail(f"Tab never came to {selector}")

    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the playground")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to the playground")).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("#text")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.type(TEXT)
    tab_to("#picker [data-name=mood]")
    page.keyboard.press("Space")
    page.keyboard.press("Control+Enter")
    expect(card(page, "mood").locator(".headline")).to_be_visible()
    expect(page.get_by_role("checkbox", name="mood")).to_be_focused()
    tab_to("#go")
    tab_to("footer a")  # and out of every list again


def test_reduced_motion_moves_nothing(visits: Any, url: str) -> None:
    moving = "getComputedStyle(document.querySelector('#fill')).transitionDuration"
    assert visits(url).open().evaluate(moving) != "0s"
    assert visits(url, reduced_motion="reduce").open().evaluate(moving) == "0s"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_serious(visits: Any, url: str, scheme: str, width: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    visit = visits(url, color_scheme=scheme, viewport={"width": WIDTHS[width], "height": 800})
    page = visit.ask(TEXT, *NAMES, pair="the shop was bad")
    page.evaluate("document.dispatchEvent(new CustomEvent('token-wanted', { detail: 'This server wants a token.' }))")
    page.evaluate("document.querySelector('#wrong').textContent = 'A sentence of an error.'")
    page.evaluate("document.querySelector('#notice').textContent = 'The server does not answer.'")
    page.evaluate("document.querySelector('.card').classList.add('failed')")
    found = axe.Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in serious] == []
