// Calls of the controller, or of the server of run directories; the session is a cookie.

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function answer(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Refused(0, "no answer: the job has ended, or the connection is gone");
  }
  if (response.status === 204) return null;
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, body?.detail ?? `the answer is ${response.status}`);
  return body;
}

export const session = () => answer("/v1/session");

export function login(token) {
  if (!/^[\x21-\x7e]+$/.test(token)) throw new Refused(401, "that is not a token: it has letters and digits alone");
  return answer("/v1/session", { method: "POST", headers: { authorization: `Bearer ${token}` } });
}

export const logout = () => answer("/v1/session", { method: "DELETE" });

export const get = (run, path) => answer(`${run.base}${path}`);

export const post = (run, path) => answer(`${run.base}${path}`, { method: "POST" });

// Calls `heard` with each event after `after`; `lost` with whether the connection is gone. Returns what closes it.
export function follow(run, after, heard, lost) {
  const source = new EventSource(`${run.base}/events?after=${after}`);
  const kinds = ["step", "validation", "publication", "replica", "drop", "reward", "checkpoint", "rewind", "job", "alarm", "controller"];
  for (const kind of kinds) {
    source.addEventListener(kind, (message) => {
      lost(false);
      heard(JSON.parse(message.data));
    });
  }
  source.onopen = () => lost(false);
  source.onerror = () => lost(true);
  return () => source.close();
}
