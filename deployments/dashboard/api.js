// What the service is asked. A token that it wants is kept for the browser's session.

/** A reply that is no success; `status` is HTTP's. */
export class Refused extends Error {
  constructor(path, status, message) {
    super(`${path}: ${status} ${message}`);
    this.status = status;
  }
}

export const use = token => sessionStorage.setItem("token", token);

export async function get(path) {
  return (await ask(path)).json();
}

/** Whole lines of JSON behind byte `from` of a file that grows; [their values, where to go on]. */
export async function linesFrom(path, from) {
  const reply = await ask(path, {range: `bytes=${from}-`}, [416]);
  if (reply.status === 416) return [[], from]; // nothing is there yet
  const bytes = new Uint8Array(await reply.arrayBuffer()),
    end = bytes.lastIndexOf(10) + 1;
  const text = new TextDecoder().decode(bytes.subarray(0, end));
  return [
    text
      .split("\n")
      .filter(Boolean)
      .map(line => JSON.parse(line)),
    from + end,
  ];
}

async function ask(path, headers = {}, fine = []) {
  const token = sessionStorage.getItem("token");
  if (token !== null) headers.authorization = `Bearer ${token}`;
  const reply = await fetch(path, {headers, cache: "no-store"});
  if (reply.ok || fine.includes(reply.status)) return reply;
  const body = await reply.json().catch(() => null);
  throw new Refused(path, reply.status, body?.error?.message ?? reply.statusText);
}
