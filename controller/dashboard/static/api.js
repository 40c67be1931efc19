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

export const post = (run, path, body) => answer(`${run.base}${path}`, { method: "POST",
  ...(body === undefined ? {} : { headers: { "content-type": "application/json" }, body: JSON.stringify(body) }) });

const KINDS = ["step", "validation", "publication", "replica", "drop", "reward", "checkpoint", "rewind", "job", "alarm", "scale", "members", "controller"];
// Milliseconds until what failed is tried again.
export const AGAIN = 3000;

// Calls `heard` with each event after `after`, and tells `app` of the connection. Returns what closes it.
// A tab that is not seen follows nothing: browsers allow six connections to a host, tabs all together.
// A browser gives up after any status but 200: then it is tried again, unless the session has ended.
export function follow(run, after, heard, app) {
  let source = null;
  let timer = null;
  let ended = false;
  const shut = () => { clearTimeout(timer); source?.close(); };
  const open = () => {
    shut();
    if (ended || document.hidden) return;
    source = new EventSource(`${run.base}/events?after=${after}`);
    for (const kind of KINDS) {
      source.addEventListener(kind, (message) => {
        after = Number(message.lastEventId);
        app.lost(false);
        heard(JSON.parse(message.data));
      });
    }
    source.onopen = () => app.lost(false);
    source.onerror = () => {
      app.lost(true);
      if (source.readyState === EventSource.CLOSED) again();
    };
  };
  const again = () => {
    timer = setTimeout(() => session().then(open, (error) => {
      if (ended) return;
      if (error.status === 401) app.failed(error); else again();
    }), AGAIN);
  };
  document.addEventListener("visibilitychange", open);
  open();
  return () => { ended = true; document.removeEventListener("visibilitychange", open); shut(); };
}
