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
METHODS = {
    "adapter": "adapters",
    "norms": "the norms",
    "head": "a head on the frozen backbone",
    "hyperformer": "adapters from a hypernetwork that they share",
    "full": "the whole backbone",
}
MOST_LABELS = 50
FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")
PATH = re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\]")  # how a place on a disk begins
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def card(record: Mapping[str, Any], repo: str | None = None) -> str:
    """The README.md of graft.json or joint.json, as on disk or as in a repository of the Hub.

    What the record does not hold is left out.
    """
    together = "tasks" in record
    sections = [
        ("", introduction_together(record) if together else introduction(record)),
        ("Data", "" if together else data(record)),
        ("Scores", scores_together(record) if together else scores(record)),
        ("Size", size(record)),
        ("Training", training(record)),
        ("Use", use(record, repo)),
        ("Limits", limits(record)),
    ]
    body = [f"## {title}\n\n{text}" if title else text for title, text in sections if text]
    return "\n\n".join([front_matter(record), f"# {escape(name_of(record))}", *body]) + "\n"


def published(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as strangers may read it: files and folders of someone's disk by their names alone."""
    backbone = part(record, "backbone")
    changed = {**record, "backbone": {**backbone, "name": backbone_of(record) or backbone.get("name")}}
    if "tasks" in record:
        return {**changed, "tasks": {name: task_in_public(task) for name, task in part(record, "tasks").items()}}
    return task_in_public(changed)


def task_in_public(record: Mapping[str, Any]) -> dict[str, Any]:
    task = dict(part(record, "task"))
    if "source" in task:
        task["source"] = without_folders(str(task["source"]))
    if "notes" in task:
        task["notes"] = [without_folders(str(note)) for note in task["notes"]]
    return {**record, "task": task}


def front_matter(record: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    backbone, members = backbone_of(record), members_of(record)
    method = part(members[0], "method").get("method")
    pipelines = {PIPELINES.get(kind_of(member)) for member in members}
    metrics = [str(name) for member in members for name in part(member, "task").get("metrics") or ()]
    on_hub = HUB_NAME.fullmatch(backbone) is not None
    fields = {
        "library_name": "taskgraft",
        "license": record.get("license") or part(record, "task").get("license"),
        "base_model": backbone if on_hub else None,
        "base_model_relation": ("finetune" if method == "full" else "adapter") if on_hub else None,
        "pipeline_tag": pipelines.pop() if len(pipelines) == 1 else None,
        "tags": ["taskgraft", *([str(method)] if method else [])],
        "metrics": list(dict.fromkeys(metrics)),
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


def introduction_together(record: Mapping[str, Any]) -> str:
    tasks, backbone = part(record, "tasks"), backbone_of(record)
    method = part(members_of(record)[0], "method").get("method")
    trained = f" ({METHODS[method]})" if method in METHODS else ""
    on = f" on {escape(backbone)}" if backbone else ""
    text = f"{len(tasks)} tasks that were trained together{on}{trained}, with all that they share."
    rows = [
        [
            escape(name),
            GIVES.get(kind_of(task), "-"),
            ", ".join(map(escape, labels_of(task)[:MOST_LABELS])) or "-",
            escape(without_folders(str(part(task, "task").get("source") or "-"))),
        ]
        for name, task in tasks.items()
    ]
    return f"{text}\n\n{markdown_table(['task', 'gives', 'labels', 'source'], rows).rstrip()}"


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


def scores_together(record: Mapping[str, Any]) -> str:
    rows = []
    for name, task in part(record, "tasks").items():
        metrics = part(task, "metrics")
        score = metrics.get("score")
        if isinstance(score, int | float) and math.isfinite(score):
            names = " and ".join(escape(its) for its in part(task, "task").get("metrics") or ())
            rows.append([escape(name), score_text(score), names or "-", escape(metrics.get("split") or "-")])
    return markdown_table(["task", "score", "metric", "split"], rows).rstrip() if rows else ""


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
    if origin := part(record, "origin"):
        parts.append(f"Pulled from {escape(origin.get('hub'))} at commit {escape(origin.get('commit'))}.")
    for title, values in (
        ("Method", part(members_of(record)[0], "method")),
        ("Settings", settings),
        ("Versions", part(record, "packages")),
    ):
        shown = {
            key: ", ".join(map(str, v)) if isinstance(v, list | tuple) else v
            for key, v in values.items()
            if v is not None
        }
        known = [f"{value}" if key == "method" else f"{key} {value}" for key, value in shown.items() if key != "format"]
        if known:
            parts.append(f"{title}: {escape('; '.join(known))}.")
    return "\n\n".join(parts)


def use(record: Mapping[str, Any], repo: str | None = None) -> str:
    """Snippets that run as they stand: from the Hub, or where the graft lies in a folder `grafts`."""
    name, tasks = name_of(record), part(record, "tasks")
    asked = members_of(record)[0]
    pairs, path = has_pairs(asked), literal(f"grafts/{name}")
    texts = '[["...", "..."]]' if kind_of(asked) == "tokens" else '["..."], ["..."]' if pairs else '["..."]'
    first = next(iter(tasks), None)
    if first is None:
        called, loaded, added = name, f"tg.load_graft({path})", f"tg.add_graft(backbone.model, {path})"
    else:
        called, added = f"{name}/{first}", f"tg.add_joint(backbone.model, {path})"
        loaded = f"tg.load_joint({path}).task({literal(first)})"
    place, pulled, pull = "With the graft in a folder `grafts`:", "", ""
    if repo is not None:
        place, pulled = "From the Hub into a folder `grafts`:", f'tg.pull({literal(repo)}, "grafts")\n'
        pull = f"taskgraft pull {shlex.quote(repo)} --store grafts\n"
    return f"""{place}

```python
import taskgraft as tg

{pulled}backbone = tg.load_backbone({literal(backbone_of(record) or "...")})
print(tg.predict(backbone, {loaded}, {texts}))

{added}  # to stay on the model, beside other tasks
```

```sh
{pull}taskgraft predict {shlex.quote(called)} "..."{' --pair "..."' if pairs else ""} --store grafts
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


def members_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tasks that were trained together, or the graft itself."""
    return [task for task in part(record, "tasks").values() if isinstance(task, Mapping)] or [record]


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
