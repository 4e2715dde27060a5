"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const hidden = new Set(); // groups of lines that the reader has switched off, in all figures
  const switched = new Map(); // what the reader has switched in a figure: its name and the control's
  let figures = {};
  let onDark = {}; // colours that take the place of others on a dark page
  let printing = false;

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const values = (id) => JSON.parse(document.getElementById(id).textContent);

  const isDark = () => dark.matches && !printing;
  const themed = (colour) => (Array.isArray(colour) ? colour.map(themed) : isDark() ? (onDark[colour] ?? colour) : colour);

  // Names in the colours of their lines, moved towards the text's colour until they can be read.
  function readable(colour) {
    const parse = (text) => (text.length === 4 ? [...text.slice(1)].map((each) => each + each) : text.slice(1).match(/../g)).map((each) => parseInt(each, 16));
    const linear = (value) => (value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
    const [text, behind] = printing ? [[0, 0, 0], [255, 255, 255]] : [parse(variable("--text")), parse(variable("--card"))];
    for (let share = 0; share < 1; share += 0.05) {
      const mixed = parse(colour).map((each, k) => Math.round(each + share * (text[k] - each)));
      const [low, high] = [luminance(mixed), luminance(behind)].sort((a, b) => a - b);
      if ((high + 0.05) / (low + 0.05) >= 4.5) return `rgb(${mixed.join(", ")})`;
    }
    return variable("--text");
  }

  async function loadPlotly() {
    const packed = document.getElementById("plotly").textContent;
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  // A figure as it is to be drawn now: in the colours of the theme, with what the reader has switched.
  function prepared(name) {
    const { data, layout } = structuredClone(figures[name]);
    const text = printing ? "#000" : variable("--text");
    const lines = printing ? "#ccc" : variable("--line");
    layout.font = { family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13, color: text };
    layout.hoverlabel = { bgcolor: variable("--card"), bordercolor: lines, font: { color: variable("--text") }, align: "left" };
    layout.showlegend = false;
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) Object.assign(layout[key], { gridcolor: lines, linecolor: lines, fixedrange: narrow.matches });
    }
    layout.annotations = (layout.annotations ?? []).filter((each) => !each.name || !(narrow.matches || hidden.has(each.name)));
    for (const each of layout.annotations) {
      each.arrowcolor = themed(each.font.color);
      each.font.color = readable(each.arrowcolor);
    }
    if (narrow.matches) squeeze(data, layout);
    const trueEpsilon = switched.get(`${name} true-epsilon`);
    const singleRuns = switched.get(`${name} single-runs`);
    if (trueEpsilon) {
      delete layout.xaxis.tickvals;
      layout.xaxis.title.text = "true privacy loss ε (without bound: not drawn)";
      const known = data.flatMap((trace) => trace.meta?.true ?? []).filter((each) => each > 0);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      const decades = Math.log10(high / low);
      const room = narrow.matches ? 4 : 9; // numbers that stand beside each other without touching
      if (decades > 2) Object.assign(layout.xaxis, { dtick: Math.ceil(decades / room), tickformat: "~s" });
      for (const trace of data) if (trace.meta?.everywhere && known.length) trace.x = [0.9 * low, 1.1 * high];
    }
    for (const trace of data) {
      for (const part of [trace.line, trace.marker, trace.marker?.line]) if (part?.color) part.color = themed(part.color);
      if (trace.type === "heatmap") trace.colorscale = [[0, isDark() ? "#1d2f47" : "#f0f5fb"], [1, isDark() ? "#3f7fc8" : "#1f5fa8"]];
      if (trace.meta?.single) trace.visible = Boolean(singleRuns);
      if (trace.meta?.asked && trueEpsilon) trace.x = trace.meta.true;
      if (hidden.has(trace.legendgroup)) trace.visible = false;
    }
    return { data, layout };
  }

  const named = (layout, data) => layout.yaxis.type === "category" && data[0].type !== "heatmap";

  // On a phone the names of lines stand above them, not beside them.
  function squeeze(data, layout) {
    if (data[0].type === "heatmap") data[0].showscale = false;
    layout.margin.r = 14;
    if (!named(layout, data)) return;
    Object.assign(layout.yaxis, { showticklabels: false, automargin: false });
    layout.margin.l = 14;
    for (const each of layout.annotations) Object.assign(each, { xanchor: "right", yshift: -14 });
    for (const y of new Set(data.flatMap((trace) => trace.y))) {
      const above = { text: y, y, x: 0, xref: "paper", xanchor: "left", yshift: 15, showarrow: false };
      layout.annotations.push({ ...above, font: { color: layout.font.color } });
    }
  }

  function draw(name) {
    const place = document.querySelector(`[data-figure="${CSS.escape(name)}"]`);
    if (!place) return;
    const wide = Number(place.dataset.height);
    const taller = narrow.matches && named(figures[name].layout, figures[name].data);
    place.style.height = `${taller ? 1.4 * wide : wide}px`;
    const { data, layout } = prepared(name);
    return Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
  }
  const drawAll = () => Promise.all(Object.keys(figures).map(draw));
  const redress = () => {
    Object.keys(figures).forEach(legend);
    return drawAll();
  };

  // One button for each group of lines; it is worked by mouse and keyboard, and rules all figures.
  function legend(name) {
    const place = document.querySelector(`[data-legend="${CSS.escape(name)}"]`);
    const named = figures[name].data.filter((trace) => trace.legendgroup && trace.showlegend !== false);
    const groups = new Map(named.map((trace) => [trace.legendgroup, trace]));
    if (!place || groups.size < 2) return;
    place.replaceChildren();
    const plain = document.createElement("textarea"); // turns &lt; back into <, and makes no elements
    for (const [group, trace] of groups) {
      const button = document.createElement("button");
      const swatch = document.createElement("span");
      const colour = trace.line?.color ?? trace.marker?.color;
      const points = trace.mode.includes("markers");
      swatch.className = points ? `swatch ${trace.marker?.symbol ?? "circle"}` : `swatch line ${trace.line?.dash ?? "solid"}`;
      if (typeof colour === "string") swatch.style.color = themed(colour);
      plain.innerHTML = group;
      button.type = "button";
      button.dataset.group = group;
      button.setAttribute("aria-pressed", String(!hidden.has(group)));
      button.append(swatch, plain.value);
      button.addEventListener("click", () => {
        hidden.has(group) ? hidden.delete(group) : hidden.add(group);
        for (const each of document.querySelectorAll(".legend button")) {
          if (each.dataset.group === group) each.setAttribute("aria-pressed", String(!hidden.has(group)));
        }
        drawAll();
      });
      place.append(button);
    }
  }

  function controls() {
    for (const box of document.querySelectorAll("[data-control]")) {
      const key = `${box.dataset.of} ${box.dataset.control}`;
      box.checked = Boolean(switched.get(key));
      box.addEventListener("change", () => {
        switched.set(key, box.checked);
        draw(box.dataset.of);
      });
    }
  }

  function show(all) {
    figures = all;
    controls();
    return redress();
  }

  // Live pages ask their server whether anything has changed, and keep what the reader has opened and switched.
  function follow(state) {
    const line = document.getElementById("live");
    let known = state.version;
    let asking = false; // one question at a time, however long the answer takes
    setInterval(async () => {
      if (asking) return;
      asking = true;
      try {
        const answer = await fetch(`update?known=${encodeURIComponent(known)}`);
        if (answer.status === 503) {
          line.textContent = `Nothing can be read at the moment: ${await answer.text()}`;
          return;
        }
        if (!answer.ok) throw new Error(answer.statusText);
        const news = answer.status === 204 ? null : await answer.json();
        if (news) {
          const opened = [...document.querySelectorAll("details[open]")].map((each) => each.id);
          for (const place of document.querySelectorAll(".canvas")) Plotly.purge(place);
          document.getElementById("header").innerHTML = news.header;
          document.getElementById("main").innerHTML = news.main;
          document.title = news.title;
          opened.filter(Boolean).forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
          known = news.version;
          await show(news.figures);
        }
        line.textContent = `Live: last looked at ${new Date().toLocaleTimeString()}.`;
      } catch (error) {
        line.textContent = "The server has stopped: this page no longer changes.";
      } finally {
        asking = false;
      }
    }, state.every);
  }

  async function start() {
    const state = values("state");
    onDark = state.onDark;
    try {
      await loadPlotly();
      await show(values("figures"));
    } catch (error) {
      for (const place of document.querySelectorAll(".canvas")) {
        place.classList.add("failed");
        place.textContent = "This browser cannot draw the figure; its numbers are in the table below.";
      }
      console.error(error);
      return;
    }
    dark.addEventListener("change", redress);
    narrow.addEventListener("change", drawAll);
    const unfolded = []; // on paper nothing can be unfolded: promises are, before it is printed
    addEventListener("beforeprint", () => {
      printing = true;
      for (const each of document.querySelectorAll("details[data-print]:not([open])")) {
        each.open = true;
        unfolded.push(each);
      }
      redress();
    });
    addEventListener("afterprint", () => {
      printing = false;
      for (const each of unfolded.splice(0)) each.open = false;
      redress();
    });
    if (state.live) follow(state);
    document.documentElement.dataset.ready = "true";
  }
  start();
})();
