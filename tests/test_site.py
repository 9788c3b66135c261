"""The documentation's site: it builds without a warning and without a network, and nothing in it leads nowhere."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import typer

import taskgraft as tg
from taskgraft.cli import app

pytest.importorskip("material", reason="the site needs mkdocs-material: pip install 'taskgraft[docs]'")
pytest.importorskip("mkdocstrings", reason="the site needs mkdocstrings: pip install 'taskgraft[docs]'")

ROOT = Path(__file__).parent.parent
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
WRITTEN_BY_MATERIAL = {"__skip", "__search"}
NOT_OURS = {"--help", "--build-arg"}


class Html(HTMLParser):
    """What a page has, leads to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids.update(filter(None, (found.get("id"), found.get("name"))))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in LOADED and found.get(LOADED[tag]):
            self.loads.append(str(found[LOADED[tag]]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, with no network there."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")

    def refused(*_: Any) -> None:
        raise AssertionError("the site is built without a network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refused)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path.read_text()) for path in site.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Html]) -> None:
    assert len(pages) > 40
    for path, page in pages.items():
        assert not [url for url in page.loads if re.match(r"(\w+:)?//", url)], path
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_no_link_leads_nowhere(site: Path, pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        if path.name == "404.html":  # served at any address, so its links begin at the root
            continue
        for link in (*page.links, *page.loads):
            address, anchor = urldefrag(unquote(link))
            if re.match(r"\w+:", address):
                continue
            target = Path(os.path.normpath(path.parent / address)) if address else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)} leads to {link}"
            if anchor and target in pages and anchor not in WRITTEN_BY_MATERIAL:
                assert anchor in pages[target].ids, f"{path.relative_to(site)} leads to {link}"


def test_every_public_name_is_in_the_reference_once(pages: dict[Path, Html]) -> None:
    for name in tg.__all__:
        where = [path for path, page in pages.items() if f"taskgraft.{name}" in page.ids]
        assert len(where) == 1 or name == "__version__", f"put `::: tg.{name}` into one page of docs/reference"


def test_every_command_and_option_is_on_its_page(site: Path) -> None:
    text = (site / "reference/cli/index.html").read_text()
    for command, options in commands():
        anchor = command.replace(" ", "-")
        section = re.split(r"<h[23] ", text.partition(f'id="{anchor}"')[2])[0]
        assert section, command
        assert not [option for option in options if f"<code>{option}</code>" not in section], command


def test_options_that_pages_speak_of_exist() -> None:
    known = {option for _, options in commands() for option in options}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for code in re.findall(r"`((?:taskgraft |--)[^`\n]*)`", page.read_text()):
            unknown = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", code)) - known - NOT_OURS
            assert not unknown, f"{page.name} speaks of {code}"


def test_pictures_are_in_the_page_and_follow_its_colours(site: Path) -> None:
    text = (site / "ideas/index.html").read_text()
    assert '<svg id="ideas"' in text and "var(--md-default-fg-color" in text and "ideas.svg" not in text


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command by its whole name, with its options."""

    def walk(command: Any, called: str) -> Iterator[tuple[str, list[str]]]:
        yield (
            called,
            [name for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)],
        )
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{called} {name}")

    return walk(typer.main.get_command(app), "taskgraft")
