// The page: one state, drawn whole after every change; the state is in the address, so that a link shows the same.
var ui = { exact: false, lang: "en" };
var TEXTS = read("texts"), SOURCES = read("step-source");
var models = read("traces").map(function (t) { return new Model(t); });
var state = { src: 0, n: 0, sub: 0, query: 0, key: null, T: null, newest: null, other: -1, learn: null, playing: null, projector: false, hide: false, quiz: true };

function pickText(page, key, values) {
  var both = TEXTS[page][key];
  var out = both ? both[ui.lang] : key;
  Object.keys(values || {}).forEach(function (name) { out = out.split("{" + name + "}").join(String(values[name])); });
  return out;
}
function say(key, values) { return pickText("stepper", key, values); }
function model() { return models[state.src]; }
function entry() { return model().steps[state.n]; }
function row() { return entry().row; }
function subName() { return model().order()[state.sub]; }
function modelName(m) {
  var c = m.config;
  return say(m.source.kind === "run" ? "kind_run" : m.source.kind === "lab" ? "kind_lab" : "kind_built_in") + ": " + (m.source.kind === "built-in" ? say("toy_name") : m.source.name) + " (K " + c.K + ", N " + c.N + ", m " + c.m + ", T " + c.T + ", " + c.order + ")";
}

// ------------------------------------------------------------------------------------------------ address
function writeHash() {
  var parts = ["src=" + state.src, "t=" + row().t, "s=" + subName(), "q=" + state.query, "lang=" + ui.lang];
  if (state.key !== null) parts.push("key=" + state.key);
  if (state.T !== null) parts.push("T=" + state.T);
  if (state.newest !== null) parts.push("newest=" + state.newest);
  if (state.other >= 0) parts.push("with=" + state.other);
  if (state.learn !== null) parts.push("learn=" + state.learn);
  if (state.hide) parts.push("hideText=1");
  if (!state.quiz) parts.push("quiz=0");
  if (state.projector) parts.push("projector=1");
  history.replaceState(null, "", "#" + parts.join("&"));
}
function readHash() {
  var found = {};
  location.hash.slice(1).split("&").forEach(function (part) { var at = part.indexOf("="); if (at > 0) found[part.slice(0, at)] = decodeURIComponent(part.slice(at + 1)); });
  function whole(name, low, high, otherwise) { var v = Number(found[name]); return found[name] !== undefined && Number.isInteger(v) && v >= low && v <= high ? v : otherwise; }
  ui.lang = found.lang === "zh" || found.lang === "en" ? found.lang : remembered() || ((navigator.language || "en").slice(0, 2) === "zh" ? "zh" : "en");
  state.src = whole("src", 0, models.length - 1, 0);
  var m = model();
  state.n = found.t !== undefined && isFinite(Number(found.t)) ? m.indexOf(Number(found.t)) : firstGood(m);
  state.sub = Math.max(m.order().indexOf(found.s), 0);
  state.query = whole("q", 0, m.Q - 1, 0);
  state.key = found.key !== undefined && Number.isInteger(Number(found.key)) && m.birthOf(Number(found.key)) ? Number(found.key) : null;
  var T = Number(found.T);
  state.T = found.T !== undefined && T >= 0.01 && T <= 2 ? T : null;
  state.newest = whole("newest", 0, m.config.K, null);
  state.other = whole("with", 0, models.length - 1, -1);
  state.learn = whole("learn", 0, LEARN.length - 1, null);
  if (state.learn !== null && found.t === undefined) go(LEARN[state.learn].go());
  state.hide = found.hideText === "1"; state.quiz = found.quiz !== "0"; state.projector = found.projector === "1";
}
function remembered() { try { return localStorage.getItem("mocokit-lang"); } catch (error) { return null; } } // a disk page may have no storage
function remember(lang) { try { localStorage.setItem("mocokit-lang", lang); } catch (error) { return; } }
// Where the story is worth telling: the first detailed step with a full queue, as the figure of the course shows it.
function firstGood(m) {
  for (var n = 0; n < m.steps.length; n++) if (m.detailed(n) && m.steps[n].row.fill === m.config.K) return n;
  return m.steps.length - 1;
}

// ------------------------------------------------------------------------------------------------- moving
function move(change) { Object.assign(state, change); draw(); }
function toStep(n, sub) { move({ n: Math.min(Math.max(n, 0), model().steps.length - 1), sub: sub === undefined ? state.sub : sub }); }
function nextSub() { if (state.sub < 9) move({ sub: state.sub + 1 }); else if (state.n < model().steps.length - 1) move({ n: state.n + 1, sub: 0 }); else stop(); }
function previousSub() { if (state.sub > 0) move({ sub: state.sub - 1 }); else if (state.n > 0) move({ n: state.n - 1, sub: 9 }); }
function stop() { if (state.playing !== null) { clearInterval(state.playing); state.playing = null; draw(); } }
function play() { if (state.playing !== null) { stop(); return; } state.playing = setInterval(nextSub, 1600); draw(); }
function follow(id) { move({ key: id }); }
function go(where) { // for the course: {src, n, sub, query}
  var change = { src: where.src };
  if (where.src === undefined) change = {};
  Object.assign(state, change);
  state.n = Math.min(where.n === undefined ? state.n : where.n, model().steps.length - 1);
  state.sub = where.sub === undefined ? state.sub : model().order().indexOf(where.sub);
  state.query = 0; state.key = where.key === undefined ? null : where.key; state.T = null; state.newest = null;
}

// --------------------------------------------------------------------------------------------------- drawing
function button(label, name, action, attributes) {
  return el("button", Object.assign({ type: "button", "aria-label": name, title: name, on: { click: action } }, attributes || {}), label);
}
function draw(keepToolbar) { // a slider that is being dragged must stay the same element
  var focus = document.activeElement && document.activeElement.id;
  document.documentElement.lang = ui.lang === "zh" ? "zh" : "en";
  document.documentElement.dataset.lang = ui.lang;
  document.documentElement.classList.toggle("projector", state.projector);
  document.documentElement.classList.toggle("hidetext", state.hide);
  document.title = say("title") + " · mocokit";
  var m = model(); state.query = Math.min(state.query, m.Q - 1);
  put("title", say("title"));
  drawModes(); drawSources(); drawLearn();
  if (!keepToolbar) drawToolbar();
  var s = row(), sub = subName(), full = m.detailed(state.n);
  put("sentence", sentence(sub, s)); put("formula", full ? formula(sub, s) : say("light_step"));
  ["views", "encoders", "plane", "dictionary", "softmax", "loss", "code", "numbers", "key", "whatif"].forEach(function (name) {
    document.getElementById("card-" + name).classList.toggle("on", (CARDS_OF[sub] || []).indexOf(name) >= 0);
  });
  drawViews(full); drawEncoders(sub, s); drawPlane(full, sub); drawDictionary(sub); drawSoftmax(full); drawLoss(s); drawCode(sub); drawNumbers(s); drawKey(); drawWhatIf(full); drawCompare();
  writeHash();
  var again = focus && document.getElementById(focus);
  if (again && document.activeElement !== again) again.focus({ preventScroll: true });
}
var CARDS_OF = { views: ["views"], q: ["encoders", "plane"], k: ["encoders", "plane"], ema: ["encoders", "numbers"], logits: ["softmax", "plane"], loss: ["softmax", "loss"], backward: ["encoders", "numbers"], optimiser: ["encoders", "numbers"], enqueue: ["dictionary"], next: ["dictionary", "key"] };

function drawModes() {
  put("modes", [
    button("English", "English", function () { setLang("en"); }, { id: "lang-en", lang: "en", "class": "always", "aria-pressed": String(ui.lang === "en") }),
    button("中文", "中文", function () { setLang("zh"); }, { id: "lang-zh", lang: "zh-Hans", "aria-pressed": String(ui.lang === "zh") }),
    button(say("learn"), say("learn"), function () { openPage(state.learn === null ? 0 : null); }, { id: "mode-learn", "aria-pressed": String(state.learn !== null) }),
    button(say("projector"), say("projector"), function () { move({ projector: !state.projector }); }, { id: "mode-projector", "aria-pressed": String(state.projector) }),
    button(say("hide_text"), say("hide_text"), function () { move({ hide: !state.hide }); }, { id: "mode-hide", "aria-pressed": String(state.hide) }),
    button(say("all_digits"), say("all_digits"), function () { ui.exact = !ui.exact; draw(); }, { id: "mode-exact", "aria-pressed": String(ui.exact) }),
    button(say("print"), say("print"), function () { window.print(); }, { id: "mode-print" }),
    button(say("copy_link"), say("copy_link"), copyLink, { id: "mode-link" }),
    button("CSV", say("csv"), csv, { id: "mode-csv" }),
    button("PNG", say("png"), png, { id: "mode-png" }),
    button("?", say("help"), help, { id: "mode-help" })
  ]);
}
function setLang(lang) { ui.lang = lang; remember(lang); draw(); }
function copyLink() { writeHash(); if (navigator.clipboard) navigator.clipboard.writeText(location.href).then(function () { put("sentence", say("copied")); }, function () { put("sentence", location.hash); }); else put("sentence", location.hash); }
function choice(id, label, options, value, change) {
  return el("label", {}, [label, el("select", { id: id, on: { change: function (event) { change(Number(event.target.value)); } } }, options.map(function (o) {
    return el("option", { value: o[0], selected: o[0] === value }, o[1]);
  }))]);
}
function drawSources() {
  var names = models.map(function (m, i) { return [i, modelName(m)]; });
  put("sources", [
    choice("source", say("shown"), names, state.src, function (v) { stop(); var was = row().t; state.key = null; state.T = null; state.newest = null; state.src = v; state.query = 0; state.sub = 0; state.n = models[v].indexOf(was); draw(); }),
    choice("other", say("beside"), [[-1, say("nothing")]].concat(names), state.other, function (v) { move({ other: v }); })
  ]);
}
function drawToolbar() {
  var m = model(), last = m.steps.length - 1, bar = document.getElementById("toolbar");
  bar.setAttribute("aria-label", say("toolbar")); document.getElementById("subs").setAttribute("aria-label", say("substeps"));
  put("toolbar", [
    button("«", say("previous_step"), function () { toStep(state.n - 1); }, { id: "previous-step", disabled: state.n === 0 }),
    button("‹", say("previous_sub"), previousSub, { id: "previous-sub", disabled: state.n === 0 && state.sub === 0 }),
    button(state.playing === null ? "▶ " + say("play") : "⏸ " + say("pause"), state.playing === null ? say("play") : say("pause"), play, { id: "play", "aria-pressed": String(state.playing !== null) }),
    button("›", say("next_sub"), nextSub, { id: "next-sub", disabled: state.n === last && state.sub === 9 }),
    button("»", say("next_step"), function () { toStep(state.n + 1); }, { id: "next-step", disabled: state.n === last }),
    el("label", {}, [say("step") + " ", el("input", { type: "range", id: "step-range", min: 0, max: last, value: state.n, "aria-valuetext": say("step") + " " + row().t, on: { input: function (event) { state.n = Number(event.target.value); put("step-number", num(row().t, "t")); event.target.setAttribute("aria-valuetext", say("step") + " " + row().t); draw(true); } } }), el("output", { id: "step-number" }, num(row().t, "t"))]),
    choice("query", say("query"), range(m.Q).map(function (i) { return [i, String(i)]; }), state.query, function (v) { move({ query: v }); })
  ]);
  put("subs", m.order().map(function (name, i) {
    return button((i + 1) + " " + say("sub_" + name), say("sub_" + name), function () { move({ sub: i }); }, { id: "sub-" + name, "aria-current": i === state.sub ? "step" : null, "aria-pressed": String(i === state.sub) });
  }));
}
function range(count) { var out = []; for (var i = 0; i < count; i++) out.push(i); return out; }

// ------------------------------------------------------------------------------------------------ one step in words
function facts(s) {
  var m = model(), c = m.config;
  var leaving = m.leaving(state.n), entering = m.entering(state.n);
  return { t: s.t, m: short(s.m), K: c.K, N: c.N, fill: s.fill, after: s.fill_after, entered: s.entered, left: s.left, loss: short(s.loss), chance: short(s.chance), lr: short(s.lr), moved: short(s.moved), gradient: short(s.gradient_theta_q), apart: short(s.theta[c.order === "paper" ? "updated" : "start"].apart), then: short(s.theta[c.order === "paper" ? "end" : "keys"].apart), first_in: m.name(entering[0]), last_in: m.name(entering[entering.length - 1]), first_out: m.name(leaving[0]), last_out: m.name(leaving[leaving.length - 1]), T: c.T, query: state.query, masked: s.masked ? s.masked[state.query].length : 0, rank: s.rank ? s.rank[state.query] : "–", life: short(c.K / c.keys_per_step), pointer: s.pointer, pointer_after: s.pointer_after };
}
function sentence(sub, s) {
  var key = "say_" + sub;
  if (sub === "enqueue" && !s.left) key = "say_enqueue_filling";
  if (sub === "next" && !s.left) key = "say_next_filling";
  if (sub === "logits" && s.dictionary === "batch") key = "say_logits_first";
  return say(key, facts(s));
}
function formula(sub, s) {
  var m = model(), c = m.config, i = state.query, r = m.recompute(state.n, i, c.T, null);
  var before = c.order === "paper" ? "updated" : "start", after = c.order === "paper" ? "end" : "keys";
  var logit = r.positive / c.T;
  switch (sub) {
    case "views": return ["x_q = view a(x),  x_k = view b(x)"];
    case "q": return ["q = f_q(x_q) / ‖f_q(x_q)‖,  ‖f_q(x_q)‖ = ", num(s.z_norm[i], "z_norm." + i)];
    case "k": return ["k₊ = f_k(x_k) / ‖f_k(x_k)‖      ", say("no_graph")];
    case "logits": return ["q·k₊ / T = ", num(r.positive, "positive"), " / ", num(c.T), " = ", num(logit), "\nq·kᵢ / T : ", num(r.n), " ", say("negatives_word")];
    case "loss": return ["L = −log p₊ = −log ", num(r.p), " = ", num(s.losses[i], "losses." + i), "\n", say("mean_over"), num(s.loss, "loss"), "   ", say("chance_word"), " = ln(1 + ", num(r.n), ") = ", num(r.chance)];
    case "backward": return ["∂L/∂q = (Σ pᵢ kᵢ − k₊)/T,  ‖∂L/∂q‖ = ", num(s.gradient_q[i], "gradient_q." + i), "\n‖∂L/∂z‖ = ", num(s.gradient_z[i], "gradient_z." + i), "   ‖∂L/∂θq‖ = ", num(s.gradient_theta_q, "gradient_theta_q"), "\n∂L/∂θk = ", num(s.gradient_theta_k, "gradient_theta_k"), "   ∂L/∂queue = ", num(s.gradient_queue, "gradient_queue")];
    case "optimiser": return ["θq ← θq − lr·(…),  lr = ", num(s.lr, "lr"), ",  ‖Δθq‖ = ", num(s.moved, "moved"), "\n", say("one_weight"), num(s.parameter.keys[0], "parameter.keys.0"), " → ", num(s.parameter.updated[0], "parameter.updated.0")];
    case "ema": return ["θk ← m·θk + (1 − m)·θq\n", say("one_weight"), num(s.m, "m"), "·(", num(s.parameter[before][1], "parameter." + before + ".1"), ") + ", num(1 - s.m), "·(", num(s.parameter[before][0], "parameter." + before + ".0"), ") = ", num(s.parameter[after][1], "parameter." + after + ".1"), "\n‖θq − θk‖: ", num(s.theta[before].apart, "theta." + before + ".apart"), " → ", num(s.theta[after].apart, "theta." + after + ".apart")];
    case "enqueue": return ["queue[(pointer + i) mod K] ← k,   pointer ", num(s.pointer, "pointer"), " → ", num(s.pointer_after, "pointer_after"), "   K = ", num(c.K)];
    default: return [say("difference"), "+ ", num(s.entered, "entered"), "  − ", num(s.left, "left"), "   ", num(s.fill, "fill"), " → ", num(s.fill_after, "fill_after")];
  }
}

// --------------------------------------------------------------------------------------------------- the cards
function heading(key) { return el("h2", {}, say(key)); }
function imageOf(m, index) { return index >= 0 && m.images[index] ? m.images[index] : null; }
function figure(url, caption, alt) { return el("figure", {}, [picture(url, alt || caption), el("figcaption", {}, caption)]); }
function thumbFor(m, index, caption) {
  var image = imageOf(m, index);
  if (!image) return el("span", { "class": "legend" }, caption);
  return image.thumb ? figure(image.thumb, caption + (image.label ? " · " + image.label : ""), image.name || image.id) : el("span", { "class": "legend" }, caption + " (" + say("no_thumb") + ")");
}
function drawViews(full) {
  var m = model(), s = row(), i = state.query;
  if (!full) { put("card-views", [heading("card_views"), el("p", {}, say("light_step"))]); return; }
  var parts = [thumbFor(m, s.images[i], say("image"))];
  if (s.views_q[i]) parts.push(el("span", { "aria-hidden": "true" }, "→"), figure(s.views_q[i], say("view_a")), figure(s.views_k[i], say("view_b")));
  var image = imageOf(m, s.images[i]);
  put("card-views", [heading("card_views"), el("div", { "class": "views" }, parts), image && image.name ? el("p", { "class": "legend", id: "image-name" }, image.name) : null]);
}
function drawEncoders(sub, s) { put("card-encoders", [heading("card_encoders"), encodersDrawing(sub, s, model()), el("p", { "class": "legend" }, say("arrows"))]); }
function drawPlane(full, sub) {
  var m = model(), s = row();
  if (!full) { put("card-plane", [heading("card_plane"), el("p", {}, say("light_step"))]); return; }
  var r = m.recompute(state.n, state.query, m.config.T, null), q = floats(s.flat_q), k = floats(s.flat_k), i = state.query;
  var rows = [["q", q[2 * i], q[2 * i + 1]], ["k₊", k[2 * i], k[2 * i + 1]]].concat(r.bars.slice(0, 8).filter(function (b) { return m.keys[b.key] && m.keys[b.key].flat; }).map(function (b) { return [m.name(b.key), m.keys[b.key].flat[0], m.keys[b.key].flat[1]]; }));
  put("card-plane", [heading("card_plane"), planeDrawing(m, state.n, i, sub), el("p", { "class": "legend" }, say("plane_note", { how: say(m.config.D === 2 ? "plane_self" : "plane_principal") })), tableOf(say("card_plane"), [say("vector"), "x", "y"], rows)]);
}
// The dictionary in blocks: the rows of one birth that lie side by side; with few keys every block is one key.
function blocks(slots, t) {
  var m = model(), out = [], last = null;
  slots.forEach(function (id, r) {
    var birth = id === null || id === undefined ? null : id < 0 ? -1 : m.keys[id].birth;
    if (last && last.birth === birth && m.config.keys_per_step > 1 && birth !== null) { last.count++; last.ids.push(id); }
    else if (last && birth === null && last.birth === null) last.count++;
    else { last = { birth: birth, start: r, count: 1, ids: birth === null ? [] : [id], age: birth === null || birth < 0 ? null : t - birth }; out.push(last); }
  });
  return out;
}
function ageClass(age) {
  if (age === null) return "agex";
  var life = Math.max(model().config.K / model().config.keys_per_step, 1);
  return "age" + Math.min(4, Math.max(0, Math.floor((age - 1) / life * 5)));
}
function drawDictionary(sub) {
  var m = model(), s = row(), next = sub === "next", slots = next ? m.after(state.n) : m.dictionary(state.n), t = next ? s.t + 1 : s.t;
  var gone = sub === "enqueue" ? m.leaving(state.n) : [], fresh = next ? m.entering(state.n) : [], pointer = next ? s.pointer_after : s.pointer;
  var goneSet = new Set(gone), freshSet = new Set(fresh), found = blocks(slots, t);
  var chosen = state.key;
  var items = found.map(function (b, i) {
    var label = b.birth === null ? say("empty_rows", { n: b.count }) : b.birth < 0 ? say("random_rows", { n: b.count }) : b.count === 1 ? m.name(b.ids[0]) : say("born", { t: b.birth });
    var cls = "slot " + ageClass(b.age) + (pointer >= b.start && pointer < b.start + b.count ? " pointer" : "") + (b.ids.length && b.ids.every(function (id) { return goneSet.has(id); }) ? " leaving" : "") + (b.ids.length && b.ids.some(function (id) { return freshSet.has(id); }) ? " entering" : "") + (b.ids.indexOf(chosen) >= 0 ? " chosen" : "");
    var full = label + (b.age === null ? "" : ", " + say("age", { age: b.age })) + (b.count > 1 ? ", " + say("rows", { n: b.count }) : "") + (cls.indexOf("leaving") > 0 ? ", " + say("leaves") : "") + (cls.indexOf("entering") > 0 ? ", " + say("enters") : "") + (cls.indexOf(" pointer") > 0 ? ", " + say("pointer_here") : "");
    var selected = b.ids.indexOf(chosen) >= 0 || (i === 0 && !found.some(function (x) { return x.ids.indexOf(chosen) >= 0; }));
    return el("li", {}, el("button", { type: "button", "class": cls, id: "block-" + i, tabindex: selected ? "0" : "-1", "aria-label": full, title: full, "data-key": b.ids.length ? b.ids[0] : null, on: { click: function () { if (b.ids.length) follow(b.ids[0]); }, keydown: function (event) { rove(event, i, found.length); } } },
      [label, el("br"), b.age === null ? "–" : say("age_short", { age: b.age }), (cls.indexOf(" pointer") > 0 ? " ▼" : "")]));
  });
  put("card-dictionary", [heading(next ? "card_dictionary_next" : "card_dictionary"), el("ol", { "class": "slots", "aria-label": say("card_dictionary") }, items),
    el("p", { "class": "legend" }, say("ages_legend", { life: short(m.config.K / m.config.keys_per_step) })),
    tableOf(say("card_dictionary"), [say("rows_word"), say("birth"), say("age_word"), say("keys_word")], found.map(function (b) { return [b.start + (b.count > 1 ? "–" + (b.start + b.count - 1) : ""), b.birth === null ? "–" : b.birth, b.age === null ? "–" : b.age, b.birth === null ? 0 : b.count]; }))]);
}
function rove(event, i, count) {
  var to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: count - 1 }[event.key];
  if (to === undefined || event.shiftKey) return;
  event.preventDefault(); event.stopPropagation();
  var node = document.getElementById("block-" + Math.min(Math.max(to, 0), count - 1));
  document.querySelectorAll(".slot").forEach(function (s) { s.tabIndex = -1; });
  node.tabIndex = 0; node.focus();
}
function drawSoftmax(full) {
  var m = model(), s = row();
  if (!full) { put("card-softmax", [heading("card_softmax"), el("p", {}, say("light_step"))]); return; }
  var r = m.recompute(state.n, state.query, m.config.T, null);
  var rows = [["k₊", r.positive, r.p]].concat(r.bars.slice(0, 50).map(function (b) { return [m.name(b.key), b.cosine, b.p]; }));
  var pictures = r.bars.slice(0, 3).map(function (b) { var key = m.keys[b.key]; return key && imageOf(m, key.image) && imageOf(m, key.image).thumb ? thumbFor(m, key.image, m.name(b.key)) : null; }).filter(Boolean);
  put("card-softmax", [heading("card_softmax"), softmaxDrawing(m, r, 8),
    el("p", {}, [say("rank_is"), " ", num(s.rank[state.query], "rank." + state.query), " / ", num(r.n + 1), s.masked[state.query].length ? el("span", {}, ["  · ", say("masked_rows"), " ", num(s.masked[state.query].length)]) : null]),
    pictures.length ? el("div", { "class": "views" }, pictures) : null,
    tableOf(say("card_softmax"), [say("key"), say("cosine"), "p"], rows),
    tableOf(say("all_queries"), [say("query"), "q·k₊", "L", say("rank"), say("masked_rows")], Array.prototype.map.call(s.decoded.positive, function (p, i) { return [i, p, s.losses[i], s.rank[i], s.excluded[i]]; })),
    tableOf(say("histogram"), [say("from"), say("positives"), say("negatives_word")], s.histogram.positives.map(function (p, i) { return [Number((-1 + i / 20).toFixed(2)), p, s.histogram.negatives[i]]; }))]);
}
function drawLoss(s) {
  var m = model(), losses = m.steps.map(function (e) { return [e.row.t, e.row.loss]; }), chances = m.steps.map(function (e) { return [e.row.t, e.row.chance]; });
  put("card-loss", [heading("card_loss"), el("p", {}, [say("loss_word"), " ", num(s.loss, "loss"), " · ", say("chance_word"), " ", num(s.chance, "chance")]),
    courseDrawing([{ name: say("loss_word"), points: losses }, { name: say("chance_word"), points: chances }], say("card_loss"), s.t),
    el("p", { "class": "legend" }, say("loss_legend")),
    tableOf(say("card_loss"), [say("step"), say("loss_word"), say("chance_word")], m.steps.map(function (e) { return [e.row.t, e.row.loss, e.row.chance]; }))]);
}
function drawCode(sub) {
  var source = SOURCES[model().config.order], part = { views: "1", k: "1", q: "2", logits: "2", loss: "2", backward: "3", optimiser: "3", ema: "4", enqueue: "5", next: "5" }[sub], lines = new Set(source.parts[part]);
  put("card-code", [heading("card_code"), el("p", { "class": "legend" }, [el("code", {}, source.name), model().source.kind === "lab" ? " · " + say("lab_code") : null]), el("div", { "class": "code", tabindex: "0", role: "region", "aria-label": say("card_code") }, source.lines.map(function (line, i) { return el("span", { "class": lines.has(i) ? "on" : null }, line || " "); }))]);
}
function drawNumbers(s) {
  var rows = [["loss", s.loss, "loss"], [say("chance_word"), s.chance, "chance"], ["lr", s.lr, "lr"], ["m", s.m, "m"], ["‖θq‖", s.theta.end.q, "theta.end.q"], ["‖θk‖", s.theta.end.k, "theta.end.k"], ["‖θq − θk‖", s.theta.end.apart, "theta.end.apart"], ["‖∂L/∂θq‖", s.gradient_theta_q, "gradient_theta_q"], ["∂L/∂θk", s.gradient_theta_k, "gradient_theta_k"], ["∂L/∂queue", s.gradient_queue, "gradient_queue"], ["‖Δθq‖", s.moved, "moved"], [say("bn_apart"), s.bn_apart, "bn_apart"], [say("keys_word"), s.fill, "fill"]];
  var layers = s.layers || [];
  put("card-numbers", [heading("card_numbers"), el("table", { "class": "facts" }, el("tbody", {}, rows.map(function (r) { return el("tr", {}, [el("th", { scope: "row" }, r[0]), el("td", { "class": "n" }, num(r[1], r[2]))]); }))),
    el("p", { "class": "legend" }, say("bn_note")), layers.length ? tableOf(say("layers"), [say("layer"), "‖θq − θk‖", "‖θq‖"], layers.map(function (l) { return [l.name, l.apart, l.norm]; })) : null]);
}
function drawKey() {
  var m = model(), parts = [heading("card_key")], slots = m.dictionary(state.n).filter(function (id) { return id !== null && id !== undefined; });
  var ids = slots.slice(); m.entering(state.n).forEach(function (id) { ids.push(id); });
  if (state.key !== null && ids.indexOf(state.key) < 0) ids.unshift(state.key);
  parts.push(el("label", {}, [say("follow"), " ", el("select", { id: "key-choice", on: { change: function (event) { move({ key: event.target.value === "" ? null : Number(event.target.value) }); } } },
    [el("option", { value: "" }, "–")].concat(ids.slice(0, 1500).map(function (id) { return el("option", { value: id, selected: id === state.key }, m.name(id)); })))]));
  parts.push(" ", button(say("own_key"), say("own_key"), function () { follow(m.positiveKey(state.n, state.query)); }, { id: "own-key" }));
  if (state.key === null) { parts.push(el("p", {}, say("follow_hint"))); put("card-key", parts); return; }
  var key = m.birthOf(state.key), life = m.life(state.key, state.query), stale = m.staleness(state.key);
  parts.push(el("p", { id: "key-story" }, [el("strong", {}, m.name(state.key)), ": ", key.birth < 0 ? say("random_key") : say("key_born", { t: key.birth, first: key.birth + 1, last: key.birth + Math.ceil(m.config.K / m.config.keys_per_step) })]));
  if (key.image >= 0) parts.push(el("div", { "class": "views" }, thumbFor(m, key.image, say("birth_image"))));
  var known = life.filter(function (l) { return l.p !== null && l.age !== null; });
  if (known.length) parts.push(courseDrawing([{ name: "p", points: known.map(function (l) { return [l.age, l.p]; }) }], say("key_course"), row().t - key.birth, 0), el("p", { "class": "legend" }, say("key_axis", { query: state.query })));
  parts.push(tableOf(say("card_key"), [say("step"), say("age_word"), say("cosine"), "p", say("rank"), say("mean_p"), say("best_rank"), say("end_word")], life.map(function (l) {
    return [l.t, l.age === null ? "–" : l.age, l.cosine === null ? "–" : l.cosine, l.masked ? say("left_out") : l.p === null ? "–" : l.p, l.rank === null ? "–" : l.rank, l.followed ? l.followed.mean_p : "–", l.followed ? l.followed.best_rank : "–", l.leaves ? say("leaves") : ""];
  })));
  var table = parts[parts.length - 1]; table.open = true; table.id = "key-life";
  if (stale.length) {
    parts.push(el("p", { id: "key-stale" }, [say("stale_is"), " "].concat([].concat.apply([], stale.map(function (one, i) { return [i ? ", " : "", say("age", { age: one.age }) + ": ", num(one.cosine, "staleness")]; })))));
    if (stale.length > 1) parts.push(courseDrawing([{ name: say("cosine"), points: stale.map(function (s) { return [s.age, s.cosine]; }) }], say("stale_is"), null));
  } else parts.push(el("p", { "class": "legend" }, say("stale_unknown")));
  put("card-key", parts);
}
function drawWhatIf(full) {
  var m = model();
  if (!full) { put("card-whatif", [heading("card_whatif"), el("p", {}, say("light_step"))]); return; }
  var T = state.T === null ? m.config.T : state.T, rows = m.scores(state.n, state.query).cosines.length;
  function slide(name, event) { state[name] = Number(event.target.value); drawWhatIfResult(); writeHash(); }
  put("card-whatif", [heading("card_whatif"), el("p", { "class": "note" }, say("whatif_note")),
    el("p", {}, el("label", {}, ["T ", el("input", { type: "range", id: "temperature", min: 0.01, max: 1, step: 0.01, value: T, on: { input: slide.bind(null, "T") } }), el("output", { id: "temperature-value" })])),
    el("p", {}, el("label", {}, [say("newest"), " ", el("input", { type: "range", id: "newest", min: 0, max: rows, step: 1, value: state.newest === null ? rows : Math.min(state.newest, rows), on: { input: slide.bind(null, "newest") } }), el("output", { id: "newest-value" })])),
    el("div", { id: "whatif-result" }),
    button(say("reset"), say("reset"), function () { move({ T: null, newest: null }); }, { id: "whatif-reset" })]);
  drawWhatIfResult();
}
function drawWhatIfResult() {
  var m = model(), s = row(), T = state.T === null ? m.config.T : state.T, rows = m.scores(state.n, state.query).cosines.length;
  var newest = state.newest === null ? rows : Math.min(state.newest, rows), r = m.recompute(state.n, state.query, T, newest >= rows ? null : newest), same = T === m.config.T && newest >= rows;
  put("temperature-value", num(T)); put("newest-value", num(newest));
  put("whatif-result", [
    el("p", {}, [say("loss_word"), " ", el("strong", { id: "whatif-loss" }, num(r.loss, "whatif")), " · ", say("chance_word"), " ", num(r.chance), " · p₊ ", num(r.p), " · ", say("rank"), " ", num(r.rank)]),
    el("p", { "class": "legend", id: "whatif-same" }, same ? say("whatif_same", { loss: short(s.losses[state.query]) }) : say("whatif_other")),
    softmaxDrawing(m, r, 5), tableOf(say("card_whatif"), [say("key"), say("cosine"), "p"], [["k₊", r.positive, r.p]].concat(r.bars.slice(0, 20).map(function (b) { return [m.name(b.key), b.cosine, b.p]; })))]);
}
function drawCompare() {
  var card = document.getElementById("card-compare");
  card.hidden = state.other < 0 || state.other === state.src;
  if (card.hidden) { clear(card); return; }
  var a = model(), b = models[state.other], n = b.indexOf(row().t), s = row(), o = b.steps[n].row, equal = 0, both = 0;
  a.steps.forEach(function (e) { var m = b.indexOf(e.row.t); if (b.steps[m].row.t === e.row.t) { both++; if (b.steps[m].row.loss === e.row.loss) equal++; } });
  var values = [[say("step"), s.t, o.t], ["m", s.m, o.m], ["K", a.config.K, b.config.K], [say("loss_word"), s.loss, o.loss], [say("chance_word"), s.chance, o.chance], ["‖θq − θk‖", s.theta.end.apart, o.theta.end.apart], ["‖Δθq‖", s.moved, o.moved], ["‖∂L/∂θq‖", s.gradient_theta_q, o.gradient_theta_q], [say("keys_word"), s.fill, o.fill]];
  function ages(m) { var out = []; m.steps.forEach(function (e) { (e.row.staleness || []).forEach(function (x) { out.push([x.age, x.cosines.reduce(function (p, q) { return p + q; }, 0) / x.cosines.length]); }); }); return out.sort(function (p, q) { return p[0] - q[0]; }); }
  var parts = [heading("card_compare"), el("p", {}, [el("strong", {}, "A: "), modelName(a), el("br"), el("strong", {}, "B: "), modelName(b)]),
    el("p", { id: "compare-equal" }, say("equal_losses", { equal: equal, both: both })),
    el("div", { "class": "scroll", tabindex: "0", role: "region", "aria-label": say("card_compare") }, el("table", {}, [el("thead", {}, el("tr", {}, [el("td"), el("th", { scope: "col" }, "A"), el("th", { scope: "col" }, "B"), el("th", { scope: "col" }, "B − A")])), el("tbody", {}, values.map(function (v) { return el("tr", {}, [el("th", { scope: "row" }, v[0]), el("td", { "class": "n" }, num(v[1])), el("td", { "class": "n" }, num(v[2])), el("td", { "class": "n" }, typeof v[1] === "number" && typeof v[2] === "number" ? num(v[2] - v[1]) : "–")]); }))])),
    el("div", { "class": "cards" }, [
      el("div", {}, [el("h3", {}, say("card_loss")), courseDrawing([{ name: "A", points: a.steps.map(function (e) { return [e.row.t, e.row.loss]; }) }, { name: "B", points: b.steps.map(function (e) { return [e.row.t, e.row.loss]; }) }], say("card_loss"), s.t), tableOf(say("card_loss"), [say("step"), "A"], a.steps.map(function (e) { return [e.row.t, e.row.loss]; })), tableOf("B", [say("step"), "B"], b.steps.map(function (e) { return [e.row.t, e.row.loss]; }))]),
      ages(a).length && ages(b).length ? el("div", {}, [el("h3", {}, say("stale_by_age")), courseDrawing([{ name: "A", points: ages(a) }, { name: "B", points: ages(b) }], say("stale_by_age"), null), tableOf(say("stale_by_age"), [say("age_word"), "A"], ages(a)), tableOf("B", [say("age_word"), "B"], ages(b))]) : null,
      b.detailed(n) && a.detailed(state.n) ? el("div", {}, [el("h3", {}, say("card_softmax") + " A"), softmaxDrawing(a, a.recompute(state.n, state.query, a.config.T, null), 5), el("h3", {}, say("card_softmax") + " B"), softmaxDrawing(b, b.recompute(n, Math.min(state.query, b.Q - 1), b.config.T, null), 5)]) : null
    ])];
  put("card-compare", parts);
}

// -------------------------------------------------------------------------------------------------- keyboard, files
function csv() {
  var m = model(), s = row(), lines = ["name,value"];
  function walk(name, value) {
    if (value !== null && typeof value === "object") Object.keys(value).forEach(function (k) { walk(name ? name + "." + k : k, value[k]); });
    else if (typeof value === "number" || value === null) lines.push(name + "," + (value === null ? "" : value));
  }
  walk("", Object.fromEntries(Object.entries(s).filter(function (e) { return ["decoded", "decodedFlat"].indexOf(e[0]) < 0; })));
  if (m.detailed(state.n)) m.recompute(state.n, state.query, m.config.T, null).bars.forEach(function (b) { lines.push("cosine." + m.name(b.key) + "," + b.cosine, "p." + m.name(b.key) + "," + b.p); });
  download("step-" + s.t + ".csv", new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
}
function help() {
  var keys = [["← →", "next_sub"], ["Shift ← →", "next_step"], ["Home End", "ends"], ["Space", "play"], ["k", "follow"], ["t", "temperature_word"], ["l", "learn"], ["?", "help"], ["Esc", "close"]];
  put("help", [el("h2", {}, say("help")), el("p", {}, say("help_text")), el("table", {}, el("tbody", {}, keys.map(function (k) { return el("tr", {}, [el("td", {}, el("kbd", {}, k[0])), el("td", {}, say(k[1]))]); }))), el("p", {}, say("honesty")), button(say("close"), say("close"), function () { document.getElementById("help").close(); }, { id: "help-close" })]);
  document.getElementById("help").setAttribute("aria-label", say("help"));
  document.getElementById("help").showModal();
}
document.addEventListener("keydown", function (event) {
  var tag = event.target.tagName, typing = tag === "INPUT" || tag === "SELECT" || tag === "TEXTAREA";
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  if (event.key === "Escape") { stop(); if (state.learn !== null) move({ learn: null }); return; }
  if (typing && event.key.length !== 1) return;
  if (typing && event.key === " ") return;
  if (tag === "BUTTON" && (event.key === " " || event.key === "Enter")) return;
  if (tag === "SUMMARY" && event.key === " ") return;
  var done = true;
  if (event.key === "ArrowRight") { if (event.shiftKey) toStep(state.n + 1); else nextSub(); }
  else if (event.key === "ArrowLeft") { if (event.shiftKey) toStep(state.n - 1); else previousSub(); }
  else if (event.key === "Home") toStep(0, 0);
  else if (event.key === "End") toStep(model().steps.length - 1, 9);
  else if (event.key === " ") play();
  else if (event.key === "k") { follow(m_first()); document.getElementById("key-choice").focus(); }
  else if (event.key === "t") { var slider = document.getElementById("temperature"); if (slider) slider.focus(); }
  else if (event.key === "l") openPage(state.learn === null ? 0 : null);
  else if (event.key === "?") help();
  else done = false;
  if (done) event.preventDefault();
});
function m_first() { return state.key !== null ? state.key : model().positiveKey(state.n, state.query); }
window.addEventListener("hashchange", function () { readHash(); draw(); });
readHash();
draw();
