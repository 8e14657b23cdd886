// Building blocks: elements with text (never markup), numbers with their exact value, small charts as SVG.
var NS = "http://www.w3.org/2000/svg";
function el(tag, attributes, children) {
  var node = document.createElement(tag);
  return fill(node, attributes, children);
}
function svg(tag, attributes, children) { return fill(document.createElementNS(NS, tag), attributes, children); }
function fill(node, attributes, children) {
  Object.keys(attributes || {}).forEach(function (name) {
    var value = attributes[name];
    if (value === null || value === undefined || value === false) return;
    if (name === "on") Object.keys(value).forEach(function (event) { node.addEventListener(event, value[event]); });
    else if (name === "style") Object.keys(value).forEach(function (key) { node.style.setProperty(key, value[key]); });
    else node.setAttribute(name, value === true ? "" : String(value));
  });
  [].concat(children === undefined || children === null ? [] : children).forEach(function (child) {
    if (child === null || child === undefined) return;
    node.appendChild(child.nodeType ? child : document.createTextNode(String(child)));
  });
  return node;
}
function clear(node) { while (node.firstChild) node.removeChild(node.firstChild); return node; }
function put(id, children) { return fill(clear(document.getElementById(id)), {}, children); }
function short(value) {
  if (value === null || value === undefined) return "∅";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  var size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}
// A number of the trace: four digits, all of them on demand; `path` says which entry of the step it is.
function num(value, path) {
  return el("span", { "class": "num", "data-value": value === null ? "null" : value, "data-path": path, title: value === null ? null : value }, ui.exact && typeof value === "number" ? String(value) : short(value));
}
function tableOf(caption, head, rows) {
  return el("details", { "class": "twin" }, [el("summary", {}, say("as_table")), el("div", { "class": "scroll", tabindex: "0", role: "region", "aria-label": caption }, el("table", {}, [
    el("caption", { "class": "hidden" }, caption),
    el("thead", {}, el("tr", {}, head.map(function (h) { return el("th", { scope: "col" }, h); }))),
    el("tbody", {}, rows.map(function (row) { return el("tr", {}, row.map(function (cell) { return el("td", { "class": "n" }, typeof cell === "number" ? num(cell) : cell); })); }))
  ]))]);
}
function picture(url, alt, cls) { return el("img", { src: url, alt: alt, "class": cls || "thumb" }); }
function shape(width, height, title, desc, children) {
  var id = "d" + (shape.count = (shape.count || 0) + 1);
  return svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-labelledby": id + "t " + id + "d", "class": "drawing" },
    [svg("title", { id: id + "t" }, title), svg("desc", { id: id + "d" }, desc)].concat(children));
}
function text(x, y, content, attributes) {
  return svg("text", Object.assign({ x: x, y: y, "class": "label" }, attributes || {}), content);
}
function arrow(x1, y1, x2, y2, kind) {
  var angle = Math.atan2(y2 - y1, x2 - x1), s = 8;
  var tip = [[x2, y2], [x2 - s * Math.cos(angle - 0.45), y2 - s * Math.sin(angle - 0.45)], [x2 - s * Math.cos(angle + 0.45), y2 - s * Math.sin(angle + 0.45)]];
  return svg("g", { "class": "arrow " + kind }, [svg("line", { x1: x1, y1: y1, x2: x2 - 5 * Math.cos(angle), y2: y2 - 5 * Math.sin(angle) }), svg("polygon", { points: tip.map(function (p) { return p.join(","); }).join(" ") })]);
}
// Where gradient, EMA and vectors go. on: the sub-step that is shown.
function encodersDrawing(on, row, model) {
  var parts = [
    svg("rect", { x: 92, y: 20, width: 130, height: 56, "class": "box query" + (on === "q" || on === "optimiser" || on === "backward" ? " on" : "") }),
    text(157, 45, "f_q", { "text-anchor": "middle", "class": "label big" }), text(157, 65, "θq", { "text-anchor": "middle" }),
    svg("rect", { x: 92, y: 164, width: 130, height: 56, "class": "box key" + (on === "k" || on === "ema" ? " on" : "") }),
    text(157, 189, "f_k", { "text-anchor": "middle", "class": "label big" }), text(157, 209, "θk", { "text-anchor": "middle" }),
    text(6, 52, say("view_a_short"), {}), arrow(54, 48, 90, 48, "flow" + (on === "q" || on === "views" ? " on" : "")),
    text(6, 196, say("view_b_short"), {}), arrow(54, 192, 90, 192, "flow" + (on === "k" || on === "views" ? " on" : "")),
    arrow(224, 40, 300, 40, "flow" + (on === "q" ? " on" : "")), text(306, 45, "q", { "class": "label big" }),
    arrow(224, 192, 300, 192, "flow" + (on === "k" ? " on" : "")), text(306, 197, "k", { "class": "label big" }),
    arrow(157, 80, 157, 160, "ema" + (on === "ema" ? " on" : "")), text(166, 125, "EMA  m = " + short(row.m), {}),
    arrow(300, 62, 226, 62, "gradient" + (on === "backward" || on === "optimiser" ? " on" : "")), text(232, 82, "∂L/∂θq", {}),
    text(232, 226, "∂L/∂θk: ∅", { "class": "label none" }), text(6, 242, say("none_stamp"), { "class": "label none" })
  ];
  return shape(340, 250, say("card_encoders"), say("desc_encoders"), parts);
}
// The vectors on the plane that the whole trace uses; with two dimensions these are the vectors themselves.
function planeDrawing(model, n, query, on) {
  var s = model.steps[n].row, size = 260, c = size / 2, r = 105, items = [], D2 = model.config.D === 2;
  var q = floats(s.flat_q), kf = floats(s.flat_k), scores = model.recompute(n, query, model.config.T, null);
  var near = scores.bars.slice(0, 8);
  var points = near.map(function (b) { return model.keys[b.key] && model.keys[b.key].flat; });
  var all = points.filter(Boolean).concat([[q[2 * query], q[2 * query + 1]], [kf[2 * query], kf[2 * query + 1]]]);
  var reach = D2 ? 1 : Math.max.apply(null, all.map(function (p) { return Math.max(Math.abs(p[0]), Math.abs(p[1])); })) || 1;
  function at(p) { return [c + p[0] / reach * r, c - p[1] / reach * r]; }
  items.push(svg("line", { x1: c - r, x2: c + r, y1: c, y2: c, "class": "axis" }), svg("line", { x1: c, x2: c, y1: c - r, y2: c + r, "class": "axis" }));
  if (D2) items.push(svg("circle", { cx: c, cy: c, r: r, "class": "axis" }));
  var k = at([kf[2 * query], kf[2 * query + 1]]), a = at([q[2 * query], q[2 * query + 1]]), named = [{ at: k, text: "k₊", big: true }, { at: a, text: "q", big: true }], marks = [k, a];
  points.forEach(function (p, i) {
    if (!p) return;
    var b = at(p);
    marks.push(b);
    items.push(svg("rect", { x: b[0] - 4, y: b[1] - 4, width: 8, height: 8, "class": "dot negative" }));
    if (named.length < 7) named.push({ at: b, text: model.name(near[i].key) });
  });
  items.push(svg("polygon", { points: [[k[0], k[1] - 7], [k[0] + 7, k[1] + 6], [k[0] - 7, k[1] + 6]].map(function (p) { return p.join(","); }).join(" "), "class": "dot positive" }));
  items.push(svg("circle", { cx: a[0], cy: a[1], r: 6, "class": "dot query" }));
  return shape(size, size, say("card_plane"), say("desc_plane"), items.concat(labels(named, marks, size)));
}
// Names beside their marks: each at the nearest of 48 places where it covers no mark and no other name, with a line
// to its mark where that is not close by. The same names and marks are always placed the same.
function labels(named, marks, size) {
  var taken = marks.map(function (p) { return [p[0] - 7, p[1] - 7, p[0] + 7, p[1] + 7]; }), out = [];
  function free(box) {
    return box[0] >= 0 && box[1] >= 0 && box[2] <= size && box[3] <= size && taken.every(function (t) { return box[2] <= t[0] || t[2] <= box[0] || box[3] <= t[1] || t[3] <= box[1]; });
  }
  named.forEach(function (one) {
    var w = one.text.length * (one.big ? 10.5 : 7.2) + 2, h = one.big ? 18 : 13, found = null;
    for (var i = 0; i < 48 && !found; i++) {
      var angle = (i % 8) * Math.PI / 4 - Math.PI / 4, far = 10 + Math.floor(i / 8) * 13;
      var x = one.at[0] + Math.cos(angle) * (far + w / 2), y = one.at[1] + Math.sin(angle) * (far + h / 2);
      var box = [x - w / 2, y - h / 2, x + w / 2, y + h / 2];
      if (free(box)) found = { box: box, x: x, y: y, far: far };
    }
    if (!found) return; // no room: the table has it
    taken.push(found.box);
    if (found.far > 10) out.push(svg("line", { x1: one.at[0], y1: one.at[1], x2: Math.min(Math.max(one.at[0], found.box[0]), found.box[2]), y2: Math.min(Math.max(one.at[1], found.box[1]), found.box[3]), "class": "leader" }));
    out.push(text(found.x, found.y + (one.big ? 6 : 4), one.text, { "class": one.big ? "label big" : "label", "text-anchor": "middle" }));
  });
  return out;
}
// Softmax as horizontal bars: the positive, the hardest negatives, all the others together.
function softmaxDrawing(model, result, count) {
  var shown = result.bars.slice(0, count), rest = result.bars.slice(count);
  var rows = [{ name: "k₊", p: result.p, cls: "positive" }].concat(shown.map(function (b) { return { name: model.name(b.key), p: b.p, cls: "negative" }; }));
  if (rest.length) rows.push({ name: "+" + rest.length, p: rest.reduce(function (a, b) { return a + b.p; }, 0), cls: "others" });
  // Many small ones together would dwarf each: they have a bar of their own measure, outlined, with its number.
  var top = Math.max.apply(null, rows.map(function (r) { return r.cls === "others" ? 0 : r.p; })) || 1, h = 22;
  return shape(360, rows.length * h + 6, say("card_softmax"), say("desc_softmax"), rows.map(function (r, i) {
    var w = Math.max(Math.min(r.p / top, 1) * 190, 1);
    return svg("g", {}, [text(76, i * h + 17, r.name, { "text-anchor": "end" }), svg("rect", { x: 84, y: i * h + 4, width: w, height: h - 6, "class": "bar " + r.cls }), text(90 + w, i * h + 17, short(r.p), {})]);
  }));
}
function courseDrawing(series, title, mark, low) {
  var width = 360, height = 130, left = 60, points = [].concat.apply([], series.map(function (s) { return s.points; }));
  if (!points.length) return null;
  var xs = points.map(function (p) { return p[0]; }), ys = points.map(function (p) { return p[1]; });
  var x0 = Math.min.apply(null, xs), x1 = Math.max.apply(null, xs), y0 = low === undefined ? Math.min.apply(null, ys) : low, y1 = Math.max.apply(null, ys);
  if (x1 === x0) x1 = x0 + 1;
  if (y1 - y0 < 1e-12) y1 = y0 + 1;
  function at(p) { return [left + (p[0] - x0) / (x1 - x0) * (width - left - 10), height - 22 - (p[1] - y0) / (y1 - y0) * (height - 34)]; }
  var parts = [text(left - 6, height - 20, short(y0), { "text-anchor": "end" }), text(left - 6, 16, short(y1), { "text-anchor": "end" }), text(left, height - 4, short(x0), {}), text(width - 8, height - 4, short(x1), { "text-anchor": "end" }),
    svg("line", { x1: left, x2: width - 10, y1: height - 22, y2: height - 22, "class": "axis" })];
  if (mark !== null && mark !== undefined) { var m = at([mark, y0]); parts.push(svg("line", { x1: m[0], x2: m[0], y1: 8, y2: height - 22, "class": "now" })); }
  series.forEach(function (s, i) {
    parts.push(svg("polyline", { points: s.points.map(function (p) { return at(p).join(","); }).join(" "), "class": "line line" + i }));
    s.points.forEach(function (p) { var a = at(p); parts.push(i ? svg("rect", { x: a[0] - 3, y: a[1] - 3, width: 6, height: 6, "class": "mark line" + i }) : svg("circle", { cx: a[0], cy: a[1], r: 3, "class": "mark line" + i })); });
  });
  return shape(width, height, title, series.map(function (s) { return s.name; }).join(", "), parts);
}
