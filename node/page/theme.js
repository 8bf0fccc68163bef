// The colours: as the system has them, until somebody chooses. Not a module: it runs before the first paint.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const order = ["automatic", "light", "dark"];
  const read = () => { try { return localStorage.getItem("grapevine-colours"); } catch { return null; } };
  let chosen = order.includes(read()) ? read() : "automatic";

  function apply() {
    document.documentElement.dataset.theme = chosen === "automatic" ? (dark.matches ? "dark" : "light") : chosen;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Colours: ${chosen}`;
    dispatchEvent(new Event("colours"));
  }

  dark.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      chosen = order[(order.indexOf(chosen) + 1) % order.length];
      try { localStorage.setItem("grapevine-colours", chosen); } catch { /* kept for this visit only */ }
      apply();
    });
    apply();
  });
  apply();
})();
