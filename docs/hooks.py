"""What mkdocs does here beyond its own: the rest of the project that pages link to becomes part of the site, pictures
follow its colours, and the page of the command line is written from the commands themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
ICON = ROOT / "src/taskgraft/serving/page/icon.svg"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.svg)\)")
AS_THEY_ARE = (".md", ".png", ".svg")
LANGUAGES = {".py": "python", ".toml": "toml"}
COMMANDS = "<!-- the commands -->"
NAME = re.compile(r"^::: tg\.(\w+)$", re.MULTILINE)  # for mkdocstrings, under the name by which people call it


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in every file outside of docs/ that a page links to, and what those link to in turn; and the icon."""
    files.append(File(ICON.name, str(ICON.parent), config.site_dir, config.use_directory_urls))
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        for target in linked_from(waiting.pop()):
            if target in seen or not target.is_file():
                continue
            seen.add(target)
            if not target.is_relative_to(DOCS):
                files.append(taken_in(target, config))
                waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder, here = source_of(page.file.src_uri).parent, page.file.src_uri

    def placed(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        return os.path.relpath(place_of(target), Path(here).parent) if target.is_file() else link[1]

    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(command_line()))
    markdown = NAME.sub(r"::: taskgraft.\1\n    options:\n      heading: tg.\1\n      toc_label: tg.\1", markdown)
    markdown = PICTURE.sub(lambda found: f'<div class="picture">{(folder / found[1]).read_text()}</div>', markdown)
    return LINK.sub(placed, markdown)


# -- the rest of the project


def linked_from(source: Path) -> list[Path]:
    return [(source.parent / target).resolve() for target in LINK.findall(source.read_text())]


def place_of(path: Path) -> str:
    """Where a file of the project is in the site: docs/ is its root, and code has a page of its own."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    place = path.relative_to(ROOT).as_posix()
    return place if path.suffix in AS_THEY_ARE else f"{place}.md"


def source_of(place: str) -> Path:
    return DOCS / place if (DOCS / place).exists() else ROOT / place


def taken_in(path: Path, config: MkDocsConfig) -> File:
    place = place_of(path)
    if path.suffix in AS_THEY_ARE:
        return File(place, str(ROOT), config.site_dir, config.use_directory_urls)
    title = path.relative_to(ROOT).as_posix()
    code = f"# `{title}`\n\n~~~~{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n~~~~\n"
    return File.generated(config, place, content=code)


# -- the command line


def command_line() -> Iterator[str]:
    from taskgraft.cli import app

    yield '<div class="options" markdown="1">'
    yield from described(typer.main.get_command(app), "taskgraft")
    yield "</div>"


def described(command: Any, called: str) -> Iterator[str]:
    """A command's page: what it does, how it is called, its arguments and options, its examples, its commands."""
    context = typer.Context(command, info_name=called)
    level = max(2, len(called.split()))
    yield f"{'#' * level} `{called}`\n\n{command.help}\n"
    usage = " ".join([called, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(parameter)
    for panel, parameters in panels.items():
        yield f"| {panel} | | default |\n|---|---|---|"
        yield from (line_of(parameter) for parameter in parameters)
        yield ""
    if command.epilog:
        yield from epilogue(command.epilog)
    for name, inner in getattr(command, "commands", {}).items():
        yield from described(inner, f"{called} {name}")


def line_of(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name != "option":
        names = [parameter.metavar or parameter.name.upper()]
    shown = ", ".join(f"`{name}`" for name in names)
    says = (parameter.help or "").replace("|", "\\|")
    return f"| {shown} | {says} | {default_of(parameter)} |"


def default_of(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.required:
        return "required"
    if parameter.default in (None, False, [], ()):
        return ""
    return f"`{parameter.default}`"


def epilogue(text: str) -> Iterator[str]:
    """Lines that are indented are for a shell; the others are words."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        words = [line for line in block.splitlines() if not line.startswith("  ")]
        code = [line[2:] for line in block.splitlines() if line.startswith("  ")]
        yield " ".join(words) + "\n"
        if code:
            yield "```text\n" + "\n".join(code) + "\n```\n"
