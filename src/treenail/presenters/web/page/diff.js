// Diffs: inline, or both sides beside each other.

import { html, useState } from "./vendor/preact.js";
import { Segments } from "./parts.js";
import { coloured, languageOf } from "./syntax.js";

const KINDS = { added: "new", deleted: "deleted", modified: "", mode: "mode", type: "type" };
const MAX_LINES = 1500;

let chosen = localStorage.getItem("diff") ?? "inline";

export function Diff({ files, open = true }) {
  const [side, setSide] = useState(chosen);
  const choose = (name) => {
    chosen = name;
    localStorage.setItem("diff", name);
    setSide(name);
  };
  if (!files.length) return html`<p class="empty">No file changed.</p>`;
  const added = files.reduce((sum, each) => sum + each.added, 0);
  const removed = files.reduce((sum, each) => sum + each.removed, 0);
  return html`<div class="diff">
    <div class="diff-bar">
      <span>${files.length} ${files.length === 1 ? "file" : "files"} <${Counts} added=${added} removed=${removed} /></span>
      <${Segments} label="How the diff is shown" value=${side} onChange=${choose} options=${[["inline", "Inline"], ["sides", "Side by side"]]} />
    </div>
    ${files.map((each) => html`<${FileDiff} key=${each.path} file=${each} sides=${side === "sides"} open=${open && files.length <= 20} />`)}
  </div>`;
}

export function Counts({ added, removed }) {
  return html`<span class="counts">${added > 0 && html`<b class="plus">+${added}</b>`} ${removed > 0 && html`<b class="minus">−${removed}</b>`}</span>`;
}

function FileDiff({ file, sides, open }) {
  const [shown, setShown] = useState(open);
  const language = languageOf(file.path);
  return html`<article class="file-diff">
    <button type="button" class="file-head" aria-expanded=${shown} onClick=${() => setShown(!shown)}>
      <span class="path">${file.path}${file.is_directory ? "/" : ""}</span>
      ${KINDS[file.kind] && html`<span class="tag">${KINDS[file.kind]}</span>`}
      <${Counts} added=${file.added} removed=${file.removed} />
    </button>
    ${shown && file.notes.map((note) => html`<p class="note">${note}</p>`)}
    ${shown && file.hunks.length > 0 && html`<div class="hunks" tabindex="0" role="region" aria-label=${`Changes in ${file.path}`}>
      <table class=${sides ? "sides" : "inline"}>
        ${sides && html`<colgroup><col class="no" /><col /><col class="no" /><col /></colgroup>`}
        <tbody>${limited(file.hunks.flatMap((hunk, at) => [
          html`<tr class="hunk" key=${`h${at}`}><td colspan="4">${at ? "⋯" : ""} line ${hunk.new || hunk.old}</td></tr>`,
          ...(sides ? sideRows(hunk, language) : inlineRows(hunk, language)),
        ]))}</tbody>
      </table>
    </div>`}
  </article>`;
}

function limited(rows) {
  if (rows.length <= MAX_LINES) return rows;
  const more = rows.length - MAX_LINES;
  return [...rows.slice(0, MAX_LINES), html`<tr class="hunk"><td colspan="4">… ${more} more lines</td></tr>`];
}

function inlineRows(hunk, language) {
  let [old, now] = [hunk.old, hunk.new];
  return hunk.lines.map(([mark, text]) => {
    const numbers = mark === "\\" ? ["", ""] : [mark === "+" ? "" : old++, mark === "-" ? "" : now++];
    return html`<tr class=${NAMES[mark]}><td class="no">${numbers[0]}</td><td class="no">${numbers[1]}</td><td class="sign">${mark}</td><td class="src">${coloured(text, language)}</td></tr>`;
  });
}

const NAMES = { "+": "plus", "-": "minus", " ": "same", "\\": "remark" };

// Pairs the removed lines of a block with the added ones that follow them.
function sideRows(hunk, language) {
  let [old, now] = [hunk.old, hunk.new];
  const rows = [];
  let minus = [];
  let plus = [];
  const flush = () => {
    for (let at = 0; at < Math.max(minus.length, plus.length); at++) rows.push([minus[at], plus[at]]);
    [minus, plus] = [[], []];
  };
  for (const [mark, text] of hunk.lines) {
    if (mark === "-") {
      if (plus.length) flush();
      minus.push(["minus", old++, text]);
    } else if (mark === "+") plus.push(["plus", now++, text]);
    else if (mark === " ") {
      flush();
      rows.push([["same", old++, text], ["same", now++, text]]);
    }
  }
  flush();
  const cell = (side) =>
    side
      ? html`<td class=${`no ${side[0]}`}>${side[1]}</td><td class=${`src ${side[0]}`}>${coloured(side[2], language)}</td>`
      : html`<td class="no none"></td><td class="src none"></td>`;
  return rows.map(([left, right]) => html`<tr>${cell(left)}${cell(right)}</tr>`);
}
