// Calls of the server. The key is in memory, and in this tab's sessionStorage if its user wants; never in a cookie or URL.

const ROOT = new URL(".", document.baseURI);
const STORED = "peraxis-key";

let key = sessionStorage.getItem(STORED) ?? "";
let tenant = ""; // that an administrator acts for; empty: the key's own
let onRefused = () => {};
const onChanges = [];

export class ApiError extends Error {
  constructor(message, status = 0, code = "unreachable") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => key !== "";
export const actingFor = () => tenant;
export const whenKeyIsRefused = (listener) => (onRefused = listener);
/** Call `listener` when another key is used, or another tenant's variants. */
export const whenCallerChanges = (listener) => onChanges.push(listener);

export function actFor(name) {
  tenant = name;
  for (const listener of onChanges) listener();
}

export function useKey(text, isKept) {
  key = text.trim();
  actFor("");
  if (key && isKept) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

function addressOf(path, query = {}) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query))
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  if (tenant && /^(variants|v1|tokenize)/.test(path)) url.searchParams.set("tenant", tenant);
  return url;
}

const headersOf = (type) => ({
  ...(key ? { Authorization: `Bearer ${key}` } : {}),
  ...(type ? { "Content-Type": type } : {}),
});

/** The error of a reply to a call with the key `used`, which may have been changed since. */
function errorOf(status, text, used) {
  let error;
  try {
    error = JSON.parse(text).error;
  } catch {
    // A proxy's page, or nothing.
  }
  const found = new ApiError(error?.message ?? `the server answered ${status}`, status, error?.code ?? String(status));
  if (status === 401 && used === key) onRefused(found);
  return found;
}

async function request(path, { method = "GET", query, body, signal } = {}) {
  const type = body === undefined ? undefined : "application/json";
  const used = key;
  let reply;
  try {
    reply = await fetch(addressOf(path, query), {
      method,
      signal,
      headers: headersOf(type),
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer");
  }
  if (!reply.ok) throw errorOf(reply.status, await reply.text().catch(() => ""), used);
  return reply;
}

/** Return a call's document; ApiError with the server's own message if it is refused. */
export async function call(path, options = {}) {
  const timeout = AbortSignal.timeout(options.timeout ?? 30_000);
  const signal = options.signal ? AbortSignal.any([options.signal, timeout]) : timeout;
  try {
    const reply = await request(path, { ...options, signal });
    return await reply.json();
  } catch (error) {
    if (error.name === "AbortError" && options.signal?.aborted) throw error;
    if (error instanceof ApiError) throw error;
    throw new ApiError("the server does not answer");
  }
}

/** Call `onPart` with each document of a stream of server-sent events; return the reply's headers. */
export async function stream(path, body, signal, onHead, onPart) {
  const reply = await request(path, { method: "POST", body, signal });
  onHead(reply.headers);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the connection broke before the answer ended");
    }
    if (piece.done) return;
    rest += piece.value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (!data.length || data[0] === "[DONE]") continue;
      const document = JSON.parse(data.join("\n"));
      if (document.error) throw new ApiError(document.error.message, 0, document.error.code);
      onPart(document);
    }
  }
}

/** Send a file; `onProgress` gets the bytes sent. XMLHttpRequest, because fetch tells nothing of what it has sent. */
export function upload(file, query, signal, onProgress) {
  return new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest();
    const used = key;
    sending.open("POST", addressOf("variants", query));
    for (const [name, value] of Object.entries(headersOf("application/octet-stream")))
      sending.setRequestHeader(name, value);
    let sent = 0;
    sending.upload.onprogress = (event) => onProgress((sent = event.loaded));
    sending.onload = () => {
      if (sending.status >= 200 && sending.status < 300) resolve({ ...JSON.parse(sending.responseText), isNew: sending.status === 201 });
      else reject(errorOf(sending.status, sending.responseText, used));
    };
    sending.onerror = () =>
      reject(
        new ApiError(
          `the connection broke after ${Math.floor((100 * sent) / Math.max(file.size, 1))}% and nothing was published: ` +
            "try again; the same bytes never make a second version",
        ),
      );
    sending.onabort = () => reject(new DOMException("cancelled", "AbortError"));
    signal.addEventListener("abort", () => sending.abort());
    sending.send(file);
  });
}
