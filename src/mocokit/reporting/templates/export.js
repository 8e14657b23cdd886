// The frame that is shown as a PNG: its drawings put into one SVG, styles written into it, drawn on a canvas.
var FRAME = { width: 1200, height: 840, scale: 2 };
var STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-weight", "font-family", "text-anchor"];
// A drawing as it looks here, without the page's style sheet: what is computed is written on every element.
function standing(node) {
  var copy = node.cloneNode(true), from = [node].concat(Array.from(node.querySelectorAll("*"))), to = [copy].concat(Array.from(copy.querySelectorAll("*")));
  from.forEach(function (one, i) {
    var style = getComputedStyle(one);
    STYLES.forEach(function (name) { to[i].style.setProperty(name, style.getPropertyValue(name)); });
    to[i].removeAttribute("class");
  });
  return copy;
}
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function words(x, y, content, size, more) {
  return svg("text", Object.assign({ x: x, y: y, fill: colour("--ink"), "font-size": size, "font-family": getComputedStyle(document.documentElement).fontFamily }, more || {}), content);
}
// Broken into lines: a Chinese character is as wide as its size, a Latin one half.
function lines(content, size, width) {
  var out = [""], used = 0;
  content.split(/(\s+|[\u2e80-\uffee])/).forEach(function (part) {
    var wide = Array.from(part).reduce(function (sum, c) { return sum + (c > "\u2e7f" ? size : size * 0.54); }, 0);
    if (used + wide > width && out[out.length - 1]) { out.push(""); used = 0; part = part.trimStart(); }
    out[out.length - 1] += part; used += wide;
  });
  return out;
}
function placed(id, x, y, width, height) {
  var node = document.querySelector("#card-" + id + " svg.drawing");
  if (!node) return [];
  var copy = standing(node);
  Object.entries({ x: x, y: y + 26, width: width, height: height - 26, preserveAspectRatio: "xMidYMin meet" }).forEach(function (pair) { copy.setAttribute(pair[0], pair[1]); });
  ["width", "max-width", "height"].forEach(function (name) { copy.style.removeProperty(name); });
  return [words(x, y + 16, document.querySelector("#card-" + id + " h2").textContent, 15, { "font-weight": 700 }), copy];
}
function dictionaryPart(x, y, width, height) {
  var slots = Array.from(document.querySelectorAll(".slot")), out = [words(x, y + 16, document.querySelector("#card-dictionary h2").textContent, 15, { "font-weight": 700 })];
  var columns = Math.max(1, Math.min(slots.length, slots.length <= 8 ? slots.length : Math.ceil(Math.sqrt(slots.length * 2.6)))), rows = Math.max(Math.ceil(slots.length / columns), 1);
  var w = Math.min(width / columns, 96), h = Math.min((height - 30) / rows, 44), written = w >= 52 && h >= 30;
  slots.forEach(function (slot, i) {
    var style = getComputedStyle(slot), left = x + (i % columns) * w, top = y + 28 + Math.floor(i / columns) * h, border = parseFloat(style.borderTopWidth) || 1;
    out.push(svg("rect", { x: left + 2, y: top + 2, width: w - 4, height: h - 4, rx: 4, fill: style.backgroundColor, stroke: style.borderTopColor, "stroke-width": border, "stroke-dasharray": style.borderTopStyle === "dashed" ? "6 4" : null }));
    if (written) slot.innerText.split("\n").forEach(function (line, n) { out.push(words(left + w / 2, top + 17 + 14 * n, line, 12, { fill: style.color, "text-anchor": "middle" })); });
  });
  return out;
}
function frameSvg() {
  var m = model(), parts = [svg("rect", { width: FRAME.width, height: FRAME.height, fill: colour("--paper") })], y = 84;
  parts.push(words(24, 40, say("step") + " " + row().t + " · " + (state.sub + 1) + " " + say("sub_" + subName()), 24, { "font-weight": 700 }));
  parts.push(words(24, 62, modelName(m), 13, { fill: colour("--soft") }));
  lines(document.getElementById("sentence").textContent, 17, FRAME.width - 48).slice(0, 4).forEach(function (line) { parts.push(words(24, y + 6, line, 17)); y += 24; });
  y = 190;
  parts = parts.concat(placed("encoders", 24, y, 380, 310), placed("plane", 424, y, 340, 310), placed("softmax", 784, y, 392, 310), dictionaryPart(24, y + 330, 740, 280), placed("loss", 784, y + 330, 392, 200));
  return svg("svg", { xmlns: NS, width: FRAME.width * FRAME.scale, height: FRAME.height * FRAME.scale, viewBox: "0 0 " + FRAME.width + " " + FRAME.height }, parts);
}
function download(name, blob) {
  var link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000); // the download may begin after the click
}
function png() {
  var image = new Image(), name = "step-" + row().t + "-" + subName() + ".png";
  image.onload = function () {
    var canvas = el("canvas", { width: FRAME.width * FRAME.scale, height: FRAME.height * FRAME.scale });
    canvas.getContext("2d").drawImage(image, 0, 0);
    canvas.toBlob(function (blob) { download(name, blob); }, "image/png");
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(frameSvg()));
}
