// The only place that speaks with the server; in an exported file, with the data inside that file.

const inside = document.getElementById("frozen");
export const frozen = inside ? JSON.parse(inside.textContent) : null;

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function get(path, signal) {
  if (frozen) return thawed(path);
  return answer(await reached(path, { signal }));
}

export async function post(path, data = {}) {
  const body = JSON.stringify(data);
  return answer(await reached(path, { method: "POST", body, headers: { "content-type": "application/json" } }));
}

async function reached(path, options) {
  try {
    return await fetch(path, { ...options, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The inspector does not answer. Start it again with `treenail view`.", 0);
  }
}

async function answer(response) {
  const data = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(data.error ?? `The inspector answered ${response.status}.`, response.status);
  return data;
}

// Long texts stand once in an exported file, however often they are shown.
function thawed(path) {
  const found = frozen.answers[path];
  if (found === undefined) throw new ApiError("This is not in the exported file. Look at it with `treenail view`.", 404);
  return whole(found);
}

function whole(value) {
  if (Array.isArray(value)) return value.map(whole);
  if (value === null || typeof value !== "object") return value;
  if (typeof value.$ === "number") return frozen.texts[value.$];
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, whole(each)]));
}

// The token comes in the fragment, which no browser sends anywhere, and leaves it at once.
export async function login() {
  if (frozen) return;
  const given = new URLSearchParams(location.hash.slice(1));
  const token = given.get("token");
  if (!token) return;
  const run = given.get("run");
  history.replaceState(null, "", run ? `#/runs/${run}` : "#/");
  await post("/api/login", { token });
}

// Follows a stream: the browser reconnects by itself, and says after which event.
export function follow(path, onData, onState) {
  if (frozen) return () => {};
  const stream = new EventSource(path);
  stream.onopen = () => onState("live");
  stream.onmessage = (event) => onData(JSON.parse(event.data));
  stream.onerror = () => onState(stream.readyState === EventSource.CLOSED ? "closed" : "lost");
  stream.addEventListener("gone", () => {
    stream.close();
    onState("gone");
  });
  return () => stream.close();
}
