"""The screenshots of the page in docs/images: `python tests/page_screenshots.py STORE` trains what STORE lacks.

The three bundled tasks, and two made of the complaints: which words are dates and amounts, and what they speak of.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

import taskgraft as tg
from taskgraft.serving.engine import Engine

from page_server import CHROMIUM, server_of

ROOT = Path(__file__).parent.parent
DATA, IMAGES = ROOT / "src/taskgraft/data", ROOT / "docs/images"
TEXT = (
    "I was charged a $35.00 late fee on 03/14/2016 although I had paid on time, and now it is on my credit report. "
    "I called three times, and nobody could help me. Terrible service!"
)
SIGNALS = {
    "fees": r"\bfees?\b|charged",
    "fraud": r"fraud|stolen|identity|scam|unauthori[sz]ed",
    "phone_calls": r"\bcall(s|ed|ing)?\b|phone",
    "credit_report": r"credit (score|report|bureau)",
    "no_reply": r"no response|never (heard|respond)|ignor|nobody",
    "refund": r"refund|money back|reimburse",
}


def signals(text: str) -> dict[str, Any]:
    return {"text": text, "label": [name for name, pattern in SIGNALS.items() if re.search(pattern, text.lower())]}


def dates_and_amounts(text: str) -> dict[str, Any] | None:
    """Tags of words, where there are some; the complaints' dates are blacked out, and get numbers again."""
    draw = random.Random(text)
    date = f"{draw.randint(1, 12):02}/{draw.randint(1, 28):02}/201{draw.randint(0, 9)}"
    shown = re.sub(r"XX/XX/(XXXX|\d{4})", date, text)
    words = re.sub(r"\{(\$[\d.,]+)\}", r"\1", shown).split()  # {$35.00} stands for an amount
    tags = ["DATE" if re.match(r"\d\d/\d\d/", word) else "AMOUNT" if word[0] == "$" else "O" for word in words]
    return None if set(tags) == {"O"} else {"text": words, "label": tags}


MADE: dict[str, tuple[Callable[[str], dict[str, Any] | None], list[str]]] = {
    "complaint_signals": (signals, ["--kind", "multilabel", "--method", "head"]),
    "dates_and_amounts": (dates_and_amounts, ["--kind", "tokens"]),
}


def train(store: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, (DATA / "complaint_routing.csv").open() as complaints:
        rows = list(csv.DictReader(complaints))
        sources: dict[str, list[str]] = {path.stem: [str(path)] for path in DATA.glob("*.csv")}
        for name, (make, options) in MADE.items():
            made = [row | found for row in rows if (found := make(row["text"])) is not None]
            path = Path(folder, f"{name}.jsonl")
            path.write_text("".join(json.dumps(row) + "\n" for row in made))
            sources[name] = [str(path), *options]
        for name, source in sources.items():
            if not (store / name).exists():
                command = ["taskgraft.cli", "train", *source, "--store", str(store), "--epochs", "8"]
                subprocess.run([sys.executable, "-m", *command], check=True)


def ask(page: Page, names: Sequence[str]) -> None:
    page.fill("#text", TEXT)
    for name in names:
        page.check(f"#picker [data-name={name}]")
    draw = random.Random(0)
    for _ in range(45):  # so that the lines have something to show
        for _ in range(draw.randint(1, 4)):
            page.click("#go")
            expect(page.locator("#go")).not_to_have_attribute("aria-disabled", "true")
        page.wait_for_timeout(1000)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


SHOTS = (  # name, theme, width, pixels for each of the page's, tasks
    ("light", "light", 1280, 1.5, ("review_sentiment", "complaint_routing", "tweet_mood", "dates_and_amounts")),
    ("dark", "dark", 1280, 1.5, ("complaint_signals", "review_sentiment", "tweet_mood", "dates_and_amounts")),
    ("phone", "light", 390, 2, ("review_sentiment", "complaint_routing")),
)


def shoot(url: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, theme, width, scale, picked in SHOTS:
            size = {"width": width, "height": 800}
            page = browser.new_page(viewport=size, color_scheme=theme, device_scale_factor=scale)
            page.goto(url)
            ask(page, picked)
            taken = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            taken.quantize(128).save(IMAGES / f"serve-{name}.png", optimize=True)
            page.close()
        browser.close()


def main() -> None:
    store = Path(sys.argv[1])
    train(store)
    with Engine(tg.load_backbone(), store, memory=64_000_000) as engine, server_of(engine) as url:
        shoot(url)


if __name__ == "__main__":
    main()
