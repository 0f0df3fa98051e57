// The page of `draftproof serve`: a chat, where each token came from, and the load of the server.
// What the server sends becomes text nodes and numbers, never markup.

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SAMPLES = 60; // of the load that a plot shows, about one a second
const PAUSES = { first: 1000, longest: 30000 }; // milliseconds until the feed is asked for again
const ORIGINS = new Set(["draft", "residual", "bonus", "plain"]);
const KEY = "draftproof-api-key";

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
const percent = (share) => `${Math.round(100 * share)} %`;
const LOAD = {
  tokens_per_second: { name: "tokens per second", show: (n) => n.toFixed(n < 10 ? 1 : 0) },
  tokens_per_pass: { name: "tokens per pass", show: (n) => n.toFixed(2) },
  acceptance: { name: "guesses kept", show: percent, most: 1 },
  kv: { name: "KV cache in use", show: percent, most: 1 },
  running: { name: "requests running", show: String },
  waiting: { name: "requests waiting", show: String },
};

const chat = { messages: [], running: null };
let model;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// ---- calls

let keyQuestion = null;

function askForKey() {
  keyQuestion ??= new Promise((resolve) => {
    const dialog = at("key-dialog");
    at("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      keyQuestion = null;
      if (dialog.returnValue === "ok") sessionStorage.setItem(KEY, at("key").value);
      resolve(dialog.returnValue === "ok");
    }, { once: true });
    dialog.showModal();
  });
  return keyQuestion;
}

// Call the server; ask for a key if it wants one. Paths are relative: the server may be behind a prefix.
async function call(path, options = {}, mayAsk = true) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await problem(response));
    const changed = sessionStorage.getItem(KEY) !== key;
    if (!changed && !(mayAsk && await askForKey())) throw new Error("The server asks for a key.");
  }
}

async function problem(response) {
  const body = await response.json().catch(() => ({}));
  const wait = response.headers.get("Retry-After");
  const message = body.error?.message ?? `The server answered with status ${response.status}.`;
  return wait ? `${message} Try again in ${wait} s.` : message;
}

// The events of a stream, parsed, up to "[DONE]".
async function* events(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---- one answer

// Ask for an answer; `onPart` is called after every event with the answer so far.
async function complete(messages, asked, signal, onPart = () => {}) {
  const body = {
    ...(asked.model ? { model: asked.model } : {}),
    messages, stream: true, draftproof_trace: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: asked.temperature, max_tokens: asked.maxTokens, seed: asked.seed,
    ...(asked.speculation ? {} : { num_draft_tokens: 0 }), // with speculation the server's own draft length
    ...(asked.rule ? { rule: asked.rule } : {}),
  };
  const answer = { text: "", parts: [], tokens: 0, started: performance.now(), first: null, last: null, draftproof: null };
  const response = await call("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const content = event.choices?.[0]?.delta?.content ?? "";
    const added = event.draftproof?.tokens ?? [];
    answer.text += content;
    answer.parts.push(...added);
    answer.draftproof = event.draftproof ?? answer.draftproof;
    answer.tokens = event.usage?.completion_tokens ?? answer.tokens;
    if (content) {
      answer.last = performance.now();
      answer.first ??= answer.last;
    }
    onPart(answer, added);
  }
  return answer;
}

function piece(part) {
  return el("span", { class: ORIGINS.has(part.from) ? `t ${part.from}` : "t" }, part.text);
}

function facts(answer, asked) {
  const { tokens_per_pass: perPass, acceptance } = answer.draftproof ?? {};
  const seconds = (answer.last - answer.first) / 1000;
  return [
    `${answer.tokens} ${answer.tokens === 1 ? "token" : "tokens"}`,
    perPass ? `${perPass.toFixed(2)} per pass` : null,
    asked.speculation && acceptance != null ? `${percent(acceptance)} of the guesses kept` : null,
    seconds > 0 ? `${(answer.tokens / seconds).toFixed(0)} tokens per second` : null,
    answer.first ? `first after ${duration(answer.first - answer.started)}` : null,
    asked.temperature > 0 ? `seed ${asked.seed}` : null,
  ].filter(Boolean).join(" · ");
}

// ---- the check

// Whether an answer must be the same text without speculation, and why.
function promise(asked) {
  if (!asked.speculation) return { holds: false, why: "Without speculation there is nothing to compare with." };
  if (asked.temperature === 0) {
    return { holds: true, why: "At temperature 0 every token is the most likely one, guessed or not: the text is the same without speculation." };
  }
  if (asked.rule === "coupled") {
    return { holds: true, why: "The rule coupled draws every token with random numbers of the seed and the position: the text is the same without speculation." };
  }
  return {
    holds: false,
    why: "With this rule the text has the same distribution as without speculation, and other random numbers decide: it is another text, so the two are not compared. Choose temperature 0 or the rule coupled.",
  };
}

function firstDifference(one, other) {
  let i = 0;
  while (i < one.length && i < other.length && one[i] === other[i]) i++;
  return i;
}

function checkRow(messages, asked, answer) {
  const { holds, why } = promise(asked);
  const note = el("p", {}, why);
  if (!holds) return el("div", { class: "check" }, note);
  const button = el("button", { type: "button" }, "Check: the same text without speculation");
  button.addEventListener("click", async () => {
    button.disabled = true;
    note.className = "";
    note.textContent = "Writing it again, one token in each pass …";
    try {
      const plain = await complete(messages, { ...asked, speculation: false }, undefined);
      const same = plain.text === answer.text;
      note.className = same ? "same" : "different";
      note.textContent = same ? sameText(answer, plain) : differentText(answer, plain);
    } catch (error) {
      note.className = "problem";
      note.textContent = error.message;
    }
    button.disabled = false;
  });
  return el("div", { class: "check" }, button, note);
}

function sameText(answer, plain) {
  const [fast, slow] = [answer, plain].map((each) => duration(each.last - each.started));
  return `✓ The same ${answer.text.length} characters: ${fast} with speculation, ${slow} without.`;
}

function differentText(answer, plain) {
  const i = firstDifference(answer.text, plain.text);
  const [one, other] = [answer, plain].map((each) => JSON.stringify(each.text.slice(i, i + 24)));
  return `✗ They differ from character ${i + 1} on: ${one} with speculation, ${other} without. Scores that are equal up to rounding can come out in another order where one pass computes several tokens.`;
}

// ---- the chat

function settings() {
  const seed = at("seed").value;
  return {
    model, // undefined until the list of models is there: the server then takes its own
    speculation: at("speculation").checked,
    temperature: Number(at("temperature").value),
    maxTokens: Number(at("max-tokens").value),
    rule: at("rule").value,
    seed: seed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(seed),
  };
}

function settingsAreValid() {
  return ["temperature", "seed", "max-tokens"].every((id) => at(id).reportValidity());
}

function append(...nodes) {
  const log = at("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  at("empty").hidden = true;
  log.append(...nodes);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function send() {
  const text = at("question").value.trim();
  if (!text || chat.running || !settingsAreValid()) return;
  const asked = settings(), messages = chat.messages = [...chat.messages, { role: "user", content: text }];
  const words = el("div", { class: "words" }), line = el("p", { class: "facts" });
  const shown = el("article", { class: "answer", "aria-label": "Answer", "aria-busy": "true" }, words, line);
  at("question").value = "";
  append(el("p", { class: "question" }, text), shown);
  at("log").scrollTop = at("log").scrollHeight;
  const running = chat.running = new AbortController();
  setRunning(true);
  let answer = null;
  try {
    answer = await complete(messages, asked, running.signal, (soFar, added) => {
      const log = at("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      answer = soFar;
      words.append(...added.map(piece));
      line.textContent = facts(soFar, asked);
      if (atEnd) log.scrollTop = log.scrollHeight;
    });
    if (words.textContent !== answer.text) words.replaceChildren(answer.text); // a server that reports no origins
    shown.append(checkRow(messages, asked, answer));
  } catch (error) {
    const stopped = running.signal.aborted;
    shown.append(el("p", stopped ? { class: "note" } : { class: "problem", role: "alert" }, stopped ? "Stopped." : error.message));
  }
  if (chat.running === running) { // "New chat" may have begun another one
    if (answer?.text) chat.messages = [...messages, { role: "assistant", content: answer.text }];
    else chat.messages = messages.slice(0, -1);
    chat.running = null;
    setRunning(false);
    at("question").focus();
  }
  shown.setAttribute("aria-busy", "false");
}

function setRunning(yes) {
  at("stop").hidden = !yes;
  at("send").disabled = yes;
}

function stop() {
  chat.running?.abort();
}

function clear() {
  stop();
  chat.running = null;
  chat.messages = [];
  setRunning(false);
  at("log").replaceChildren(at("empty"));
  at("empty").hidden = false;
  at("question").focus();
}

// ---- the load

const tiles = Object.fromEntries(Object.entries(LOAD).map(([field, { name }]) => {
  const value = el("dd", {}, "–"), plot = document.createElementNS(SVG, "svg");
  plot.setAttribute("viewBox", "0 0 120 30");
  plot.setAttribute("preserveAspectRatio", "none");
  plot.setAttribute("aria-hidden", "true");
  const line = plot.appendChild(document.createElementNS(SVG, "line"));
  for (const [key, number] of Object.entries({ x1: 0, x2: 120, y1: 29, y2: 29 })) line.setAttribute(key, number);
  const path = plot.appendChild(document.createElementNS(SVG, "path"));
  at("load").append(el("div", { "data-field": field }, el("dt", {}, name), value, plot));
  return [field, { value, path, seen: [] }];
}));

function showLoad(sample) {
  for (const [field, { show, most }] of Object.entries(LOAD)) {
    const tile = tiles[field], number = typeof sample[field] === "number" ? sample[field] : null;
    tile.seen = [...tile.seen, number].slice(-SAMPLES);
    tile.value.textContent = number === null ? "–" : show(number);
    tile.path.setAttribute("d", outline(tile.seen, most ?? Math.max(1, ...tile.seen)));
  }
}

// A line through the samples, the newest at the right; broken where there is no number, a dot where one stands alone.
function outline(samples, most) {
  let pen = "M", path = "";
  samples.forEach((number, i) => {
    if (number === null) { pen = "M"; return; }
    const x = 120 - (samples.length - 1 - i) * (120 / (SAMPLES - 1)), y = 29 - 27 * Math.min(1, number / most);
    path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}${pen === "M" ? "h0" : ""}`;
    pen = "L";
  });
  return path;
}

async function watchLoad() {
  let pause = PAUSES.first, mayAsk = true;
  for (;;) {
    try {
      const response = await call("events", {}, mayAsk);
      at("state").textContent = "connected";
      for await (const sample of events(response)) {
        showLoad(sample);
        pause = PAUSES.first;
      }
      at("state").textContent = "disconnected";
    } catch (error) {
      at("state").textContent = "not connected";
      at("state").title = error.message;
    }
    mayAsk = false; // the next message asks for the key again
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, PAUSES.longest);
  }
}

async function showModel() {
  const listed = await (await call("v1/models")).json();
  model = listed.data?.[0]?.id;
  if (model) at("model").textContent = model;
}

// ---- start

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !at("key-dialog").open) stop(); });
at("stop").addEventListener("click", stop);
at("clear").addEventListener("click", clear);
at("key-cancel").addEventListener("click", () => at("key-dialog").close(""));
for (const id of ["speculation", "temperature", "seed", "rule", "max-tokens"]) {
  at(id).addEventListener("input", () => { at("promise").textContent = promise(settings()).why; });
}
at("promise").textContent = promise(settings()).why;
showModel().catch(() => {});
watchLoad();
