// Two variants, or two versions of one, answer the same prompt side by side.

import { useEffect, useRef, useState } from "./hooks.mjs";
import { call, stream, whenCallerChanges } from "./api.js";
import { Panel, cls, count, html, rate, seconds } from "./ui.js";

const EMPTY = { models: ["", ""], prompt: "", kind: "chat", tokens: 128, temperature: 0, seed: 0 };
const chosen = { ...EMPTY };
whenCallerChanges(() => Object.assign(chosen, EMPTY));

/** Where two texts part, in UTF-16 units and never inside a character. */
export function partingOf(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at++;
  return at && /[\uD800-\uDBFF]/.test(one[at - 1]) ? at - 1 : at;
}

export const tryOut = (model) => {
  chosen.models = [model, chosen.models[1] === model ? "" : chosen.models[1]];
  location.hash = "#/playground";
};

export function Playground() {
  const [form, setForm] = useState(chosen);
  const [answers, setAnswers] = useState([null, null]);
  const [names, setNames] = useState([]);
  const aborting = useRef(null);
  const set = (changes) => setForm(Object.assign(chosen, changes) && { ...chosen });
  const isRunning = answers.some((each) => each?.state === "running");
  useEffect(() => {
    const loading = new AbortController();
    call("v1/models", { query: { limit: 200 }, signal: loading.signal }).then(
      ({ data }) => {
        setNames(data.map((each) => each.id));
        // Not while a field has the focus: what is typed would be appended to the default.
        if (!chosen.models.some(Boolean) && !document.activeElement.matches(".model input"))
          set({ models: [data[1]?.id ?? "base", data[1] ? "base" : ""] });
      },
      () => {},
    );
    return () => (loading.abort(), aborting.current?.abort());
  }, []);

  const run = (event) => {
    event?.preventDefault();
    if (isRunning || !form.prompt || !form.models.some(Boolean)) return;
    aborting.current = new AbortController();
    setAnswers([null, null]);
    form.models.forEach((model, index) => {
      if (!model) return;
      const tell = (answer) => setAnswers((before) => before.map((each, at) => (at === index ? answer : each)));
      answer(model, form, aborting.current.signal, tell);
    });
  };
  const [one, other] = answers;
  const parting = one?.text && other?.text ? partingOf(one.text, other.text) : null;
  const isWhole = one?.state === "done" && other?.state === "done";
  const isEqual = isWhole && one.text === other.text;
  return html`<div class="page playground">
    <div class="head"><h1>Playground</h1></div>
    <form class="ask panel" onSubmit=${run}>
      <label class="field prompt"><span>Prompt</span>
        <textarea rows="3" value=${form.prompt} placeholder="Ask both the same" onInput=${(event) => set({ prompt: event.target.value })}
          onKeyDown=${(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && run(event)} />
      </label>
      <div class="options">
        <label class="field"><span>Form</span>
          <select value=${form.kind} onChange=${(event) => set({ kind: event.target.value })}>
            <option value="chat">Chat</option><option value="completion">Completion</option>
          </select></label>
        <label class="field"><span>Tokens</span><input type="number" min="1" max="100000" value=${form.tokens} onInput=${(event) => set({ tokens: Number(event.target.value) || 1 })} /></label>
        <label class="field"><span>Temperature</span><input type="number" min="0" max="100" step="0.1" value=${form.temperature} onInput=${(event) => set({ temperature: Number(event.target.value) || 0 })} /></label>
        <label class="field"><span>Seed</span><input type="number" min="0" value=${form.seed} onInput=${(event) => set({ seed: Number(event.target.value) || 0 })} /></label>
        <div class="spacer" />
        ${parting !== null && html`<span class="verdict" role="status">${isEqual ? "Both texts are equal" : parting < Math.min(one.text.length, other.text.length) || isWhole ? `They part after ${count(parting)} characters` : "Equal so far"}</span>`}
        ${isRunning
          ? html`<button type="button" onClick=${() => aborting.current.abort()}>Stop</button>`
          : html`<button class="primary" type="submit" disabled=${!form.prompt || !form.models.some(Boolean)} title="Ctrl+Enter">Run both</button>`}
      </div>
    </form>
    <datalist id="models">${names.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    <div class="sides">
      ${form.models.map(
        (model, index) => html`<${Side} key=${index} side=${index ? "Right" : "Left"} model=${model} answer=${answers[index]}
          parting=${isEqual ? null : parting}
          onModel=${(name) => set({ models: form.models.map((each, at) => (at === index ? name.trim() : each)) })} />`,
      )}
    </div>
  </div>`;
}

function Side({ side, model, answer, parting, onModel }) {
  const text = answer?.text ?? "";
  return html`<section class="panel side" aria-label=${`${side} answer`}>
    <header>
      <label class="model"><span class="sr">${side} variant, NAME or NAME@VERSION</span>
        <input class="mono" list="models" spellcheck="false" placeholder="variant, variant@version or base" value=${model} onInput=${(event) => onModel(event.target.value)} />
      </label>
      ${answer?.version && html`<span class="tag">v${answer.version}</span>`}
      ${answer?.digest && html`<span class="tag mono" title=${answer.digest}>${answer.digest.replace("sha256:", "").slice(0, 12)}</span>`}
      ${answer?.was && html`<span class=${cls("tag", answer.was === "device" ? "good" : "cold")}>${answer.was === "device" ? "warm" : `cold, from ${answer.was === "host" ? "host memory" : "disk"}`}</span>`}
    </header>
    <div class="answer" tabindex="0" aria-live="off" dir="auto">
      ${answer?.failure
        ? html`<p class="failure" role="alert">${answer.failure.message}</p>`
        : answer
          ? html`${parting === null ? text : text.slice(0, parting)}${parting !== null && parting < text.length && html`<mark>${text.slice(parting)}</mark>`}${answer.state === "running" && html`<i class="caret" />`}`
          : html`<span class="muted">The answer comes here.</span>`}
    </div>
    <footer class="measures">
      <span>First token <b>${seconds(answer?.firstS)}</b></span>
      <span>Speed <b>${rate(answer?.rate)}</b> tok/s</span>
      <span>Tokens <b>${count(answer?.tokens)}</b></span>
      <span>${answer?.reason ? `ended by ${answer.reason}` : answer?.state === "stopped" ? "stopped" : ""}</span>
    </footer>
  </section>`;
}

/** Where the version is that a request will have; null of the base and of other tenants' variants. */
async function levelOf(model, signal) {
  if (model === "base") return null;
  const [name, number] = model.split("@");
  try {
    const { active } = number ? {} : await call(`variants/${encodeURIComponent(name)}`, { query: { limit: 1 }, signal });
    const version = Number(number ?? active);
    const { versions } = await call(`variants/${encodeURIComponent(name)}`, { query: { limit: 1, after: version - 1 }, signal });
    return versions[0]?.version === version ? versions[0].level : null;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return null;
  }
}

async function answer(model, form, signal, tell) {
  const state = { state: "running", text: "" };
  const shown = () => tell({ ...state });
  shown();
  try {
    state.was = await levelOf(model, signal);
    const isChat = form.kind === "chat";
    const body = {
      model, max_tokens: form.tokens, temperature: form.temperature, seed: form.seed, stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...(isChat ? { messages: [{ role: "user", content: form.prompt }] } : { prompt: form.prompt }),
    };
    const began = performance.now();
    let firstAt = 0;
    let lastAt = 0;
    const onHead = (headers) => {
      state.version = headers.get("X-Peraxis-Version");
      state.digest = headers.get("X-Peraxis-Digest");
    };
    await stream(isChat ? "v1/chat/completions" : "v1/completions", body, signal, onHead, (part) => {
      const [choice] = part.choices ?? [];
      const text = choice && (isChat ? (choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? "") : choice.text);
      if (text) {
        lastAt = performance.now();
        if (!firstAt) state.firstS = ((firstAt = lastAt) - began) / 1000;
        state.text += text;
      }
      if (choice?.finish_reason) state.reason = choice.finish_reason;
      if (part.usage) {
        state.tokens = part.usage.completion_tokens;
        if (lastAt > firstAt) state.rate = (1000 * (state.tokens - 1)) / (lastAt - firstAt);
      }
      shown();
    });
    state.state = "done";
  } catch (error) {
    state.state = error.name === "AbortError" ? "stopped" : "failed";
    if (state.state === "failed") state.failure = error;
  }
  shown();
}
