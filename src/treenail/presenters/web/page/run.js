// One run: what is true of it as a whole, and its views.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { frozen, get, post } from "./api.js";
import { Detail } from "./detail.js";
import { Diff } from "./diff.js";
import { ago, duration, money, plural, words } from "./format.js";
import { Button, Loaded, Problem, Quiet, State, useKeys } from "./parts.js";
import { useRun } from "./rows.js";
import { RunRow } from "./runs.js";
import { Timeline } from "./timeline.js";

export function Run({ id, view, rest, about, onTitle }) {
  const run = useRun(id);
  const head = run.head;
  useEffect(() => {
    const title = head?.task || id.slice(0, 8);
    onTitle(title);
    document.title = `${title} · Treenail`;
  }, [head?.task]);
  if (run.error && !head) return html`<main class="middle"><h1>This run cannot be shown</h1><${Problem} error=${run.error} /></main>`;
  if (!head) return html`<main class="middle" aria-busy="true"></main>`;
  const tabs = [
    ["timeline", "Timeline"],
    ["changes", "Changes"],
    head.child_runs?.length && ["children", `Children ${head.child_runs.length}`],
  ].filter(Boolean);
  const shown = view === "event" ? "timeline" : view;
  return html`<main class="run">
    <${Head} run=${run} about=${about} />
    <nav class="tabs" aria-label="Views of the run">${tabs.map(([name, title]) => html`<a href=${name === "timeline" ? `#/runs/${id}` : `#/runs/${id}/${name}`} aria-current=${shown === name ? "page" : undefined}>${title}</a>`)}
      <span class="link" data-link=${run.link} role="status">${LINKS[run.link] ?? ""}</span></nav>
    ${shown === "timeline" && html`<${Happened} id=${id} run=${run} rest=${view === "event" ? rest : []} about=${about} />`}
    ${shown === "changes" && html`<div class="page"><${Loaded} path=${`/api/runs/${id}/diff`} version=${run.version}>${(data) => html`<${Diff} files=${data.files} />`}<//></div>`}
    ${shown === "children" && html`<div class="page">${head.child_runs.map((child) => html`<${RunRow} run=${child} />`)}</div>`}
  </main>`;
}

const LINKS = { live: "live", lost: "connection lost, trying again", closed: "the inspector was stopped", gone: "this run was erased" };

function Head({ run, about }) {
  const head = run.head;
  const turn = head.turns.at(-1);
  const facts = [
    head.agent,
    turn?.model,
    html`<span title=${head.created_at}>${ago(head.created_at)}</span>`,
    head.elapsed_s !== null && duration(head.elapsed_s * 1000),
    head.cost_usd !== null && html`${money(head.cost_usd)}${head.max_cost_usd ? ` of ${money(head.max_cost_usd)}` : ""}`,
    head.calls > 0 && plural(head.calls, "call"),
    head.workspace && html`<span class="mono" title=${head.workspace}>${head.workspace.split("/").slice(-2).join("/")}</span>`,
  ].filter(Boolean);
  return html`<header class="run-head">
    <div class="run-title"><${State} state=${head.state}>${words(head.state)}${head.reason && head.state !== "damaged" ? ` · ${words(head.reason)}` : ""}<//><h1 title=${head.task}>${head.task || "No task"}</h1></div>
    <p class="facts">${facts.map((fact) => html`<span>${fact}</span>`)}</p>
    ${!about.read_only && !frozen && head.calls > 0 && head.workspace && html`<${UndoButtons} run=${run} />`}
    ${head.damage && html`<p class="problem">The log is damaged from here on: ${head.damage}. Nothing was changed or deleted.</p>`}
  </header>`;
}

function UndoButtons({ run }) {
  const [state, setState] = useState({});
  const act = async (name) => {
    setState({ busy: true });
    try {
      await post(`/api/runs/${run.head.run}/${name}`);
      setState({});
    } catch (error) {
      setState({ error });
    }
  };
  return html`<p class="buttons"><${Button} icon="undo" disabled=${state.busy} onClick=${() => act("undo")}>Undo its changes<//><${Button} disabled=${state.busy} onClick=${() => act("redo")}>Redo<//></p>${state.error && html`<${Problem} error=${state.error} />`}`;
}

// The waterfall, and beside it what is known of the chosen row.
function Happened({ id, run, rest, about }) {
  const head = run.head;
  const list = useRef(null);
  const panel = useRef(null);
  const [selected, setSelected] = useState(null);
  const [shown, setShown] = useState(false);
  const [seq, index] = rest;

  useEffect(() => {
    if (seq === undefined) {
      setShown(false);
      return;
    }
    const choose = (at) => {
      if (at !== selected) list.current?.[selected === null ? "centre" : "reveal"](at);
      setSelected(at);
      setShown(true);
    };
    if (index !== undefined) choose(Math.min(Number(index), head.rows - 1));
    else get(`/api/runs/${id}/at/${Number(seq)}`).then((data) => choose(data.index));
  }, [seq, index]);

  const linkTo = (at) => {
    const row = run.row(at);
    const of = row?.seq ?? head.turns[row?.turn]?.seq ?? row?.changed ?? 0;
    return `#/runs/${id}/event/${of}/${at}`;
  };
  const move = (step) => {
    const next = Math.min(head.rows - 1, Math.max(0, (selected ?? -1) + step));
    list.current.reveal(next);
    setSelected(next);
    if (shown) history.replaceState(null, "", linkTo(next));
  };
  const close = () => {
    setShown(false);
    history.replaceState(null, "", `#/runs/${id}`);
    list.current.focus();
  };
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: (event) => {
      if (event.target.closest?.("button, a, summary")) return false;
      if (selected === null) return false;
      setShown(true);
      history.replaceState(null, "", linkTo(selected));
      return true;
    },
    Escape: () => {
      if (shown) close();
      else location.hash = "#/";
    },
  });

  if (!head.rows) return html`<${Quiet}>Nothing has happened in this run yet.<//>`;
  return html`<div class="split" data-open=${shown}>
    <${Timeline} run=${run} selected=${selected} listRef=${list} onSelect=${(at) => {
      setSelected(at);
      setShown(true);
    }} />
    ${shown && selected !== null && html`<aside class="panel" ref=${panel} aria-label="Details"><${Detail} key=${selected} id=${id} index=${selected} row=${run.row(selected)} run=${run} about=${about} onClose=${close} /></aside>`}
  </div>`;
}
