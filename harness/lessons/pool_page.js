// The page of the pool: buttons, pictures, steps back, challenges. All decisions are in BlockPool.
const $ = id => document.getElementById(id);
const PROMPTS = {
  "system + question": "You are a helpful assistant . Answer in one short sentence : what is a block ?".split(" "),
  "system + other question": "You are a helpful assistant . Answer in one short sentence : why is it small ?".split(" "),
  "a short prompt": "Hello there my friend".split(" "),
  "64 tokens": Array.from({length: 64}, (_, i) => `t${i}`),
};
let pool, past = [], made = 0, marked = new Set(), won = new Set();

const CHALLENGES = [
  {text: "Bring one block to 3 references.", done: p => p.refs.some(refs => refs >= 3)},
  {text: "Fork a sequence whose last block is partly filled, and make a copy on write happen.", done: p => p.copies > 0},
  {text: "Let a request hit a block whose owner has ended.", done: (p, note) => note === "revived"},
  {text: "Make the pool evict a cached block.", done: p => p.evictions > 0},
  {text: "4 beams write 10 tokens each behind a prompt of 64, in blocks of 16. How many blocks are in use?", answer: () => beams(64, 4, 10, 16)},
  {text: "A prompt of 48 tokens comes a second time, blocks of 16. How many of its tokens hit?", answer: () => repeated(48, 16)},
];
function beams(prompt, width, own, size) {
  const p = new BlockPool(64, size);
  p.add("0", PROMPTS["64 tokens"].slice(0, prompt));
  for (let i = 1; i < width; i++) p.fork("0", String(i));
  for (let i = 0; i < width; i++) p.append(String(i), own);
  return p.blocks - p.free;
}
function repeated(length, size) {
  const p = new BlockPool(64, size), prompt = PROMPTS["64 tokens"].slice(0, length);
  p.add("a", prompt);
  return p.add("b", prompt) * size;
}

function start() {
  pool = new BlockPool(Math.min(64, Math.max(4, Number($("blocks").value) || 24)), Number($("size").value));
  past = []; made = 0; marked = new Set();
  say("An empty pool. Add a request.");
  show();
}
function act(work) {
  const before = pool.copy(), held = [...pool.refs];
  try {
    const text = work();
    past.push(before);
    marked = new Set(pool.refs.map((refs, block) => [refs, block]).filter(([refs, block]) => refs !== held[block]).map(([, block]) => block));
    say(text);
  } catch (error) {
    pool = before;
    say(`Refused: ${error.message}. Nothing changed.`);
  }
  show();
}
const chosen = () => { if (!$("sequence").value) throw new Error("there is no sequence yet: add a request"); return $("sequence").value; };
const actions = {
  add() {
    const words = $("text").value.trim().split(/\s+/).filter(Boolean), name = `s${++made}`, before = pool.copy();
    const hits = pool.add(name, words), table = pool.sequences.get(name).table;
    const revived = table.slice(0, hits).some(block => !before.refs[block]);
    check(revived ? "revived" : "");
    return `${name}: ${words.length} tokens in blocks ${table.join(", ")}; ${hits} of them hit in the prefix cache${revived ? ", though their owner had ended" : ""}.`;
  },
  append() {
    const name = chosen(), count = Number($("count").value), before = pool.sequences.get(name).table.length, copied = pool.append(name, count);
    const grown = pool.sequences.get(name).table.length - before;
    return `${name} writes ${count} token${count === 1 ? "" : "s"}: ${copied ? `block ${copied[0]} is shared, so it is copied to ${copied[1]} first; ` : "no copy; "}${grown} new block${grown === 1 ? "" : "s"}.`;
  },
  fork() { const name = chosen(), child = `s${++made}`; pool.fork(name, child); return `${child} reads all blocks of ${name}. No block was taken and nothing was copied.`; },
  cow() {
    const name = chosen(), copied = pool.cow(name);
    return copied ? `Block ${copied[0]} was copied to ${copied[1]}, which is ${name}'s own.` : `Nothing to copy: the last block of ${name} is full, or nobody else reads it.`;
  },
  free() {
    const name = chosen(), gone = pool.release(name);
    return `${name} ended. ${gone.length ? `Free now: ${gone.join(", ")}; those with a hash can still be found.` : "Others read all its blocks, so none is free."}`;
  },
};
function back() {
  if (past.length) { pool = past.pop(); marked = new Set(); say("One step back."); } else say("This is the first step.");
  show();
}
function say(text) { $("said").textContent = text; }
function kind(block) { return pool.refs[block] ? (pool.refs[block] > 1 ? "shared" : "used") : pool.hash[block] === null ? "free" : "cached"; }
function describe(block) {
  const owners = [...pool.sequences].filter(([, one]) => one.table.includes(block)).map(([name]) => name);
  const parts = [`Block ${block}: ${kind(block)}, ${pool.refs[block]} reference${pool.refs[block] === 1 ? "" : "s"}`, `${pool.fill[block]} of ${pool.size} slots written`];
  if (owners.length) parts.push(`read by ${owners.join(", ")}`);
  if (pool.hash[block] !== null) parts.push(`hash of the prefix "${pool.hash[block].slice(-60)}"`);
  if (pool.queue.includes(block)) parts.push(`number ${pool.queue.indexOf(block) + 1} in the order of eviction`);
  return parts.join("; ") + ".";
}
function show() {
  const grid = $("grid");
  grid.replaceChildren(...Array.from({length: pool.blocks}, (_, i) => {
    const block = i + 1, cell = document.createElement("button");
    cell.type = "button"; cell.className = `cell ${kind(block)}${marked.has(block) ? " marked" : ""}`;
    cell.setAttribute("aria-label", describe(block));
    const meter = document.createElement("span"); meter.className = "meter"; meter.style.height = `${100 * (kind(block) === "free" ? 0 : pool.fill[block]) / pool.size}%`;
    const text = document.createElement("span"); text.className = "number"; text.textContent = block;
    const refs = document.createElement("span"); refs.className = "refs"; refs.textContent = pool.refs[block] ? `×${pool.refs[block]}` : "";
    cell.append(meter, text, refs);
    cell.addEventListener("click", () => { $("detail").textContent = describe(block); });
    return cell;
  }));
  const kept = $("sequence").value;
  $("sequence").replaceChildren(...[...pool.sequences.keys()].map(name => new Option(name, name)));
  if (pool.sequences.has(kept)) $("sequence").value = kept;
  $("tables").replaceChildren(...[...pool.sequences].map(([name, one]) => {
    const row = document.createElement("tr");
    for (const value of [name, one.tokens, one.table.join(" "), (pool.size - one.tokens % pool.size) % pool.size]) row.insertCell().textContent = value;
    return row;
  }));
  $("stack").textContent = pool.stack.length ? pool.stack.slice(-12).reverse().join(" ") + (pool.stack.length > 12 ? " …" : "") : "empty";
  $("queue").textContent = pool.queue.length ? pool.queue.join(" ") : "empty";
  const logical = [...pool.sequences.values()].reduce((sum, one) => sum + one.table.length, 0), used = pool.refs.filter(Boolean).length;
  $("counts").textContent = `${used} of ${pool.blocks} blocks in use for ${logical} table entries; ${pool.queue.length} cached, ${pool.stack.length} free without a hash; copies: ${pool.copies}, evictions: ${pool.evictions}, hits: ${pool.hits}.`;
  $("back").disabled = !past.length;
  check("");
}
function check(note) {
  CHALLENGES.forEach((one, i) => { if (one.done && one.done(pool, note)) won.add(i); });
  document.querySelectorAll("#challenges li").forEach((item, i) => {
    const mark = item.querySelector(".mark"), text = won.has(i) ? "done" : "open";
    if (mark.textContent !== text) mark.textContent = text;
    item.classList.toggle("won", won.has(i));
  });
}
function challenges() {
  $("challenges").replaceChildren(...CHALLENGES.map((one, i) => {
    const item = document.createElement("li"), mark = document.createElement("span");
    mark.className = "mark"; mark.textContent = "open";
    item.append(mark, ` ${one.text} `);
    if (one.answer) {
      const input = document.createElement("input"), button = document.createElement("button"), reply = document.createElement("span");
      input.type = "number"; input.min = 0; input.setAttribute("aria-label", `answer: ${one.text}`);
      button.type = "button"; button.textContent = "Check"; reply.setAttribute("role", "status");
      button.addEventListener("click", () => {
        const right = one.answer(), given = Number(input.value);
        if (input.value !== "" && given === right) won.add(i);
        reply.textContent = input.value === "" ? " Type a number." : given === right ? " Right." : ` Not ${given}: try it in the pool above.`;
        check("");
      });
      item.append(input, " ", button, reply);
    }
    return item;
  }));
}
if (typeof document !== "undefined" && $("grid")) {
  for (const name of Object.keys(PROMPTS)) $("preset").append(new Option(name, name));
  $("preset").addEventListener("change", () => { $("text").value = PROMPTS[$("preset").value].join(" "); });
  $("text").value = PROMPTS["system + question"].join(" ");
  for (const name of Object.keys(actions)) $(name).addEventListener("click", () => act(actions[name]));
  $("back").addEventListener("click", back);
  for (const id of ["blocks", "size"]) $(id).addEventListener("change", start);
  challenges();
  start();
}
