// The page: the selection and how it is shown. `slot` -1 is the last token of a round.

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const selected = { round: 0, slot: -1 };

const ORIGINS = {
  draft: ["a guess that was kept", "kept"],
  residual: ["drawn in place of a rejected guess", "residual"],
  bonus: ["free token: the whole draft was kept", "bonus"],
  plain: ["nothing was guessed", "plain"],
};
const FATES = { kept: "kept", rejected: "rejected", dropped: "dropped" };
const CLOSINGS = { residual: "replacement", bonus: "free token", plain: "no guess" };

const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

function describe() {
  const s = data.summary;
  const kept = s.drafted ? ` Of ${plural(s.drafted, "guess", "guesses")}, ${s.accepted} were kept (${Math.round(100 * s.acceptance_rate)} %).` : "";
  at("lede").append(
    el("b", {}, plural(s.tokens, "token")), " in ", el("b", {}, plural(s.passes, "pass", "passes")),
    ` of the target, where plain decoding needs ${plural(s.tokens, "pass", "passes")}.${kept}`,
  );
  for (const [name, value] of Object.entries(data.settings)) {
    at("settings").append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  }
  at("prompt").textContent = data.prompt;
}

function writeText() {
  const text = at("text");
  const whole = data.text.map((piece) => piece.text).join("");
  text.classList.toggle("code", whole.includes("```") || /\n {4}/.test(whole));
  const seen = new Set();
  for (const piece of data.text) {
    const shown = el("span", { class: `t ${piece.origin}`, "data-round": piece.round, "data-slot": piece.slot }, shownText(piece));
    shown.classList.toggle("part", shown.textContent === "");
    if (piece.slot === -1) text.append(...rejectedOf(piece.round));
    text.append(shown);
    seen.add(piece.origin);
  }
  text.addEventListener("click", (event) => {
    const hit = event.target.closest(".t");
    if (hit) select(Number(hit.dataset.round), Number(hit.dataset.slot));
  });
  for (const [origin, [words, kind]] of Object.entries(ORIGINS)) {
    if (seen.has(origin)) at("legend").append(el("li", {}, el("span", { class: `cell ${kind}` }), words));
  }
  at("show-rejected").addEventListener("change", (event) => text.classList.toggle("show-rejected", event.target.checked));
}

// A token that ends the text has no text, so its name is shown; one that is only part of a character shows nothing.
function shownText(piece) {
  return piece.text || (piece.label.includes("\ufffd") ? "" : piece.label);
}

function rejectedOf(round) {
  return data.rounds[round].slots
    .map((slot, i) => [slot, i])
    .filter(([slot]) => slot.fate === "rejected")
    .map(([slot, i]) => el("span", { class: "t gone", "data-round": round, "data-slot": i }, slot.label.replaceAll("\n", "⏎")));
}

function drawStrip() {
  data.rounds.forEach((round, r) => {
    const cells = round.slots.map((slot) => el("span", { class: `cell ${slot.fate}` }));
    cells.push(el("span", { class: `cell ${round.closing.origin}` }));
    const name = `Round ${r + 1}: ${round.kept} of ${round.slots.length} guesses kept`;
    const column = el("button", { class: "column", role: "option", tabindex: "-1", title: name, "aria-label": name, "aria-selected": "false" }, ...cells.reverse());
    column.addEventListener("click", () => select(r, firstOf(r)));
    at("strip").append(column);
  });
}

// The slot selected first in a round: the rejected guess, else the first guess, else the only token.
function firstOf(r) {
  const { slots } = data.rounds[r];
  const rejected = slots.findIndex((slot) => slot.fate === "rejected");
  return rejected >= 0 ? rejected : slots.length ? 0 : -1;
}

// The round selected first: some guesses kept, then one rejected whose chance was neither tiny nor nearly 1.
function mostInstructive() {
  const interest = (round) => {
    const rejected = round.slots[round.kept];
    const open = rejected && rejected.chance > 0.05 && rejected.chance < 0.95;
    return (rejected ? 1 : 0) + (round.kept > 0 ? 2 : 0) + (open ? 3 : 0);
  };
  const all = data.rounds.map(interest);
  return all.indexOf(Math.max(...all));
}

function order(r) {
  return [...data.rounds[r].slots.keys(), -1];
}

function select(round, slot) {
  Object.assign(selected, { round, slot });
  const columns = at("strip").children;
  [...columns].forEach((column, r) => column.setAttribute("aria-selected", String(r === round)));
  const strip = at("strip"), column = columns[round];
  strip.scrollLeft = column.offsetLeft - strip.offsetLeft - strip.clientWidth / 2;
  const { slots, kept } = data.rounds[round];
  const guesses = slots.length ? `${kept} of ${plural(slots.length, "guess", "guesses")} kept, then one token more` : "no guess, one token";
  at("where").textContent = `Round ${round + 1} of ${data.rounds.length}: ${guesses}`;
  at("previous").disabled = round === 0;
  at("next").disabled = round === data.rounds.length - 1;
  markText();
  showChips();
  showDetail();
}

function markText() {
  for (const piece of at("text").children) {
    const inRound = Number(piece.dataset.round) === selected.round;
    piece.classList.toggle("round", inRound);
    piece.classList.toggle("here", inRound && Number(piece.dataset.slot) === selected.slot);
  }
  const here = at("text").querySelector(".here") || at("text").querySelector(".round");
  if (here) at("text").scrollTop = here.offsetTop - at("text").offsetTop - at("text").clientHeight / 2;
}

function showChips() {
  const { slots, closing } = data.rounds[selected.round];
  const chip = (label, kind, words, slot) => {
    const made = el("button", { class: `chip ${kind}`, "aria-pressed": String(slot === selected.slot) }, token(label), el("small", {}, words));
    made.addEventListener("click", () => select(selected.round, slot));
    return made;
  };
  at("chips").replaceChildren(
    ...slots.map((slot, i) => chip(slot.label, slot.fate, FATES[slot.fate], i)),
    chip(closing.label, closing.origin, closing.said ? CLOSINGS[closing.origin] : "after the end", -1),
  );
}

function showDetail() {
  const round = data.rounds[selected.round];
  const isClosing = selected.slot === -1;
  const shown = isClosing ? round.closing : round.slots[selected.slot];
  const hasDraft = !isClosing || round.closing.origin === "residual";
  const marks = new Map([[shown.token, isClosing ? "drawn" : "guessed"]]);
  if (hasDraft && isClosing) marks.set(round.slots[round.kept].token, "rejected");
  if (!isClosing && selected.slot === round.kept) marks.set(round.closing.token, "drawn instead");
  at("detail-title").replaceChildren("Token ", token(shown.label), ` — ${isClosing ? CLOSINGS[shown.origin] : FATES[shown.fate]}`);
  at("story").textContent = shown.story.happened;
  at("why").textContent = shown.story.why;
  at("bars").replaceChildren(...bars(shown.candidates, marks, hasDraft));
  const weighted = round.as_block && (isClosing ? shown.weight < 1 : true);
  at("residual-name").replaceChildren(el("b", {}, weighted ? "max(0, w·p − q)" : "max(0, p − q)"), " the residual");
  at("residual-name").parentElement.hidden = !hasDraft;
  document.querySelector(".detail .legend li:nth-child(2)").hidden = !hasDraft;
  showCoin(round, shown, isClosing);
}

function showCoin(round, shown, isClosing) {
  at("coin-title").textContent = isClosing ? "No coin here" : "The coin";
  if (isClosing) {
    at("coin").replaceChildren();
    at("coin-note").textContent = "The last token of a round is drawn, not tested: every round emits at least one token, so decoding never stalls.";
    return;
  }
  at("coin").replaceChildren(coinLine(shown.chance, shown.coin, shown.judged, shown.fate === "kept"));
  const ratio = `p/q = ${number(shown.p)} / ${number(shown.q)} = ${number(shown.ratio)}.`;
  at("coin-note").textContent = !shown.judged && shown.fate === "dropped" ? "Its coin was not used."
    : round.as_block ? `${ratio} The block rule compares the coin with the chance of keeping the draft up to this token.`
    : `${ratio} The coin is a fresh random number between 0 and 1.`;
}

function step(by) {
  const round = selected.round + by;
  if (round >= 0 && round < data.rounds.length) select(round, firstOf(round));
}

function stepToken(by) {
  const slots = order(selected.round), next = slots.indexOf(selected.slot) + by;
  if (next >= 0 && next < slots.length) return select(selected.round, slots[next]);
  const round = selected.round + by;
  if (round >= 0 && round < data.rounds.length) select(round, by > 0 ? order(round)[0] : -1);
}

function showPositions() {
  const { positions } = data;
  at("positions-note").textContent = positions.length
    ? "For each position of a draft, the pale column counts the guesses made there and the filled part those that were kept. A guess can be kept only if all before it are kept."
    : "Nothing was guessed in this text.";
  if (positions.length) at("positions").append(positionPlot(positions));
}

// Keys act on the whole page. What they change must be on the screen, so scroll to the rounds unless it is.
function reveal() {
  const rounds = at("rounds").getBoundingClientRect(), story = at("story").getBoundingClientRect();
  if (rounds.top < 0 || story.bottom > window.innerHeight) at("rounds").scrollIntoView({ block: "start" });
}

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  if (event.shiftKey) stepToken(by);
  else step(by);
  reveal();
});
at("previous").addEventListener("click", () => step(-1));
at("next").addEventListener("click", () => step(1));

describe();
writeText();
drawStrip();
showPositions();
at("footer").textContent = "Made by draftproof explain. One file, no network: save it, send it, show it in class.";
if (data.rounds.length) {
  const first = mostInstructive();
  select(first, firstOf(first));
}
