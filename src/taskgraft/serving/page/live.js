// The live figures: what the server says of itself each second, and lines of the last minute.

import { bytes, count, duration, find, milliseconds, say } from "./elements.js";
import { call } from "./server.js";

const SECONDS = 60;
const history = []; // {rate, p50, p99} of each second, the oldest first; null: nothing is known
let timer = 0;

/** Ask for figures each second while the page is seen. `seen` is given each of them, `failed` what went wrong. */
export function watch(seen, failed) {
  const tick = async () => {
    clearTimeout(timer);
    if (document.hidden) {
      history.length = 0; // a minute with a hole in it would look like one without
      return;
    }
    const started = performance.now();
    try {
      const stats = await call("/v1/stats", undefined, 10);
      show(stats);
      seen(stats);
    } catch (error) {
      remember({ rate: null, p50: null, p99: null });
      failed(error);
      if (error.wantsToken) return;
    }
    clearTimeout(timer);
    timer = setTimeout(tick, Math.max(0, 1000 - (performance.now() - started)));
  };
  document.addEventListener("visibilitychange", tick);
  tick();
  return tick;
}

function show(stats) {
  const { p50, p99 } = stats.latency_ms;
  remember({ rate: stats.rate, p50, p99 });
  say(find("#rate"), stats.rate.toLocaleString("en", { maximumFractionDigits: stats.rate < 10 ? 1 : 0 }));
  say(find("#p50"), p50 === null ? "–" : milliseconds(p50));
  say(find("#p99"), p99 === null ? "–" : milliseconds(p99));
  say(find("#waiting"), stats.waiting.toLocaleString("en"));
  say(find("#waiting-noun"), stats.waiting === 1 ? "question" : "questions");
  say(find("#resident"), stats.resident.toLocaleString("en"));
  say(find("#held"), count(stats.tasks, "task"));
  say(find("#bytes"), bytes(stats.resident_bytes));
  say(find("#budget"), bytes(stats.budget_bytes));
  find("#fill").style.inlineSize = `${Math.min(100, (100 * stats.resident_bytes) / (stats.budget_bytes || 1))}%`;
  say(find("#uptime"), `${count(stats.answered, "answer")} in ${duration(stats.uptime_s)}`);
}

function remember(second) {
  history.push(second);
  if (history.length > SECONDS) history.shift();
  const latency = (values) => `${milliseconds(values.at(-1) ?? 0)} now, ${milliseconds(Math.max(...values))} at most`;
  const rate = (values) => `${values.at(-1).toFixed(1)} now, ${Math.max(...values).toFixed(1)} at most`;
  draw(find("#rate-line"), ["rate"], "Answers per second over the last minute", rate);
  draw(find("#latency-line"), ["p99", "p50"], "Latency over the last minute, p99 and median", latency);
}

/** Lines of the named figures, on one scale; the words tell the first of them. */
function draw(svg, names, title, words) {
  const known = history.map((second) => second[names[0]]).filter((value) => value !== null);
  const top = Math.max(...known, 1e-9);
  svg.setAttribute("viewBox", `0 0 ${SECONDS - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-label", `${title}: ${known.length ? words(known) : "nothing yet"}`);
  svg.replaceChildren(...names.map((name) => line(name, top)));
}

function line(name, top) {
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  let drawn = "";
  history.forEach((second, index) => {
    if (second[name] === null) return;
    const joined = index > 0 && history[index - 1][name] !== null;
    const x = SECONDS - history.length + index;
    drawn += `${joined ? "L" : "M"}${x} ${(19 - (18 * second[name]) / top).toFixed(2)}`;
  });
  path.setAttribute("d", drawn);
  path.setAttribute("class", name);
  return path;
}
