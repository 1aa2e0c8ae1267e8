"use strict";
(() => {
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // ---- light and dark: the system's choice until the button is used
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { button.textContent = isDark() ? "light" : "dark"; };
  const wanted = new URLSearchParams(location.search).get("theme");
  let kept = null;
  try { kept = localStorage.getItem("latepix-theme"); } catch { /* storage may be closed for files */ }
  if (["light", "dark"].includes(wanted ?? kept)) root.dataset.theme = wanted ?? kept;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("latepix-theme", root.dataset.theme); } catch { /* only this view, then */ }
    label();
  });
  system.addEventListener("change", label);
  label();

  // ---- curves: crosshair and values
  const charts = JSON.parse(document.getElementById("hover").textContent);
  const nearest = (steps, wantedStep) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= wantedStep) low = middle; else high = middle;
    }
    return wantedStep - steps[low] <= steps[high] - wantedStep ? low : high;
  };
  const atOrBefore = (steps, step) => {
    let index = nearest(steps, step);
    while (index >= 0 && steps[index] > step) index -= 1;
    return index;
  };

  for (const figure of document.querySelectorAll("[data-chart]")) {
    const { first, last, curves } = charts[figure.dataset.chart];
    const plot = figure.querySelector(".plot");
    const crosshair = plot.querySelector(".crosshair");
    const tip = plot.querySelector(".tip");
    const percent = (step) => (100 * (step - first)) / (last - first);
    const dots = curves.map((curve) => plot.insertBefore(make("i", `dot ${curve.color}`), tip));
    const dense = curves.find((curve) => !curve.isSparse) ?? curves[0];
    const hide = () => { for (const element of [crosshair, tip, ...dots]) element.hidden = true; };

    const show = (event) => {
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const step = dense.step[nearest(dense.step, first + share * (last - first))];
      const rows = [make("b", "", `step ${step.toLocaleString("en")}`)];
      curves.forEach((curve, index) => {
        const at = curve.isSparse ? atOrBefore(curve.step, step) : nearest(curve.step, step);
        const isKnown = at >= 0 && (curve.isSparse || curve.step[at] === step);
        dots[index].hidden = !isKnown;
        if (!isKnown) return;
        dots[index].style.left = `${percent(curve.step[at])}%`;
        dots[index].style.top = `${curve.y[at]}%`;
        const row = make("div", curve.color);
        const name = make("span", "", curve.step[at] === step ? curve.label : `${curve.label}, step ${curve.step[at]}`);
        name.prepend(make("i"));
        row.append(name, make("b", "", curve.text[at]));
        rows.push(row);
      });
      tip.replaceChildren(...rows);
      crosshair.style.left = `${percent(step)}%`;
      crosshair.hidden = tip.hidden = false;
      const x = (percent(step) / 100) * box.width;
      const rightmost = box.width - tip.offsetWidth + 10;
      tip.style.left = `${Math.max(-50, Math.min(x - tip.offsetWidth / 2, rightmost))}px`;
    };

    hide();
    plot.addEventListener("pointermove", show);
    plot.addEventListener("pointerdown", show);
    plot.addEventListener("pointerleave", hide);
  }

  // ---- rollouts: one step at a time, by outcome
  const sources = [...document.querySelectorAll(".source")];
  if (sources.length === 0) return;
  const sourceButtons = [...document.querySelectorAll("#choose-source button")];
  const outcomeButtons = [...document.querySelectorAll("#choose-outcome button")];
  const linked = sources.find((source) => `#${source.dataset.source}` === location.hash);
  const firstShown = linked ?? sources.findLast((source) => source.dataset.source.startsWith("train")) ?? sources[0];
  const state = { source: firstShown.dataset.source, outcome: "all" };

  const apply = () => {
    for (const source of sources) {
      source.hidden = source.dataset.source !== state.source;
      if (source.hidden) continue;
      const counts = {};
      let numShown = 0;
      for (const group of source.querySelectorAll(".group")) {
        let numInGroup = 0;
        for (const rollout of group.querySelectorAll(".rollout")) {
          const { outcome } = rollout.dataset;
          counts[outcome] = (counts[outcome] ?? 0) + 1;
          rollout.hidden = state.outcome !== "all" && state.outcome !== outcome;
          numInGroup += rollout.hidden ? 0 : 1;
        }
        group.hidden = numInGroup === 0;
        numShown += numInGroup;
      }
      source.querySelector(".nothing").hidden = numShown > 0;
      for (const choice of outcomeButtons) {
        const { outcome } = choice.dataset;
        if (outcome === "all") continue;
        choice.querySelector("small").textContent = counts[outcome] ?? 0;
        choice.hidden = !counts[outcome] && outcome !== state.outcome && outcome === "partial";
      }
    }
    for (const choice of sourceButtons) choice.setAttribute("aria-pressed", choice.dataset.source === state.source);
    for (const choice of outcomeButtons) choice.setAttribute("aria-pressed", choice.dataset.outcome === state.outcome);
  };

  for (const choice of sourceButtons) {
    choice.addEventListener("click", () => {
      state.source = choice.dataset.source;
      location.replace(`#${state.source}`);
      apply();
    });
  }
  for (const choice of outcomeButtons) {
    choice.addEventListener("click", () => { state.outcome = choice.dataset.outcome; apply(); });
  }
  apply();
})();
