"use strict";
// Draws the charts embedded in the page. Everything that came from a record is set as text, never as HTML.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const states = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (series) => css(`--series-${series.colour % 8}`);
  const number = (value) => String(Number(value.toPrecision(3)));
  const say = (x) => (typeof x === "number" ? String(x) : x);
  // Plotly reads some tags and entities in text: without "<" and "&" there is nothing to read.
  const plain = (text, most = 48) => {
    const cut = Array.from(text).length > most ? Array.from(text).slice(0, most - 1).join("") + "…" : text;
    return cut.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  };

  const prefixed = (name, values) => Object.fromEntries(Object.entries(values).map(([key, value]) => [`${name}.${key}`, value]));

  function element(parent, tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    parent.append(made);
    return made;
  }

  function hovers(chart, series) {
    return series.y.map((y, i) => [
      ...(series.name ? [plain(series.name)] : []),
      `${plain(chart.x_title)}: ${plain(say(series.x[i]))}`,
      `<b>${number(y)}</b> [${number(series.low[i])}, ${number(series.high[i])}]`,
      `${series.seeds[i]} seeds, 95% interval`,
      ...(series.extra.length && series.extra[i] ? [plain(series.extra[i], 80)] : []),
    ].join("<br>"));
  }

  // The interval around a line: there and back again. A log axis has no place for 0, and clips what is far below.
  function band(series, state) {
    const kept = series.y.map((_, i) => i).filter((i) => !state.log || series.y[i] > 0);
    const back = [...kept].reverse();
    const low = (i) => (state.log ? Math.max(series.low[i], series.y[i] * 1e-6) : series.low[i]);
    const channels = colour(series).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
    return {
      type: "scatter", mode: "lines", hoverinfo: "skip", line: { width: 0 }, fill: "toself",
      fillcolor: `rgba(${channels.join(",")},${Math.max(0.06, Math.min(0.16, 0.5 / state.variant.series.length))})`,
      x: [...kept, ...back].map((i) => series.x[i]),
      y: [...kept.map((i) => series.high[i]), ...back.map(low)],
      visible: !state.hidden.has(series.name),
    };
  }

  // A row for each series, a column for each place; on a log scale the colour is that of the exponent.
  function heat(chart, state) {
    const { series } = state.variant;
    const places = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
    const at = (each, values) => places.map((x) => values[each.x.indexOf(x)] ?? null);
    const shade = (value) => (value === null ? null : !state.log ? value : value > 0 ? Math.log10(value) : null);
    const z = series.map((each) => at(each, each.y).map(shade));
    const found = z.flat().filter((value) => value !== null);
    const [low, high] = [Math.min(...found), Math.max(...found)];
    const ticks = state.log && found.length ? logTicks([low, high]) : { tickmode: "auto" };
    return [{
      type: "heatmap", z, x: places.map(String), y: series.map((each) => plain(each.name, 28)),
      customdata: series.map((each) => at(each, hovers(chart, each))),
      hovertemplate: "%{customdata}<extra></extra>", hoverongaps: false, xgap: 1, ygap: 1,
      colorscale: [[0, css("--heat-low")], [0.6, css("--series-0")], [1, css("--heat-high")]],
      colorbar: { thickness: 12, outlinewidth: 0, tickfont: { color: css("--soft"), size: 12 }, exponentformat: "power",
                  title: { text: plain(chart.y_title), side: "right", font: { color: css("--soft"), size: 13 } },
                  ...ticks, ...(ticks.tickvals ? { tickvals: ticks.tickvals.map(Math.log10) } : state.log ? { tickprefix: "10^" } : {}) },
    }];
  }

  function traces(chart, state) {
    if (chart.kind === "heat") return heat(chart, state);
    const lines = linesOrBars(chart, state);
    return chart.band ? [...state.variant.series.map((series) => band(series, state)), ...lines] : lines;
  }

  function linesOrBars(chart, state) {
    const base = chart.reference;
    return state.variant.series.map((series) => {
      const bar = chart.kind === "bar";
      const paint = colour(series);
      const above = series.y.map((y, i) => series.high[i] - y);
      const below = series.y.map((y, i) => y - series.low[i]);
      return {
        type: bar ? "bar" : "scatter",
        name: plain(series.name),
        x: series.x,
        y: bar && base !== null ? series.y.map((y) => y - base) : chart.band && state.log ? series.y.map((y) => (y > 0 ? y : null)) : series.y,
        ...(bar && base !== null ? { base } : {}),
        ...(bar ? {} : { mode: series.x.length > 30 ? "lines" : "lines+markers", line: { color: paint, width: 2, dash: series.dash } }),
        marker: bar ? { color: paint } : { color: paint, size: 8, symbol: series.marker },
        ...(chart.band ? {} : { error_y: { type: "data", symmetric: false, array: above, arrayminus: below, thickness: 1.3, width: 4,
                   color: bar ? css("--ink") : paint } }),
        customdata: hovers(chart, series),
        hovertemplate: "%{customdata}<extra></extra>",
        visible: !state.hidden.has(series.name),
      };
    });
  }

  // Plotly's own ticks of a log axis are crowded: 1, 2 and 5 of every decade, or every so many decades, read better.
  function logTicks([low, high]) {
    const span = high - low;
    if (span < 0.7) return { tickmode: "auto", tickvals: null };
    const step = Math.max(1, Math.ceil(span / 7));
    const vals = [];
    for (let power = Math.floor(low / step) * step; power <= high; power += step)
      for (const digit of span < 1 ? [1, 1.5, 2, 3, 4, 5, 7] : span < 2.5 ? [1, 2, 5] : [1]) vals.push(Number(`${digit}e${power}`));
    const power = (value) => `10<sup>${String(Math.round(Math.log10(value))).replace("-", "−")}</sup>`;
    const near = low > -3.5 && high < 5.5;
    return { tickmode: "array", tickvals: vals, ticktext: vals.map((v) => (near ? String(v) : span < 2.5 ? v.toExponential() : power(v))) };
  }

  // Where a log axis ends: [log10 of the lowest, of the highest] of what is drawn, with a margin.
  function extent(values) {
    const found = values.filter((value) => value > 0).map(Math.log10);
    if (!found.length) return [-1, 1];
    const [low, high] = [Math.min(...found), Math.max(...found)];
    const margin = 0.06 * (high - low) || 0.5;
    return [low - margin, high + margin];
  }

  // Ticks where points are, unless they would touch.
  function placeTicks(places) {
    const found = [...new Set(places)].sort((a, b) => a - b);
    const roomy = found.length < 10 && found.every((x, i) => i === 0 || x / found[i - 1] > 1.3);
    return roomy ? { tickmode: "array", tickvals: found, ticktext: found.map(String) } : logTicks(extent(found));
  }

  function valueAxis(chart, state) {
    if (!state.log) return { type: "linear", autorange: true, tickmode: "auto", tickvals: null };
    const drawn = state.variant.series.filter((series) => !state.hidden.has(series.name));
    const range = extent([...drawn.flatMap((series) => [...series.y, ...series.low, ...series.high]), ...(chart.reference ? [chart.reference] : [])]);
    // An interval that reaches 0 has no place on a log axis, and must not stretch it either.
    const lowest = extent(drawn.flatMap((series) => series.y))[0] - 1;
    range[0] = Math.max(range[0], chart.reference ? -Infinity : lowest);
    return { type: "log", autorange: false, range, ...logTicks(range) };
  }

  // As high as its rows need, up to a screen and a half.
  const heightOf = (state) => Math.min(1400, 110 + 19 * Math.max(8, state.variant.series.length));

  function layout(chart, state, width) {
    const soft = css("--soft");
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true,
                   tickfont: { color: soft, size: 13 }, exponentformat: "power" };
    const title = (text) => ({ text: plain(text), font: { size: 13, color: soft }, standoff: 12 });
    const narrow = (width || state.plot.clientWidth) < 560;
    const shown = chart.categories;
    const heated = chart.kind === "heat";
    return {
      ...(width ? { width, height: heated ? heightOf(state) : 360 } : {}),
      autosize: !width,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: css("--ink"), size: 13 },
      margin: { l: narrow ? 48 : 64, r: 8, t: 12, b: 48 },
      showlegend: false,
      dragmode: "zoom",
      hovermode: "closest",
      hoverlabel: { bgcolor: css("--surface"), bordercolor: css("--line"), font: { color: css("--ink"), size: 13 }, align: "left" },
      bargap: 0.3,
      bargroupgap: 0.08,
      uirevision: JSON.stringify([state.variant.choices, state.log, state.zoom, [...state.hidden]]),
      ...(heated ? {
        xaxis: { ...axis, type: "category", showgrid: false, title: title(chart.x_title) },
        yaxis: { ...axis, type: "category", showgrid: false, autorange: "reversed", tickmode: "linear", dtick: 1, tickfont: { color: soft, size: narrow ? 9 : 11 } },
      } : {
      xaxis: shown
        ? { ...axis, type: "category", categoryorder: "array", categoryarray: shown, showgrid: false, title: title(chart.x_title),
            tickvals: shown, ticktext: shown.map((text) => plain(text, narrow ? 12 : 24)), tickangle: narrow || shown.length > 9 ? -40 : 0 }
        : { ...axis, type: chart.x_log ? "log" : "linear", showgrid: false, title: title(chart.x_title),
            ...(chart.x_log ? placeTicks(state.variant.series.flatMap((series) => series.x)) : {}) },
      yaxis: { ...axis, title: title(chart.y_title), ...valueAxis(chart, state) } }),
      shapes: chart.reference === null ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.reference, y1: chart.reference,
                                                  line: { color: soft, width: 1.2, dash: "dot" } }],
    };
  }

  function draw(state, width) {
    return Plotly.react(state.plot, traces(state.chart, state), layout(state.chart, state, width),
                        { displayModeBar: false, responsive: !width, displaylogo: false });
  }

  function legend(state) {
    const list = state.figure.querySelector(".legend");
    list.replaceChildren();
    if (state.variant.series.length < 2 || state.chart.kind === "heat") return;
    for (const series of state.variant.series) {
      const button = element(element(list, "li"), "button", undefined, { type: "button", "aria-pressed": !state.hidden.has(series.name) });
      button.innerHTML = state.chart.kind === "bar"
        ? '<svg width="14" height="14" aria-hidden="true"><rect width="14" height="14" rx="2"/></svg>'
        : '<svg width="30" height="10" aria-hidden="true"><line x1="0" x2="30" y1="5" y2="5" stroke-width="2.5"/></svg>';
      const mark = button.querySelector("rect, line");
      const paint = `var(--series-${series.colour % 8})`;
      mark.style[state.chart.kind === "bar" ? "fill" : "stroke"] = paint;
      if (series.dash !== "solid") mark.style.strokeDasharray = { dash: "7 4", dot: "2 3", dashdot: "7 3 2 3" }[series.dash];
      element(button, "span", series.name);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(series.name)) state.hidden.add(series.name);
        button.setAttribute("aria-pressed", !state.hidden.has(series.name));
        draw(state);
      });
    }
  }

  function table(state) {
    const box = state.figure.querySelector("table");
    const extra = state.variant.series.some((series) => series.extra.length);
    box.tHead.replaceChildren();
    box.tBodies[0].replaceChildren();
    box.caption.textContent = [state.chart.y_title, ...state.variant.choices].join(", ");
    const head = element(box.tHead, "tr");
    for (const text of [state.chart.x_title, "series", "mean", "95% from", "to", "seeds", ...(extra ? ["and"] : [])])
      element(head, "th", text, { scope: "col" });
    for (const series of state.variant.series)
      series.y.forEach((y, i) => {
        const row = element(box.tBodies[0], "tr");
        element(row, "th", say(series.x[i]), { scope: "row" });
        for (const text of [series.name, number(y), number(series.low[i]), number(series.high[i]), series.seeds[i],
                            ...(extra ? [series.extra[i] || ""] : [])])
          element(row, "td", text);
      });
  }

  function show(state) {
    const { figure, chart, variant } = state;
    figure.querySelectorAll("select").forEach((select, i) => { select.value = variant.choices[i]; });
    figure.querySelector(".setting").textContent = variant.setting;
    const notes = figure.querySelector("ul.notes");
    notes.replaceChildren();
    for (const note of variant.notes) element(notes, "li", note);
    state.plot.setAttribute("aria-label", `${chart.title}. ${[...variant.choices, `${variant.series.length} series`].join(", ")}. The data table follows.`);
    legend(state);
    table(state);
    // Without a point there is nothing to see: the notes say why. Drawn all the same, since Plotly must not measure a hidden box.
    state.plot.hidden = false;
    if (chart.kind === "heat") state.plot.style.height = `${heightOf(state)}px`;
    return draw(state).then(() => { state.plot.hidden = !variant.series.some((series) => series.y.length); });
  }

  // Not every combination was measured: keep the choice just made, and of the others as many as there are.
  function choose(state, index, value) {
    const kept = (variant) => variant.choices.filter((each, i) => each === state.variant.choices[i]).length;
    const candidates = state.chart.variants.filter((variant) => variant.choices[index] === value);
    state.variant = candidates.reduce((best, each) => (kept(each) > kept(best) ? each : best));
    show(state);
  }

  function start(chart) {
    const figure = document.getElementById(chart.anchor);
    const state = { chart, figure, plot: figure.querySelector(".plot"), variant: chart.variants[0], log: chart.y_log, hidden: new Set(), zoom: 0 };
    states.push(state);
    figure.querySelectorAll("select").forEach((select, i) => select.addEventListener("change", () => choose(state, i, select.value)));
    const log = figure.querySelector(".log");
    log.addEventListener("click", () => {
      state.log = !state.log;
      log.setAttribute("aria-pressed", state.log);
      draw(state);
    });
    figure.querySelector(".reset").addEventListener("click", () => { state.zoom += 1; draw(state); });
    return show(state).then(() => {
      state.plot.on("plotly_doubleclick", () => { state.zoom += 1; draw(state); return false; });
      state.plot.on("plotly_relayout", (change) => {  // a zoom: ticks for the range that is seen now
        if (state.log && state.chart.kind !== "heat" && "yaxis.range[0]" in change)
          Plotly.relayout(state.plot, prefixed("yaxis", logTicks([change["yaxis.range[0]"], change["yaxis.range[1]"]])));
      });
    });
  }

  function attribution() {
    const select = document.getElementById("attribution-choice");
    const panels = [...document.querySelectorAll("[data-panel]")];
    const update = () => panels.forEach((panel) => { panel.hidden = panel.dataset.panel !== (select ? select.value : "0"); });
    if (select) select.addEventListener("change", update);
    update();
  }

  attribution();
  dark.addEventListener("change", () => states.forEach((state) => draw(state)));
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.print = "";
    document.querySelectorAll(".claims details").forEach((more) => { more.open = true; });
    states.forEach((state) => draw(state, 660));
  });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.print; states.forEach((state) => draw(state)); });
  // One chart at a time, so that the page can be read and scrolled meanwhile.
  (function next(i) {
    if (i === charts.length) { document.documentElement.dataset.ready = ""; return; }
    start(charts[i]).then(() => setTimeout(() => next(i + 1)));
  })(0);
})();
