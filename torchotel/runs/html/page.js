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
    }
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
