"use strict";
// Drawing functions of the page: elements, token labels, bars and plots. They do not depend on the selection.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "on") Object.entries(value).forEach(([event, run]) => node.addEventListener(event, run));
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function svg(tag, options = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(options)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// A token with its whitespace made visible.
function token(label) {
  const parts = [];
  for (const piece of label.split(/(\s)/)) {
    if (piece === "") continue;
    const mark = { " ": "␣", "\n": "⏎", "\t": "⇥" }[piece];
    parts.push(mark ? el("span", { class: "sp" }, mark) : piece);
  }
  return el("code", { title: JSON.stringify(label) }, ...parts);
}

function number(x) {
  if (x === 0) return "0";
  if (x < 0.001) return x.toExponential(0);
  return String(Number(x.toFixed(3)));
}

// Bars for p, q and the residual of each candidate; `marks` maps a token to a remark.
function bars(candidates, marks, hasDraft) {
  const largest = Math.max(1e-9, ...candidates.map((c) => Math.max(c.p, hasDraft ? c.q : 0)));
  const bar = (kind, x) => {
    const fill = el("i", { class: kind });
    fill.style.width = x > 0 ? `max(2px, ${(100 * x) / largest}%)` : "0";
    return el("div", { class: "bar" }, fill, el("span", {}, number(x)));
  };
  return candidates.map((c) => {
    const remark = marks.get(c.token);
    const name = token(c.label);
    if (remark) name.append(el("small", {}, remark));
    const lines = hasDraft ? [bar("p", c.p), bar("q", c.q), bar("r", c.residual)] : [bar("p", c.p)];
    return el("div", { class: remark ? "bar-row marked" : "bar-row" }, name, el("div", {}, ...lines));
  });
}

// The interval from 0 to 1: the range of coins that keep the token, and the coin.
function coinLine(chance, coin, judged, kept) {
  const width = 400, left = 14, span = width - 2 * left;
  const x = (value) => left + span * Math.min(1, value);
  const colour = kept ? "var(--kept)" : "var(--rejected)";
  const drawing = svg("svg", { viewBox: `0 0 ${width} 112`, role: "img", "aria-label": `coin ${number(coin)}, chance ${number(chance)}` });
  drawing.append(
    svg("rect", { x: left, y: 44, width: span, height: 18, rx: 9, fill: "var(--rejected-bg)" }),
    svg("rect", { x: left, y: 44, width: Math.max(2, x(chance) - left), height: 18, rx: 9, fill: "var(--kept-bg)" }),
    svg("line", { x1: x(chance), x2: x(chance), y1: 38, y2: 68, stroke: "var(--kept)", "stroke-width": 2 }),
  );
  const end = chance > 0.8 ? "end" : chance < 0.2 ? "start" : "middle";
  drawing.append(svg("text", { x: x(chance), y: 84, "text-anchor": end }, `kept below ${number(chance)}`));
  drawing.append(svg("text", { x: left, y: 104, "text-anchor": "start" }, "0"), svg("text", { x: width - left, y: 104, "text-anchor": "end" }, "1"));
  if (!judged) return drawing;
  const side = coin > 0.8 ? "end" : coin < 0.2 ? "start" : "middle";
  drawing.append(
    svg("circle", { cx: x(coin), cy: 53, r: 8, fill: colour, stroke: "var(--card)", "stroke-width": 2 }),
    svg("text", { x: x(coin), y: 28, "text-anchor": side, class: "strong" }, `coin ${number(coin)}`),
  );
  return drawing;
}

// A column for each position of a draft: how many guesses were made there, and how many were kept.
function positionPlot(positions) {
  const gap = 58, height = 150, top = 22, base = 118;
  const width = Math.max(320, positions.length * gap + 40);
  const most = Math.max(1, ...positions.map((p) => p.drafted));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Kept guesses by position" });
  drawing.style.maxWidth = `${width}px`;
  drawing.append(svg("line", { x1: 10, x2: width - 10, y1: base, y2: base, stroke: "var(--line)" }));
  positions.forEach((place, i) => {
    const x = 24 + i * gap, tall = ((base - top) * place.drafted) / most, kept = ((base - top) * place.kept) / most;
    drawing.append(
      svg("rect", { x, y: base - tall, width: 34, height: tall, rx: 4, fill: "var(--plain-bg)", stroke: "var(--line)" }),
      svg("rect", { x, y: base - kept, width: 34, height: kept, rx: 4, fill: "var(--kept)" }),
      svg("text", { x: x + 17, y: base - tall - 6, "text-anchor": "middle", class: "strong" }, `${Math.round((100 * place.kept) / place.drafted)}%`),
      svg("text", { x: x + 17, y: base + 18, "text-anchor": "middle" }, `${i + 1}`),
    );
  });
  return drawing;
}
