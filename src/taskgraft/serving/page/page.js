// The page: a theme, a token where the server wants one, live figures, tasks, and a playground.

import { card, spoken } from "./answers.js";
import { count, find, make, milliseconds, say } from "./elements.js";
import { watch } from "./live.js";
import { call, keepToken } from "./server.js";
import { TaskList, choice, tableRow } from "./tasks.js";

// -- light and dark

const THEME = "taskgraft-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const kept = localStorage.getItem(THEME);
  if (kept) document.documentElement.dataset.theme = kept;
  const isDark = kept ? kept === "dark" : dark.matches;
  say(find("#theme"), isDark ? "Light" : "Dark");
  find("#theme").setAttribute("aria-label", isDark ? "Light theme" : "Dark theme");
}

find("#theme").addEventListener("click", () => {
  localStorage.setItem(THEME, find("#theme").textContent.toLowerCase());
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();

// -- the token

document.addEventListener("token-wanted", ({ detail }) => {
  const first = find("#token-form").hidden;
  find("#token-form").hidden = false;
  say(find("#token-why"), detail);
  say(find("#notice"), "");
  if (first) find("#token").focus();
});

find("#token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(find("#token").value);
  find("#token").value = "";
  find("#token-form").hidden = true;
  tick();
});

// -- picking tasks

const picked = new Map(); // name: what is known of the task

const picker = new TaskList(
  find("#picker"),
  20,
  choice((name) => picked.has(name), pick),
  (tasks) => {
    for (const task of tasks) if (picked.has(task.name)) picked.set(task.name, task);
  },
);

const table = new TaskList(find("#tasks"), 100, tableRow((task) => {
  pick(task, true);
  picker.fill();
  find("#text").focus();
}));

function pick(task, isPicked) {
  if (isPicked) picked.set(task.name, task);
  else picked.delete(task.name);
  showPicked();
}

function showPicked() {
  find("#picked").replaceChildren(
    ...[...picked.values()].map((task) => {
      const cross = make("span", { "aria-hidden": "true" }, "×");
      const chip = make("button", { type: "button", "aria-label": `Drop ${task.name}` }, `${task.name} `, cross);
      chip.addEventListener("click", () => {
        pick(task, false);
        picker.fill();
        (find("#picked button") ?? find("#pick-search")).focus();
      });
      return make("li", {}, chip);
    }),
  );
  const readers = [...picked.values()].filter((task) => task.reads_pairs).map((task) => task.name);
  find("#second").hidden = !readers.length;
  say(find("#pair-why"), `Read by ${readers.join(", ")}.`);
}

// -- asking

let asking = false;

find("#ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
find("#ask").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  ask();
});

/** What is missing before there is something to ask: a sentence, and the field it is about. */
function missing() {
  if (!find("#text").value.trim()) return ["Write a text first.", find("#text")];
  if (!picked.size) return ["Pick at least one task.", find("#picker input[type=checkbox]") ?? find("#pick-search")];
  if (!find("#second").hidden && !find("#pair").value.trim()) {
    return [`Write the second text too. ${find("#pair-why").textContent}`, find("#pair")];
  }
  return null;
}

function questions() {
  const text = find("#text").value;
  const pair = find("#pair").value;
  return [...picked.values()].map((task) => ({
    task: task.name,
    text: task.kind === "tokens" ? text.trim().split(/\s+/) : text, // words, so that each tag has its own
    ...(task.reads_pairs ? { pair } : {}),
  }));
}

async function ask() {
  if (asking) return;
  const wrong = missing();
  for (const field of [find("#text"), find("#pair")]) field.setAttribute("aria-invalid", String(wrong?.[1] === field));
  find("#wrong").textContent = "";
  if (wrong) {
    say(find("#wrong"), wrong[0]);
    wrong[1].focus();
    return;
  }
  asking = true;
  find("#go").setAttribute("aria-disabled", "true");
  find("#answers").setAttribute("aria-busy", "true");
  const asked = questions();
  const started = performance.now();
  try {
    const { answers } = await call("/v1/predict", { questions: asked });
    const took = milliseconds(performance.now() - started);
    const failed = answers.filter((answer) => answer.error).length;
    const right = failed === answers.length ? [] : [count(answers.length - failed, "answer")];
    const parts = failed ? [...right, count(failed, "error")] : right;
    say(find("#took"), `${parts.join(" and ")} in ${took}, from one request`);
    say(find("#spoken"), `${find("#took").textContent}. ${answers.map((one, n) => spoken(asked[n], one)).join(". ")}`);
    find("#cards").replaceChildren(...answers.map((answer, number) => card(asked[number], answer)));
    const below = find("#answers").getBoundingClientRect().top > innerHeight - 100;
    if (below) find("#answers").scrollIntoView(); // on a phone, where they follow the form
    table.reload();
  } catch (error) {
    if (!error.wantsToken) say(find("#wrong"), error.message);
  } finally {
    asking = false;
    find("#go").removeAttribute("aria-disabled");
    find("#answers").removeAttribute("aria-busy");
  }
}

// -- the figures, and what they tell of the rest

let held = null; // how many tasks there were

async function showBackbone() {
  const readable = table.tasks.find((task) => !task.error);
  if (!readable) return;
  const path = readable.name.split("/").map(encodeURIComponent).join("/");
  const { backbone } = await call(`/v1/tasks/${path}`);
  say(find("#backbone"), backbone);
}

async function reload() {
  await Promise.all([table.reload(), picker.reload()]);
  showPicked();
  await showBackbone().catch(() => {}); // it is said elsewhere that the server does not answer
}

const tick = watch(
  (stats) => {
    say(find("#notice"), "");
    if (stats.tasks !== held) reload();
    held = stats.tasks;
  },
  (error) => {
    held = null;
    if (!error.wantsToken) say(find("#notice"), `${error.message} Trying again each second.`);
  },
);
