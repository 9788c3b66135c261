// Elements and numbers for people. Text goes in as text, never as markup.

/** An element with properties, `data-` and `aria-` attributes among them, and children: elements or strings. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const find = (selector, root = document) => root.querySelector(selector);

/** Set a text if it is another one: what has not changed is not read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function count(number, noun, plural = `${noun}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}

export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share < 1 && share > 0.999) return "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

export function decimal(value) {
  const small = value !== 0 && Math.abs(value) < 0.01;
  const digits = small ? { maximumSignificantDigits: 3 } : { minimumFractionDigits: 2, maximumFractionDigits: 3 };
  return value.toLocaleString("en", digits).replace("-", "−");
}

export function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size.toFixed(unit === 0 || size >= 99.5 ? 0 : 1)} ${units[unit]}`;
}

export function milliseconds(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
}

export function duration(seconds) {
  if (seconds < 120) return count(Math.round(seconds), "second");
  if (seconds < 7200) return count(Math.floor(seconds / 60), "minute");
  if (seconds < 172_800) return count(Math.floor(seconds / 3600), "hour");
  return count(Math.floor(seconds / 86_400), "day");
}

/** A sentence as it stands alone: with a capital, unless it begins with a name of a file, and a full stop. */
export function sentence(text) {
  const whole = text.trim().replace(/^[a-z](?=[a-z]*[ ,])/, (first) => first.toUpperCase());
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
