// The page's only script: sorting and filtering of the table of points, and a chart of any two quantities of the sweep.
// It needs no library and no network. Without it the page shows the same points as static figures and a plain table.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const COLOURS = ["#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#949494", "#56b4e9", "#ece133", "#000000"];
  const create = (name, facts, parent, text) => {
    const one = document.createElementNS(NS, name);
    for (const key in facts) one.setAttribute(key, facts[key]);
    if (text !== undefined) one.textContent = text;
    if (parent) parent.appendChild(one);
    return one;
  };
  const html = (name, facts, parent, text) => {
    const one = Object.assign(document.createElement(name), facts);
    if (text !== undefined) one.textContent = text;
    if (parent) parent.appendChild(one);
    return one;
  };
  const show = (v) => {
    if (v === null || v === undefined) return "–";
    if (typeof v !== "number") return String(v);
    const size = Math.abs(v);
    return size >= 1e5 || (size && size < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));
  };

  // ---- the table of points -------------------------------------------------------------------------------------
  const number = (text) => {
    const found = text.replace(/[,\s]|pts|%/g, "").replace("−", "-");
    return found === "" || isNaN(found) ? null : Number(found);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    const sort = (column) => {
      const down = heads[column].getAttribute("aria-sort") === "ascending";
      const value = (row) => row.cells[column].textContent.trim();
      const rows = [...body.rows].map((row) => [number(value(row)), value(row), row]);
      rows.sort(([a, s], [b, t]) => (a === null) - (b === null) || (a !== null ? a - b : s.localeCompare(t)));
      if (down) rows.reverse();
      heads.forEach((head, place) => head.removeAttribute("aria-sort"));
      heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows.map(([, , row]) => row));
    };
    heads.forEach((head, column) => {
      const text = head.textContent;
      head.textContent = "";
      html("button", { type: "button", onclick: () => sort(column) }, head, text);
    });
    const bar = html("p", { className: "controls" });
    const label = html("label", {}, bar, "Filter the points ");
    const field = html("input", { type: "search", placeholder: "e.g. paged 16" }, label);
    const count = html("span", { className: "count" }, bar, `${body.rows.length} points`);
    count.setAttribute("role", "status");
    field.oninput = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let kept = 0;
      for (const row of body.rows) {
        const cells = [...row.cells].map((cell) => cell.textContent.trim().toLowerCase());
        const fits = words.every((word) => cells.some((cell) => (number(word) === null ? cell.includes(word) : cell === word)));
        row.hidden = !fits;
        kept += fits;
      }
      count.textContent = `${kept} of ${body.rows.length} points`;
    };
    const scroll = table.closest(".scroll") || table;
    scroll.parentNode.insertBefore(bar, scroll);
  }

  // ---- the chart -----------------------------------------------------------------------------------------------
  const source = document.getElementById("points-data");
  const place = document.getElementById("explorer");
  if (!source || !place) return;
  const data = JSON.parse(source.textContent);
  // one number stands for four equal ones; sides that nothing is known of are left out at the end
  const sides = (v) => typeof v === "number" ? [v, v, v, v] : v && [...v, null, null, null].slice(0, 4);
  for (const point of data.points) point.v = point.v.map(sides);
  place.hidden = false;
  const controls = html("div", { className: "controls" }, place);
  const choose = (title, name, options, first, change) => {
    const label = html("label", {}, controls, title + " ");
    const select = html("select", {}, label);
    select.setAttribute("aria-label", name);
    for (const [value, text] of options) html("option", { value, selected: value === first }, select, text);
    select.onchange = change;
    return select;
  };
  const names = data.metrics.map((one) => ["m:" + one.name, one.label]);
  const swept = data.axes.filter((one) => one.values.length > 1);
  const settings = swept.map((one) => ["a:" + one.key, one.label]);
  const has = (key) => settings.some(([value]) => value === key);
  let zoom = null, shown = null;  // the ranges asked for, and those of the chart as it stands
  const again = () => { zoom = null; draw(); };
  const startX = settings.find(([value]) => swept.find((one) => "a:" + one.key === value).values.every((v) => typeof v === "number"));
  const x = choose("x", "x axis", [...settings, ...names], (startX || settings[0] || ["m:" + data.metrics[0].name])[0], again);
  const y = choose("y", "y axis", names, (names.find(([value]) => value !== x.value) || names[0])[0], again);
  const colour = choose("colour", "colour by", [["", "none"], ...settings], has("a:cache.policy") ? "a:cache.policy" : (settings[0] || [""])[0], again);
  const held = swept.map((one) => [one, choose(one.label, "hold " + one.label, [["", "all"], ...one.values.map((v) => [String(v), String(v)])], "", again)]);
  html("button", { type: "button", onclick: again }, controls, "Reset zoom");
  const W = 960, H = 420, L = 70, R = 16, T = 14, B = 46;
  const svg = create("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": "Chart of the points", class: "chart" }, place);
  const tip = html("div", { className: "tip", hidden: true }, place);
  const legend = html("p", { className: "legend" }, place);
  const detail = html("div", { className: "detail" }, place);
  detail.setAttribute("role", "status");
  detail.textContent = "Choose a point (click, or Tab and Enter) to see all its figures. Drag over the chart to zoom.";
  const axisOf = (key) => data.axes.find((one) => one.key === key.slice(2));
  const metricOf = (key) => data.metrics.findIndex((one) => one.name === key.slice(2));
  const read = (point, key, side) => {
    if (!key) return "";
    if (key[0] === "a") return point.s[data.axes.indexOf(axisOf(key))];
    const row = point.v[metricOf(key)];
    return row ? row[side] : null;
  };
  const title = (key) => {
    if (key[0] === "a") return axisOf(key).label;
    const one = data.metrics[metricOf(key)];
    return `${one.label} (${one.unit})`;
  };
  const ticks = (low, high) => {
    const step = 10 ** Math.floor(Math.log10((high - low) / 4));
    const size = [1, 2, 5, 10].map((factor) => factor * step).find((one) => (high - low) / one <= 6);
    const found = [];
    for (let at = Math.ceil(low / size) * size; at <= high + size / 1e6; at += size) found.push(+at.toPrecision(12));
    return found;
  };

  function draw() {
    svg.replaceChildren();
    legend.replaceChildren();
    const words = x.value[0] === "a" && axisOf(x.value).values.some((v) => typeof v !== "number");
    const levels = words ? axisOf(x.value).values : null;
    const xOf = (point, side) => { const v = read(point, x.value, side); return levels ? levels.indexOf(v) : v; };
    const kept = data.points.filter((point) =>
      held.every(([one, select]) => select.value === "" || String(point.s[data.axes.indexOf(one)]) === select.value));
    const marks = [];
    for (const point of kept)
      for (const side of [0, 1]) {
        const at = [xOf(point, side), read(point, y.value, side)];
        if (at.every((v) => typeof v === "number")) marks.push({ point, side, x: at[0], y: at[1] });
      }
    if (!marks.length) {
      create("text", { x: W / 2, y: H / 2, "text-anchor": "middle", class: "soft" }, svg, "No point has both figures.");
      return;
    }
    const range = (values, zero) => {
      let low = Math.min(...values), high = Math.max(...values);
      if (zero && low >= 0 && low < 0.5 * high) low = 0;
      const margin = (high - low || Math.abs(high) || 1) * 0.06;
      return [low - (low === 0 ? 0 : margin), high + margin];
    };
    const [x0, x1] = zoom ? zoom.x : range(marks.map((m) => m.x), x.value[0] === "m");
    const [y0, y1] = zoom ? zoom.y : range(marks.map((m) => m.y), true);
    shown = { x: [x0, x1], y: [y0, y1] };
    const px = (v) => L + ((v - x0) / (x1 - x0)) * (W - L - R);
    const py = (v) => H - B - ((v - y0) / (y1 - y0)) * (H - T - B);
    const grid = create("g", { class: "grid" }, svg);
    const marksX = levels ? levels.map((_, i) => i) : x.value[0] === "a" && axisOf(x.value).values.length < 12 ? axisOf(x.value).values : ticks(x0, x1);
    for (const v of marksX.filter((one) => one >= x0 && one <= x1)) {
      create("line", { x1: px(v), x2: px(v), y1: T, y2: H - B }, grid);
      create("text", { x: px(v), y: H - B + 18, "text-anchor": "middle" }, grid, levels ? levels[v] : show(v));
    }
    for (const v of ticks(y0, y1)) {
      create("line", { x1: L, x2: W - R, y1: py(v), y2: py(v) }, grid);
      create("text", { x: L - 8, y: py(v) + 4, "text-anchor": "end" }, grid, show(v));
    }
    create("text", { x: (L + W - R) / 2, y: H - 8, "text-anchor": "middle" }, svg, title(x.value));
    create("text", { x: 16, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 16 ${(T + H - B) / 2})` }, svg, title(y.value));
    const groups = colour.value ? axisOf(colour.value).values : [""];
    const palette = (colour.value && axisOf(colour.value).colours) || COLOURS;
    const tone = (point) => palette[Math.max(0, groups.indexOf(read(point, colour.value, 0))) % palette.length];
    const inside = marks.filter((m) => m.x >= x0 && m.x <= x1 && m.y >= y0 && m.y <= y1);
    for (const mark of inside) {
      const { point, side } = mark;
      if (side === 1 && y.value[0] === "m") {
        const [, , low, high] = point.v[metricOf(y.value)];
        if (low !== null) create("line", { x1: px(mark.x), x2: px(mark.x), y1: py(Math.max(low, y0)), y2: py(Math.min(high, y1)), stroke: tone(point) }, svg);
      }
      const dot = create("circle", {
        cx: px(mark.x), cy: py(mark.y), r: 5, stroke: tone(point), "stroke-width": 1.8,
        fill: side ? tone(point) : "transparent", tabindex: 0, role: "button",
        "aria-label": `${point.l}, ${side ? "measured" : "predicted"}: ${show(mark.y)}`,
      }, svg);
      const say = () => {
        tip.hidden = false;
        tip.textContent = `${point.l} · ${side ? "measured" : "predicted"} · ${title(x.value)} ${show(read(point, x.value, side))} · ${title(y.value)} ${show(mark.y)}`;
        const box = svg.getBoundingClientRect();
        tip.style.left = Math.min(px(mark.x) * box.width / W, box.width - 230) + "px";
        tip.style.top = svg.offsetTop + py(mark.y) * box.height / H + 12 + "px";
      };
      dot.onmouseenter = dot.onfocus = say;
      dot.onmouseleave = dot.onblur = () => { tip.hidden = true; };
      dot.onclick = () => pick(point);
      dot.onkeydown = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(point); } };
    }
    if (colour.value) groups.forEach((value, index) => {
      const one = html("span", {}, legend, String(value));
      one.style.setProperty("--tone", palette[index % palette.length]);
    });
    html("span", { className: "plain" }, legend, "○ predicted  ● measured, with the range of runs");
  }
  function pick(point) {
    detail.replaceChildren();
    html("h3", {}, detail, point.l);
    const table = html("table", {}, html("div", { className: "scroll" }, detail));
    const head = html("tr", {}, html("thead", {}, table));
    for (const text of ["figure", "predicted", "measured", "range of runs"]) html("th", { className: text === "figure" ? "" : "n", scope: "col" }, head, text);
    const body = html("tbody", {}, table);
    data.metrics.forEach((one, index) => {
      const row = point.v[index];
      if (!row) return;
      const line = html("tr", {}, body);
      html("td", {}, line, `${one.label} (${one.unit})`);
      for (const text of [show(row[0]), show(row[1]), row[2] === null ? "–" : `${show(row[2])} – ${show(row[3])}`]) html("td", { className: "n" }, line, text);
    });
  }
  // zoom: drag a rectangle
  let from = null, frame = null;
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return [(event.clientX - box.left) * W / box.width, (event.clientY - box.top) * H / box.height];
  };
  svg.onpointerdown = (event) => {
    if (event.target.tagName === "circle") return;
    from = at(event);
    frame = create("rect", { class: "frame" }, svg);
  };
  svg.onpointermove = (event) => {
    if (!from) return;
    const to = at(event);
    const facts = { x: Math.min(from[0], to[0]), y: Math.min(from[1], to[1]), width: Math.abs(from[0] - to[0]), height: Math.abs(from[1] - to[1]) };
    for (const key in facts) frame.setAttribute(key, facts[key]);
  };
  window.addEventListener("pointerup", (event) => {
    if (!from) return;
    const to = at(event), begin = from;
    from = null;
    frame.remove();
    if (Math.abs(begin[0] - to[0]) < 8 || Math.abs(begin[1] - to[1]) < 8) return;
    const vx = (p) => shown.x[0] + ((p - L) / (W - L - R)) * (shown.x[1] - shown.x[0]);
    const vy = (p) => shown.y[0] + ((H - B - p) / (H - T - B)) * (shown.y[1] - shown.y[0]);
    const order = (a, b) => [Math.min(a, b), Math.max(a, b)];
    zoom = { x: order(vx(begin[0]), vx(to[0])), y: order(vy(begin[1]), vy(to[1])) };
    draw();
  });
  svg.ondblclick = again;
  draw();
})();
