"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const PAGE = 24;
  const $ = (id) => document.getElementById(id);
  const store = { get: (key) => { try { return localStorage.getItem(key); } catch { return null; } },
    set: (key, value) => { try { localStorage.setItem(key, value); } catch { /* a private window keeps nothing */ } } };

  // ------------------------------------------------------------------------------------------------- words

  let language = "en";
  const t = (key, values = {}) => Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll(`{${name}}`, String(value)), DATA.strings[key][language]);

  function speak(chosen) {
    language = chosen === "zh" ? "zh" : "en";
    store.set("mocokit-language", language);
    document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
    document.title = t("search.title");
    for (const one of document.querySelectorAll("[data-t]")) one.textContent = t(one.dataset.t);
    for (const one of document.querySelectorAll("[data-label]")) one.setAttribute("aria-label", t(one.dataset.label));
    $("language").textContent = language === "zh" ? "English" : "中文";
    $("language").lang = language === "zh" ? "en" : "zh";
    const list = $("keys").querySelector("dl");
    list.replaceChildren();
    for (const [key, text] of [["← → ↑ ↓", "move"], ["Enter", "similar"], ["O", "full"], ["N / P", "turn"], ["/", "filter"],
      ["U", "choose"], ["B", "browse"], ["L", "language"], ["Esc", "close"]]) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = key;
      dd.textContent = t(`search.${text}`);
      list.append(dt, dd);
    }
  }

  // -------------------------------------------------------------------- where answers come from: server or this file

  async function ask(path, options = {}) {
    const reply = await fetch(path, { credentials: "same-origin", ...options });
    const body = await reply.json().catch(() => ({ error: `${reply.status}` }));
    if (!reply.ok) throw new Error(body.error || `${reply.status}`);
    return body;
  }

  const server = {
    facts: () => ask("/api/index"),
    images: (skip, label) => ask(`/api/images?${words({ skip, k: PAGE, label })}`),
    similar: (id, skip, label) => ask(`/api/similar?${words({ id, skip, k: PAGE, label })}`),
    upload: (file, skip, label) => ask(`/api/similar?${words({ skip, k: PAGE, label })}`,
      { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } }),
    thumbnail: (id) => `/api/thumbnail/${id}`,
    preview: (id) => `/api/preview/${id}`,
    picture: (id) => `/api/picture/${id}`,
  };

  function words(values) {
    const out = new URLSearchParams();
    for (const [name, value] of Object.entries(values)) if (value !== "" && value !== null) out.set(name, value);
    return out;
  }

  function local(saved) {
    const bytes = Uint8Array.from(atob(saved.vectors), (c) => c.charCodeAt(0));
    const vectors = new Int16Array(bytes.buffer), dim = saved.dim;
    const place = new Map(saved.images.map((one, row) => [one.id, row]));
    const card = (row, score) => ({ ...saved.images[row], score });
    const rows = (label) => saved.images.map((_, row) => row).filter((row) => !label || saved.images[row].label === label);
    return {
      facts: async () => saved.facts,
      images: async (skip, label) => {
        const some = rows(label);
        return { hits: some.slice(skip, skip + PAGE).map((row) => card(row, null)), more: some.length > skip + PAGE };
      },
      similar: async (id, skip, label) => {
        const own = place.get(id);
        if (own === undefined) throw new Error(t("search.unknown"));
        const scored = rows(label).filter((row) => row !== own).map((row) => {
          let sum = 0;
          for (let d = 0; d < dim; d++) sum += vectors[own * dim + d] * vectors[row * dim + d];
          return [row, sum / (32767 * 32767)];
        }).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
        return { asked: card(own, null), hits: scored.slice(skip, skip + PAGE).map(([row, score]) => card(row, score)),
          more: scored.length > skip + PAGE };
      },
      thumbnail: (id) => saved.images[place.get(id)].thumbnail,
      preview: (id) => saved.images[place.get(id)].preview,
      picture: (id) => saved.images[place.get(id)].thumbnail,
    };
  }

  const source = DATA.saved ? local(DATA.saved) : server;

  // ------------------------------------------------------------------------------------------------- state

  let file = null, fileUrl = null, shown = [], focused = 0, turn = 0, clips = false;

  const state = () => {
    const found = new URLSearchParams(location.hash.slice(1));
    const page = Number.parseInt(found.get("page") || "0", 10);
    return { id: found.get("id") || "", label: found.get("label") || "", up: found.get("up") === "1" ? "1" : "",
      page: page >= 0 && page <= 4000 ? page : 0 };
  };

  function go(changes) {
    const next = words({ ...state(), ...changes });
    if (next.get("page") === "0") next.delete("page");
    if (location.hash.slice(1) === next.toString()) show(); else location.hash = next.toString();
  }

  async function show() {
    const { id, label, page, up } = state();
    const mine = ++turn;
    $("filter").value = label;
    say(t("search.working"));
    try {
      let answer;
      if (up && file) answer = await source.upload(file, page * PAGE, label);
      else if (id) answer = await source.similar(id, page * PAGE, label);
      else answer = await source.images(page * PAGE, label);
      if (mine !== turn) return;
      draw(answer, page, up !== "" && file !== null, id !== "");
    } catch (error) {
      if (mine !== turn) return;
      shown = [];
      $("grid").replaceChildren();
      say(t("search.failed", { why: error.message }), true);
    }
  }

  function say(text, error = false) {
    $("status").textContent = text;
    $("status").classList.toggle("error", error);
  }

  function draw(answer, page, uploaded, stored) {
    shown = answer.hits;
    focused = 0;
    $("grid").replaceChildren(...shown.map(cardOf));
    rove();
    const asked = $("asked"), picture = asked.querySelector("img"), text = asked.querySelector("p");
    asked.hidden = !(uploaded || stored);
    if (uploaded) { picture.src = fileUrl; text.textContent = file.name; }
    else if (stored) { picture.src = source.thumbnail(answer.asked.id); text.textContent = nameOf(answer.asked); }
    $("previous").disabled = page === 0;
    $("next").disabled = !answer.more;
    $("page").textContent = t("search.page", { n: page + 1 });
    say(shown.length ? t(uploaded || stored ? "search.found" : "search.all", { n: shown.length }) : t("search.nothing"));
  }

  const nameOf = (hit) => hit.label ? `${hit.name} · ${hit.label}` : hit.name;

  // A clip plays over and over; who asks for less motion sees its strip of frames stand still.
  function moving(img, id) {
    if (!clips) { img.src = source.thumbnail(id); return img; }
    const both = document.createElement("picture"), still = document.createElement("source");
    still.media = "(prefers-reduced-motion: reduce)";
    still.srcset = source.thumbnail(id);
    img.src = source.preview(id);
    both.append(still, img);
    return both;
  }

  function cardOf(hit, number) {
    const card = document.createElement("li"), find = document.createElement("button"), img = document.createElement("img");
    find.type = "button";
    find.className = "find";
    find.dataset.number = number;
    img.loading = "lazy";
    img.decoding = "async";
    img.alt = nameOf(hit);
    img.onerror = () => {
      const gone = document.createElement("span");
      gone.className = "missing";
      gone.textContent = t("search.gone");
      img.replaceWith(gone);
    };
    find.append(moving(img, hit.id));
    find.setAttribute("aria-label", t("search.like", { name: nameOf(hit) }));
    find.onclick = () => go({ id: hit.id, page: 0, up: "" });
    card.append(find);
    if (hit.score !== null && hit.score !== undefined) {
      const line = document.createElement("div"), meter = document.createElement("meter"), value = document.createElement("span");
      line.className = "score";
      meter.min = 0;
      meter.max = 1;
      meter.value = Math.max(0, hit.score);
      meter.setAttribute("aria-hidden", "true");
      value.textContent = hit.score.toFixed(3);
      value.title = t("search.score");
      line.append(meter, value);
      card.append(line);
    }
    for (const [kind, text] of [["label", hit.label], ["name", hit.name]]) {
      if (!text) continue;
      const line = document.createElement("div");
      line.className = kind;
      line.textContent = text;
      line.title = text;
      card.append(line);
    }
    const open = document.createElement("button");
    open.type = "button";
    open.className = "open";
    open.tabIndex = -1;
    open.textContent = t("search.full");
    open.onclick = () => full(hit);
    card.append(open);
    return card;
  }

  function full(hit) {
    const dialog = $("full");
    dialog.querySelector("img").src = source.picture(hit.id);
    dialog.querySelector("img").alt = nameOf(hit);
    dialog.querySelector("p").textContent = `${nameOf(hit)} (${hit.id})`;
    $("full-find").onclick = () => { dialog.close(); go({ id: hit.id, page: 0, up: "" }); };
    dialog.showModal();
  }

  function take(chosen) {
    if (!chosen || clips || !source.upload) return;
    if (chosen.size > DATA.limit) { say(t("search.large", { mb: Math.floor(DATA.limit / 1e6) }), true); return; }
    if (fileUrl) URL.revokeObjectURL(fileUrl);
    file = chosen;
    fileUrl = URL.createObjectURL(chosen);
    go({ id: "", up: "1", page: 0 });
  }

  // ---------------------------------------------------------------------------------------------- keyboard

  const finds = () => [...$("grid").querySelectorAll(".find")];

  function rove(focus = false) {
    finds().forEach((one, number) => { one.tabIndex = number === focused ? 0 : -1; });
    if (focus && finds()[focused]) finds()[focused].focus();
  }

  function columns() {
    const all = finds();
    if (all.length < 2) return 1;
    const top = all[0].getBoundingClientRect().top;
    const next = all.findIndex((one) => Math.abs(one.getBoundingClientRect().top - top) > 4);
    return next < 0 ? all.length : next;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    const inGrid = event.target.closest && event.target.closest("#grid");
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() };
    if (!typing && event.key in steps && shown.length && (inGrid || event.target === document.body)) {
      const next = inGrid ? focused + steps[event.key] : focused;
      if (next >= 0 && next < shown.length) focused = next;
      rove(true);
      event.preventDefault();
      return;
    }
    if (typing) return;
    const pressed = { o: () => shown[focused] && full(shown[focused]), n: () => $("next").click(), p: () => $("previous").click(),
      "/": () => $("filter").focus(), u: () => source.upload && $("file").click(), b: () => $("browse").click(),
      l: () => $("language").click(), "?": () => $("keys").showModal() }[event.key.toLowerCase()];
    if (pressed) { pressed(); event.preventDefault(); }
  });
  $("grid").addEventListener("focusin", (event) => {
    const number = finds().indexOf(event.target);
    if (number >= 0 && number !== focused) { focused = number; rove(); }
  });

  // ------------------------------------------------------------------------------------------------- start

  $("help").onclick = () => $("keys").showModal();
  $("keys-close").onclick = () => $("keys").close();
  $("full-close").onclick = () => $("full").close();
  $("language").onclick = () => { speak(language === "zh" ? "en" : "zh"); facts(); show(); };
  $("filter").onchange = (event) => go({ label: event.target.value, page: 0 });
  $("browse").onclick = () => go({ id: "", up: "", page: 0 });
  $("previous").onclick = () => go({ page: Math.max(0, state().page - 1) });
  $("next").onclick = () => go({ page: state().page + 1 });
  $("file").onchange = (event) => take(event.target.files[0]);
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
  }
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    take(event.dataTransfer.files[0]);
  });
  window.addEventListener("hashchange", show);

  let known = null;
  async function facts() {
    try {
      known = known || await source.facts();
    } catch (error) {
      say(t("search.failed", { why: error.message }), true);
      return;
    }
    const every = document.createElement("option");
    every.value = "";
    every.textContent = t("search.every");
    $("filter").replaceChildren(every, ...known.labels.map(({ name, count }) => {
      const option = document.createElement("option");
      option.value = name;
      option.textContent = `${name} (${count})`;
      return option;
    }));
    $("filter").value = state().label;
    clips = known.clips;
    $("drop").hidden = clips || !source.upload;
    const how = known.kind === "exact" ? t("search.exact") : t("search.near", { kind: known.kind, recall: known.recall.toFixed(3) });
    $("facts").textContent = t("search.facts", { n: known.images, dim: known.dim, readout: known.readout, how });
  }

  speak(store.get("mocokit-language") || (navigator.language || "en").slice(0, 2));
  facts().then(show);
})();
