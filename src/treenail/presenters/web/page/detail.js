// What is known of one row: a turn, a model call, a tool call, a question ...

import { html, useState } from "./vendor/preact.js";
import { frozen, post } from "./api.js";
import { Diff } from "./diff.js";
import { clock, count, duration, money, pretty, words } from "./format.js";
import { Button, Copy, Icon, Loaded, Problem, Section, State } from "./parts.js";
import { Code } from "./syntax.js";
import { titleOf } from "./timeline.js";

export function Detail({ id, index, row, run, about, onClose }) {
  const turn = run.head.turns[row?.turn ?? 0];
  if (!row) return html`<div class="loading" aria-busy="true"></div>`;
  const isTurn = !row.kind;
  const seq = isTurn ? turn?.seq ?? row.changed : row.seq;
  const link = location.href.split("#")[0] + `#/runs/${id}/event/${seq}/${index}`;
  return html`<header class="panel-head">
      <${Icon} name=${row.kind ?? "turn"} />
      <h2>${titleOf(row, turn)}</h2>
      ${(row.status || isTurn) && html`<${State} state=${isTurn ? turn.state : row.status} />`}
      <span class="grow"></span>
      <${Copy} text=${link} title="Copy a link to this event" />
      <${Button} kind="bare" icon="close" title="Close (Esc)" onClick=${onClose} />
    </header>
    <div class="panel-body" tabindex="0" role="region" aria-label="What is known of it">
      ${isTurn ? html`<${TurnDetail} turn=${turn} />` : html`<${Loaded} path=${`/api/runs/${id}/rows/${index}`} version=${row.changed}>${(data) => html`<${ItemDetail} id=${id} row=${data} run=${run} about=${about} />`}<//>`}
      <${Raw} id=${id} seq=${seq} />
    </div>`;
}

function Facts({ facts }) {
  return html`<dl class="facts-list">${facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function took(row) {
  return row.started_at && row.ended_at ? duration(Date.parse(row.ended_at) - Date.parse(row.started_at)) : null;
}

function TurnDetail({ turn }) {
  if (!turn) return null;
  return html`<${Facts} facts=${[["Agent", turn.agent], ["Model", turn.model], ["Began", clock(turn.started_at)], ["Ended", clock(turn.ended_at)], ["Took", took(turn)], ["Model calls", turn.usage.model_calls], ["Tokens", `${count(turn.usage.input_tokens)} in, ${count(turn.usage.output_tokens)} out, ${count(turn.usage.cached_tokens)} cached`], ["Cost", money(turn.usage.cost_usd)], ["Why", turn.error_kind && words(turn.error_kind)]]} />
    ${turn.details && html`<p class="said">${turn.details}</p>`}
    ${turn.missing_evidence.length > 0 && html`<p class="problem">The log lacks evidence: ${turn.missing_evidence.join(", ")}.</p>`}
    ${turn.next_actions.length > 0 && html`<${Section} title="What to do next"><${Actions} actions=${turn.next_actions} /><//>`}
    <${Section} title="Task"><p class="said">${turn.task}</p><//>`;
}

function Actions({ actions }) {
  return html`<ul class="next">${actions.map((each) => html`<li><code>${each}</code><${Copy} text=${each} /></li>`)}</ul>`;
}

// Does something to the run, and says what came of it.
function useAct(id) {
  const [state, setState] = useState({});
  const act = async (name, data) => {
    setState({ busy: true });
    try {
      setState({ done: await post(`/api/runs/${id}/${name}`, data) });
    } catch (error) {
      setState({ error });
    }
  };
  return [state, act];
}

function Hold({ id, row, about }) {
  const [state, act] = useAct(id);
  const [note, setNote] = useState("");
  if (row.status !== "waiting" || about.read_only || frozen) return null;
  const answer = (approved) => act("answer", { call: row.call_id, approved, note });
  return html`<${Section} title="Your answer">
    <textarea class="wide" rows="2" aria-label="A note for the model" placeholder="A note for the model" value=${note} onInput=${(event) => setNote(event.target.value)}></textarea>
    <p class="buttons"><${Button} kind="main" disabled=${state.busy} onClick=${() => answer(true)}>Let it run<//><${Button} kind="danger" disabled=${state.busy} onClick=${() => answer(false)}>Refuse<//></p>
    ${state.error && html`<${Problem} error=${state.error} />`}
    ${state.done && html`<p role="status">Answered. Continue the run with <code>treenail resume ${id.slice(0, 8)}</code>.</p>`}
  <//>`;
}

function CallActions({ id, row, run, about }) {
  const [state, act] = useAct(id);
  const [into, setInto] = useState(`${run.head.workspace ?? ""}-fork`);
  if (about.read_only || frozen || !row.diff) return null;
  return html`<${Section} title="From here">
    <p class="buttons">${row.status === "kept" && html`<${Button} icon="undo" disabled=${state.busy} onClick=${() => act("rollback", { call: row.call_id })}>Go back to before this call<//>`}
    <${Button} icon="fork" disabled=${state.busy} onClick=${() => act("fork", { call: row.call_id, into })}>Fork before this call<//></p>
    <label class="field">The fork's directory<input class="wide" value=${into} onInput=${(event) => setInto(event.target.value)} /></label>
    ${state.error && html`<${Problem} error=${state.error} />`}
    ${state.done?.run && html`<p role="status">Made <a class="inline" href=${`#/runs/${state.done.run}`}>run ${state.done.run.slice(0, 8)}</a>.</p>`}
    ${state.done?.undone && html`<p role="status">Undone: ${state.done.undone.join(", ") || "nothing"}.</p>`}
  <//>`;
}

function ItemDetail({ id, row, run, about }) {
  if (row.kind === "tool") return html`<${ToolDetail} id=${id} row=${row} /><${CallActions} id=${id} row=${row} run=${run} about=${about} />`;
  if (row.kind === "model") return html`<${ModelDetail} id=${id} row=${row} />`;
  return html`<${Facts} facts=${[["When", clock(row.started_at)], ["Took", row.ended_at !== row.started_at ? took(row) : null], ["Event", row.seq]]} />
    ${row.text && html`<div class="said">${row.text}</div>`}
    ${row.kind === "hold" && html`<${Hold} id=${id} row=${row} about=${about} />`}
    ${row.kind === "subagent" && row.call_id && html`<p><a class="button" href=${`#/runs/${row.call_id}`}>Open this child's run</a></p>`}
    ${row.next_actions.length > 0 && html`<${Section} title="What to do next"><${Actions} actions=${row.next_actions} /><//>`}`;
}

function ModelDetail({ id, row }) {
  const used = row.usage;
  return html`<${Facts} facts=${[["Began", clock(row.started_at)], ["Took", took(row)], ["Input", used && `${used.input_tokens.toLocaleString("en")} tokens`], ["From the cache", used?.cached_tokens ? `${used.cached_tokens.toLocaleString("en")} tokens` : null], ["Output", used && `${used.output_tokens.toLocaleString("en")} tokens`], ["Cost", used && money(used.cost_usd)], ["Events", row.first_seq === row.seq ? row.seq : `${row.first_seq} to ${row.seq}`]]} />
    ${row.text && html`<p class="said">${row.text}</p>`}`;
}

function ToolDetail({ id, row }) {
  return html`<${Facts} facts=${[["Began", clock(row.started_at)], ["Took", took(row)], ["Call", html`<code>${row.call_id}</code>`], ["Events", row.first_seq === row.seq ? row.seq : `${row.first_seq} to ${row.seq}`]]} />
    ${row.undone && html`<p class="undone-note">Undone ${row.undone}. Files and state are as they were before it.</p>`}
    <${Section} title="Arguments" aside=${html`<${Copy} text=${row.arguments} />`}><${Code} text=${pretty(row.arguments || "{}")} language="json" label="Arguments" /><//>
    ${row.text && html`<${Section} title="Result" aside=${html`<${Copy} text=${row.text} />`}><${Code} text=${row.text} label="Result" /><//>`}
    ${row.diff && html`<${Section} title=${row.undone ? "What it had changed" : "What it changed"}><${Loaded} path=${`/api/runs/${id}/diff?call=${row.seq}`} version=${row.changed}>${(data) => html`<div class=${row.undone ? "is-undone" : ""}><${Diff} files=${data.files} /></div>`}<//><//>`}`;
}

function Raw({ id, seq }) {
  const [shown, setShown] = useState(false);
  return html`<details class="raw" open=${shown} onToggle=${(event) => setShown(event.target.open)}><summary>Event ${seq} as it is logged</summary>
    ${shown && html`<${Loaded} path=${`/api/runs/${id}/events/${seq}`}>${(data) => html`<p class="facts"><span>${data.type}</span><span>${data.at}</span><span class="mono">${data.checksum}</span></p><${Code} text=${JSON.stringify(data.payload, null, 2)} language="json" label="Event" />`}<//>`}
  </details>`;
}
