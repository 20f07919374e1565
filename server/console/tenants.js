// Tenants, their limits, and what they use of them.

import { useState } from "./hooks.mjs";
import { call } from "./api.js";
import { Ask, Empty, Panel, Pending, bytes, cls, count, html, notify, useLoaded } from "./ui.js";

const PERIOD_MS = 5000;
const LIMITS = {
  requests_per_minute: "Requests per minute", tokens_per_minute: "Tokens per minute", max_running: "Running requests",
  max_uploads: "Uploads at a time", max_stored_bytes: "Stored bytes", max_stored_versions: "Stored versions",
  max_variants: "Variants", max_versions: "Versions of a variant", max_pinned: "Pinned versions",
};

export function Tenants() {
  const [after, setAfter] = useState([]);
  const [changed, setChanged] = useState(null);
  const { value, failure, isOld, reload } = useLoaded(
    (signal) => call("tenants", { query: { limit: 50, after: after.at(-1) }, signal }),
    [after.at(-1)],
    PERIOD_MS,
  );
  const turnTo = (after) => !isOld && setAfter(after);
  return html`<div class="page">
    <div class="head"><h1>Tenants</h1></div>
    <${Panel} title="Limits and use" flush>
      ${!value
        ? html`<${Pending} failure=${failure} retry=${reload} />`
        : value.tenants.length
          ? html`<table aria-label="Tenants">
              <thead><tr>
                <th>Tenant</th><th>Requests, last minute</th><th>Tokens, last minute</th><th>Running</th><th>Stored</th>
                <th>Variants</th><th>Versions</th><th>Pinned</th><th class="num">Keys</th><th>Limits</th>
              </tr></thead>
              <tbody>
                ${value.tenants.map(
                  ({ name, usage, limits, ...each }) => html`<tr key=${name}>
                    <td class="name"><b>${name}</b></td>
                    <td><${Use} used=${usage.requests_last_minute} of=${limits.requests_per_minute} /></td>
                    <td><${Use} used=${usage.tokens_last_minute} of=${limits.tokens_per_minute} /></td>
                    <td><${Use} used=${usage.running} of=${limits.max_running} /></td>
                    <td><${Use} used=${usage.stored_bytes} of=${limits.max_stored_bytes} format=${bytes} /></td>
                    <td><${Use} used=${each.num_variants} of=${limits.max_variants} /></td>
                    <td><${Use} used=${each.num_versions} of=${limits.max_stored_versions} /></td>
                    <td><${Use} used=${usage.pinned} of=${limits.max_pinned} /></td>
                    <td class="num">${each.num_keys}</td>
                    <td><button class="small" onClick=${() => setChanged({ name, limits })}>${each.has_own_limits ? "Own limits" : "Default limits"}…</button></td>
                  </tr>`,
                )}
              </tbody>
            </table>`
          : html`<${Empty} title="There are no tenants yet">A key or an upload makes one.</${Empty}>`}
    </${Panel}>
    ${(after.length > 0 || value?.has_more) &&
    html`<div class="pager">
      <button disabled=${!after.length} onClick=${() => turnTo(after.slice(0, -1))}>Previous</button>
      <button disabled=${!value?.has_more} onClick=${() => turnTo([...after, value.last_id])}>Next</button>
    </div>`}
    ${changed && html`<${Limits} ...${changed} onClose=${() => (setChanged(null), reload())} />`}
  </div>`;
}

/** What is used of a limit, as numbers and as a bar. */
function Use({ used, of, format = count }) {
  if (used === null || used === undefined) return html`<span class="muted" title="Without keys nothing is counted">–</span>`;
  const share = of === null || of === undefined ? 0 : of ? Math.min(1, used / of) : 1;
  return html`<span class="use">
    <span>${format(used)}${of !== null && of !== undefined && html`<span class="muted"> / ${format(of)}</span>`}</span>
    ${of !== null && of !== undefined && html`<i class=${cls("meter", share >= 0.9 && "full")}><i style=${{ width: `${100 * share}%` }} /></i>`}
  </span>`;
}

function Limits({ name, limits, onClose }) {
  const [given, setGiven] = useState(Object.fromEntries(Object.keys(LIMITS).map((key) => [key, limits[key] ?? ""])));
  const act = async () => {
    const filled = Object.entries(given).filter(([, value]) => value !== "");
    await call(`tenants/${encodeURIComponent(name)}`, {
      method: "PUT",
      body: Object.fromEntries(filled.map(([key, value]) => [key, Number(value)])),
    });
    notify(`Limits of ${name} are set`);
  };
  return html`<${Ask} title=${`Limits of ${name}`} action="Set limits" act=${act} onClose=${onClose}>
    <p>A field that is empty is unlimited. Every server counts by these within a second.</p>
    <div class="fields">
      ${Object.entries(LIMITS).map(
        ([key, title]) => html`<label class="field" key=${key}><span>${title}</span>
          <input type="number" min="0" step="1" placeholder="unlimited" value=${given[key]}
            onInput=${(event) => setGiven({ ...given, [key]: event.target.value })} />
        </label>`,
      )}
    </div>
  </${Ask}>`;
}
