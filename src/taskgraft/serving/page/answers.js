// An answer as a card: what the task says, large; then how sure it is.

import { count, decimal, make, percent, sentence } from "./elements.js";

const TOP = 5; // classes that are shown at first
const AROUND = 400; // characters of a context on each side of an answer

/** The card of an answer to {task, text, pair}. */
export function card(question, answer) {
  const title = make("h3", {}, question.task);
  if (answer.error) {
    const why = make("p", { className: "error" }, sentence(answer.error.message));
    return make("article", { className: "card failed" }, title, why);
  }
  const version = answer.version === null ? "" : `version ${answer.version}`;
  const head = make("div", { className: "ends" }, title, make("span", { className: "muted small" }, version));
  return make("article", { className: "card" }, head, ...SHOWN[answer.kind](answer, question));
}

/** The answer in a few words, to be read out. */
export function spoken(question, answer) {
  return `${question.task}: ${answer.error ? sentence(answer.error.message) : headline(answer)}`;
}

function headline(answer) {
  switch (answer.kind) {
    case "classification":
      if (answer.label === null) return "What was written is none of the labels.";
      return answer.probability === undefined ? answer.label : `${answer.label}, ${percent(answer.probability)}`;
    case "multilabel":
      return likeliest(answer.labels, answer.probabilities).join(", ") || "None of them";
    case "regression":
      return decimal(answer.value);
    case "tokens":
      return count(answer.tags.filter((tag) => tag !== "O").length, "tagged word");
    default:
      return answer.answer || "No answer.";
  }
}

function likeliest(labels, probabilities) {
  return labels.toSorted((a, b) => probabilities[b] - probabilities[a]);
}

const large = (text) => make("p", { className: "headline" }, text);

const SHOWN = {
  classification(answer) {
    if (answer.label === null) return [large("–"), make("p", { className: "muted" }, headline(answer))];
    const parts = [large(answer.label)];
    if (answer.probabilities) parts.push(...bars(answer.probabilities, [answer.label], "class"));
    return parts;
  },
  multilabel(answer) {
    return [large(headline(answer)), ...bars(answer.probabilities, answer.labels, "label")];
  },
  regression: (answer) => [large(decimal(answer.value))],
  tokens(answer, question) {
    const words = answer.tags.map((tag, index) => {
      const word = make("span", { className: "word" }, make("span", {}, question.text[index]), " ");
      if (tag !== "O") word.append(make("span", { className: "tag" }, tag));
      return word;
    });
    return [make("p", { className: "words" }, ...words)];
  },
  spans(answer, question) {
    if (!answer.answer) return [large("–"), make("p", { className: "muted" }, "The second text holds no answer.")];
    const letters = [...question.pair]; // the server counts characters, and JavaScript halves of some
    const from = Math.max(0, answer.start - AROUND);
    const to = Math.min(letters.length, answer.end + AROUND);
    const part = (start, end) => letters.slice(start, end).join("");
    const before = (from > 0 ? "… " : "") + part(from, answer.start);
    const after = part(answer.end, to) + (to < letters.length ? " …" : "");
    const found = make("mark", {}, part(answer.start, answer.end));
    return [large(answer.answer), make("p", { className: "context" }, before, found, after)];
  },
  text: (answer) => [make("blockquote", {}, answer.answer || "It wrote nothing.")],
};

/** A bar for each class, the likeliest first, and a button that shows those beyond the top. */
function bars(probabilities, chosen, noun) {
  const sorted = likeliest(Object.keys(probabilities), probabilities);
  const top = Math.max(TOP, noun === "label" ? chosen.length : 0);
  const list = make("ul", { className: noun === "label" ? "bars threshold" : "bars" });
  for (const label of sorted) {
    const share = probabilities[label];
    const fill = make("span", {});
    fill.style.inlineSize = `${100 * share}%`;
    const item = make("li", { className: chosen.includes(label) ? "chosen" : "", hidden: list.children.length >= top });
    item.append(make("span", { className: "label" }, label), make("span", { className: "share" }, percent(share)));
    item.append(make("span", { className: "track", "aria-hidden": "true" }, fill));
    list.append(item);
  }
  const parts = [list];
  const line = "The line is at 50 %: labels beyond it are given.";
  if (noun === "label") parts.push(make("p", { className: "muted small" }, line));
  if (sorted.length > top) parts.push(toggle(list, top, noun));
  return parts;
}

function toggle(list, top, noun) {
  const total = list.children.length;
  const button = make("button", { type: "button", className: "quiet", "aria-expanded": "false" });
  const label = (open) => {
    button.textContent = open ? `Top ${top} only` : `All ${total} ${noun === "class" ? "classes" : "labels"}`;
  };
  label(false);
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "false";
    [...list.children].forEach((item, index) => (item.hidden = !open && index >= top));
    button.setAttribute("aria-expanded", String(open));
    label(open);
  });
  return button;
}
