// How figures, times and names are written.

export function money(usd) {
  if (usd === null || usd === undefined) return "–";
  if (usd === 0) return "$0";
  if (Math.abs(usd) < 0.01) return `$${usd.toFixed(4)}`;
  return `$${usd.toFixed(usd < 10 ? 3 : 2)}`.replace(/(\.\d\d)0$/, "$1");
}

export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms < 1) return ms > 0 ? "<1 ms" : "0 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 10) return `${s.toFixed(2)} s`;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} m`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function count(n) {
  if (n === null || n === undefined) return "–";
  if (n < 1000) return String(n);
  if (n < 1e6) return `${(n / 1000).toFixed(n < 10000 ? 1 : 0)}k`;
  return `${(n / 1e6).toFixed(1)}M`;
}

export function bytes(n) {
  if (n < 1024) return `${n} B`;
  if (n < 1024 * 1024) return `${(n / 1024).toFixed(1)} KB`;
  return `${(n / 1024 / 1024).toFixed(1)} MB`;
}

export function plural(n, word) {
  return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
}

export function ago(iso, now = Date.now()) {
  const s = (now - Date.parse(iso)) / 1000;
  if (s < 45) return "just now";
  if (s < 3600) return `${Math.round(s / 60)} min ago`;
  if (s < 86400) return `${Math.round(s / 3600)} h ago`;
  if (s < 86400 * 14) return `${Math.round(s / 86400)} d ago`;
  return iso.slice(0, 10);
}

export function clock(iso) {
  return iso ? new Date(iso).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "";
}

export function words(text) {
  return text.replaceAll("_", " ");
}

// The tone of a state or a row: what colour it has, and nothing else.
const TONES = {
  completed: "good", complete: "good", kept: "good", approved: "good", answered: "good", closed: "good", ready: "good",
  running: "live", pending: "quiet", queued: "quiet", empty: "quiet", withdrawn: "quiet",
  held: "warn", waiting: "warn", unfinished: "warn", interrupted: "warn", timed_out: "warn", cut_off: "warn", left_open: "warn", retried: "warn",
  partial: "warn", partial_failed: "bad", failed: "bad", damaged: "bad", refused: "bad", undone: "undone",
};

export function tone(status, isGood = true) {
  return TONES[status] ?? (isGood ? "quiet" : "bad");
}

export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
