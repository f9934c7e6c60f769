// The page of the replay: a canvas with one cell for each block, a slider, play, the history of a block, the blocks of a request.
const el = id => document.getElementById(id), run = new History(JSON.parse(el("data").textContent)), other = run.beside ? new History(run.beside) : null;
const canvas = el("pool");
let step = 0, playing = null, wanted = null, block = null, columns = 1, side = 10;
const tone = code => {
  const own = run.owner(code);
  if (own === null) return getComputedStyle(document.documentElement).getPropertyValue(code ? "--cached" : "--empty");
  return el("colour").value === "state" ? getComputedStyle(document.documentElement).getPropertyValue(code % 2 ? "--shared" : "--used") : `hsl(${own * 137.5 % 360} 62% ${own % 2 ? 42 : 56}%)`;
};
const small = document.createElement("canvas"), dot = document.createElement("canvas").getContext("2d", {willReadFrequently: true}), palette = new Map();
function layout() {
  const width = Math.max(200, canvas.parentElement.clientWidth - 2);
  side = Math.max(5, Math.min(22, Math.floor(Math.sqrt(width * 420 / run.num_blocks))));
  columns = Math.max(1, Math.floor(width / side));
  small.width = columns; small.height = Math.ceil(run.num_blocks / columns);
  for (const one of [canvas, el("pool-other")]) { one.width = columns * side; one.height = small.height * side; }
}
function colour(code) {   // red, green, blue, opacity of a code as one number, as the bytes of an image have them
  let found = palette.get(code);
  if (found === undefined) {
    dot.fillStyle = tone(code);
    dot.fillRect(0, 0, 1, 1);
    const seen = dot.getImageData(0, 0, 1, 1);
    if (wanted !== null && run.owner(code) !== wanted) seen.data[3] = 51;
    palette.set(code, found = new Uint32Array(seen.data.buffer)[0]);
  }
  return found;
}
function paint(run, step, canvas) {   // one pixel for each block, enlarged: quick for ten thousand of them; returns a sentence
  const pen = canvas.getContext("2d"), state = run.at(step), image = new ImageData(small.width, small.height), style = getComputedStyle(document.documentElement);
  const pixels = new Uint32Array(image.data.buffer);
  let used = 0, kept = 0;
  for (let i = 1; i <= run.num_blocks; i++) {
    const code = state[i];
    pixels[i - 1] = colour(code);
    if (code > 1) used++; else kept += code;
  }
  small.getContext("2d").putImageData(image, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, canvas.width, canvas.height);
  pen.beginPath();
  for (let x = 0; x <= columns; x++) { pen.moveTo(x * side, 0); pen.lineTo(x * side, canvas.height); }
  for (let y = 0; y <= small.height; y++) { pen.moveTo(0, y * side); pen.lineTo(canvas.width, y * side); }
  pen.strokeStyle = style.getPropertyValue("--paper"); pen.lineWidth = 1;
  pen.stroke();
  if (block !== null) {
    pen.strokeStyle = style.getPropertyValue("--ink"); pen.lineWidth = 2;
    pen.strokeRect((block - 1) % columns * side + 1, Math.floor((block - 1) / columns) * side + 1, side - 2, side - 2);
  }
  return `step ${step + 1} of ${run.steps}, ${run.times[step].toFixed(3)} s: ${run.running[step]} requests run, ${run.waiting[step]} wait; ${used} of ${run.num_blocks} blocks in use, ${kept} cached.`;
}
function draw() {
  const text = paint(run, step, canvas), named = one => one.side[0].toUpperCase() + one.side.slice(1);
  el("when").textContent = other ? `${named(run)}: ${text}` : `S${text.slice(1)}`;
  if (other) el("when-other").textContent = `${named(other)}: ${paint(other, other.stepAt(run.times[step]), el("pool-other"))}`;
  el("step").value = step;
  for (const one of document.querySelectorAll("[data-by]")) one.hidden = one.dataset.by !== el("colour").value;
}
function go(to) { step = Math.max(0, Math.min(run.steps - 1, to)); draw(); }
function play() {
  if (playing !== null) { cancelAnimationFrame(playing); playing = null; el("play").textContent = "Play"; return; }
  if (step === run.steps - 1) step = 0;
  el("play").textContent = "Stop";
  const each = Math.max(1, Math.round(run.steps / 900));
  const next = () => { go(step + each); playing = step < run.steps - 1 ? requestAnimationFrame(next) : null; if (playing === null) el("play").textContent = "Play"; };
  playing = requestAnimationFrame(next);
}
function chooseBlock(number) {
  block = number >= 1 && number <= run.num_blocks ? number : null;
  el("history").replaceChildren(...(block === null ? [] : run.of(block)).slice(0, 300).map(([when, code]) => {
    const row = document.createElement("tr");
    for (const value of [when + 1, run.times[when].toFixed(3), run.words(code)]) row.insertCell().textContent = value;
    return row;
  }));
  el("chosen").textContent = block === null ? `Blocks are 1 to ${run.num_blocks}.` : `Block ${block} changed ${run.of(block).length} times.`;
  draw();
}
function chooseRequest() {
  wanted = el("request").value === "" ? null : Number(el("request").value);
  palette.clear();
  if (wanted === null) el("asked").textContent = "";
  else {
    const [arrival, prompt, output] = run.requests[wanted], held = run.held(wanted, step);
    el("asked").textContent = `Request ${wanted}: came at ${arrival.toFixed(3)} s, ${prompt} + ${output} tokens; in this step it has blocks ${held.length ? held.join(", ") : "none"}; one that several requests have is listed for one of them.`;
  }
  draw();
}
canvas.addEventListener("click", event => {
  const box = canvas.getBoundingClientRect(), x = Math.floor((event.clientX - box.left) * canvas.width / box.width / side), y = Math.floor((event.clientY - box.top) * canvas.height / box.height / side);
  const number = y * columns + x + 1;
  if (number > run.num_blocks) return;
  el("block").value = number;
  chooseBlock(number);
  const own = run.owner(run.at(step)[number]);
  if (own !== null) { el("request").value = own; chooseRequest(); }
});
el("other").hidden = !other;
el("step").max = run.steps - 1;
el("step").addEventListener("input", () => { go(Number(el("step").value)); if (wanted !== null) chooseRequest(); });
el("play").addEventListener("click", play);
el("block").addEventListener("change", () => chooseBlock(Number(el("block").value)));
el("request").append(new Option("all", ""), ...Object.keys(run.requests).map(name => new Option(name, name)));
el("request").addEventListener("change", chooseRequest);
el("colour").addEventListener("change", () => { palette.clear(); draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette.clear(); draw(); });
window.addEventListener("resize", () => { layout(); draw(); });
layout();
draw();
