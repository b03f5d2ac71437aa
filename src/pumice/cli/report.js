(() => {
  "use strict";
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const INK = { text: "#e7ecf4", soft: "#98a4b8", line: "#232c3d", accent: "#58c4dc", warm: "#f5b861" };
  const FONT = { family: 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif', size: 13, color: INK.soft };
  const NONE = { name: "unlabelled", colour: "#39424f" };
  const ERRORS = [{ name: "right", colour: "#5d6675" }, { name: "wrong", colour: "#ff4d5e", grow: 1.5 }, { name: "unlabelled", colour: "#262c36" }];
  const QUIET = { displayModeBar: false, displaylogo: false, responsive: true };
  const count = (n) => Number(n).toLocaleString("en-US");
  // Plotly reads a little HTML in its texts; names are shown as they are written.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%&#123;");

  function unpack(text, Type) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new Type(bytes.buffer);
  }

  function decode(view) {
    if (view.points) return view;
    const Code = report.codeBytes === 1 ? Uint8Array : Uint16Array;
    const packed = unpack(view.xyz, Uint16Array);
    view.points = [0, 1, 2].map((axis) => {
      const values = new Float32Array(view.shown);
      for (let i = 0; i < view.shown; i++) values[i] = view.low[axis] + packed[3 * i + axis] * view.unit[axis];
      return values;
    });
    view.label = view.labels === null ? null : unpack(view.labels, Code);
    view.predicted = view.prediction === null ? null : unpack(view.prediction, Code);
    return view;
  }

  // ---- the cloud -------------------------------------------------------------------------------------------------
  const byId = (id) => document.getElementById(id);
  const MODES = {
    label: { title: "Label", has: (v) => v.labels !== null, groups: () => [...report.classes, NONE], code: (v) => v.label },
    prediction: { title: "Prediction", has: (v) => v.prediction !== null, groups: () => [...report.classes, NONE], code: (v) => v.predicted },
    error: { title: "Error", has: (v) => v.labels !== null && v.prediction !== null, groups: () => ERRORS, code: errorCode },
    points: { title: "Points", has: (v) => v.labels === null && v.prediction === null, groups: () => [{ name: "points", colour: INK.accent }], code: (v) => new Uint8Array(v.shown) },
  };
  const state = { view: null, mode: "label", hidden: { class: new Set(), error: new Set() }, size: 1.4, traces: [], drawn: null };
  const hiddenNow = () => (state.mode === "error" ? state.hidden.error : state.hidden.class);

  function errorCode(view) {
    const codes = new Uint8Array(view.shown);
    const none = report.classes.length;
    for (let i = 0; i < view.shown; i++) codes[i] = view.label[i] >= none ? 2 : Number(view.label[i] !== view.predicted[i]);
    return codes;
  }

  function makeTraces(view) {
    const groups = MODES[state.mode].groups();
    const codes = MODES[state.mode].code(view);
    const last = groups.length - 1;
    const members = groups.map(() => []);
    for (let i = 0; i < view.shown; i++) members[Math.min(codes[i], last)].push(i);
    return groups.map((group, g) => {
      const pick = (axis) => Float32Array.from(members[g], (i) => view.points[axis][i]);
      return {
        type: "scatter3d", mode: "markers", name: plain(group.name), x: pick(0), y: pick(1), z: pick(2),
        visible: members[g].length > 0 && !hiddenNow().has(g), hoverinfo: "none", showlegend: false,
        marker: { color: group.colour, size: state.size * (group.grow || 1), symbol: "square", line: { width: 0 } }, rows: members[g],
      };
    });
  }

  function camera(view, top) {
    const along = (axis) => -(view.low[axis] + view.high[axis]) / 2 / view.span;
    const center = { x: along(0), y: along(1), z: along(2) };
    const away = top ? [0, -0.001, 1.15] : [-0.52, -0.56, 0.46];
    const eye = { x: center.x + away[0], y: center.y + away[1], z: center.z + away[2] };
    return { center, eye, up: { x: 0, y: 0, z: 1 } };
  }

  function sceneLayout(view) {
    const axis = (k) => ({ visible: false, range: [view.low[k], view.high[k]], autorange: false, showspikes: false });
    const ratio = (k) => (view.high[k] - view.low[k]) / view.span;
    return {
      margin: { l: 0, r: 0, t: 0, b: 0 }, paper_bgcolor: "#0a0d13", font: FONT, showlegend: false, uirevision: report.views.indexOf(view),
      scene: {
        // Ranges and ratios are those of the whole scan, so one metre is one metre on every axis and stays so when a class is hidden.
        xaxis: axis(0), yaxis: axis(1), zaxis: axis(2), aspectmode: "manual", aspectratio: { x: ratio(0), y: ratio(1), z: ratio(2) },
        bgcolor: "#0a0d13", camera: camera(view, false), dragmode: "turntable", uirevision: report.views.indexOf(view), hovermode: "closest",
      },
    };
  }

  function hasWebGL() {
    try { return Boolean(document.createElement("canvas").getContext("webgl")); } catch (refused) { return false; }
  }
  const webgl = hasWebGL();

  // Without WebGL the scan is drawn from above on a plain canvas: less, but never an empty box.
  function drawFlat(view) {
    const canvas = byId("flat");
    canvas.style.display = "block";
    const scale = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const ink = canvas.getContext("2d");
    const zoom = Math.min(canvas.width, canvas.height) / (view.span * 1.1);
    for (const trace of state.traces.filter((t) => t.visible)) {
      ink.fillStyle = trace.marker.color;
      for (let i = 0; i < trace.x.length; i++) {
        const px = canvas.width / 2 + trace.x[i] * zoom;
        ink.fillRect(px, canvas.height / 2 - trace.y[i] * zoom, trace.marker.size, trace.marker.size);
      }
    }
    readout("WebGL is not available in this browser: the scan is drawn from above");
  }

  function readout(text) {
    byId("readout").textContent = text;
    byId("readout").hidden = !text;
  }

  function describe(event) {
    const hit = event.points[0];
    const row = state.traces[hit.curveNumber].rows[hit.pointNumber];
    const named = (codes) => (report.classes[codes[row]] || NONE).name;
    const parts = [];
    if (state.view.label) parts.push(`label ${named(state.view.label)}`);
    if (state.view.predicted) parts.push(`prediction ${named(state.view.predicted)}`);
    parts.push(`(${state.view.points.map((axis, k) => (axis[row] + state.view.origin[k]).toFixed(2)).join(", ")}) m`);
    readout(parts.join("  ·  "));
  }

  function drawCloud() {
    const view = state.view;
    state.traces = makeTraces(view);
    if (!webgl) return drawFlat(view);
    const plot = byId("cloud");
    const layout = sceneLayout(view);
    // Switching the colours keeps the view the reader turned to.
    if (state.drawn === view && plot.layout) layout.scene.camera = plot.layout.scene.camera;
    const ready = Plotly.react(plot, state.traces, layout, { ...QUIET, scrollZoom: true });
    if (state.drawn === null) ready.then(() => { plot.on("plotly_hover", describe); plot.on("plotly_unhover", () => readout("")); });
    state.drawn = view;
  }

  function moveCamera(top) {
    if (webgl) Plotly.relayout(byId("cloud"), { "scene.camera": camera(state.view, top) });
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function legendRow(group, g, number) {
    const row = element("button", hiddenNow().has(g) ? "row off" : "row");
    const swatch = element("span", "swatch");
    swatch.style.background = group.colour;
    row.append(swatch, element("span", "name", group.name), element("span", "count", count(number)));
    row.title = group.name;
    row.setAttribute("aria-pressed", String(!hiddenNow().has(g)));
    row.addEventListener("click", () => {
      if (!hiddenNow().delete(g)) hiddenNow().add(g);
      drawCloud();
      drawLegend();
    });
    return row;
  }

  function drawLegend() {
    const legend = byId("legend");
    const groups = MODES[state.mode].groups();
    const counts = state.view.counts[state.mode];
    const head = element("div", "head");
    head.append(element("span", "", "click to hide"));
    if (hiddenNow().size) {
      const all = element("button", "", "show all");
      all.addEventListener("click", () => { hiddenNow().clear(); drawCloud(); drawLegend(); });
      head.append(all);
    } else head.append(element("span", "", "points"));
    const rows = groups.map((group, g) => (counts[g] ? legendRow(group, g, counts[g]) : null));
    legend.replaceChildren(head, ...rows.filter(Boolean));
  }

  function drawCaption() {
    const view = state.view;
    const parts = [`${count(view.total)} points`];
    if (view.shown < view.total) parts.push(`${count(view.shown)} of them drawn, chosen at random with a fixed seed`);
    if (view.accuracy !== null) parts.push(`${(100 * view.accuracy).toFixed(2)} % of the labelled points predicted right`);
    parts.push("drag to rotate, scroll to zoom, right-drag to move");
    byId("caption").textContent = parts.join("  ·  ");
  }

  function drawModes() {
    const buttons = Object.entries(MODES).filter(([, mode]) => mode.has(state.view)).map(([key, mode]) => {
      const button = element("button", "", mode.title);
      button.dataset.mode = key;
      button.setAttribute("aria-pressed", String(key === state.mode));
      button.addEventListener("click", () => { state.mode = key; refresh(); });
      return button;
    });
    byId("modes").replaceChildren(...buttons);
  }

  function refresh() {
    if (!MODES[state.mode].has(state.view)) state.mode = Object.keys(MODES).find((key) => MODES[key].has(state.view));
    readout("");
    drawModes();
    drawLegend();
    drawCaption();
    drawCloud();
  }

  function startCloud() {
    if (!report.views.length) return;
    const choose = (index) => { state.view = decode(report.views[index]); refresh(); };
    const list = byId("scans");
    report.views.forEach((view, index) => {
      const option = element("option", "", view.split ? `${view.name}  (${view.split})` : view.name);
      option.value = String(index);
      list.append(option);
    });
    list.hidden = report.views.length < 2;
    list.addEventListener("change", () => choose(Number(list.value)));
    byId("size").addEventListener("input", (event) => { state.size = Number(event.target.value); drawCloud(); });
    byId("reset").addEventListener("click", () => moveCamera(false));
    byId("above").addEventListener("click", () => moveCamera(true));
    choose(0);
  }

  // ---- the charts ------------------------------------------------------------------------------------------------
  const AXIS = { gridcolor: INK.line, zeroline: false, linecolor: INK.line, automargin: true, fixedrange: true };
  const HOVER = { bgcolor: "#0b0e14", bordercolor: INK.line, font: { ...FONT, color: INK.text } };
  const chartLayout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: FONT, hoverlabel: HOVER,
    margin: { l: 52, r: 52, t: 26, b: 44 }, showlegend: false, ...more,
  });

  // A running mean whose weight grows to 1/window: early steps are not pulled to zero.
  function smooth(values, window) {
    let mean = null;
    let seen = 0;
    return values.map((value) => {
      if (value === null) return mean;
      seen += 1;
      mean = mean === null ? value : mean + (value - mean) / Math.min(seen, window);
      return mean;
    });
  }

  function curve(name, values, colour, axis, unit) {
    const steps = report.history.step;
    const noisy = steps.length > 40;
    const line = {
      x: steps, y: noisy ? smooth(values, Math.max(5, Math.round(steps.length / 40))) : values, yaxis: axis, name,
      mode: steps.length > 1 ? "lines" : "markers", line: { color: colour, width: 2.4 }, hovertemplate: `${name} %{y${unit}}<extra></extra>`,
    };
    const raw = { x: steps, y: values, yaxis: axis, mode: "lines", line: { color: colour, width: 1 }, opacity: 0.25, hoverinfo: "skip" };
    return noisy ? [raw, line] : [line];
  }

  function drawHistory() {
    const history = report.history;
    if (!history.step.length) return;
    const traces = curve("loss", history.loss, INK.warm, "y", ":.4f");
    const right = history.accuracy.some((value) => value !== null);
    if (right) traces.push(...curve("accuracy", history.accuracy, INK.accent, "y2", ":.2%"));
    if (history.rate.some((value) => value !== null)) {
      // Speed is told on hover only: a third scale would make the picture hard to read.
      traces.push({ x: history.step, y: history.loss, customdata: history.rate, mode: "lines", line: { width: 0 }, hovertemplate: "%{customdata:,.0f} voxels/s<extra></extra>" });
    }
    Plotly.newPlot(byId("history"), traces, chartLayout({
      hovermode: "x unified",
      xaxis: { ...AXIS, title: { text: "step" }, showspikes: true, spikemode: "across", spikecolor: INK.soft, spikethickness: -1, spikedash: "solid", hoverformat: ",d", unifiedhovertitle: { text: "step %{x}" } },
      yaxis: { ...AXIS, title: { text: "loss", font: { color: INK.warm } }, rangemode: "tozero" },
      yaxis2: { ...AXIS, overlaying: "y", side: "right", tickformat: ".0%", tickmode: "array", tickvals: [0, 0.25, 0.5, 0.75, 1], range: [0, 1.04], showgrid: false, visible: right, title: { text: "accuracy", font: { color: INK.accent } } },
    }), QUIET);
  }

  // One trace per number of voxels: layers that run on the same level of the network share a colour.
  function levelTrace(voxels, colour) {
    const at = report.layers.map((layer, i) => (layer.voxels === voxels ? i : -1)).filter((i) => i >= 0);
    const layers = at.map((i) => report.layers[i]);
    return {
      type: "bar", x: at, y: layers.map((layer) => layer.ms), name: `${count(voxels)} voxels`,
      customdata: layers.map((layer) => [plain(layer.name), layer.share, layer.voxels, plain(layer.channels)]),
      marker: { color: colour, line: { width: 0 }, cornerradius: 3 },
      hovertemplate: "<b>%{customdata[0]}</b><br>%{y:.3f} ms, %{customdata[1]:.1%} of the whole<br>%{customdata[2]:,} voxels, channels %{customdata[3]}<extra></extra>",
    };
  }

  // From mint (most voxels) over blue to violet (fewest).
  function levelColour(share) {
    const stops = [[95, 224, 192], [58, 160, 216], [134, 112, 246]];
    const at = share * 2;
    const low = Math.min(1, Math.floor(at));
    return `rgb(${stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low))).join(",")})`;
  }

  function drawLayers() {
    const layers = report.layers;
    if (!layers.length) return;
    const levels = [...new Set(layers.map((layer) => layer.voxels))].sort((a, b) => b - a);
    const traces = levels.map((voxels, i) => levelTrace(voxels, levelColour(levels.length > 1 ? i / (levels.length - 1) : 0)));
    const named = layers.length <= 48 && byId("layers").clientWidth > 700;
    Plotly.newPlot(byId("layers"), traces, chartLayout({
      bargap: 0.2, barmode: "overlay", hovermode: "x", margin: { l: 52, r: 12, t: 34, b: 40 },
      showlegend: levels.length > 1 && levels.length <= 8,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { color: INK.soft, size: 12 } },
      xaxis: { ...AXIS, showgrid: false, showticklabels: named, tickmode: "array", tickangle: -45, tickfont: { size: 11 }, range: [-0.7, layers.length - 0.3],
        tickvals: layers.map((_, i) => i), ticktext: layers.map((layer) => plain(layer.name.length > 24 ? `…${layer.name.slice(-23)}` : layer.name)),
        title: { text: named ? "" : "layers, in the order in which they run" } },
      yaxis: { ...AXIS, title: { text: "ms" }, rangemode: "tozero" },
    }), QUIET);
  }

  startCloud();
  drawHistory();
  drawLayers();
})();
