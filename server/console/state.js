// What the whole page shares: the live state, and the caller as `/me` tells it.

import { Live } from "./live.js";

export const live = new Live();

export const session = { me: null };

/** True if the caller's key has a role; an administrator's has all. */
export const may = (role) => !!session.me && (session.me.roles.includes(role) || session.me.roles.includes("admin"));

/** The versions that leave their slots if `needed` more are taken: those in no use that were used longest ago. */
export function leaving(stats, needed = 1) {
  if (!stats) return [];
  const free = stats.engine.slots - stats.engine.slots_in_use;
  const idle = stats.variants.filter((each) => each.level === "device" && !each.pinned && !each.num_requests);
  return idle.slice(0, Math.max(0, needed - free));
}

export const labelOf = (variant) => `${variant.tenant}/${variant.name}@${variant.version}`;
