// The list of a tenant's variants, and the page of one: versions, history and what can be done with them.

import { useEffect, useLayoutEffect, useRef, useState } from "./hooks.mjs";
import { call, upload } from "./api.js";
import { labelOf, leaving, live, may } from "./state.js";
import {
  Ago, Ask, Dialog, Empty, Level, Panel, Pending, bytes, cls, count, html, left, notify, pathOf, percent, useLive, useLoaded,
} from "./ui.js";
import { tryOut } from "./playground.js";

const PAGE = 50;
const PERIOD_MS = 4000;
const SEARCH_MS = 200;
// A variant of more versions than this is read less often.
const MANY = 50;
const RARELY_MS = 60_000;

const pathTo = (name) => `variants/${encodeURIComponent(name)}`;

/** Load again when the server answers again. */
function useBack(reload) {
  useEffect(() => {
    addEventListener("back", reload);
    return () => removeEventListener("back", reload);
  }, [reload]);
}

export function Variants() {
  const [text, setText] = useState("");
  const [search, setSearch] = useState("");
  const [pages, setPages] = useState([]); // what each page begins behind
  const [isUploading, setUploading] = useState(false);
  const input = useRef();
  const after = pages.at(-1);
  const { value, failure, isOld, reload } = useLoaded(
    (signal) => call("variants", { query: { limit: PAGE, after, search }, signal }),
    [after, search],
    PERIOD_MS,
  );
  useBack(reload);
  useEffect(() => {
    if (text.trim() === search) return;
    const timer = setTimeout(() => (setSearch(text.trim()), setPages([])), SEARCH_MS);
    return () => clearTimeout(timer);
  }, [text, search]);
  // A layout effect: who sees the field can press the key, and an effect comes a frame later, or a tenth of a second.
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (event.key !== "/" || /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) return;
      event.preventDefault();
      input.current?.focus();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const from = pages.length * PAGE + 1;
  // A click is ignored until the page has loaded: its `last_id` says where the next one begins.
  const turnTo = (pages) => !isOld && setPages(pages);
  return html`<div class="page">
    <div class="head">
      <h1>Variants</h1>
      <label class="search"><span class="sr">Search by name</span>
        <input ref=${input} type="search" placeholder="Search by name" maxlength="64" value=${text} onInput=${(event) => setText(event.target.value)} />
        <kbd>/</kbd>
      </label>
      <div class="spacer" />
      ${may("publish") && html`<button class="primary" onClick=${() => setUploading(true)}>Upload…</button>`}
    </div>
    <${Panel} title=${search ? `Names with “${search}”` : "All variants"} flush aside=${value ? `${count(value.total)} ${value.total === 1 ? "variant" : "variants"}` : ""}>
      ${!value
        ? html`<${Pending} failure=${failure} retry=${reload} />`
        : value.variants.length
          ? html`<table aria-label="Variants">
              <thead><tr>
                <th>Variant</th><th>Active</th><th>Where it is</th><th class="num">Requests</th><th class="num">Size</th>
                <th class="num">Agreement</th><th class="num">KL</th><th class="num">Versions</th><th>Published</th>
              </tr></thead>
              <tbody>${value.variants.map((each) => html`<${Row} key=${each.name} variant=${each} />`)}</tbody>
            </table>`
          : search
            ? html`<${Empty} title="No name has this part">Names are compared in letters of any case.</${Empty}>`
            : html`<${Empty} title="There are no variants yet">Upload an artifact, or run <code>peraxis push FILE --name NAME</code>.</${Empty}>`}
    </${Panel}>
    ${value &&
    (pages.length > 0 || value.has_more) &&
    html`<nav class="pager" aria-label="Pages">
      <button disabled=${!pages.length} onClick=${() => turnTo(pages.slice(0, -1))}>Previous</button>
      <span>${isOld ? "…" : `${count(from)}–${count(from + value.variants.length - 1)}`} of ${count(value.total)}</span>
      <button disabled=${!value.has_more} onClick=${() => turnTo([...pages, value.last_id])}>Next</button>
    </nav>`}
    ${isUploading && html`<${Upload} onClose=${() => (setUploading(false), reload())} />`}
  </div>`;
}

function Row({ variant }) {
  const active = variant.versions.find((each) => each.version === variant.active);
  const newest = variant.versions.at(-1);
  const shown = active ?? newest;
  return html`<tr>
    <td class="name"><a href=${pathOf(variant.name)}><bdi>${variant.name}</bdi></a>${variant.visibility === "public" && html`<span class="tag">public</span>`}</td>
    <td>${active ? html`<b>v${active.version}</b>` : html`<span class="muted">none</span>`}${newest.version !== shown.version && html` <span class="muted">newest v${newest.version}</span>`}</td>
    <td>${active && html`<${Level} level=${active.level} pinned=${active.pinned} />`}</td>
    <td class="num">${shown.num_requests ? html`<b>${count(shown.num_requests)}</b>` : "–"}</td>
    <td class="num">${bytes(shown.size_bytes)}</td>
    <td class="num">${percent(shown.agreement, 1)}</td>
    <td class="num">${shown.kl === null ? "–" : shown.kl.toPrecision(2)}</td>
    <td class="num">${count(variant.num_versions)}</td>
    <td><${Ago} time=${newest.created_at} /></td>
  </tr>`;
}

/** All versions with the variant's own fields; a variant with more than a few pages has its first ones. */
async function whole(name, signal) {
  let document = await call(pathTo(name), { query: { limit: 200 }, signal });
  const versions = [...document.versions];
  for (let turn = 0; document.has_more && turn < 20; turn++) {
    document = await call(pathTo(name), { query: { limit: 200, after: document.last_id }, signal });
    versions.push(...document.versions);
  }
  return { ...document, versions };
}

export function Variant({ name }) {
  const { value, failure, reload } = useLoaded((signal) => whole(name, signal), [name], (found) =>
    found.versions.length > MANY ? RARELY_MS : PERIOD_MS,
  );
  const [doing, setDoing] = useState(null); // a dialog: what is asked, of which version, and what was active then
  useBack(reload);
  useEffect(() => {
    document.title = `${name} – Peraxis`;
    return () => (document.title = "Peraxis console");
  }, [name]);
  if (failure?.status === 404) {
    return html`<div class="page"><${Head} name=${name} /><${Panel} title="Not found">
      <${Empty} title=${value ? "This variant was deleted" : "There is no such variant"}>
        ${value ? "It was deleted while this page was open. " : ""}<a href="#/variants">See all variants</a>, or upload it.
      </${Empty}>
    </${Panel}></div>`;
  }
  if (!value) return html`<div class="page"><${Head} name=${name} /><${Pending} failure=${failure} retry=${reload} /></div>`;
  const active = value.versions.find((each) => each.version === value.active);
  const previous = value.versions.find((each) => each.version === value.previous);
  // A load or a pin may have its effect a moment after its answer.
  const reloadSoon = () => [0, 800, 2000].forEach((pause) => setTimeout(reload, pause));
  const close = () => (setDoing(null), reloadSoon());
  const act = (action, version) => async () => {
    try {
      await call(`${pathTo(name)}/${action}`, { method: "POST", query: { version: version.version } });
      notify(`${DONE[action]} ${name}@${version.version}`);
    } catch (error) {
      notify(error.message, "bad");
    }
    reloadSoon();
  };
  return html`<div class="page">
    <${Head} name=${name}>
      ${active && html`<span class="tag good">v${active.version} active</span>`}
      <span class="tag">${value.visibility}</span>
      <div class="spacer" />
      ${may("inference") && active && html`<button onClick=${() => tryOut(name)}>Try it</button>`}
      ${may("publish") &&
      html`<button onClick=${() => setDoing(["upload"])}>Upload version…</button>
        <button class="danger quiet" onClick=${() => setDoing(["delete"])}>Delete…</button>
        ${previous && html`<button class="primary" onClick=${() => setDoing(["promote", previous, value])}>${previous.version < value.active ? "Roll back" : "Return"} to v${previous.version}…</button>`}`}
    </${Head}>
    <div class="columns">
      <${Panel} title="Versions" flush aside=${`${count(value.num_versions)}, newest first`}>
        <table aria-label=${`Versions of ${name}`}>
          <thead><tr>
            <th>Version</th><th>Where it is</th><th class="num">Size</th><th class="num">Agreement</th><th class="num">KL</th>
            <th>Method</th><th>Published</th><th><span class="sr">Actions</span></th>
          </tr></thead>
          <tbody>
            ${[...value.versions].reverse().map(
              (each) => html`<tr key=${each.version} class=${cls(each === active && "current")}>
                <td class="name"><b>v${each.version}</b>${each === active && html`<span class="tag good">active</span>`}${each === previous && html`<span class="tag">before</span>`}</td>
                <td><${Level} level=${each.level} pinned=${each.pinned} />${each.num_requests > 0 && html` <span class="muted">${count(each.num_requests)} ${each.num_requests === 1 ? "request" : "requests"}</span>`}</td>
                <td class="num">${bytes(each.size_bytes)}</td>
                <td class="num">${percent(each.agreement, 1)}</td>
                <td class="num">${each.kl === null ? "–" : each.kl.toPrecision(2)}</td>
                <td>${each.method}</td>
                <td><${Ago} time=${each.created_at} /></td>
                <td class="actions">
                  ${may("publish") &&
                  html`${each.level === "device"
                      ? html`<button key="unload" class="small" onClick=${act("unload", each)}>Unload</button>`
                      : html`<button key="load" class="small" onClick=${act("load", each)}>Load</button>`}
                    ${each.pinned
                      ? html`<button key="unpin" class="small" onClick=${act("unpin", each)}>Unpin</button>`
                      : html`<button key="pin" class="small" onClick=${() => setDoing(["pin", each])}>Pin…</button>`}
                    ${each !== active && html`<button class="small" onClick=${() => setDoing(["promote", each, value])}>${active && each.version < active.version ? "Roll back" : "Promote"}…</button>`}
                    <button class="small quiet" aria-label=${`Details of version ${each.version}`} onClick=${() => setDoing(["details", each])}>Details</button>`}
                </td>
              </tr>`,
            )}
          </tbody>
        </table>
      </${Panel}>
      <${History} variant=${value} />
    </div>
    ${doing?.[0] === "promote" && html`<${Promote} name=${name} variant=${doing[2]} version=${doing[1]} onClose=${close} />`}
    ${doing?.[0] === "pin" && html`<${Pin} name=${name} version=${doing[1]} onClose=${close} />`}
    ${doing?.[0] === "upload" && html`<${Upload} name=${name} onClose=${close} />`}
    ${doing?.[0] === "details" && html`<${Details} name=${name} version=${doing[1]} isActive=${doing[1].version === value.active} onDelete=${() => setDoing(["delete", doing[1]])} onClose=${close} />`}
    ${doing?.[0] === "delete" &&
    html`<${Delete} name=${name} version=${doing[1]} onClose=${() => {
      setDoing(null);
      reload();
    }} />`}
  </div>`;
}

const DONE = { load: "Asked to load", unload: "Unloaded", pin: "Pinned", unpin: "Unpinned" };

const Head = ({ name, children }) => html`<div class="head">
  <a class="back" href="#/variants" aria-label="All variants">Variants</a><span class="muted">/</span>
  <h1 class="mono"><bdi>${name}</bdi></h1>${children}
</div>`;

/** Publications that became active and promotions, newest first. */
function History({ variant }) {
  const published = variant.versions
    .filter((each) => each.activate)
    .map((each) => ({ version: each.version, at: each.created_at, word: "published as active" }));
  const versions = new Set(variant.versions.map((each) => each.version));
  const promoted = variant.history.map((each) => ({
    version: each.version, at: each.promoted_at, by: each.key_id, isDeleted: !versions.has(each.version), word: "promoted",
  }));
  const shown = [...promoted, ...published].sort((one, other) => (one.at < other.at ? 1 : -1));
  return html`<${Panel} title="History" flush class="history">
    ${shown.length
      ? html`<ol class="timeline">
          ${shown.map(
            (each) => html`<li key=${`${each.at} ${each.word} ${each.version}`} class=${each.word === "promoted" ? "promote" : "publish"}>
              <span class="what"><b>v${each.version}</b> ${each.word}${each.isDeleted && html` <span class="muted">(deleted since)</span>`}</span>
              <span class="by"><${Ago} time=${each.at} />${each.by && ` · key ${each.by}`}</span>
            </li>`,
          )}
        </ol>`
      : html`<${Empty} title="No version has been active yet">Promote one.</${Empty}>`}
  </${Panel}>`;
}

function Promote({ name, variant, version, onClose }) {
  const active = variant.versions.find((each) => each.version === variant.active);
  const isBack = active && version.version < active.version;
  const act = async () => {
    // Refused if somebody was first: what this dialog shows would not be what is replaced.
    await call(pathTo(name), { method: "PATCH", body: { active: version.version, if_active: variant.active ?? 0 } });
    notify(`${name}: v${version.version} is active`);
  };
  const change = (title, value) => html`<tr><th scope="row">${title}</th><td>${active ? value(active) : "–"}</td><td>${value(version)}</td></tr>`;
  return html`<${Ask} title=${isBack ? `Roll back ${name}` : `Promote ${name}`} action=${isBack ? `Roll back to v${version.version}` : `Promote v${version.version}`} act=${act} onClose=${onClose}>
    <p>New requests get version ${version.version} at once. Running ones end with the version that they began with.</p>
    <table class="plain compare" aria-label="What changes">
      <thead><tr><th><span class="sr">Figure</span></th><th>${active ? `v${active.version}, now` : "now"}</th><th>v${version.version}</th></tr></thead>
      <tbody>
        ${change("Agreement", (each) => percent(each.agreement, 1))}
        ${change("KL", (each) => each.kl?.toPrecision(2) ?? "–")}
        ${change("Size", (each) => bytes(each.size_bytes))}
        ${change("Published", (each) => html`<${Ago} time=${each.created_at} />`)}
      </tbody>
    </table>
  </${Ask}>`;
}

function Pin({ name, version, onClose }) {
  useLive();
  const evicted = version.level === "device" ? [] : leaving(live.stats);
  const free = live.stats ? live.stats.engine.slots - live.stats.engine.slots_in_use : null;
  const act = async () => {
    await call(`${pathTo(name)}/pin`, { method: "POST", query: { version: version.version } });
    notify(`Pinned ${name}@${version.version}`);
  };
  return html`<${Ask} title=${`Pin ${name}@${version.version}`} action="Pin" act=${act} onClose=${onClose}>
    <p>A pinned version stays in its slot until it is unpinned, and takes ${bytes(version.device_bytes)} of device memory.</p>
    <p class="forecast">
      ${version.level === "device"
        ? "It is in a slot already: nothing is evicted."
        : free === null
          ? "What it would evict is only shown to administrators."
          : free > 0
            ? `${free} of ${live.stats.engine.slots} slots ${free === 1 ? "is" : "are"} free: nothing is evicted.`
            : evicted.length
              ? html`No slot is free. As things stand it would evict <b class="mono">${labelOf(evicted[0])}</b>, which was used longest ago.`
              : "No slot is free, and all are pinned or in use: it waits until one is not."}
    </p>
  </${Ask}>`;
}

function Delete({ name, version, onClose }) {
  const act = async () => {
    await call(pathTo(name), { method: "DELETE", query: { version: version?.version } });
    notify(`Deleted ${version ? `${name}@${version.version}` : name}`);
    if (!version) location.hash = "#/variants";
  };
  return html`<${Ask} title=${version ? `Delete ${name}@${version.version}` : `Delete ${name}`} action="Delete" danger typed=${version ? `${name}@${version.version}` : name} act=${act} onClose=${onClose}>
    <p>${version ? "This version is" : "All its versions are"} refused to new requests at once; running ones end. This cannot be undone. The number is never assigned again.</p>
  </${Ask}>`;
}

function Details({ name, version, isActive, onDelete, onClose }) {
  return html`<${Dialog} wide title=${`${name}@${version.version}`} onClose=${onClose}>
    <div class="text">
      <dl>
        <dt>Digest</dt><dd class="mono wrap">${version.digest}</dd>
        <dt>Artifact</dt><dd>${bytes(version.size_bytes)}, ${bytes(version.device_bytes)} in a slot</dd>
        <dt>Method</dt><dd>${version.method}</dd>
        <dt>Published</dt><dd>${new Date(version.created_at).toString()}</dd>
      </dl>
      <h3>Fidelity report</h3>
      <pre tabindex="0">${JSON.stringify(version.fidelity, null, 2)}</pre>
    </div>
    <footer>
      <button type="button" class="danger quiet" disabled=${isActive} title=${isActive ? "Promote another version first" : ""} onClick=${onDelete}>Delete version…</button>
      <div class="spacer" />
      <button type="button" autofocus onClick=${onClose}>Close</button>
    </footer>
  </${Dialog}>`;
}

function Upload({ name: given, onClose }) {
  const [name, setName] = useState(given ?? "");
  const [file, setFile] = useState(null);
  const [isActive, setActive] = useState(true);
  const [progress, setProgress] = useState(null); // {sent, rate, isChecked}
  const [failure, setFailure] = useState(null);
  const aborting = useRef(null);
  useEffect(() => () => aborting.current?.abort(), []);
  const send = async (event) => {
    event.preventDefault();
    if (!file || !name || progress) return;
    setFailure(null);
    aborting.current = new AbortController();
    const points = [[performance.now(), 0]]; // of the last seconds, for a rate that follows changes
    setProgress({ sent: 0, rate: null });
    const onProgress = (sent) => {
      const now = performance.now();
      points.push([now, sent]);
      while (points.length > 2 && now - points[0][0] > 5000) points.shift();
      const [[begin, before]] = points;
      setProgress({ sent, rate: now > begin ? (1000 * (sent - before)) / (now - begin) : null });
    };
    try {
      const made = await upload(file, { name, activate: isActive ? undefined : "false" }, aborting.current.signal, onProgress);
      notify(!made.isNew ? `${name} has these bytes already, as v${made.version}` : `${name}@${made.version} is published`);
      onClose();
    } catch (error) {
      setProgress(null);
      if (error.name !== "AbortError") setFailure(error);
    }
  };
  const share = progress && file.size ? progress.sent / file.size : 0;
  const isSent = progress && progress.sent >= file.size;
  return html`<${Dialog} title=${given ? `Upload a version of ${given}` : "Upload a variant"} onClose=${() => !progress && onClose()}>
    <form onSubmit=${send}>
      <div class="text">
        ${!given &&
        html`<label class="field"><span>Name</span>
          <input required pattern="[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}" title="1 to 64 letters, digits, '.', '_' and '-'" spellcheck="false" autocomplete="off" autofocus value=${name} disabled=${progress} onInput=${(event) => setName(event.target.value)} />
        </label>`}
        <label class="field"><span>Artifact, of <code>peraxis compress</code></span>
          <input type="file" accept=".safetensors" disabled=${progress} onChange=${(event) => setFile(event.target.files[0] ?? null)} />
        </label>
        <label class="check"><input type="checkbox" checked=${isActive} disabled=${progress} onChange=${(event) => setActive(event.target.checked)} />
          Make it the active version at once</label>
        ${progress &&
        html`<div class="progress">
          <progress max="1" value=${isSent ? undefined : share} aria-label="Upload" />
          <p role="status">${isSent
            ? "All bytes are there. The server checks them…"
            : html`${bytes(progress.sent)} of ${bytes(file.size)}${progress.rate ? html` · ${bytes(progress.rate)}/s · ${left((file.size - progress.sent) / progress.rate)} left` : ""}`}</p>
        </div>`}
        ${failure && html`<p class="failure" role="alert">${failure.message}</p>`}
      </div>
      <footer>
        ${progress
          ? html`<button type="button" onClick=${() => aborting.current.abort()}>Cancel upload</button>`
          : html`<button type="button" onClick=${onClose}>Cancel</button><button class="primary" type="submit" disabled=${!file || !name}>Upload</button>`}
      </footer>
    </form>
  </${Dialog}>`;
}
