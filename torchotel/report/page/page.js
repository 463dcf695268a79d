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

  for (const source of document.querySelectorAll("script[data-figure]")) {
    const { data, layout } = JSON.parse(source.textContent);
    for (const trace of data) {
      if (trace.type === "heatmap") trace.hovertext = hoverTexts(trace);
    }
    await Plotly.newPlot(source.dataset.figure, data, layout, config);
    await new Promise((resolve) => setTimeout(resolve)); // what is drawn can be seen before the next one is
  }
  document.documentElement.dataset.drawnMs = Math.round(performance.now());
})();
