"use strict";
(function () {
  var root = document.documentElement, buttons = document.querySelectorAll("[data-set-lang]");
  function speak(language) {
    root.lang = language === "zh" ? "zh" : "en";
    root.dataset.lang = root.lang;
    buttons.forEach(function (b) { b.setAttribute("aria-pressed", String(b.dataset.setLang === root.lang)); });
  }
  buttons.forEach(function (b) {
    b.addEventListener("click", function () { speak(b.dataset.setLang); history.replaceState(null, "", "#lang=" + b.dataset.setLang); });
  });
  var asked = /lang=(zh|en)/.exec(location.hash);
  speak(asked ? asked[1] : (navigator.language || "en").slice(0, 2));
}());
