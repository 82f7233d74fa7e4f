// A run over time: a waterfall of turns, model calls, tool calls, judges, children and steps.

import { html, useMemo, useRef, useState } from "./vendor/preact.js";
import { count, duration, money, tone, words } from "./format.js";
import { VirtualList } from "./list.js";
import { Icon } from "./parts.js";

export const ROW = 30;
const WHOLE = 150; // up to so many rows, bars are drawn on the scale of the whole run
const GAP_PART = 0.03; // how much of the scale a time takes in which nobody worked

export function Timeline({ run, selected, onSelect, listRef }) {
  const [range, setRange] = useState([0, 0]);
  const head = run.head;
  const onRange = (first, last) => {
    run.want(first, last);
    setRange((old) => (old[0] === first && old[1] === last ? old : [first, last]));
  };
  const seen = [];
  for (let index = range[0]; index < range[1]; index++) {
    const row = run.row(index);
    if (row) seen.push(row);
  }
  const scale = makeScale(head, seen);
  return html`<div class="timeline">
    <div class="axis" aria-hidden="true"><span class="axis-label">${head.rows.toLocaleString("en")} rows · ${head.seq.toLocaleString("en")} events</span><span class="axis-scale">${scale.ticks.map(
      ([at, text]) => html`<i style=${{ left: `${at * 100}%` }}>${text}</i>`,
    )}</span><span class="axis-time">time</span><span class="axis-cost">cost</span></div>
    <${VirtualList} className="waterfall" count=${head.rows} height=${ROW} label="What happened" listRef=${listRef} onRange=${onRange} stick=${head.state === "running"}
      render=${(index) => html`<${Line} key=${index} id=${head.run} index=${index} row=${run.row(index)} turns=${head.turns} scale=${scale} alive=${head.state === "running"} current=${index === selected} onSelect=${onSelect} />`} />
  </div>`;
}

// Time on the screen: what is seen, without the times in which nobody worked.
function makeScale(head, seen) {
  const rows = head.rows <= WHOLE ? null : seen;
  const times = (rows ?? []).flatMap((row) => [row.started_at, row.ended_at]).filter(Boolean).map(Date.parse);
  const turns = head.turns.filter((turn) => turn.started_at);
  const begin = times.length ? Math.min(...times) : Date.parse(turns[0]?.started_at ?? head.created_at);
  const end = times.length ? Math.max(...times) : Math.max(begin + 1, ...head.turns.map((turn) => Date.parse(turn.ended_at ?? turn.started_at) || 0), head.last_ms ?? 0, head.state === "running" ? Date.now() : 0);
  const gaps = head.gaps.filter(([from, to]) => to > begin && from < end);
  const idle = gaps.reduce((sum, [from, to]) => sum + Math.min(to, end) - Math.max(from, begin), 0);
  const busy = Math.max(1, end - begin - idle);
  const width = busy * GAP_PART;
  const total = busy + gaps.length * width;
  const at = (ms) => {
    let x = ms - begin;
    for (const [from, to] of gaps) {
      if (ms >= to) x -= to - Math.max(from, begin) - width;
      else if (ms > from) x -= (ms - from) * (1 - width / (to - from));
    }
    return Math.min(1, Math.max(0, x / total));
  };
  const ticks = gaps.length ? gaps.map(([from, to]) => [at(from), `${duration(to - from)} idle`]) : [0, 0.25, 0.5, 0.75].map((part) => [part, duration(busy * part)]);
  return { at, ticks: ticks.slice(0, 6), gaps: gaps.map(([from, to]) => [at(from), at(to)]) };
}

export function titleOf(row, turn) {
  if (!row.kind) return turn?.task ? `Turn ${row.turn + 1}` : "Before the first turn";
  const titles = { user: "Person", text: "Model says", answer: "Answer", draft: "Not final", partial: "Not an answer", ending: `Turn ${words(row.status)}`, compaction: "Compacted", notice: row.title || "Note", ceilings: "Ceilings", limit: words(row.title), attention: row.status ? "Fixed by a person" : "Needs a person", undo: words(row.status), restored: "Restored", unknown: row.title, hold: `${row.title} held`, check: row.title || "Completion check", feedback: row.title, fork: "Fork" };
  return titles[row.kind] ?? row.title;
}

function about(row, turn) {
  if (!row.kind) return turn?.task ?? "";
  if (row.kind === "tool") return row.arguments || row.text;
  if (row.kind === "model") return row.usage ? `${count(row.usage.input_tokens)} in · ${count(row.usage.output_tokens)} out${row.usage.cached_tokens ? ` · ${count(row.usage.cached_tokens)} cached` : ""}` : words(row.status);
  if (row.kind === "ending") return [row.title && words(row.title), row.text].filter(Boolean).join(": ");
  return row.text;
}

const QUIET = new Set(["kept", "answered", "end", "tools", "approved", "completed", ""]);

function Line({ id, index, row, turns, scale, alive, current, onSelect }) {
  if (!row) return html`<div class="line" role="listitem" style=${{ height: `${ROW}px` }}></div>`;
  const turn = turns[row.turn];
  const isTurn = !row.kind;
  const status = isTurn ? turn?.state ?? "" : !alive && row.status === "running" ? "left_open" : row.status;
  const start = isTurn ? turn?.started_at : row.started_at;
  const end = isTurn ? turn?.ended_at : row.ended_at;
  const from = start ? scale.at(Date.parse(start)) : 0;
  const to = end ? scale.at(Date.parse(end)) : alive && start && isOpen(status, isTurn, turn) ? 1 : from;
  const took = start && end ? Date.parse(end) - Date.parse(start) : null;
  const cost = isTurn ? turn?.usage.cost_usd : row.usage?.cost_usd;
  const shade = isTurn ? tone(status) : tone(status, row.is_good);
  return html`<div class="line" role="listitem" style=${{ height: `${ROW}px` }}>
    <a href=${`#/runs/${id}/event/${row.seq ?? turn?.seq ?? row.changed}/${index}`} class=${isTurn ? "is-turn" : ""} data-kind=${row.kind ?? "turn"} data-tone=${shade} aria-current=${current ? "true" : undefined} onClick=${() => onSelect(index)}>
      <span class="what"><${Icon} name=${row.kind ?? "turn"} /><b>${titleOf(row, turn)}</b>${!QUIET.has(status) && html`<em>${words(status)}</em>`}<span>${about(row, turn)}</span></span>
      <span class="bars">${scale.gaps.map(([left, right]) => html`<i class="gap" style=${{ left: `${left * 100}%`, width: `${(right - left) * 100}%` }}></i>`)}${start && html`<i class=${took === 0 || (took !== null && to - from < 0.002) ? "bar point" : "bar"} style=${{ left: `${from * 100}%`, width: `${Math.max(0, to - from) * 100}%` }}></i>`}</span>
      <span class="took">${took ? duration(took) : ""}</span>
      <span class="spent">${cost ? money(cost) : ""}</span>
    </a>
  </div>`;
}

function isOpen(status, isTurn, turn) {
  return isTurn ? turn?.state === "unfinished" : status === "running" || status === "pending" || status === "waiting";
}
