// What requests of given lengths take in paged and contiguous KV memory. A browser test compares every figure with the
// managers of the policy core for random lengths, block sizes and pools.
const ceil = (a, b) => Math.floor((a + b - 1) / b);
const chunk = n => { let size = 1; while (size < n) size *= 2; return size; };

function account({prompt, output}, {size, kvBytes, poolTokens, maxLen}) {
  const tokens = prompt + Math.max(output, 1) - 1;  // the last token is never fed back; the first comes with the prompt
  const blocks = ceil(tokens, size), poolBlocks = Math.floor(poolTokens / size);
  const guess = Math.max(tokens, Math.min(maxLen, prompt + chunk(output)));
  const fits = length => Math.floor(poolTokens / length);
  return {
    tokens, blocks, tail: blocks * size - tokens, entries: blocks, bytes: blocks * size * kvBytes, tableBytes: 4 * blocks,
    paged: Math.floor(poolBlocks / blocks),
    max: tokens <= maxLen ? fits(maxLen) : 0,
    pow2: tokens <= maxLen ? fits(chunk(guess)) : 0,     // buddy: a reservation takes the next power of two
    oracle: tokens <= maxLen ? fits(chunk(tokens)) : 0,
  };
}
function total(requests, settings) {
  const rows = requests.map(request => account(request, settings)), sum = key => rows.reduce((all, row) => all + row[key], 0);
  const slots = sum("blocks") * settings.size, held = rows.filter(row => row.tokens <= settings.maxLen);
  const reserved = held.length * settings.maxLen;   // no reservation holds the others
  return {rows, tokens: sum("tokens"), blocks: sum("blocks"), tail: sum("tail"), entries: sum("entries"), bytes: sum("bytes"),
    waste: slots ? sum("tail") / slots : 0, reserved, longer: rows.length - held.length, reservedWaste: reserved ? 1 - held.reduce((all, row) => all + row.tokens, 0) / reserved : 0};
}
function curve(requests, settings, sizes) {   // bytes that a block size costs: empty slots of the last blocks, and tables
  return sizes.map(size => {
    const all = total(requests, {...settings, size});
    return {size, tail: all.tail * settings.kvBytes, table: 4 * all.entries};
  });
}
function parse(text) {
  const rows = text.split("\n").map((line, i) => [line.trim(), i + 1]).filter(([line]) => line && !line.startsWith("#"));
  return rows.map(([line, number]) => {
    const [prompt, output, ...rest] = line.split(/[\s,;]+/).map(Number);
    if (rest.length || ![prompt, output].every(n => Number.isInteger(n) && n >= 0 && n <= 1e7) || !prompt) throw new Error(`line ${number}: "${line}" must be two whole numbers, prompt tokens from 1 on and output tokens from 0 on`);
    return {prompt, output};
  });
}
