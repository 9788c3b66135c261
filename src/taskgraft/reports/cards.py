"""A graft's model card: a README.md with the front matter that the Hugging Face Hub reads, from its record alone."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from taskgraft.backbones.load import EMBEDDED_MODULE, EMBEDDED_NAME
from taskgraft.reports.tables import bytes_text, count_text, markdown_table, score_text, seconds_text, share_text

PIPELINES = {
    "classification": "text-classification",
    "multilabel": "text-classification",
    "regression": "text-classification",
    "tokens": "token-classification",
    "spans": "question-answering",
    "text": "text2text-generation",
}
GIVES = {
    "classification": "one label",
    "multilabel": "any number of labels, or none",
    "regression": "a number",
    "tokens": "a label for each word",
    "spans": "the part of the text that answers a question",
    "text": "a text",
}
METHODS = {"adapter": "adapters", "norms": "the norms", "head": "a head on the frozen backbone"}
MOST_LABELS = 50
FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")
PATH = re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\]")  # how a place on a disk begins
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def card(graft_record: Mapping[str, Any]) -> str:
    """The README.md of a graft, from `Graft.to_json()` or graft.json; what the record does not hold is left out."""
    sections = [
        ("", introduction(graft_record)),
        ("Data", data(graft_record)),
        ("Scores", scores(graft_record)),
        ("Size", size(graft_record)),
        ("Training", training(graft_record)),
        ("Use", use(graft_record)),
        ("Limits", limits(graft_record)),
    ]
    body = [f"## {title}\n\n{text}" if title else text for title, text in sections if text]
    return "\n\n".join([front_matter(graft_record), f"# {escape(name_of(graft_record))}", *body]) + "\n"


def front_matter(record: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    task, backbone, kind = part(record, "task"), backbone_of(record), kind_of(record)
    fields = {
        "library_name": "taskgraft",
        "license": record.get("license") or task.get("license"),
        "base_model": backbone if HUB_NAME.fullmatch(backbone) else None,
        "pipeline_tag": PIPELINES.get(kind),
        "tags": ["taskgraft", *([str(method)] if (method := part(record, "method").get("method")) else [])],
        "metrics": [str(name) for name in task.get("metrics") or ()],
    }
    known = {name: value for name, value in fields.items() if value}
    return f"---\n{yaml.safe_dump(known, sort_keys=False, allow_unicode=True)}---"


def introduction(record: Mapping[str, Any]) -> str:
    backbone, kind, method = backbone_of(record), kind_of(record), part(record, "method").get("method")
    trained = f" ({METHODS[method]})" if method in METHODS else ""
    text = (
        f"A graft{f' for {escape(backbone)}' if backbone else ''}{trained}: trained for one task, the backbone frozen."
    )
    if kind in GIVES:
        given = "a question and a text" if kind == "spans" else "two texts" if has_pairs(record) else "a text"
        text += f" Given {given}, it gives {GIVES[kind]}."
    if labels := labels_of(record):
        more = f", and {len(labels) - MOST_LABELS:,} more" if len(labels) > MOST_LABELS else ""
        text += f"\n\nLabels ({len(labels)}): {', '.join(map(escape, labels[:MOST_LABELS]))}{more}."
    return text


def data(record: Mapping[str, Any]) -> str:
    task = part(record, "task")
    parts = []
    if source := str(task.get("source") or ""):
        parts.append(f"Source: {escape(without_folders(source))}.")
    if columns := part(task, "columns"):
        parts.append(f"Columns: {', '.join(f'{escape(role)} from {escape(its)}' for role, its in columns.items())}.")
    if rows := part(task, "rows"):
        parts.append(markdown_table(["split", "rows"], [[escape(k), f"{n:,}"] for k, n in rows.items()]).rstrip())
    if notes := task.get("notes"):
        parts.append("\n".join(f"- {escape(without_folders(note))}" for note in notes))
    return "\n\n".join(parts)


def scores(record: Mapping[str, Any]) -> str:
    metrics = part(record, "metrics")
    splits = {split: part(metrics, split) for split in ("validation", "test") if part(metrics, split)}
    parts = []
    score = metrics.get("score")
    if isinstance(score, int | float) and math.isfinite(score):
        split = metrics.get("split") or next(reversed(splits), None)
        names = [escape(name) for name in part(record, "task").get("metrics") or ()]
        what = f"the mean of {' and '.join(names)}" if len(names) > 1 else names[0] if names else "the task's score"
        parts.append(f"**{score_text(score)}**{f' on the {escape(split)} split' if split else ''}: {what}.")
    if splits:
        names = list(dict.fromkeys(name for found in splits.values() for name in found))
        rows = [[escape(n), *(score_text(f[n]) if n in f else "-" for f in splits.values())] for n in names]
        parts.append(markdown_table(["metric", *splits], rows).rstrip())
    if "validation" in splits:
        parts.append("The validation rows chose which epoch to keep, so their scores flatter it.")
    return "\n\n".join(parts)


def size(record: Mapping[str, Any]) -> str:
    parts = []
    if trained := record.get("parameters"):
        total = part(record, "training").get("backbone_parameters")
        of = f", {share_text(trained / total)} of the backbone's {count_text(total)}" if total else ""
        parts.append(f"{count_text(trained)} trained parameters{of}.")
    if stored := part(record, "tensors").get("bytes"):
        parts.append(f"{bytes_text(stored)} on disk.")
    return " ".join(parts)


def training(record: Mapping[str, Any]) -> str:
    done, settings = part(record, "training"), part(part(record, "training"), "settings")
    kept, seed = done.get("kept_epoch", done.get("chosen_epoch")), done.get("seed", settings.get("seed"))
    facts = [
        f"{done['epochs']} epochs" if done.get("epochs") else "",
        f"epoch {kept} kept" if kept else "",
        f"{count_text(done['steps'])} steps" if done.get("steps") else "",
        seconds_text(done["seconds"]) if done.get("seconds") else "",
        f"seed {seed}" if seed is not None else "",
        f"on {str(record['created'])[:10]}" if record.get("created") else "",
    ]
    parts = [f"Trained: {', '.join(map(escape, filter(None, facts)))}."] if any(facts) else []
    others = [name for name in done.get("together") or () if name != record.get("name")]
    by, listed = escape(str(part(done, "method").get("method", "one method"))), ", ".join(map(escape, others))
    if others and "like" in done:
        start = escape(str(done["like"]))
        parts.append(f"Started from {start}, one of {listed}, which were trained together by {by}.")
    elif others:
        parts.append(f"Trained by {by} together with {listed}, and written out as a plain graft.")
    for title, values in (
        ("Method", part(record, "method")),
        ("Settings", settings),
        ("Versions", part(record, "packages")),
    ):
        shown = {
            key: ", ".join(map(str, v)) if isinstance(v, list) else v for key, v in values.items() if v is not None
        }
        known = [f"{value}" if key == "method" else f"{key} {value}" for key, value in shown.items() if key != "format"]
        if known:
            parts.append(f"{title}: {escape('; '.join(known))}.")
    return "\n\n".join(parts)


def use(record: Mapping[str, Any]) -> str:
    """Snippets that run as they stand where the graft lies in a folder `grafts`."""
    name, pairs = name_of(record), has_pairs(record)
    backbone = literal(backbone_of(record) or "...")
    texts = '[["...", "..."]]' if kind_of(record) == "tokens" else '["..."], ["..."]' if pairs else '["..."]'
    return f"""With the graft in a folder `grafts`:

```python
import taskgraft as tg

backbone = tg.load_backbone({backbone})
print(tg.predict(backbone, tg.load_graft({literal(f"grafts/{name}")}), {texts}))

tg.add_graft(backbone.model, {literal(f"grafts/{name}")})  # to stay on the model, beside other tasks
```

```sh
taskgraft predict {shlex.quote(name)} "..."{' --pair "..."' if pairs else ""} --store grafts
```"""


def limits(record: Mapping[str, Any]) -> str:
    done, kind = part(record, "training"), kind_of(record)
    items = ["It was measured on rows like those it was trained on: check it on yours before you rely on it."]
    if kind in ("classification", "tokens"):
        items.append("It knows no label but its own, and gives one of them also where none fits.")
    if length := part(done, "settings").get("max_length"):
        cut = done.get("cut", done.get("rows_cut"))
        number = sum(cut.values()) if isinstance(cut, Mapping) else cut
        seen = (
            ""
            if number is None
            else f" {count_text(number)} of its own rows were."
            if number
            else " None of its own was."
        )
        inside = "read in windows of that many" if kind == "spans" else "cut there"
        items.append(f"Texts of more than {length} tokens are {inside}.{seen if kind != 'spans' else ''}")
    if sha := part(record, "backbone").get("sha256"):
        items.append(f"It loads only on the backbone it was trained on (sha256 {escape(str(sha)[:12])}…).")
    return "\n".join(f"- {item}" for item in items)


# -- the record's parts, any of which may be missing


def part(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = record.get(key)
    return found if isinstance(found, Mapping) else {}


def name_of(record: Mapping[str, Any]) -> str:
    return str(record.get("name") or part(record, "task").get("name") or "graft")


def backbone_of(record: Mapping[str, Any]) -> str:
    """Its name on the Hub, or its folder's name after "path/to/"; nothing where it has no name but its class's."""
    name = str(part(record, "backbone").get("name") or "")
    if re.fullmatch(r"\w+Model", name):
        return ""
    if EMBEDDED_MODULE in re.split(r"[/\\]", name):
        return EMBEDDED_NAME
    short = without_folders(name)
    return short if short == name else f"path/to/{short}"


def kind_of(record: Mapping[str, Any]) -> str:
    return str(part(record, "task").get("kind") or part(record, "head").get("kind") or "")


def labels_of(record: Mapping[str, Any]) -> Sequence[Any]:
    return part(record, "task").get("labels") or part(record, "head").get("labels") or ()


def has_pairs(record: Mapping[str, Any]) -> bool:
    return kind_of(record) == "spans" or "pair" in part(part(record, "task"), "columns")


# -- text


def without_folders(text: str) -> str:
    """Files by their names alone: where they lay on someone's disk is nobody's business."""
    if PATH.match(text) or text.lower().endswith(FILES):
        return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    return re.sub(rf"(?<!\S){PATH.pattern}(?:[^/\\\s]+[/\\])*", "", text)


def escape(value: Any) -> str:
    """Plain text inside Markdown: no name or label becomes a heading, a link, HTML or a new line."""
    return re.sub(r"([\\`*_{}\[\]<>()#|~&$!])", r"\\\1", " ".join(str(value).split()))


def literal(text: str) -> str:
    """A string as Python source."""
    return json.dumps(text, ensure_ascii=False)
