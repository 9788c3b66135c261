// Asking the server. Whatever goes wrong becomes a sentence.

import { sentence } from "./elements.js";

const TOKEN = "taskgraft-token";

/** What to show for a request that failed. `wantsToken`: the token field says it already. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.wantsToken = status === 401;
  }
}

export function keepToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** GET a path, or POST a body to it. */
export async function call(path, body, seconds = 60) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { Accept: "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = "application/json";
  let response, found;
  try {
    const signal = AbortSignal.timeout(1000 * seconds);
    const method = body ? "POST" : "GET";
    response = await fetch(path, { method, headers, body: JSON.stringify(body), cache: "no-store", signal });
    found = await response.json().catch((error) => {
      if (error.name !== "SyntaxError") throw error;
      return null; // something between here and the server speaks for it
    });
  } catch (error) {
    if (error.name === "TimeoutError") throw new ServerError(`The server gave no answer within ${seconds} seconds.`);
    throw new ServerError("The server does not answer: it may have been stopped, or the network is down.");
  }
  if (response.ok && found) return found;
  if (response.status === 401) {
    const why = token
      ? "The server refused this token: check that you have all of it, and that it is still in use."
      : "This server answers only to those who have a token. Yours stays in this tab, and goes when you close it.";
    document.dispatchEvent(new CustomEvent("token-wanted", { detail: why }));
    throw new ServerError(why, 401);
  }
  throw new ServerError(reason(response, found), response.status);
}

function reason(response, found) {
  if (response.status === 429) {
    const wait = Number(response.headers.get("Retry-After")) || 1;
    return `The server has more to do than it can take: ask again in ${wait} second${wait === 1 ? "" : "s"}.`;
  }
  if (found?.error?.message) return sentence(found.error.message);
  return `The server answered with status ${response.status} and no reason: look at its log.`;
}
