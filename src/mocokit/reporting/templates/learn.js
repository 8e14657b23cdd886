// The course: pages that move the diagram, ask before they tell, and take their answers from the trace.
function toyIndex(order, m) {
  for (var i = 0; i < models.length; i++) if (models[i].source.kind === "built-in" && models[i].config.order === order && models[i].config.m === m) return i;
  return models.length - 1;
}
function toy() { return toyIndex("paper", 0.9); }
function teach(key, values) { return pickText("learn", key, values); }
function at(sub, n) { return function () { return { src: toy(), n: n === undefined ? 5 : n, sub: sub }; }; }
function numbers(right, others) { // options that are numbers, ascending, without doubles
  var all = [right].concat(others).filter(function (v, i, list) { return list.indexOf(v) === i; }).sort(function (a, b) { return a - b; });
  return { options: all.map(short), right: all.indexOf(right) };
}
function keyed(id, count, right) { var o = []; for (var i = 0; i < count; i++) o.push(teach(id + "_o" + i)); return { options: o, right: right }; }
var LEARN = [
  { id: "compare", go: at("logits"), ask: function (m, n) { var r = m.recompute(n, 0, m.config.T, null); return numbers(1 + r.n, [m.config.N, m.config.K, 2 * m.config.N, m.config.K + 2]); } },
  { id: "gradient", go: at("backward"), ask: function (m, n) { return keyed("gradient", 3, m.steps[n].row.with_gradient_on_key_side === 0 ? 0 : 2); } },
  { id: "ema", go: at("ema"), ask: function (m, n) { var t = m.steps[n].row.theta; return numbers(Number(t.end.apart.toPrecision(4)), [Number(((1 - m.config.m) * t.updated.apart).toPrecision(4)), 0, Number(t.updated.apart.toPrecision(4))]); } },
  { id: "life", go: at("enqueue"), ask: function (m, n) { var out = m.leaving(n)[0], into = m.entering(n)[0], held = m.dictionary(n).slice().sort(function (a, b) { return a - b; }); var names = [out, held[1], held[held.length - 1], into].map(m.name); return { options: names, right: 0 }; } },
  { id: "temperature", go: at("loss"), ask: function (m, n) { var now = m.recompute(n, 0, m.config.T, null), half = m.recompute(n, 0, m.config.T / 2, null); var top = function (r) { return Math.max(r.p, r.bars.length ? r.bars[0].p : 0); }; return keyed("temperature", 3, top(half) > top(now) ? 0 : top(half) < top(now) ? 1 : 2); } },
  { id: "relatives", go: at("next"), ask: function () { var N = 256; return numbers(2 * N - 2, [N, 2 * N - 1, N - 1]); } },
  { id: "meaning", go: at("loss", 11), ask: function () { return keyed("meaning", 3, 2); } },
  { id: "q1", quiz: true, go: at("logits"), ask: function () { return keyed("q1", 4, 1); } },
  { id: "q2", quiz: true, go: at("ema"), ask: function () { return keyed("q2", 4, 1); } },
  { id: "q3", quiz: true, go: function () { return { src: toyIndex("paper", 0.999), n: 5, sub: "ema" }; }, ask: function () { return keyed("q3", 4, 0); } },
  { id: "q4", quiz: true, go: at("enqueue"), ask: function () { return keyed("q4", 4, 2); } },
  { id: "q5", quiz: true, go: at("next"), ask: function () { return keyed("q5", 4, 3); } },
  { id: "q6", quiz: true, go: at("loss"), ask: function () { return keyed("q6", 4, 0); } },
  { id: "q7", quiz: true, go: at("logits"), ask: function () { return keyed("q7", 4, 2); } },
  { id: "q8", quiz: true, go: at("backward"), ask: function () { return keyed("q8", 4, 3); } },
  { id: "q9", quiz: true, go: function () { return { src: toyIndex("paper", 0), n: 6, sub: "ema" }; }, ask: function () { return keyed("q9", 4, 1); } },
  { id: "q10", quiz: true, go: at("optimiser", 11), ask: function () { return keyed("q10", 4, 0); } },
  { id: "m1", claim: true, go: at("backward") },
  { id: "m2", claim: true, go: function () { return { src: toyIndex("paper", 0.999), n: 6, sub: "ema" }; } },
  { id: "m3", claim: true, go: at("enqueue", 8) },
  { id: "m4", claim: true, go: function () { return { src: toyIndex("paper", 0), n: 6, sub: "enqueue" }; } },
  { id: "m5", claim: true, go: at("logits", 7) }
];
var answers = {};
function openPage(number) { // the course moves the diagram only when a page is opened, so that one can look around
  state.learn = number;
  if (number !== null) go(LEARN[number].go());
  draw();
}
function drawLearn() {
  var panel = document.getElementById("learn");
  panel.hidden = state.learn === null || !state.quiz && LEARN[state.learn].quiz === true;
  if (state.learn === null) { clear(panel); return; }
  var page = LEARN[state.learn], where = page.go(), m = models[where.src], parts = [];
  var shown = LEARN.map(function (p, i) { return [i, teach("part_" + (p.quiz ? "quiz" : p.claim ? "claim" : "lesson")) + " " + teach(p.id + "_title")]; }).filter(function (o) { return state.quiz || !LEARN[o[0]].quiz; });
  var place = shown.map(function (o) { return o[0]; }).indexOf(state.learn);
  parts.push(el("div", { "class": "toolbar" }, [
    button("‹", teach("previous"), function () { openPage(shown[Math.max(place - 1, 0)][0]); }, { id: "learn-previous", disabled: place <= 0 }),
    choice("learn-page", teach("page"), shown, state.learn, openPage),
    button("›", teach("next"), function () { openPage(shown[Math.min(place + 1, shown.length - 1)][0]); }, { id: "learn-next", disabled: place >= shown.length - 1 }),
    button(teach("show_frame"), teach("show_frame"), function () { openPage(state.learn); }, { id: "learn-frame" }),
    button("✕", say("close"), function () { move({ learn: null }); }, { id: "learn-close" })
  ]));
  parts.push(el("h2", { id: "learn-title" }, teach(page.id + "_title")));
  var values = { K: m.config.K, N: m.config.N, T: m.config.T, m: m.config.m };
  if (page.claim) {
    parts.push(el("p", {}, [el("strong", {}, teach("claim_word") + " "), teach(page.id + "_claim", values)]), el("p", { id: "learn-why" }, [el("strong", {}, teach("truth_word") + " "), teach(page.id + "_truth", values)]));
  } else {
    if (!page.quiz) parts.push(el("p", {}, teach(page.id + "_body", values)));
    var asked = page.ask(m, where.n), given = answers[page.id];
    parts.push(el("p", { id: "learn-question" }, el("strong", {}, teach(page.id + "_ask", values))));
    parts.push(el("div", { "class": "choices", role: "group", "aria-labelledby": "learn-question" }, asked.options.map(function (o, i) {
      var told = given === undefined ? "" : i === asked.right ? "right" : i === given ? "wrong" : "";
      return el("button", { type: "button", id: "choice-" + i, "class": told, "aria-pressed": String(given === i), on: { click: function () { answers[page.id] = i; draw(); } } }, [o, told === "right" ? " ✓ " + teach("right_word") : told === "wrong" ? " ✗" : ""]);
    })));
    parts.push(el("p", { id: "learn-why", "aria-live": "polite" }, given === undefined ? teach("predict") : teach(page.id + "_why", values)));
  }
  put("learn", parts);
}
