// Colours for code: comments, strings, numbers and keywords, for most languages in one pattern.

import { html } from "./vendor/preact.js";

const KEYWORDS = new Set(
  ("and as assert async await break case catch class const continue def default del do elif else enum except export extends false " +
    "finally fn for from func function global if impl import in interface is lambda let loop match mod module mut new nil none not null " +
    "or package pass pub public private protected raise return select self static struct super switch this throw trait true try type " +
    "typeof undefined union unsafe use var void while with yield False None True SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE").split(" "),
);
const HASH = /^(py|sh|bash|zsh|rb|toml|yml|yaml|conf|cfg|ini|mk|r|pl|tf|dockerfile|makefile)$/i;
const SLASH = /^(js|mjs|ts|tsx|jsx|c|h|cc|cpp|hpp|java|go|rs|swift|kt|cs|css|scss|php|scala|proto)$/i;
const PLAIN = /^(md|txt|rst|csv|log|)$/i;
const MAX_CHARS = 4000; // a longer line is not worth the time

function pattern(language) {
  const comment = HASH.test(language) ? "#.*" : SLASH.test(language) ? "\\/\\/.*|\\/\\*.*?(?:\\*\\/|$)" : "(?!)";
  return new RegExp(
    `(${comment})|("(?:[^"\\\\]|\\\\.)*"?|'(?:[^'\\\\]|\\\\.)*'?|\`(?:[^\`\\\\]|\\\\.)*\`?)|(\\b\\d[\\w.]*\\b)|([A-Za-z_]\\w*)`,
    "g",
  );
}

export function languageOf(path) {
  const name = path.split("/").pop();
  return name.includes(".") ? name.split(".").pop() : name.toLowerCase();
}

// Returns text nodes and spans: whatever the text holds, none of it becomes markup.
export function coloured(text, language) {
  if (PLAIN.test(language) || text.length > MAX_CHARS) return text;
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(pattern(language))) {
    const [all, comment, string, number, word] = found;
    const kind = comment ? "c" : string ? "s" : number ? "n" : KEYWORDS.has(word) ? "k" : null;
    if (!kind) continue;
    if (found.index > at) parts.push(text.slice(at, found.index));
    parts.push(html`<span class=${`t-${kind}`}>${all}</span>`);
    at = found.index + all.length;
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

export function Code({ text, language = "", label = "Code" }) {
  const lines = text.split("\n");
  const shown = lines.length > 2000 ? lines.slice(0, 2000) : lines;
  const body = shown.length > 600 ? shown.join("\n") : shown.map((line, at) => html`${at ? "\n" : ""}${coloured(line, language)}`);
  const more = lines.length - shown.length;
  return html`<pre class="code" tabindex="0" role="region" aria-label=${label}><code>${body}</code>${
    more > 0 ? html`<span class="more">… ${more.toLocaleString("en")} more lines</span>` : ""
  }</pre>`;
}
