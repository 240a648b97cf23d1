"use strict";
(() => {
  document.documentElement.classList.add("js");
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const timeline = page.charts ? page.timeline || page.diagnosis.timeline : null;

  // Copy buttons
  function copyByHand(text) {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  async function copy(button) {
    const text = button.dataset.copy;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      copyByHand(text);
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-copy]");
    if (button) copy(button);
  });

  // Sortable tables: values that are not known stay last either way
  function compare(a, b, number) {
    return number ? Number(a) - Number(b) : a.localeCompare(b);
  }
  function sortTable(table, column, ascending) {
    const number = table.tHead.rows[0].cells[column].classList.contains("n");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, value: row.cells[column].dataset.v }));
    rows.sort((a, b) => {
      if (a.value === undefined || b.value === undefined) return (a.value === undefined) - (b.value === undefined);
      return ascending ? compare(a.value, b.value, number) : compare(b.value, a.value, number);
    });
    body.append(...rows.map((entry) => entry.row));
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      header.replaceChildren(button);
      button.addEventListener("click", () => {
        // Numbers are asked for largest first, names from A.
        const first = header.classList.contains("n") ? "descending" : "ascending";
        const second = first === "ascending" ? "descending" : "ascending";
        const order = header.getAttribute("aria-sort") === first ? second : first;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", order);
        sortTable(table, column, order === "ascending");
      });
    });
  }

  // Filter
  for (const input of document.querySelectorAll("input[data-filter]")) {
    const rows = document.getElementById(input.dataset.filter).tBodies[0].rows;
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }

  // Download
  const download = document.getElementById("download");
  if (page.diagnosis) {
    download.hidden = false;
    download.addEventListener("click", () => {
      const blob = new Blob([JSON.stringify(page.diagnosis, null, 2) + "\n"], { type: "application/json" });
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = "diagnosis.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  // Paper shows what a click would open
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });

  if (!timeline) return;

  // Timeline
  const chart = document.getElementById("chart");
  const inSeconds = timeline.end_ns >= 1e9;
  const factor = inSeconds ? 1e9 : 1e6;
  const unit = inSeconds ? "s" : "ms";
  const first = timeline.start_ns / factor;
  const last = timeline.end_ns / factor;
  const step = (last - first) / timeline.columns;
  // Grey that reads on white and on the dark page, so that a change of theme needs no new chart.
  const grey = "#7d8896";
  const grid = "rgba(128,140,155,0.25)";
  const lines = ["#3f79b5", "#d98a1f", "#2f9b74", "#d1434f", "#8a63d2", "#8a6a4f", "#38a3c4", "#7d8896"];
  let edges = null;

  function sliceKey(series) {
    return (series.cause ? series.kind + "-" + series.cause : series.kind).replace(/[^a-z0-9]+/g, "-");
  }
  function sliceStyle(series) {
    return page.slices[sliceKey(series)] || { label: series.cause || series.kind, color: page.slices.other.color };
  }
  function deviceTraces(device, row) {
    // Stacked in the order of the bars above; what they do not have (time outside the window) goes on top.
    const place = (series) => (page.order.indexOf(sliceKey(series)) + page.order.length + 1) % (page.order.length + 1);
    return [...device.series].sort((a, b) => place(a) - place(b)).map((series) => {
      const style = sliceStyle(series);
      return {
        // The last value is repeated at the right edge: each column is a step as wide as itself.
        x: edges, y: [...series.share, series.share[series.share.length - 1]],
        type: "scatter", mode: "lines", line: { width: 0, shape: "hv", color: style.color },
        fillcolor: style.color, stackgroup: "device" + row, name: style.label, showlegend: false,
        yaxis: row ? "y" + (row + 1) : "y", hovertemplate: "%{y:.1%}",
      };
    });
  }
  // One device: counters of one unit share a row, a line each. Several: a row per counter, a line per device.
  const perCounter = timeline.devices.length > 1;
  function counterRows() {
    const groups = new Map();
    for (const counter of timeline.counters || []) {
      const key = perCounter ? counter.name : counter.unit;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(counter);
    }
    return [...groups.values()].map((counters) => ({
      counters,
      isRatio: counters[0].unit === "ratio",
      title: perCounter ? page.counters[counters[0].name] : counters[0].unit === "ratio" ? "counters" : counters[0].unit,
    }));
  }
  // Samples may be further apart than columns are wide: a value holds for a few columns, a longer gap stays a gap.
  function held(values) {
    let age = Infinity;
    return values.map((value, column) => {
      age = value === null ? age + 1 : 0;
      return age <= 5 ? values[column - age] : null;
    });
  }
  function counterTraces(group, row, isFirst) {
    return group.counters.map((counter, number) => ({
      x: edges, y: held([...counter.values, counter.values[counter.values.length - 1]]),
      type: "scatter", mode: "lines", line: { width: 1.3, shape: "hv", color: lines[number % lines.length] },
      name: perCounter ? "GPU " + counter.device : page.counters[counter.name],
      legendgroup: perCounter ? "GPU " + counter.device : undefined, showlegend: isFirst || !perCounter,
      yaxis: "y" + (row + 1), hovertemplate: group.isRatio ? "%{y:.1%}" : "%{y:.4~s}",
    }));
  }
  function build() {
    edges = Array.from({ length: timeline.columns + 1 }, (_, column) => first + column * step);
    const counters = counterRows();
    const rows = timeline.devices.length + counters.length;
    const many = timeline.devices.length > 2;
    const heights = [...timeline.devices.map(() => (many ? 46 : 110)), ...counters.map(() => 100)];
    const gap = 22;
    const plot = heights.reduce((sum, height) => sum + height + gap, -gap);
    const height = plot + 14 + 46 + (counters.length ? 34 : 0);
    const layout = {
      height, margin: { l: 58, r: 8, t: 14, b: height - plot - 14 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: grey }, hovermode: "x unified", dragmode: "zoom",
      hoverlabel: { bgcolor: "#1b2430", bordercolor: "#1b2430", font: { color: "#ffffff", size: 12 } },
      legend: { orientation: "h", x: 0, y: -36 / plot, yanchor: "top", traceorder: "normal" },
      xaxis: {
        range: [first, last], ticksuffix: " " + unit, showgrid: false, linecolor: grid, ticks: "outside", tickcolor: grid,
        hoverformat: ".6~f", minallowed: first, maxallowed: last, nticks: chart.clientWidth < 500 ? 5 : 9, tickangle: 0,
      },
    };
    const traces = [];
    let top = 1;
    for (let row = 0; row < rows; row += 1) {
      const bottom = Math.max(top - heights[row] / plot, 0);
      const device = timeline.devices[row];
      const group = device ? null : counters[row - timeline.devices.length];
      layout["yaxis" + (row ? row + 1 : "")] = {
        domain: [bottom, top], fixedrange: true, gridcolor: grid, zeroline: false, anchor: "x",
        range: device || group.isRatio ? [0, 1] : undefined, rangemode: "tozero", nticks: many && device ? 2 : 3,
        tickformat: device || group.isRatio ? ".0%" : "~s",
        title: { text: device ? "GPU " + device.id : group.title, standoff: 4 },
      };
      traces.push(...(device ? deviceTraces(device, row) : counterTraces(group, row, group === counters[0])));
      top = bottom - gap / plot;
    }
    // Without an anchor at the lowest row the time axis would be drawn under the first one.
    layout.xaxis.anchor = rows > 1 ? "y" + rows : "y";
    return { traces, layout };
  }

  function decimal(ns, up) {
    const length = Math.max(shown[1] - shown[0], 1 / factor) * factor;
    const grain = 10 ** Math.max(Math.ceil(length).toString().length - 3, 0);
    const rounded = (up ? Math.ceil(ns / grain) : Math.floor(ns / grain)) * grain;
    return String(Number((rounded / factor).toFixed(inSeconds ? 9 : 6))) + unit;
  }
  let shown = [first, last];
  function sayRange() {
    const text = "--window " + decimal(shown[0] * factor, false) + ":" + decimal(shown[1] * factor, true);
    document.getElementById("range").textContent = text;
    const button = document.querySelector(".range .copy");
    button.dataset.copy = text;
    button.setAttribute("aria-label", "Copy " + text);
  }
  function setRange(from, to, mark) {
    const width = Math.min(Math.max(to - from, 5 * step), last - first);
    const start = Math.min(Math.max((from + to - width) / 2, first), last - width);
    const change = { "xaxis.range": [start, start + width] };
    if (mark !== undefined) change.shapes = mark;
    return window.Plotly ? window.Plotly.relayout(chart, change) : null;
  }
  const moves = {
    left: ([a, b]) => setRange(a - (b - a) / 2, b - (b - a) / 2),
    right: ([a, b]) => setRange(a + (b - a) / 2, b + (b - a) / 2),
    in: ([a, b]) => setRange(a + (b - a) / 4, b - (b - a) / 4),
    out: ([a, b]) => setRange(a - (b - a) / 2, b + (b - a) / 2),
    all: () => setRange(first, last, []),
  };
  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => moves[button.dataset.zoom](shown));
  }
  for (const button of document.querySelectorAll("button.show")) {
    button.addEventListener("click", async () => {
      await ready();
      const from = Number(button.dataset.start) / factor;
      const to = Number(button.dataset.end) / factor;
      document.getElementById("timeline").scrollIntoView();
      setRange(from - 2 * (to - from), to + 2 * (to - from), [{
        type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1,
        fillcolor: "rgba(63,121,181,0.18)", line: { width: 1.5, color: "#3f79b5" },
      }]);
    });
  }

  async function inflate() {
    const element = document.getElementById("plotly");
    const bytes = Uint8Array.from(atob(element.textContent), (char) => char.charCodeAt(0));
    element.remove();
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
  async function draw() {
    if (typeof DecompressionStream === "undefined") {
      chart.firstElementChild.textContent = "The chart needs a newer browser; the table above holds the totals.";
      return;
    }
    chart.firstElementChild.textContent = "Loading the chart …";
    await inflate();
    const { traces, layout } = build();
    chart.replaceChildren();
    await window.Plotly.newPlot(chart, traces, layout, { responsive: true, displayModeBar: false, displaylogo: false });
    chart.on("plotly_relayout", () => {
      shown = chart.layout.xaxis.range.map(Number);
      sayRange();
    });
    sayRange();
  }
  let drawing = null;
  function ready() {
    drawing = drawing || draw();
    return drawing;
  }
  // After the first screen has been painted: reading it must not wait for the chart.
  addEventListener("load", () => setTimeout(ready, 50));
})();
