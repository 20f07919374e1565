// Parts that every view uses: formats, dialogs, messages, and charts with their tables.

import { h } from "./preact.mjs";
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "./hooks.mjs";
import htm from "./htm.mjs";
import { live } from "./state.js";

export const html = htm.bind(h);

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(number) {
  if (number === null || number === undefined) return "–";
  let unit = 0;
  while (number >= 999.5 && unit < UNITS.length - 1) (number /= 1000), unit++;
  return `${unit && number < 10 ? number.toFixed(1) : Math.round(number)} ${UNITS[unit]}`;
}

export const count = (number) => (number === null || number === undefined ? "–" : number.toLocaleString("en-US"));

export function rate(number) {
  if (number === null || number === undefined) return "–";
  return number < 10 && !Number.isInteger(number) ? number.toFixed(1) : count(Math.round(number));
}

export function seconds(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (number === Infinity) return "> 120 s";
  if (number < 0.0995) return `${(number * 1000).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 0.9995) return `${Math.round(number * 1000)} ms`;
  return number < 100 ? `${number.toFixed(number < 10 ? 2 : 1)} s` : `${Math.round(number / 60)} min`;
}

export function ago(time) {
  const elapsed = (Date.now() + live.clockOffset - new Date(time).getTime()) / 1000;
  if (!(elapsed >= 5)) return Number.isNaN(elapsed) ? "–" : "just now";
  if (elapsed < 60) return `${Math.floor(elapsed)} s ago`;
  if (elapsed < 3600) return `${Math.floor(elapsed / 60)} min ago`;
  if (elapsed < 86400) return `${Math.floor(elapsed / 3600)} h ago`;
  if (elapsed < 86400 * 60) return `${Math.floor(elapsed / 86400)} d ago`;
  return new Date(time).toISOString().slice(0, 10);
}

export const left = (s) =>
  s < 60 ? `${Math.max(1, Math.round(s))} s` : s < 3600 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;

export const Ago = ({ time }) => html`<time datetime=${time} title=${new Date(time).toString()}>${ago(time)}</time>`;

export const percent = (part, digits = 0) =>
  part === null || part === undefined ? "–" : `${(100 * part).toFixed(digits)}%`;

export const pathOf = (name) => `#/variants/${encodeURIComponent(name)}`;

export const cls = (...names) => names.filter(Boolean).join(" ");

/** Where a version is, and whether it stays there. */
export function Level({ level, pinned }) {
  const words = { device: "in a slot", host: "host memory", disk: "on disk" };
  return html`<span class=${`tag level-${level}`}>${words[level] ?? level}</span>${pinned &&
  html`<span class="tag pinned">pinned</span>`}`;
}

export function Panel({ title, aside, children, class: extra, flush }) {
  const body = useRef();
  // What scrolls is reached by the keyboard, in browsers that leave this to the page, too.
  useLayoutEffect(() => {
    if (body.current.scrollHeight > body.current.clientHeight) body.current.tabIndex = 0;
    else if (document.activeElement !== body.current) body.current.removeAttribute("tabindex");
  });
  return html`<section class=${cls("panel", extra)} aria-label=${title}>
    <header><h2>${title}</h2>${aside && html`<div class="aside">${aside}</div>`}</header>
    <div class=${cls("body", flush && "flush")} ref=${body}>${children}</div>
  </section>`;
}

export const Empty = ({ children, title }) =>
  html`<div class="empty"><strong>${title}</strong>${children && html`<p>${children}</p>`}</div>`;

/** What stands where a list would, while it comes or when it failed. */
export function Pending({ failure, retry }) {
  if (!failure) return html`<div class="pending" role="status"><i /><i /><i /><span class="sr">Loading</span></div>`;
  return html`<div class="empty error" role="alert">
    <strong>That did not work</strong>
    <p>${failure.message}</p>
    ${retry && html`<button onClick=${retry}>Try again</button>`}
  </div>`;
}

/** A native dialog, open as long as it is shown; Escape and a click beside it call `onClose`. */
export function Dialog({ title, onClose, children, wide }) {
  const ref = useRef();
  // On the window, since the focus may be outside; the dialog's own `cancel` cannot be prevented twice in a row.
  useLayoutEffect(() => {
    const pressed = (event) => event.key === "Escape" && !event.isComposing && (event.preventDefault(), onClose());
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [onClose]);
  useLayoutEffect(() => {
    const opener = document.activeElement;
    const dialog = ref.current;
    dialog.showModal();
    // What is behind an open dialog cannot take the focus.
    return () => (dialog.close(), opener?.focus?.());
  }, []);
  return html`<dialog
    ref=${ref}
    class=${cls(wide && "wide")}
    aria-label=${title}
    onCancel=${(event) => event.target === ref.current && (event.preventDefault(), onClose())}
    onClick=${(event) => event.target === ref.current && onClose()}
  >
    <div class="sheet">
      <header>
        <h2>${title}</h2>
        <button type="button" class="quiet icon" aria-label="Close" onClick=${onClose}>✕</button>
      </header>
      ${children}
    </div>
  </dialog>`;
}

/** A dialog that does one thing; the server's refusal stays in it. */
export function Ask({ title, children, action, danger, typed, act, onClose }) {
  const [failure, setFailure] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const [text, setText] = useState("");
  // It stays open until the reply: a late reply would close another dialog.
  const close = () => !isBusy && onClose();
  const submit = async (event) => {
    event.preventDefault();
    if (isBusy || (typed && text !== typed)) return;
    setBusy(true);
    setFailure(null);
    try {
      await act();
      onClose();
    } catch (error) {
      setFailure(error);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} onClose=${close}>
    <form onSubmit=${submit}>
      <div class="text">${children}</div>
      ${typed &&
      html`<label class="field">
        <span>Type <b class="mono">${typed}</b> to confirm</span>
        <input autofocus autocomplete="off" spellcheck="false" value=${text} onInput=${(event) => setText(event.target.value)} />
      </label>`}
      ${failure && html`<p class="failure" role="alert">${failure.message}</p>`}
      <footer>
        <button type="button" disabled=${isBusy} onClick=${close}>Cancel</button>
        <button
          type="submit"
          autofocus=${!typed}
          class=${danger ? "danger" : "primary"}
          disabled=${isBusy || (typed && text !== typed)}
        >
          ${isBusy ? "Working…" : action}
        </button>
      </footer>
    </form>
  </${Dialog}>`;
}

let showNotice = () => {};
export const notify = (text, kind = "good") => showNotice({ text, kind, id: Math.random() });

export function Notices() {
  const [notices, setNotices] = useState([]);
  showNotice = useCallback((notice) => {
    setNotices((shown) => [...shown.slice(-2), notice]);
    setTimeout(() => setNotices((shown) => shown.filter((each) => each !== notice)), 6000);
  }, []);
  return html`<div class="notices" role="status" aria-live="polite">
    ${notices.map((each) => html`<div key=${each.id} class=${`notice ${each.kind}`}>${each.text}</div>`)}
  </div>`;
}

const RETRY_MS = 4000;

/**
 * A value that a call returns, read again by `reload` and while the page is visible every `period` ms: a number, or a
 * function of the value. While `isOld` is true, the value is that of earlier inputs.
 */
export function useLoaded(load, inputs, period = 0) {
  const [state, setState] = useState({ value: null, failure: null, inputs });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const aborting = new AbortController();
    let timer = 0;
    let pause = typeof period === "number" ? period : 0;
    const read = async () => {
      try {
        const value = await load(aborting.signal);
        if (typeof period === "function") pause = period(value);
        setState({ value, failure: null, inputs });
      } catch (failure) {
        if (failure.name === "AbortError") return;
        setState((before) => ({ ...before, failure }));
        pause ||= RETRY_MS;
      }
      if (!aborting.signal.aborted && pause) timer = setTimeout(again, pause);
    };
    const again = () => (document.hidden ? (timer = setTimeout(again, pause)) : read());
    read();
    return () => (aborting.abort(), clearTimeout(timer));
  }, [...inputs, turn]);
  const reload = useCallback(() => setTurn((before) => before + 1), []);
  return { ...state, isOld: inputs.some((input, index) => input !== state.inputs[index]), reload };
}

export function useLive() {
  const [, setTurn] = useState(0);
  useEffect(() => {
    const told = () => setTurn((turn) => turn + 1);
    const stop = live.listen(told);
    // It may have been told since the first render.
    told();
    return stop;
  }, []);
  return live;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clock = (time, withSeconds) => new Date(time * 1000).toTimeString().slice(0, withSeconds ? 8 : 5);
// A chart begins with so many seconds, and grows to the kept ones.
const SHORTEST_S = 120;
const LONGEST_S = 900;

/** A chart of series over the kept time, and the same as a table of minutes. */
export function Chart({ label, lines, format }) {
  const ref = useRef();
  const plot = useRef();
  const [theme, setTheme] = useState(0);
  const { times, series } = useLive();
  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setTheme((turn) => turn + 1);
    scheme.addEventListener("change", changed);
    return () => scheme.removeEventListener("change", changed);
  }, []);
  useLayoutEffect(() => {
    const box = ref.current;
    const size = () => ({ width: Math.max(80, box.clientWidth), height: Math.max(60, box.clientHeight) });
    const axis = {
      stroke: color("--muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: color("--line"), width: 1 },
      ticks: { show: false },
    };
    plot.current = new uPlot(
      {
        ...size(),
        padding: [8, 8, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 6 } },
        scales: { y: { range: (_, low, high) => [0, Math.max(1, (high ?? 0) * 1.1)] } },
        axes: [
          { ...axis, grid: { show: false }, size: 24, space: 90, values: (_, ticks, at, space, step) => ticks.map((tick) => clock(tick, step < 60)) },
          { ...axis, size: 44, space: 32, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? count(tick) : "")) },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            stroke: color(line.color),
            width: 1.5,
            fill: line.fill ? color(line.fill) : undefined,
            points: { show: false },
          })),
        ],
        hooks: { setCursor: [(chart) => setAt(chart.cursor.idx ?? null)] },
      },
      [[], ...lines.map(() => [])],
      box,
    );
    const resized = new ResizeObserver(() => plot.current.setSize(size()));
    resized.observe(box);
    return () => (resized.disconnect(), plot.current.destroy());
  }, [theme]);
  const [at, setAt] = useState(null);
  const newest = times.length - 1;
  useEffect(() => {
    const now = Date.now() / 1000;
    plot.current.setData([times, ...lines.map((line) => series[line.of])], false);
    plot.current.batch(() => {
      const span = Math.min(LONGEST_S, Math.max(SHORTEST_S, now - (times[0] ?? now)));
      plot.current.setScale("x", { min: now - span, max: now });
    });
  }, [times[newest], theme]);
  const index = at !== null && at <= newest ? at : newest;
  return html`<div class="chart">
    <div class="legend">
      ${lines.map(
        (line) => html`<span key=${line.of}><i class=${`swatch ${line.of}`} />${line.name}
          <b>${format(series[line.of][index])}</b></span>`,
      )}
      <span class="when">${at !== null && times[at] ? clock(times[at], true) : ""}</span>
    </div>
    <div class="plot" ref=${ref} role="img" aria-label=${`${label}, a chart; the table after it has its values by the minute`} />
    <${MinuteTable} label=${label} lines=${lines} format=${format} />
  </div>`;
}

/** The means of each minute, newest first, behind a button. */
function MinuteTable({ label, lines, format }) {
  const { times, series } = live;
  const minutes = new Map();
  times.forEach((time, index) => {
    const minute = Math.floor(time / 60);
    if (!minutes.has(minute)) minutes.set(minute, []);
    minutes.get(minute).push(index);
  });
  const mean = (line, indexes) => {
    const found = indexes.map((index) => series[line.of][index]).filter((value) => value !== null);
    return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
  };
  return html`<details class="minutes">
    <summary>Table</summary>
    <div class="scroll" tabindex="0">
      <table aria-label=${`${label}, means by the minute`}>
        <thead><tr><th>Minute</th>${lines.map((line) => html`<th class="num">${line.name}</th>`)}</tr></thead>
        <tbody>
          ${[...minutes].reverse().map(
            ([minute, indexes]) => html`<tr key=${minute}>
              <td>${clock(minute * 60)}</td>
              ${lines.map((line) => html`<td class="num">${format(mean(line, indexes))}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  </details>`;
}
