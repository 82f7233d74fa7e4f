// The list of runs: those that need a person first.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { follow, get } from "./api.js";
import { ago, count, duration, money, plural, words } from "./format.js";
import { VirtualList } from "./list.js";
import { Icon, Problem, Segments, State, useKeys } from "./parts.js";

const PAGE = 100;
const ROW = 56;
const FILTERS = [["", "All"], ["needs_person", "Needs you"], ["running", "Running"], ["completed", "Completed"], ["stopped", "Stopped"]];
const COLUMNS = [["state", "State"], ["task", "Task"], ["started", "Started"], ["duration", "Time"], ["cost", "Cost"], ["calls", "Calls"]];

// Pages of the list, fetched as they are scrolled to; a new version drops what is known.
function useRuns(query) {
  const [, draw] = useState(0);
  const kept = useRef({ key: "", pages: new Map(), about: null, error: null, wanted: [0, 1] });
  const all = kept.current;
  const fetchPage = async (page) => {
    const key = all.key;
    all.pages.set(page, all.pages.get(page) ?? null);
    try {
      const data = await get(`/api/runs?first=${page * PAGE}&count=${PAGE}&${key}`);
      if (all.key !== key) return;
      all.pages.set(page, data.runs);
      Object.assign(all, { about: data, error: null });
    } catch (error) {
      all.error = error;
    }
    draw((n) => n + 1);
  };
  const want = (first, last) => {
    all.wanted = [Math.floor(first / PAGE), Math.floor(Math.max(first, last - 1) / PAGE)];
    for (let page = all.wanted[0]; page <= all.wanted[1]; page++) if (!all.pages.has(page)) fetchPage(page);
  };
  if (all.key !== query) {
    Object.assign(all, { key: query, pages: new Map(), about: null });
    fetchPage(0);
  }
  useEffect(() => {
    let waiting = null;
    const refresh = () => {
      waiting = null;
      for (const page of all.pages.keys()) if (page < all.wanted[0] || page > all.wanted[1]) all.pages.delete(page);
      for (let page = all.wanted[0]; page <= all.wanted[1]; page++) fetchPage(page);
    };
    const stop = follow("/api/stream", () => (waiting ??= setTimeout(refresh, 250)), () => {});
    return () => {
      clearTimeout(waiting);
      stop();
    };
  }, []);
  return { ...all, want, run: (index) => all.pages.get(Math.floor(index / PAGE))?.[index % PAGE] };
}

export function Runs({ about }) {
  const [filter, setFilter] = useState("");
  const [text, setText] = useState("");
  const [order, setOrder] = useState("");
  const [at, setAt] = useState(-1);
  const search = useRef(null);
  const list = useRef(null);
  const runs = useRuns(new URLSearchParams({ state: filter, text, order }).toString());
  const matching = runs.about?.matching ?? 0;

  const move = (step) => {
    const next = Math.min(matching - 1, Math.max(0, at + step));
    setAt(next);
    list.current.reveal(next);
  };
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => {
      const chosen = runs.run(at);
      if (!chosen) return false;
      location.hash = `#/runs/${chosen.run}`;
      return true;
    },
    "/": () => search.current.focus(),
    Escape: (event) => event.target.blur?.(),
  });

  const more = runs.about && runs.about.summarised < runs.about.sessions;
  return html`<main class="runs">
    <div class="runs-bar">
      <h1>Runs <small>${runs.about ? runs.about.total.toLocaleString("en") : ""}</small></h1>
      <${Segments} label="Which runs" value=${filter} options=${FILTERS} onChange=${setFilter} />
      <label class="search"><${Icon} name="search" /><input ref=${search} type="search" placeholder="Search tasks, tags, ids" aria-label="Search runs" value=${text} onInput=${(event) => setText(event.target.value)} /><kbd>/</kbd></label>
    </div>
    <div class="runs-head" role="group" aria-label="Sort by">
      ${COLUMNS.map(([name, title]) => html`<button type="button" class=${`col-${name}`} aria-pressed=${order === name} onClick=${() => setOrder(order === name ? "" : name)}>${title}</button>`)}
    </div>
    ${runs.error && html`<${Problem} error=${runs.error} />`}
    ${runs.about && matching === 0 && html`<p class="empty">${text || filter ? "No run matches." : html`No runs yet. Start one with <code>treenail run "task"</code>.`}</p>`}
    <${VirtualList} count=${matching} height=${ROW} label="Runs" listRef=${list} onRange=${runs.want}
      render=${(index) => html`<${RunRow} key=${index} run=${runs.run(index)} current=${index === at} />`} />
    ${more && (text || filter || order) && html`<p class="progress" role="status">${runs.about.summarised.toLocaleString("en")} of ${plural(runs.about.sessions, "run")} read so far</p>`}
  </main>`;
}

export function RunRow({ run, current }) {
  if (!run) return html`<div class="run-row" role="listitem" style=${{ height: `${ROW}px` }}></div>`;
  const part = run.max_cost_usd ? Math.min(1, (run.cost_usd ?? 0) / run.max_cost_usd) : null;
  const tags = Object.entries(run.tags).filter(([name]) => !name.startsWith("cli.") && !["agent", "nested", "workflow", "session_id"].includes(name));
  return html`<div class="run-row" role="listitem" style=${{ height: `${ROW}px` }}>
    <a href=${`#/runs/${run.run}`} aria-current=${current ? "true" : undefined} class=${run.needs_person ? "needs" : ""}>
      <span class="col-state"><${State} state=${run.state} /></span>
      <span class="col-task"><b>${run.task || (run.state === "empty" ? "Nothing was said yet" : "No task")}</b>
        <small>${run.run.slice(0, 8)}${run.agent && ` · ${run.agent}`}${run.reason && ` · ${words(run.reason)}`}${run.waiting > 0 && html` · <em>${plural(run.waiting, "call")} waiting for you</em>`}${run.children > 0 && ` · ${plural(run.children, "child run")}`}${tags.map(([name, value]) => html` <i class="tag">${name}=${value}</i>`)}</small></span>
      <span class="col-started" title=${run.created_at}>${ago(run.created_at)}</span>
      <span class="col-duration">${duration(run.elapsed_s === null ? null : run.elapsed_s * 1000)}</span>
      <span class="col-cost">${money(run.cost_usd)}${run.max_cost_usd ? html`<small> of ${money(run.max_cost_usd)}</small>` : ""}${part !== null && html`<i class="meter" data-full=${part >= 0.9}><i style=${{ width: `${part * 100}%` }}></i></i>`}</span>
      <span class="col-calls">${count(run.calls)}</span>
    </a>
  </div>`;
}
