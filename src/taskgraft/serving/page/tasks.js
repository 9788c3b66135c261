// The tasks of the server, as a table and as a list to pick from: searched and paged by the server.

import { bytes, count, find, make, say, sentence } from "./elements.js";
import { call } from "./server.js";

const PAUSE_MS = 150; // in typing, before a search

/** Tasks by the beginning of their names, `size` at a time. `row` makes the element of one. */
export class TaskList {
  constructor(root, size, row, seen = () => {}) {
    Object.assign(this, { root, size, row, seen, tasks: [], asked: 0 });
    this.search = find("[data-search]", root);
    this.rows = find("[data-rows]", root);
    this.more = find("[data-more]", root);
    this.search.addEventListener("input", () => {
      clearTimeout(this.pause);
      this.pause = setTimeout(() => this.load(size), PAUSE_MS);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) event.preventDefault();
    });
    this.more.addEventListener("click", async () => {
      const before = this.tasks.length;
      await this.load(before + size);
      find("input, button", this.rows.children[before] ?? this.root)?.focus(); // where the new ones begin
    });
  }

  /** The same tasks again, as they are now. */
  reload() {
    return this.load(Math.max(this.size, this.tasks.length));
  }

  async load(wanted) {
    const number = ++this.asked;
    const prefix = encodeURIComponent(this.search.value.trim());
    const tasks = [];
    let page = { next: null };
    try {
      do {
        const limit = Math.min(this.size, wanted - tasks.length);
        const after = page.next === null ? "" : `&after=${encodeURIComponent(page.next)}`;
        page = await call(`/v1/tasks?limit=${limit}&prefix=${prefix}${after}`);
        if (number !== this.asked) return; // another search was faster
        tasks.push(...page.tasks);
      } while (page.next !== null && page.tasks.length && tasks.length < wanted);
    } catch (error) {
      if (number === this.asked) this.tell(error.wantsToken ? "" : error.message, true);
      return;
    }
    this.tasks = tasks;
    this.seen(tasks);
    this.fill();
    this.more.hidden = page.next === null;
    this.tell(this.summary(page));
  }

  fill() {
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
    this.rows.replaceChildren(...this.tasks.map(this.row));
    if (focused !== undefined) find(`[data-name="${CSS.escape(focused)}"]`, this.rows)?.focus();
  }

  summary(page) {
    const shown = this.tasks.length;
    if (!shown && this.search.value.trim()) return `No task begins with “${this.search.value.trim()}”.`;
    if (!shown) return "There are no tasks yet: train one with “taskgraft train”, and it appears here.";
    if (page.next === null) return count(shown, "task");
    return `${shown.toLocaleString("en")} of ${count(page.total, "task")}`;
  }

  tell(text, isError = false) {
    const element = find("[data-count]", this.root);
    element.classList.toggle("error", isError);
    say(element, text);
  }
}

/** A row of the table; `pick` is called by its button. */
export function tableRow(pick) {
  return (task) => {
    const cell = (label, text, className = "") =>
      make("td", { role: "cell", "data-label": label, className }, text);
    const name = make("th", { role: "rowheader", scope: "row" }, task.name);
    if (task.error) {
      const why = make("td", { role: "cell", colSpan: 7, className: "why" });
      why.append(make("strong", {}, "Broken. "), sentence(task.error.message));
      return make("tr", { role: "row", className: "broken" }, name, why);
    }
    const where = make("span", { className: task.resident ? "where resident" : "where" });
    where.textContent = task.resident ? "in memory" : "on disk";
    const tryIt = make("button", { type: "button", className: "quiet", "data-name": task.name }, "Try");
    tryIt.setAttribute("aria-label", `Try ${task.name}`);
    tryIt.addEventListener("click", () => pick(task));
    return make(
      "tr",
      { role: "row" },
      name,
      cell("kind", kind(task)),
      cell("score", score(task)),
      cell("parameters", task.parameters.toLocaleString("en"), "number"),
      cell("size", bytes(task.bytes), "number"),
      cell("version", task.version === null ? "–" : String(task.version), "number"),
      cell("where", where),
      make("td", { role: "cell", className: "try" }, tryIt),
    );
  };
}

/** A line of the list to pick from; `picked` tells whether it is, `change` is told when that changes. */
export function choice(picked, change) {
  return (task) => {
    const box = make("input", { type: "checkbox", checked: picked(task.name), "data-name": task.name });
    box.disabled = Boolean(task.error);
    box.addEventListener("change", () => change(task, box.checked));
    const about = task.error ? "broken" : kind(task) + (task.reads_pairs ? ", two texts" : "");
    const label = make("label", {}, box, make("span", { className: "name" }, task.name));
    label.append(make("span", { className: "muted small" }, about));
    return make("li", {}, label);
  };
}

/** The score, and what was measured where it is one thing. */
function score(task) {
  if (task.score === null) return "–";
  const measured = Object.entries(task.metrics[task.metrics.split] ?? {});
  const [name] = measured.find(([, value]) => value === task.score) ?? [""];
  const words = make("span", { className: "muted small" }, name.replaceAll("_", " "));
  return make("span", { className: "nowrap" }, `${task.score.toFixed(3)} `, words);
}

function kind(task) {
  const labels = task.labels?.length;
  if (task.kind === "classification" && labels) return count(labels, "class", "classes");
  if (task.kind === "multilabel" && labels) return `any of ${count(labels, "label")}`;
  const words = { regression: "a number", tokens: "tags of words", spans: "finds an answer", text: "writes" };
  return words[task.kind] ?? task.kind;
}
