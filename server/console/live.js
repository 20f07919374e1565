// The live state of the server: `/stats` is asked once a second while the page is visible, and 15 minutes are kept.

import { call } from "./api.js";

const PERIOD_MS = 1000;
const KEPT = 900;
const RECENT_S = 10; // over which the rate of one variant is taken
const SERIES = ["generation", "prompt", "running", "waiting", "batch", "mix"];

/** The totals of one kind of durations, as sums over `found`. */
export function summed(found) {
  const total = { count: 0, sum_s: 0, buckets: [] };
  for (const each of found) {
    total.count += each.count;
    total.sum_s += each.sum_s;
    each.buckets.forEach((count, index) => (total.buckets[index] = (total.buckets[index] ?? 0) + count));
  }
  return total;
}

/** What `now` has counted more than `before`; all of it after a restart. */
export function growth(now, before) {
  if (!before || before.count > now.count) return now;
  return {
    count: now.count - before.count,
    sum_s: now.sum_s - before.sum_s,
    buckets: now.buckets.map((count, index) => count - (before.buckets[index] ?? 0)),
  };
}

/** The bound below which a share of durations lies, in seconds; null without any, Infinity beyond the last bound. */
export function quantile(durations, bounds, share) {
  let below = share * durations.count;
  if (!durations.count) return null;
  for (const [index, count] of durations.buckets.entries()) {
    if (below <= count && count) {
      if (index >= bounds.length) return Infinity;
      const lower = index ? bounds[index - 1] : 0;
      return lower + ((bounds[index] - lower) * below) / count;
    }
    below -= count;
  }
  return null;
}

const nameOf = (variant) => `${variant.tenant}/${variant.name}`;

export class Live {
  constructor() {
    this.listeners = new Set();
    this._timer = 0;
    this._asking = null;
    this.forget();
    document.addEventListener("visibilitychange", () => this._next(0));
  }

  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  start() {
    this.stop();
    this._run = {};
    this.forbidden = false;
    this._next(0);
  }

  /** Stop, and keep nothing of what one key could see from the next. */
  forget() {
    this.stop();
    this.stats = null;
    this.times = []; // seconds, of this browser's clock
    this.series = Object.fromEntries(SERIES.map((name) => [name, []]));
    // What rates need of the documents of the last minute, oldest first; tokens by variant for the last seconds alone,
    // because there may be thousands of variants.
    this.kept = [];
    this.first = null; // the first document of this server's run
    this.failure = null; // an ApiError while the server does not answer
    this.failedAt = null;
    this.forbidden = false;
    this.clockOffset = 0; // ms that the server's clock is ahead
  }

  stop() {
    this._run = null;
    clearTimeout(this._timer);
    this._asking?.abort();
    this._asking = null;
  }

  /** Rates of a variant's tokens, by label, over the last seconds. */
  rateOf(variant) {
    const newest = this.kept.at(-1);
    const oldest = this.kept.find((each) => each.tokens);
    const before = oldest?.tokens.get(nameOf(variant));
    const seconds = newest ? newest.at - oldest.at : 0;
    return before !== undefined && seconds > 0 ? Math.max(0, (variant.tokens - before) / seconds) : null;
  }

  _next(delay) {
    clearTimeout(this._timer);
    if (this._run && !document.hidden) this._timer = setTimeout(() => this._ask(), delay);
  }

  async _ask() {
    const run = this._run;
    if (this._asking || !run) return;
    this._asking = new AbortController();
    const began = performance.now();
    try {
      const stats = await call("stats", { signal: this._asking.signal, timeout: 8000 });
      if (run !== this._run) return;
      this._took(stats);
    } catch (error) {
      if (run !== this._run || error.name === "AbortError") return;
      if (error.status === 403) {
        this.forbidden = true;
        this._run = null;
      } else if (error.status !== 401) {
        this._lost(error);
      }
    } finally {
      if (run === this._run || !this._run) this._asking = null;
    }
    this._tell();
    this._next(Math.max(0, PERIOD_MS - (performance.now() - began)));
  }

  _took(stats) {
    const before = this.stats;
    this.clockOffset = stats.at * 1000 - Date.now();
    // A wrong clock, or another run of the server: what came before says nothing of a rate.
    const isNewRun = !before || before.server.started_at !== stats.server.started_at || stats.at <= before.at;
    if (isNewRun) {
      this.kept = [];
      this.first = stats;
    }
    const gap = stats.at - (before?.at ?? 0);
    const rate = (part, name) => {
      if (isNewRun || gap > 10) return null;
      return Math.max(0, (stats[part][name] - before[part][name]) / gap);
    };
    const steps = rate("engine", "steps");
    this._push({
      generation: rate("requests", "generation_tokens"),
      prompt: rate("requests", "prompt_tokens"),
      running: stats.requests.running,
      waiting: stats.requests.waiting,
      batch: steps ? rate("engine", "step_requests") / steps : null,
      mix: steps ? rate("engine", "step_variants") / steps : null,
    });
    this.stats = stats;
    this.failure = this.failedAt = null;
    const tokens = new Map(stats.variants.map((each) => [nameOf(each), each.tokens]));
    this.kept.push({ at: stats.at, first_token: stats.first_token, tokens });
    for (const each of this.kept) if (stats.at - each.at > RECENT_S) each.tokens = null;
    while (this.kept.length > 1 && stats.at - this.kept[0].at > 60) this.kept.shift();
  }

  _lost(error) {
    this.failure = error;
    this.failedAt ??= new Date();
    if (this.times.length) this._push(Object.fromEntries(SERIES.map((name) => [name, null])));
  }

  _push(values) {
    this.times.push(Date.now() / 1000);
    for (const name of SERIES) this.series[name].push(values[name]);
    if (this.times.length > KEPT) for (const kept of [this.times, ...Object.values(this.series)]) kept.shift();
  }

  _tell() {
    for (const listener of [...this.listeners]) listener();
  }
}
