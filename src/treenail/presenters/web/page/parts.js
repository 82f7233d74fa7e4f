// Small pieces that every view uses.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { get } from "./api.js";
import { tone, words } from "./format.js";

const ICONS = {
  turn: "M3 3.5v9M3 4h8l-2 2.5L11 9H3",
  user: "M8 7.5a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5ZM3 13.5c.6-2.6 2.6-4 5-4s4.4 1.4 5 4",
  model: "M8 2.5c.5 3 2.5 5 5.5 5.5C10.5 8.5 8.5 10.5 8 13.5 7.5 10.5 5.5 8.5 2.5 8 5.5 7.5 7.5 5.5 8 2.5Z",
  text: "M3 4h10M3 8h10M3 12h6",
  tool: "M9.5 6.5 3.5 12.5M10 2.5a3.5 3.5 0 1 0 3.5 3.5l-2 .5-2-2 .5-2Z",
  hold: "M5.5 3.5v9M10.5 3.5v9",
  judge: "M8 3v10M4.5 13h7M3 5l5-1.5L13 5M3 5l-1.5 4h3L3 5ZM13 5l-1.5 4h3L13 5Z",
  subagent: "M4 3v6a3 3 0 0 0 3 3h5M10 9.5l2.5 2.5L10 14.5",
  workflow: "M2.5 3h4v4h-4zM9.5 9h4v4h-4zM6.5 5H9.5a2 2 0 0 1 2 2v2",
  compaction: "M8 2v4M6 4.5 8 6.5l2-2M8 14v-4M6 11.5l2-2 2 2M3 8h10",
  fork: "M4 2.5v11M4 9c0-2.5 8-1.5 8-5M10 5.5l2-2.5 2 2.5",
  undo: "M6 4 3 7l3 3M3.5 7H10a3 3 0 0 1 0 6H7",
  limit: "M2.5 11a5.5 5.5 0 1 1 11 0M8 11l2.5-3.5",
  attention: "M8 3 14 13H2L8 3ZM8 7v2.5M8 11.5v.1",
  ending: "M3.5 2.5h9v11h-9zM6 8l1.5 1.5L10 6.5",
  notice: "M8 5v.1M8 7.5v3.5M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11Z",
  copy: "M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z",
  close: "M4 4l8 8M12 4l-8 8",
  back: "M10 3 5 8l5 5",
  search: "M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9ZM10.5 10.5l3 3",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11v-11Z",
  down: "M8 2.5v8M4.5 7.5 8 11l3.5-3.5M3 13.5h10",
  play: "M5 3.5 12 8l-7 4.5z",
  stop: "M4 4h8v8H4z",
  check: "M3 8.5 6.5 12 13 4.5",
};
const LIKE = {
  draft: "text", answer: "text", partial: "text", feedback: "judge", check: "judge", ceilings: "limit", branch: "fork",
  restored: "undo", unknown: "notice",
};

export function Icon({ name }) {
  const d = ICONS[name] ?? ICONS[LIKE[name]] ?? ICONS.notice;
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${d} /></svg>`;
}

export function State({ state, children }) {
  return html`<span class="state" data-tone=${tone(state)}><i class="dot"></i>${children ?? words(state)}</span>`;
}

export function Button({ icon, onClick, children, kind = "", disabled, title }) {
  return html`<button type="button" class="button ${kind}" onClick=${onClick} disabled=${disabled} title=${title} aria-label=${children ? undefined : title}>
    ${icon && html`<${Icon} name=${icon} />`}${children && html`<span>${children}</span>`}
  </button>`;
}

export function Copy({ text, title = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard?.writeText(text).catch(() => {});
    setDone(true);
    setTimeout(() => setDone(false), 1200);
  };
  return html`<${Button} kind="bare" icon=${done ? "check" : "copy"} title=${done ? "Copied" : title} onClick=${copy} />`;
}

export function Section({ title, aside, children, quiet }) {
  return html`<section class="section ${quiet ? "quiet" : ""}"><header><h3>${title}</h3><div class="aside">${aside}</div></header>${children}</section>`;
}

export function Segments({ label, value, options, onChange }) {
  return html`<div class="segments" role="group" aria-label=${label}>${options.map(
    ([name, text]) => html`<button type="button" aria-pressed=${value === name} onClick=${() => onChange(name)}>${text}</button>`,
  )}</div>`;
}

export function Problem({ error }) {
  return html`<p class="problem" role="alert">${error.message}</p>`;
}

export function Quiet({ children }) {
  return html`<p class="empty">${children}</p>`;
}

// Asks the server for something, again when the path or the version changes.
export function useData(path, version = 0) {
  const [state, setState] = useState({});
  useEffect(() => {
    if (!path) return undefined;
    const aborter = new AbortController();
    get(path, aborter.signal).then(
      (data) => setState({ path, data }),
      (error) => error.name !== "AbortError" && setState({ path, error }),
    );
    return () => aborter.abort();
  }, [path, version]);
  return state.path === path ? state : {};
}

export function Loaded({ path, version, children }) {
  const { data, error } = useData(path, version);
  if (error) return html`<${Problem} error=${error} />`;
  return data ? children(data) : html`<div class="loading" aria-busy="true"></div>`;
}

// What a key does while nothing is being typed.
export function useKeys(keys) {
  const now = useRef(keys);
  now.current = keys;
  useEffect(() => {
    const pressed = (event) => {
      if (event.metaKey || event.ctrlKey || event.altKey) return;
      const typing = event.target.closest?.("input, textarea, select");
      if (typing && event.key !== "Escape") return;
      const act = now.current[event.key];
      if (act && act(event) !== false) event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}
