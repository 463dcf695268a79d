"use strict";
(async () => {
  const config = {
    displaylogo: false,
    responsive: true,
    displayModeBar: "hover",
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
    trace.maxdepth = Math.min(trace.maxdepth, Math.max(2, Math.floor(width / 130)));
    if (width < 700) trace.texttemplate = "%{label}  %{customdata[1]}";
  }

  for (const source of document.querySelectorAll("script[data-figure]")) {
    const { data, layout } = JSON.parse(source.textContent);
    for (const trace of data) {
      if (trace.type === "heatmap") trace.hovertext = hoverTexts(trace);
      if (trace.type === "icicle") fitLevels(trace, document.getElementById(source.dataset.figure).clientWidth);
    }
    await Plotly.newPlot(source.dataset.figure, data, layout, config);
    await new Promise((resolve) => setTimeout(resolve)); // what is drawn can be seen before the next one is
  }
  document.documentElement.dataset.drawnMs = Math.round(performance.now());
})();
