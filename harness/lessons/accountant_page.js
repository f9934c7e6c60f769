// The page of the accountant: inputs, tables and the curve. All figures are from account(), total() and curve().
const DATA = JSON.parse(document.getElementById("data").textContent);
const by = id => document.getElementById(id);
const SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256], GIB = 2 ** 30, SHOWN = 8;
const number = n => n.toLocaleString("en-US", {maximumFractionDigits: n < 10 ? 2 : 0});
function bytes(n) {
  for (const [unit, size] of [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 1024]]) if (n >= size) return `${number(n / size)} ${unit}`;
  return `${number(n)} B`;
}
function settings() {
  const kvBytes = DATA.models[by("model").value], poolTokens = Math.floor(Number(by("pool").value) * GIB / kvBytes);
  return {size: Number(by("size").value), kvBytes, poolTokens, maxLen: Number(by("longest").value)};
}
function row(values) {
  const line = document.createElement("tr");
  values.forEach((value, i) => { const cell = line.insertCell(); cell.textContent = value; if (i) cell.className = "n"; });
  return line;
}
function show() {
  let requests;
  try {
    requests = parse(by("lengths").value);
    if (!requests.length) throw new Error("type at least one line: prompt tokens and output tokens");
    if (!(settings().poolTokens >= 1 && settings().maxLen >= 1)) throw new Error("pool and longest sequence must be above 0");
    by("wrong").hidden = true;
  } catch (error) {
    by("wrong").hidden = false; by("wrong").textContent = error.message;
    return;
  }
  const given = settings(), all = total(requests, given);
  by("sum").replaceChildren(
    row(["KV of one token", bytes(given.kvBytes)]), row(["slots of the pool", number(given.poolTokens)]),
    row(["tokens with K and V", number(all.tokens)]), row(["blocks", number(all.blocks)]), row(["empty slots of last blocks, at the end of each request", `${number(all.tail)} (${(100 * all.waste).toFixed(1)} %)`]),
    row(["entries of block tables", `${number(all.entries)} (${bytes(4 * all.entries)})`]), row(["KV memory, paged", bytes(all.bytes)]),
    row(["KV memory, each reserving the longest", `${bytes(all.reserved * given.kvBytes)} (${all.longer ? `without ${number(all.longer)} longer requests, ` : ""}${(100 * all.reservedWaste).toFixed(1)} % unused at the end of each request)`]));
  by("each").replaceChildren(...requests.slice(0, 200).map((one, i) => {
    const found = all.rows[i];
    return row([`${one.prompt} + ${one.output}`, found.blocks, found.tail, bytes(found.bytes), found.paged, found.max, found.pow2, found.oracle].map(value => typeof value === "number" ? number(value) : value));
  }));
  by("shown").textContent = requests.length > 200 ? `The first 200 of ${number(requests.length)} lines.` : "";
  picture(all, given);
  plot(curve(requests, given, SIZES), given.size);
}
function picture(all, {size, maxLen}) {   // the first requests: what each reserves contiguously, and its blocks
  const rows = all.rows.slice(0, SHOWN), W = 640, each = 24, left = 60, half = 285, most = Math.max(maxLen, ...rows.map(one => one.blocks * size));
  const bar = (x, y, slots, tokens) => `<rect x="${x}" y="${y}" width="${Math.max(2, half * slots / most)}" height="14" fill="var(--empty)" stroke="var(--soft)"/><rect x="${x}" y="${y}" width="${Math.max(1, half * Math.min(tokens, slots) / most)}" height="14" fill="var(--used)"/>`;
  const lines = rows.map((one, i) => `<text x="${left - 8}" y="${30 + each * i + 12}" text-anchor="end">${number(one.tokens)}</text>${bar(left, 30 + each * i, maxLen, one.tokens)}${bar(left + half + 8, 30 + each * i, one.blocks * size, one.tokens)}`).join("");
  const said = `At the end of each request, reserving ${number(maxLen)} tokens for it leaves ${(100 * all.reservedWaste).toFixed(1)} % of the reserved slots empty; blocks of ${size} leave ${(100 * all.waste).toFixed(1)} %.`;
  const longer = all.longer ? ` ${number(all.longer)} of ${number(all.rows.length)} requests are longer than that: none is reserved for them.` : "";
  by("picture-says").textContent = said + longer + (all.rows.length > SHOWN ? ` The picture has the first ${SHOWN} of ${number(all.rows.length)} requests.` : "");
  by("picture").innerHTML = `<svg class="chart" viewBox="0 0 ${W} ${34 + each * rows.length}" role="img" aria-label="${said}"><text x="${left - 8}" y="16" text-anchor="end">tokens</text><text x="${left}" y="16">contiguous: ${number(maxLen)} slots each</text><text x="${left + half + 8}" y="16">paged: blocks of ${size}</text>${lines}</svg>`;
}
function plot(points, now) {
  const W = 640, H = 272, left = 84, bottom = 48, top = 10, most = Math.max(...points.map(p => p.tail + p.table), 1), least = Math.max(1, Math.min(...points.map(p => Math.min(p.tail || Infinity, p.table || Infinity))));
  const x = i => left + (W - left - 16) * i / (points.length - 1), y = v => top + (H - top - bottom) * (1 - Math.log(Math.max(v, least) / least) / Math.log(most / least || 2));
  const line = (key, tone) => `<polyline fill="none" stroke="var(${tone})" stroke-width="2.5" points="${points.map((p, i) => `${x(i)},${y(p[key])}`).join(" ")}"/>`;
  const labels = points.map((p, i) => `<text x="${x(i)}" y="${H - 28}" text-anchor="middle"${p.size === now ? ' font-weight="700"' : ""}>${p.size}</text>`).join("");
  const best = points.reduce((a, b) => a.tail + a.table <= b.tail + b.table ? a : b);
  const text = `Bytes by block size: empty slots from ${bytes(points[0].tail)} to ${bytes(points.at(-1).tail)}, tables from ${bytes(points[0].table)} to ${bytes(points.at(-1).table)}`;
  by("plot").innerHTML = `<svg class="chart" viewBox="0 0 ${W} ${H}" role="img" aria-label="${text}"><g class="grid"><text x="${left - 10}" y="${y(most) + 10}" text-anchor="end">${bytes(most)}</text><text x="${left - 10}" y="${y(least)}" text-anchor="end">${bytes(least)}</text></g><text x="${(W + left) / 2}" y="${H - 6}" text-anchor="middle">block size, tokens</text><text transform="translate(14 ${(H - bottom) / 2}) rotate(-90)" text-anchor="middle">bytes, log scale</text>${line("tail", "--shared")}${line("table", "--used")}${labels}</svg>`;
  by("best").textContent = `Memory alone is smallest at block size ${best.size}. What a block size costs in time is a matter of kernels, which this page does not know.`;
}
for (const name of Object.keys(DATA.models)) by("model").append(new Option(`${name} (${bytes(DATA.models[name])} a token)`, name));
by("model").value = "llama3_8b";
for (const size of SIZES) by("size").append(new Option(size, size));
by("size").value = 16;
for (const name of Object.keys(DATA.workloads)) by("workload").append(new Option(name, name));
function take() { if (by("workload").value) by("lengths").value = DATA.workloads[by("workload").value].map(pair => pair.join(" ")).join("\n"); show(); }
by("workload").addEventListener("change", take);
for (const id of ["model", "size", "pool", "longest", "lengths"]) by(id).addEventListener("input", show);
if (DATA.chosen) {   // the lengths of a trace: reservations are for its longest request
  by("workload").value = DATA.chosen;
  by("longest").value = Math.max(...DATA.workloads[DATA.chosen].map(([prompt, output]) => prompt + output));
}
take();
