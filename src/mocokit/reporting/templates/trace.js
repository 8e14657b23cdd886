// A trace as a model: numbers decoded, and the dictionary rebuilt before every step from pointers and counts alone.
function read(id) { return JSON.parse(document.getElementById(id).textContent); }
function floats(text) {
  var raw = atob(text), bytes = new Uint8Array(raw.length);
  for (var i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  var view = new DataView(bytes.buffer), out = new Float32Array(raw.length / 4);
  for (i = 0; i < out.length; i++) out[i] = view.getFloat32(4 * i, true);
  return out;
}
function Model(trace) {
  var self = this, per = trace.config.keys_per_step, K = trace.config.K;
  self.trace = trace; self.config = trace.config; self.images = trace.images; self.source = trace.source;
  self.steps = []; self.Q = trace.config.Q || 1;
  trace.windows.forEach(function (w, number) {
    w.steps.forEach(function (s) { self.steps.push({ row: s, window: number, first: s === w.steps[0], last: s === w.steps[w.steps.length - 1] }); });
  });
  // Keys are numbered over the whole run: birth * keys a step + place in the batch. Random rows are negative.
  var before = new Array(self.steps.length), keys = {};
  function born(t, i, image, flat) {
    var id = t * per + i;
    if (!keys[id]) keys[id] = { id: id, birth: t, place: i, image: image, flat: flat };
    else if (keys[id].image < 0 && image >= 0) keys[id].image = image;
    return id;
  }
  self.keys = keys;
  self.dictionary = function (n) { // key ids by row before step n: Int32-like array with null for empty rows
    if (before[n]) return before[n];
    var s = self.steps[n], slots;
    if (s.first) {
      slots = new Array(K).fill(null);
      var init = trace.windows[s.window].initial, at = init.fill === K ? init.pointer : 0, j = 0;
      var flat = init.flat ? floats(init.flat) : null;
      (init.births || []).forEach(function (run) {
        for (var c = 0; c < run[1]; c++, j++) {
          var row = (at + j) % K, image = init.images ? init.images[j] : -1;
          var id = run[0] < 0 ? -(row + 1) : born(run[0], run[1] < per ? per - run[1] + c : c, image, flat && [flat[2 * j], flat[2 * j + 1]]);
          if (run[0] < 0 && !keys[id]) keys[id] = { id: id, birth: -1, place: row, image: -1, flat: flat && [flat[2 * j], flat[2 * j + 1]] };
          slots[row] = id;
        }
      });
    } else slots = self.after(n - 1).slice();
    before[n] = slots;
    return slots;
  };
  self.after = function (n) {
    var s = self.steps[n].row, slots = self.dictionary(n).slice();
    for (var i = Math.max(s.entered - K, 0); i < s.entered; i++) slots[(s.pointer + i) % K] = self.newKey(n, i);
    return slots;
  };
  self.newKey = function (n, i) {
    var s = self.steps[n].row;
    if (!s.decodedFlat) s.decodedFlat = s.flat_k ? floats(s.flat_k) : new Float32Array(0);
    var f = s.decodedFlat;
    return born(s.t, i, s.images && s.images[i] !== undefined ? s.images[i] : -1, f.length > 2 * i + 1 ? [f[2 * i], f[2 * i + 1]] : null);
  };
  self.leaving = function (n) {
    var s = self.steps[n].row, slots = self.dictionary(n), out = [];
    for (var i = Math.max(s.entered - K, 0); i < s.entered; i++) { var id = slots[(s.pointer + i) % K]; if (id !== null && id !== undefined) out.push(id); }
    return out;
  };
  self.entering = function (n) {
    var s = self.steps[n].row, out = [];
    for (var i = Math.max(s.entered - K, 0); i < s.entered; i++) out.push(self.newKey(n, i));
    return out;
  };
  self.positiveKey = function (n, query) { return self.newKey(n, query); };
  self.birthOf = function (id) { self.steps.forEach(function (_, n) { self.dictionary(n); }); return keys[id]; };
  self.name = function (id) {
    if (id === null || id === undefined) return "–";
    if (id < 0) return "r" + -id;
    return per === 1 ? "k" + (id + 1) : "k" + Math.floor(id / per) + "." + (id % per);
  };
  self.detailed = function (n) { return self.steps[n].row.detail === "full"; };
  // One query of one step: cosines of the positive and of every row, and which rows were left out.
  self.scores = function (n, query) {
    var s = self.steps[n].row;
    if (s.detail !== "full" || query >= s.masked.length) return null;
    if (!s.decoded) s.decoded = { negatives: floats(s.negatives), positive: floats(s.positive) };
    var all = s.decoded.negatives, rows = all.length / s.masked.length;
    return { positive: s.decoded.positive[query], cosines: all.subarray(query * rows, (query + 1) * rows), masked: new Set(s.masked[query]), loss: s.losses[query], rank: s.rank[query] };
  };
  // Which key a scored row held: in the first step the dictionary is the batch's own keys.
  self.rowKey = function (n, row) {
    return self.steps[n].row.dictionary === "batch" ? self.newKey(n, row) : self.dictionary(n)[row];
  };
  // InfoNCE in float64 from the recorded float32 cosines. newest: only that many youngest rows count, null for all.
  self.recompute = function (n, query, T, newest) {
    var s = self.steps[n].row, x = self.scores(n, query), rows = [], i;
    for (i = 0; i < x.cosines.length; i++) if (!x.masked.has(i) && (newest === null || self.ageRank(n, i) < newest)) rows.push(i);
    var top = x.positive / T;
    rows.forEach(function (r) { if (x.cosines[r] / T > top) top = x.cosines[r] / T; });
    var sum = Math.exp(x.positive / T - top);
    rows.forEach(function (r) { sum += Math.exp(x.cosines[r] / T - top); });
    var log = top + Math.log(sum);
    var bars = rows.map(function (r) { return { row: r, key: self.rowKey(n, r), cosine: x.cosines[r], p: Math.exp(x.cosines[r] / T - log) }; });
    bars.sort(function (a, b) { return b.p - a.p || a.row - b.row; });
    var rank = 1 + bars.filter(function (b) { return b.cosine > x.positive; }).length;
    return { loss: log - x.positive / T, p: Math.exp(x.positive / T - log), positive: x.positive, bars: bars, chance: Math.log(1 + rows.length), n: rows.length, rank: rank };
  };
  self.ageRank = function (n, row) { // 0 for the youngest row
    var s = self.steps[n].row;
    if (s.dictionary === "batch") return row;
    return (s.pointer - 1 - row + 2 * K) % K;
  };
  self.indexOf = function (t) { // the recorded step nearest to t
    var best = 0;
    self.steps.forEach(function (s, n) { if (Math.abs(s.row.t - t) < Math.abs(self.steps[best].row.t - t)) best = n; });
    return best;
  };
  self.order = function () {
    return self.config.order === "ema-first"
      ? ["views", "ema", "k", "q", "logits", "loss", "backward", "optimiser", "enqueue", "next"]
      : ["views", "k", "q", "logits", "loss", "backward", "optimiser", "ema", "enqueue", "next"];
  };
  // A key's life: every recorded step in which it was scored, with what the given query made of it.
  self.life = function (id, query) {
    var rows = [];
    self.steps.forEach(function (entry, n) {
      var row = self.dictionary(n).indexOf(id), s = entry.row;
      if (row < 0 || s.fill === 0) return;
      var key = keys[id], one = { n: n, t: s.t, age: key.birth < 0 ? null : s.t - key.birth, row: row, p: null, rank: null, masked: false, cosine: null };
      var x = self.scores(n, query);
      if (x) {
        one.cosine = x.cosines[row]; one.masked = x.masked.has(row);
        if (!one.masked) {
          var r = self.recompute(n, query, self.config.T, null);
          for (var i = 0; i < r.bars.length; i++) if (r.bars[i].row === row) { one.p = r.bars[i].p; break; }
          one.rank = 1 + (x.positive > one.cosine ? 1 : 0) + r.bars.filter(function (b) { return b.cosine > one.cosine; }).length;
        }
      }
      (s.followed || []).forEach(function (f) { if (key.birth === f.birth && key.place === f.place) one.followed = f; });
      one.leaves = self.leaving(n).indexOf(id) >= 0;
      rows.push(one);
    });
    return rows;
  };
  self.staleness = function (id) {
    var key = keys[id], out = [];
    if (!key) return out;
    self.steps.forEach(function (entry) {
      (entry.row.staleness || []).forEach(function (one) { if (one.birth === key.birth && key.place < one.cosines.length) out.push({ t: entry.row.t, age: one.age, cosine: one.cosines[key.place] }); });
    });
    return out;
  };
}
