// One screen that answers what is loaded, what is slow, and what changed last.

import { useRef } from "./hooks.mjs";
import { actingFor, call } from "./api.js";
import { growth, quantile, summed } from "./live.js";
import { labelOf, leaving, live, session } from "./state.js";
import {
  Ago, Chart, Empty, Level, Panel, Pending, bytes, count, html, pathOf, percent, rate, seconds, useLive, useLoaded,
} from "./ui.js";

const CHANGES_MS = 5000;
// Rows of the table of loaded versions; a host cache may hold thousands.
const SHOWN = 100;

export function Overview() {
  const { stats, forbidden, failure } = useLive();
  if (forbidden) {
    return html`<div class="page"><${Panel} title="Overview">
      <${Empty} title="This key does not see the server's figures">
        They name all tenants, so they need a key with the role admin. <a href="#/variants">The variants of your tenant</a> are
        open to you.
      </${Empty}>
    </${Panel}></div>`;
  }
  if (!stats) return html`<div class="page"><${Pending} failure=${failure} /></div>`;
  return html`<div class="overview">
    <h1 class="sr">Overview</h1>
    <${Figures} stats=${stats} />
    <${Panel} title="Tokens per second" class="tokens">
      <${Chart} label="Tokens per second" format=${rate} lines=${[
        { of: "generation", name: "generated", color: "--accent", fill: "--accent-soft" },
        { of: "prompt", name: "prompt", color: "--second" },
      ]} />
    </${Panel}>
    <${Panel} title="Requests" class="requests">
      <${Chart} label="Requests" format=${rate} lines=${[
        { of: "running", name: "running", color: "--accent", fill: "--accent-soft" },
        { of: "waiting", name: "waiting", color: "--warn" },
      ]} />
    </${Panel}>
    <${Memory} stats=${stats} />
    <${Loaded} stats=${stats} />
    <${Slow} stats=${stats} />
    <${Changes} />
  </div>`;
}

function Figure({ name, value, unit, note, tone }) {
  return html`<div class="figure">
    <span class="name">${name}</span>
    <span class=${`value ${tone ?? ""}`}>${value}${unit && html`<small>${unit}</small>`}</span>
    <span class="note">${note}</span>
  </div>`;
}

function Figures({ stats }) {
  const { requests, engine, duration_bounds_s: bounds } = stats;
  const oldest = live.kept[0];
  const first = growth(stats.first_token, live.kept.length > 1 ? oldest.first_token : undefined);
  const cold = summed(stats.cold_starts);
  const colder = growth(cold, live.first && summed(live.first.cold_starts));
  const last = (name) => live.series[name].at(-1);
  const mean = first.count ? first.sum_s / first.count : null;
  return html`<div class="figures">
    <${Figure} name="Generated" value=${rate(last("generation"))} unit="tok/s"
      note=${`${rate(last("prompt"))} prompt tok/s`} />
    <${Figure} name="Requests" value=${count(requests.running)} unit="running" tone=${requests.waiting ? "warn" : ""}
      note=${requests.waiting ? `${count(requests.waiting)} wait, ${count(requests.waiting_for_load)} of them for a load` : "none waits"} />
    <${Figure} name="Batch" value=${rate(last("batch"))} unit="requests"
      note=${last("batch") === null ? "no step in the last second" : `${rate(last("mix"))} variants in a step`} />
    <${Figure} name="First token, last minute" value=${seconds(mean)}
      note=${mean === null ? "no request began" : `95% within ${seconds(quantile(first, bounds, 0.95))}`} />
    <${Figure} name="Cold starts" value=${count(colder.count)}
      note=${cold.count ? `${seconds(cold.sum_s / cold.count)}, mean of ${count(cold.count)}` : "none yet"} />
    <${Figure} name="Slots" value=${`${engine.slots_in_use} / ${engine.slots}`}
      tone=${engine.slots && engine.slots_pinned === engine.slots ? "warn" : ""} note=${`${engine.slots_pinned} pinned`} />
    <${Figure} name="KV cache" value=${percent(engine.kv_cache_usage)} tone=${engine.kv_cache_usage > 0.9 ? "warn" : ""}
      note=${engine.preemptions ? `${count(engine.preemptions)} preemptions` : "no preemptions"} />
  </div>`;
}

const KINDS = { base: "Base model", slots: "Slots for deltas", kv: "KV cache", other: "Other" };

/** Memory by tier. Each bar has its numbers beside it. */
function Memory({ stats }) {
  const { engine } = stats;
  const kinds = Object.entries(engine.device_memory_bytes).filter(([, size]) => size);
  const total = kinds.reduce((sum, [, size]) => sum + size, 0);
  const held = stats.variants.filter((each) => each.level === "device");
  const hosted = stats.variants.filter((each) => each.level === "host");
  return html`<${Panel} title="Memory" class="memory" aside=${total ? bytes(total + engine.host_cache_bytes) : ""}>
    <div class="stack" aria-hidden="true">
      ${kinds.map(([kind, size]) => html`<i key=${kind} class=${`fill-${kind}`} style=${{ flexGrow: size / total }} />`)}
    </div>
    <table class="plain" aria-label="Device memory by use">
      <tbody>
        ${kinds.map(
          ([kind, size]) => html`<tr key=${kind}>
            <td><i class=${`swatch fill-${kind}`} />${KINDS[kind] ?? kind}</td>
            <td class="num">${kind === "kv" ? `${percent(engine.kv_cache_usage)} used` : kind === "slots" ? `${engine.slots_in_use} of ${engine.slots}` : ""}</td>
            <td class="num">${bytes(size)}</td>
          </tr>`,
        )}
        <tr class="split">
          <td>Host cache</td>
          <td class="num">${hosted.length} ${hosted.length === 1 ? "delta" : "deltas"}</td>
          <td class="num">${bytes(engine.host_cache_bytes)} of ${bytes(engine.host_cache_limit_bytes)}</td>
        </tr>
      </tbody>
    </table>
    <div class="slots" aria-hidden="true">
      ${Array.from({ length: Math.min(engine.slots, 64) }, (_, index) => {
        const slot = held[held.length - 1 - index];
        const kind = !slot ? (index < engine.slots_in_use ? "loading" : "free") : slot.pinned ? "pinned" : slot.num_requests ? "busy" : "idle";
        return html`<i key=${index} class=${kind} title=${slot ? labelOf(slot) : kind} />`;
      })}
    </div>
    <p class="key" aria-hidden="true"><i class="busy" />in use <i class="idle" />idle <i class="pinned" />pinned <i class="free" />free</p>
  </${Panel}>`;
}

function Loaded({ stats }) {
  const next = new Set(leaving(stats).map(labelOf));
  const own = actingFor() || session.me.tenant;
  const hasOthers = stats.variants.some((each) => each.tenant !== own);
  const number = stats.variants.length;
  // Rows are not reordered while a link is hovered or focused: an element that moves loses the focus and the click.
  const table = useRef();
  const order = useRef(new Map());
  const isHeld = table.current?.querySelector("a:hover, a:focus");
  const placeOf = (each) => (isHeld && order.current.get(labelOf(each))) ?? SHOWN;
  const shown = stats.variants.slice(-SHOWN).reverse().sort((one, other) => placeOf(one) - placeOf(other));
  order.current = new Map(shown.map((each, index) => [labelOf(each), index]));
  return html`<${Panel} title="Loaded" class="loaded" flush
    aside=${number ? `${count(number)} in memory, used last first` : ""}>
    ${shown.length
      ? html`<table ref=${table} aria-label="Versions in memory">
          <thead><tr><th>Variant</th><th>Where</th><th class="num">Requests</th><th class="num">Tok/s</th><th class="num">Size</th></tr></thead>
          <tbody>
            ${shown.map(
              (each) => html`<tr key=${labelOf(each)}>
                <td class="name">
                  ${each.tenant === own ? html`<a href=${pathOf(each.name)}>${each.name}</a>` : html`<span>${each.name}</span>`}<span class="at">@${each.version}</span>
                  ${hasOthers && each.tenant !== own && html`<span class="owner">${each.tenant}</span>`}
                </td>
                <td><${Level} level=${each.level} pinned=${each.pinned} />${next.has(labelOf(each)) &&
                html`<span class="tag next" title="The next load evicts it, if nothing uses it until then">next to leave</span>`}</td>
                <td class="num">${each.num_requests ? html`<b>${count(each.num_requests)}</b>` : "–"}</td>
                <td class="num">${live.rateOf(each) ? rate(live.rateOf(each)) : "–"}</td>
                <td class="num">${bytes(each.device_bytes)}</td>
              </tr>`,
            )}
            ${number > SHOWN && html`<tr><td colspan="5" class="muted">and ${count(number - SHOWN)} more, used before these</td></tr>`}
          </tbody>
        </table>`
      : html`<${Empty} title="No variant is in memory">A request loads its variant, and <a href="#/variants">Load</a> does so before.</${Empty}>`}
  </${Panel}>`;
}

const SOURCES = { store: "bucket", disk: "disk", host: "host" };
const STAGES = { fetch: "download", read: "read", copy: "copy to slot", total: "whole load" };

function Slow({ stats }) {
  const bounds = stats.duration_bounds_s;
  const rows = [
    ...stats.cold_starts.map((each) => ["Cold start", `from ${SOURCES[each.source]}`, each]),
    ...["disk", "store", "host"].flatMap((source) =>
      stats.loads
        .filter((each) => each.source === source && each.count)
        .map((each) => [`From ${SOURCES[source]}`, STAGES[each.stage], each]),
    ),
  ].filter(([, , each]) => each.count);
  const longest = Math.max(...rows.map(([, , each]) => each.sum_s / each.count), 1e-9);
  return html`<${Panel} title="Cold starts and loads" class="slow" flush aside=${rows.length ? "since the start" : ""}>
    ${rows.length
      ? html`<table aria-label="Cold starts and loads by stage">
          <thead><tr><th>What</th><th class="num">Count</th><th>Mean</th><th class="num">95%</th></tr></thead>
          <tbody>
            ${rows.map(
              ([group, stage, each]) => html`<tr key=${group + stage}>
                <td>${group} <span class="muted">${stage}</span></td>
                <td class="num">${count(each.count)}</td>
                <td class="bar"><i style=${{ width: `${(100 * each.sum_s) / each.count / longest}%` }} /><span>${seconds(each.sum_s / each.count)}</span></td>
                <td class="num">${seconds(quantile(each, bounds, 0.95))}</td>
              </tr>`,
            )}
          </tbody>
        </table>`
      : html`<${Empty} title="Nothing has been loaded yet">The first request of each variant is a cold start.</${Empty}>`}
  </${Panel}>`;
}

const WORDS = {
  publish: "published", promote: "promoted", delete: "deleted", pin: "pinned", unpin: "unpinned",
  visibility: "changed who may use", create_key: "made a key for", revoke_key: "revoked a key of", set_limits: "set limits of",
};

function Changes() {
  const { value, failure, reload } = useLoaded((signal) => call("changes", { query: { limit: 50 }, signal }), [], CHANGES_MS);
  const own = actingFor() || session.me.tenant;
  return html`<${Panel} title="Last changes" class="changes" flush>
    ${!value
      ? html`<${Pending} failure=${failure} retry=${reload} />`
      : value.changes.length
        ? html`<ol class="timeline">
            ${value.changes.map(
              (each) => html`<li key=${`${each.time} ${each.action} ${each.tenant}/${each.variant}@${each.version}`} class=${each.action}>
                <span class="what">
                  ${each.variant
                    ? html`${each.tenant === own && each.action !== "delete" ? html`<a href=${pathOf(each.variant)}>${each.variant}</a>` : html`<b>${each.variant}</b>`}${each.version && html`<span class="at">@${each.version}</span>`} ${WORDS[each.action]}${each.visibility && `: ${each.visibility}`}`
                    : html`${WORDS[each.action]} <b>${each.tenant}</b>`}
                </span>
                <span class="by"><${Ago} time=${each.time} />${each.key_id && html` · key ${each.key_id}`}${each.variant && each.tenant !== own && ` · ${each.tenant}`}</span>
              </li>`,
            )}
          </ol>`
        : html`<${Empty} title="Nothing has changed yet">Uploads, promotions, pins and limits are listed here.</${Empty}>`}
  </${Panel}>`;
}
