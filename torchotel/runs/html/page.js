"use strict";
(async () => {
  const config = {
    displaylogo: false,
    responsive: true,
    showSendToCloud: false, // nothing leaves the page
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  };

  // Hover texts of heatmaps are made here from their rows and columns: written out they would be most of the page.
  function hoverTexts(trace) {
    const { rows, columns } = trace.meta;
    return trace.z.map((line, row) =>
      line.map((log, column) => {
        const norm = log < trace.zmin - 2 ? "0" : (10 ** log).toPrecision(3);
        return `<b>${rows[row]}</b><br>${columns[column]}<br>norm ${norm}`;
      }),
    );
  }

  // As many levels as have room for their names; a click goes in.
  function fitLevels(trace, width) {
    trace.maxdepth = Math.min(trace.maxdepth, Math.max(3, Math.floor(width / 130)));
    if (width < 700) trace.texttemplate = "%{label}  %{customdata[1]}";
  }

  // Over dark paper a faint shade would be nearly black.
  function brighten(trace) {
    const opacity = (text) => `${(0.35 + 0.65 * parseFloat(text)).toFixed(3)})`;
    trace.marker.colors = trace.marker.colors.map((colour) => colour.replace(/[\d.]+\)$/, opacity));
  }

  // Plots below each other: beside each other on a narrow page their titles and ticks would overlap.
  function stackPlots(layout) {
    const rows = layout.annotations.length;
    layout.height = Math.max(layout.height, rows * 170 + 50);
    for (const name of Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key))) {
      const row = Number(name.slice("xaxis".length) || 1) - 1;
      const other = name.replace("x", "y");
      if (row >= rows) {
        delete layout[name];
        delete layout[other];
        continue;
      }
      const top = 1 - row / rows;
      layout[name].domain = [0, 1];
      layout[other].domain = [top - 0.66 / rows, top];
      Object.assign(layout.annotations[row], { x: 0.5, y: top });
    }
  }

  // Titles in several lines: plotly cuts them at the end of the page.
  function wrapTitles(layout, width) {
    for (const note of layout.annotations) {
      const lines = [""];
      for (const word of note.text.split(" ")) {
        if (lines.at(-1) && (lines.at(-1).length + word.length) * 7.5 > width) lines.push(word);
        else lines.push(`${lines.pop()} ${word}`.trim());
      }
      note.text = lines.join("<br>");
      note.align = "left";
    }
    layout.margin.t += 18;
    layout.height += 18;
  }

  const DARK = {
    "#1F2933": "#E4E7EB", "#616E7C": "#9AA5B1", "#E4E7EB": "#3E4C59", "#FFFFFF": "#16191D", "#B3123D": "#FF6B8B",
    "rgba(31,41,51,": "rgba(228,231,235,",
  };
  const dark = matchMedia("screen and (prefers-color-scheme: dark)");

  function draw(source) {
    const light = source.textContent;
    const text = dark.matches ? light.replace(/#[0-9A-F]{6}\b|rgba\(31,41,51,/g, (colour) => DARK[colour] ?? colour) : light;
    const { data, layout } = JSON.parse(text);
    const place = document.getElementById(source.dataset.figure);
    for (const trace of data) {
      if (trace.meta) trace.hovertext = hoverTexts(trace);
      if (trace.type === "icicle") fitLevels(trace, place.clientWidth);
      if (trace.type === "icicle" && dark.matches) brighten(trace);
    }
    if (place.clientWidth < 600 && place.id === "figure-logged") stackPlots(layout);
    if (place.clientWidth < 600 && place.id === "figure-timeline") wrapTitles(layout, place.clientWidth);
    // On a narrow page the buttons would cover the legend.
    const displayModeBar = place.clientWidth < 600 ? false : "hover";
    return Plotly.react(place, data, layout, { ...config, displayModeBar });
  }

  function sortBy(head) {
    const [body, column] = [head.closest("table").tBodies[0], head.cellIndex];
    const order = head.ariaSort === "descending" ? "ascending" : "descending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const sign = order === "descending" ? -1 : 1;
    const compare = (one, other) =>
      "value" in one.dataset
        ? one.dataset.value - other.dataset.value
        : one.textContent.localeCompare(other.textContent, undefined, { numeric: true });
    body.append(...[...body.rows].sort((one, other) => sign * compare(one.cells[column], other.cells[column])));
  }

  for (const head of document.querySelectorAll(".sortable th")) head.addEventListener("click", () => sortBy(head));

  // The policy of the page allows a script by its hash, compressed or not.
  const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
  const plotly = document.createElement("script");
  plotly.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(plotly);

  const sources = document.querySelectorAll("script[data-figure]");
  dark.addEventListener("change", () => sources.forEach(draw));
  for (const source of sources) {
    await draw(source);
    await new Promise((resolve) => setTimeout(resolve)); // what is drawn can be seen before the next one is
  }
  document.documentElement.dataset.drawnMs = Math.round(performance.now());
})();
