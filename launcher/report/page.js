"use strict";
// Draws the plots in the colours of the theme that is on, sorts tables, explains words. No network.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");

  // Colours are names of CSS variables ("--compute"): look them up now, as the theme may change.
  function themed(value, style) {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" && typeof value[1] !== "string"
      ? value : value.map((each) => themed(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, themed(each, style)]));
  }

  function axis(own, style) {
    const grid = style.getPropertyValue("--grid").trim();
    return { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, ...own };
  }

  function layout(own, named, style) {
    const [text, card, line] = ["--text", "--card", "--line"].map((name) => style.getPropertyValue(name).trim());
    const narrow = innerWidth < 600;
    const legendRows = Math.ceil(named / (narrow ? 3 : 10));  // a legend takes its place from the plot
    return {
      hovermode: "closest", bargap: 0.25, ...own, height: own.height + 20 * (legendRows - 1),
      dragmode: coarse.matches ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, size: narrow ? 11 : 12, family: "system-ui, Open Sans, sans-serif" },
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text }, align: "left", namelength: -1 },
      legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left" },
      modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)" },  // in a row, on plotly 7's own colour, it covers the legend
      margin: { l: 48, r: 12, t: 8, b: 40 },
      xaxis: axis(own.xaxis, style), yaxis: axis(own.yaxis, style),
    };
  }

  function draw(element) {
    const style = getComputedStyle(document.documentElement);
    const choice = element.parentElement.querySelector("select");
    const shown = plots[element.id][choice ? choice.selectedIndex : 0];
    const own = themed(shown.layout, style);
    return Plotly.react(element, themed(shown.data, style), layout(own, shown.data.length, style), { responsive: true, displaylogo: false,
      displayModeBar: coarse.matches ? false : "hover" });
  }

  const elements = Object.keys(plots).map((id) => document.getElementById(id));
  const drawAll = () => Promise.all(elements.map(draw));
  drawAll().then(() => document.documentElement.dataset.drawn = "yes");
  dark.addEventListener("change", drawAll);
  for (const select of document.querySelectorAll("select")) {
    select.addEventListener("change", () => draw(select.parentElement.querySelector(".plot")));
  }

  function sort(header) {
    const table = header.closest("table"), body = table.tBodies[0], column = header.cellIndex;
    const up = header.getAttribute("aria-sort") === "descending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...body.rows].map((row) => [key(row), row]);
    const known = rows.filter(([value]) => value !== ""), unknown = rows.filter(([value]) => value === "");
    const numeric = known.every(([value]) => !Number.isNaN(Number(value)));
    known.sort(([a], [b]) => (numeric ? a - b : String(a).localeCompare(b)) * (up ? 1 : -1));
    body.append(...[...known, ...unknown].map(([, row]) => row));
  }
  document.addEventListener("click", (event) => {
    const header = event.target.closest("th");
    if (header && event.target.closest("button")) sort(header);
  });

  const tip = document.getElementById("tip");
  function explain(event) {
    const word = event.target.closest("[data-tip]");
    tip.hidden = !word;
    if (!word) return;
    tip.textContent = word.dataset.tip;
    const box = word.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const below = box.bottom + own.height + 8 < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 4))}px`;
    tip.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - own.height - 6)}px`;
  }
  for (const kind of ["mouseover", "focusin", "click"]) document.addEventListener(kind, explain);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
