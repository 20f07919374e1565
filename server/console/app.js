// The frame of the page: the caller's key, the navigation, and the view that the address names.

import { render } from "./preact.mjs";
import { useEffect, useState } from "./hooks.mjs";
import { actFor, actingFor, call, hasKey, useKey, whenKeyIsRefused } from "./api.js";
import { live, may, session } from "./state.js";
import { Notices, Pending, html, notify, useLive, useLoaded } from "./ui.js";
import { Overview } from "./overview.js";
import { Variant, Variants } from "./variants.js";
import { Playground } from "./playground.js";
import { Tenants } from "./tenants.js";

const VIEWS = [
  ["overview", "Overview", () => true],
  ["variants", "Variants", () => true],
  ["playground", "Playground", () => may("inference")],
  ["tenants", "Tenants", () => may("admin")],
];

function useRoute() {
  const read = () => {
    const parts = location.hash.replace(/^#\/?/, "").split("?")[0].split("/");
    try {
      return parts.map(decodeURIComponent);
    } catch {
      return [""];
    }
  };
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener("hashchange", changed);
    // It may have changed since the first render.
    changed();
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route[0] ? route : ["overview"];
}

function App() {
  const route = useRoute();
  const [me, setMe] = useState(null);
  const [refusal, setRefusal] = useState(null); // an ApiError; the caller must give a key
  const [failure, setFailure] = useState(null);
  const [turn, setTurn] = useState(0);

  useEffect(() => {
    whenKeyIsRefused((error) => {
      live.forget();
      useKey("", false);
      setRefusal(error);
    });
  }, []);
  useEffect(() => {
    const aborting = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        session.me = await call("me", { signal: aborting.signal });
        setMe(session.me);
        setRefusal(null);
        setFailure(null);
        live.start();
      } catch (error) {
        if (error.name === "AbortError" || error.status === 401) return;
        if (error.status === 403) return setRefusal(error);
        setFailure(error);
        timer = setTimeout(ask, 2000);
      }
    };
    ask();
    return () => (aborting.abort(), clearTimeout(timer));
  }, [turn]);

  if (refusal) {
    return html`<${SignIn}
      refusal=${refusal}
      onKey=${(key, isKept) => {
        useKey(key, isKept);
        setRefusal(null);
        setMe(null);
        setTurn(turn + 1);
      }}
    />`;
  }
  if (!me) {
    return html`<main class="alone">${failure ? html`<${Pending} failure=${failure} />` : html`<${Pending} />`}</main>`;
  }
  const [view, name] = route;
  return html`
    <${Header}
      view=${view}
      me=${me}
      onTenant=${(tenant) => {
        if (name) {
          location.hash = "#/variants";
          // Synchronously: else the other tenant would be asked for this variant.
          dispatchEvent(new Event("hashchange"));
        }
        actFor(tenant);
        setTurn(turn + 1);
      }}
      onSignOut=${() => {
        live.forget();
        useKey("", false);
        setTurn(turn + 1);
      }}
    />
    <${Connection} />
    <main key=${`${view}/${name ?? ""}/${actingFor()}`} id="main" tabindex="-1">
      ${view === "variants" && name
        ? html`<${Variant} name=${name} />`
        : view === "variants"
          ? html`<${Variants} />`
          : view === "playground"
            ? html`<${Playground} />`
            : view === "tenants"
              ? html`<${Tenants} />`
              : html`<${Overview} />`}
    </main>
    <${Notices} />
  `;
}

function Header({ view, me, onTenant, onSignOut }) {
  const { stats, failure } = useLive();
  const state = failure ? "away" : !stats ? "unknown" : stats.server.ready ? "ready" : "starting";
  const words = { away: "not answering", unknown: "", ready: "ready", starting: stats?.server.draining ? "draining" : "starting" };
  return html`<header class="top">
    <a class="brand" href="#/overview"><img src="console/icon.svg" alt="" width="22" height="22" />Peraxis</a>
    <nav aria-label="Views">
      ${VIEWS.filter(([, , isShown]) => isShown()).map(
        ([path, title]) =>
          html`<a key=${path} href=${`#/${path}`} aria-current=${view === path ? "page" : undefined}>${title}</a>`,
      )}
    </nav>
    <div class="spacer" />
    ${words[state] &&
    html`<span class=${`state ${state}`} title=${stats?.server.base ?? ""}>
      <i />${stats?.server.base && html`<b class="mono">${stats.server.base.slice(0, 24)}</b>`}${words[state]}
    </span>`}
    ${may("admin") && hasKey() ? html`<${TenantChoice} own=${me.tenant} onTenant=${onTenant} />` : hasKey() && html`<span class="who">${me.tenant}</span>`}
    ${hasKey() && html`<button class="quiet" onClick=${onSignOut}>Sign out</button>`}
  </header>`;
}

function TenantChoice({ own, onTenant }) {
  const { value } = useLoaded((signal) => call("tenants", { query: { limit: 1000 }, signal }), []);
  const names = new Set([own, ...(value?.tenants.map((each) => each.name) ?? [])]);
  return html`<label class="choice"><span>Tenant</span>
    <select value=${actingFor() || own} onChange=${(event) => onTenant(event.target.value === own ? "" : event.target.value)}>
      ${[...names].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select>
  </label>`;
}

/** A line that stays while the server does not answer. */
function Connection() {
  const { failure, failedAt } = useLive();
  const [wasAway, setAway] = useState(false);
  useEffect(() => {
    if (failure) setAway(true);
    else if (wasAway) {
      setAway(false);
      notify("The server answers again");
      dispatchEvent(new Event("back"));
    }
  }, [failure]);
  return (
    failure &&
    html`<div class="away" role="alert">
      <strong>The server has not answered since ${failedAt.toTimeString().slice(0, 8)}.</strong> Figures below are its last.
      It is asked again every second.
    </div>`
  );
}

function SignIn({ refusal, onKey }) {
  const [key, setKey] = useState("");
  const [isKept, setKept] = useState(true);
  const isFirst = refusal.message.startsWith("this call needs an API key");
  return html`<main class="alone">
    <form
      class="sheet signin"
      onSubmit=${(event) => {
        event.preventDefault();
        if (key.trim()) onKey(key, isKept);
      }}
    >
      <img src="console/icon.svg" alt="" width="40" height="40" />
      <h1>Peraxis console</h1>
      <p>${isFirst ? "This server needs a key. One with the role admin shows everything." : refusal.message}</p>
      <label class="field"><span>API key</span>
        <input type="password" autocomplete="off" autofocus value=${key} onInput=${(event) => setKey(event.target.value)} />
      </label>
      <label class="check"><input type="checkbox" checked=${isKept} onChange=${(event) => setKept(event.target.checked)} />
        Keep it until this tab is closed
      </label>
      <button class="primary" type="submit" disabled=${!key.trim()}>Open</button>
    </form>
  </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
