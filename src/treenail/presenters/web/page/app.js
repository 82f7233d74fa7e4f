// The page: which view is shown, and the bar above it.

import { html, render, useEffect, useErrorBoundary, useState } from "./vendor/preact.js";
import { frozen, get, login, post } from "./api.js";
import { Button, Problem } from "./parts.js";
import { Run } from "./run.js";
import { Runs } from "./runs.js";

// #/ is the list, #/runs/ID a run, #/runs/ID/VIEW/... one of its views.
function route() {
  const [, first, id, view, ...rest] = location.hash.split("/");
  return first === "runs" && /^[0-9a-f-]{36}$/.test(id ?? "") ? { run: id, view: view ?? "timeline", rest } : { run: frozen?.run ?? null, view: "timeline", rest: [] };
}

function useRoute() {
  const [now, setNow] = useState(route);
  useEffect(() => {
    const changed = () => setNow(route());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return now;
}

// Light or dark: what the person chose here, or else what their system says.
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  document.documentElement.dataset.theme = localStorage.getItem("theme") ?? (prefersDark.matches ? "dark" : "light");
}

function switchTheme() {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  applyTheme();
}

function App() {
  const now = useRoute();
  const [about, setAbout] = useState(null);
  const [refused, setRefused] = useState(null);
  const [title, setTitle] = useState("");
  const [broken] = useErrorBoundary((error) => console.error(error));
  useEffect(() => {
    login()
      .then(() => get("/api/about"))
      .then(setAbout, setRefused);
  }, []);
  if (broken) return html`<main class="middle"><h1>The page failed</h1><${Problem} error=${broken} /></main>`;
  if (refused) return html`<${Login} error=${refused} />`;
  if (!about) return html`<main class="middle" aria-busy="true"></main>`;
  return html`<header class="top">
      <a class="mark" href="#/" aria-label="Treenail: all runs"><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M8 8h16v5h-5.5v12h-5V13H8z" /></svg></a>
      <nav aria-label="Where you are">${now.run && !frozen ? html`<a href="#/">Runs</a><span aria-hidden="true">/</span><b>${title}</b>` : html`<b>${frozen ? title : "Runs"}</b>`}</nav>
      <span class="store" title=${about.store}>${about.read_only ? "read-only · " : ""}${about.store.split("/").slice(-2).join("/")}</span>
      <${Button} kind="bare" icon="theme" title="Light or dark" onClick=${switchTheme} />
    </header>
    ${now.run ? html`<${Run} key=${now.run} id=${now.run} view=${now.view} rest=${now.rest} about=${about} onTitle=${setTitle} />` : html`<${Runs} about=${about} />`}`;
}

function Login({ error }) {
  const [problem, setProblem] = useState(error);
  const enter = async (event) => {
    event.preventDefault();
    try {
      await post("/api/login", { token: new FormData(event.target).get("token").trim() });
      location.reload();
    } catch (caught) {
      setProblem(caught);
    }
  };
  return html`<main class="middle">
    <h1>${error.status === 401 ? "Which token?" : "Nothing to show"}</h1>
    <${Problem} error=${problem} />
    ${error.status === 401 && html`<form onSubmit=${enter}><input name="token" type="password" aria-label="Token" autocomplete="off" /><button class="button main" type="submit">Open</button></form>`}
  </main>`;
}

applyTheme();
prefersDark.addEventListener("change", applyTheme);
render(html`<${App} />`, document.getElementById("app"));
