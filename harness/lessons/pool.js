// The block manager of engine/core (BlockManager with the prefix cache) in JavaScript, for the page alone. A browser test
// drives this class and the policy core with the same 10,000 random operations and compares every state.
class BlockPool {
  constructor(blocks, size) {
    this.blocks = blocks; this.size = size;
    this.refs = new Array(blocks + 1).fill(0);        // block 0 is the null block: never given out
    this.hash = new Array(blocks + 1).fill(null);     // of cached blocks: the tokens of the prefix up to the block's end
    this.fill = new Array(blocks + 1).fill(0);        // written slots, for the picture
    this.stack = Array.from({length: blocks}, (_, i) => blocks - i);   // free blocks without a hash, the next one last
    this.queue = [];                                  // free blocks with a hash, the next victim first
    this.index = new Map();                           // hash -> blocks, the oldest first
    this.sequences = new Map();                       // name -> {table, tokens, prompt}
    this.copies = 0; this.evictions = 0; this.hits = 0;
  }
  get free() { return this.stack.length + this.queue.length; }
  copy() {
    const twin = Object.assign(Object.create(BlockPool.prototype), this);
    for (const key of ["refs", "hash", "fill", "stack", "queue"]) twin[key] = [...this[key]];
    twin.index = new Map([...this.index].map(([hash, blocks]) => [hash, [...blocks]]));
    twin.sequences = new Map([...this.sequences].map(([name, one]) => [name, {...one, table: [...one.table]}]));
    return twin;
  }
  need(tokens) { return Math.ceil(tokens / this.size); }
  hashes(prompt) {   // one for each full block; the whole prefix counts
    return Array.from({length: Math.floor(prompt.length / this.size)}, (_, i) => prompt.slice(0, (i + 1) * this.size).join(" "));
  }
  lookup(prompt) {   // at least one token is left to compute, and the first miss ends it
    const found = [];
    for (const hash of this.hashes(prompt).slice(0, Math.floor((prompt.length - 1) / this.size))) {
      if (!this.index.has(hash)) break;
      found.push(this.index.get(hash)[0]);
    }
    return found;
  }
  known(name) {
    if (!this.sequences.has(name)) throw new Error(`there is no sequence ${name}`);
    return this.sequences.get(name);
  }
  full(name, tokens) { return new Error(`${name}: ${tokens} tokens need more blocks than the ${this.free} of ${this.blocks} that are free`); }
  take() {
    let block = this.stack.pop();
    if (block === undefined) {
      block = this.queue.shift();
      this.unhash(block);
      this.evictions += 1;
    }
    this.refs[block] = 1; this.fill[block] = 0;
    return block;
  }
  unhash(block) {
    const others = this.index.get(this.hash[block]).filter(other => other !== block);
    if (others.length) this.index.set(this.hash[block], others); else this.index.delete(this.hash[block]);
    this.hash[block] = null;
  }
  add(name, prompt) {
    if (this.sequences.has(name)) throw new Error(`${name} exists already`);
    if (!prompt.length) throw new Error(`${name}: a prompt has at least 1 token`);
    const hits = this.lookup(prompt), lacking = this.need(prompt.length) - hits.length;
    if (lacking + hits.filter(block => !this.refs[block]).length > this.free) throw this.full(name, prompt.length);
    for (const block of hits) {
      if (!this.refs[block]) this.queue.splice(this.queue.indexOf(block), 1);
      this.refs[block] += 1;
    }
    const one = {table: [...hits], tokens: prompt.length, prompt: prompt.length};
    for (let i = 0; i < lacking; i++) one.table.push(this.take());
    this.hashes(prompt).forEach((hash, i) => {
      if (i < hits.length) return;
      this.hash[one.table[i]] = hash;
      this.index.set(hash, [...(this.index.get(hash) ?? []), one.table[i]]);
    });
    this.hits += hits.length;
    this.sequences.set(name, one);
    this.refill(one);
    return hits.length;
  }
  append(name, tokens) {
    const one = this.known(name), end = one.tokens + tokens, shared = this.sharedTail(one);
    if (tokens < 1) throw new Error(`${name}: at least 1 token is appended`);
    if (this.need(end) - one.table.length + shared > this.free || end > this.blocks * this.size) throw this.full(name, tokens);
    const copied = shared ? this.cow(name) : null;
    while (one.table.length < this.need(end)) one.table.push(this.take());
    one.tokens = end;
    this.refill(one);
    return copied;
  }
  sharedTail(one) { return one.tokens % this.size > 0 && this.refs[one.table.at(-1)] > 1; }
  fork(parent, child) {
    const one = this.known(parent);
    if (this.sequences.has(child)) throw new Error(`${child} exists already`);
    for (const block of one.table) this.refs[block] += 1;
    this.sequences.set(child, {...one, table: [...one.table]});
  }
  cow(name) {   // a shared partial last block becomes the sequence's own; null where nothing is copied
    const one = this.known(name);
    if (!this.sharedTail(one)) return null;
    if (!this.free) throw this.full(name, 1);
    const source = one.table.at(-1), copy = this.take();
    this.refs[source] -= 1;
    one.table[one.table.length - 1] = copy;
    this.copies += 1;
    this.refill(one);
    return [source, copy];
  }
  release(name) {
    const gone = [];
    for (const block of this.known(name).table) {
      this.refs[block] -= 1;
      if (!this.refs[block]) gone.push(block);
    }
    gone.reverse();   // the tail of a prefix is evicted first
    this.queue.push(...gone.filter(block => this.hash[block] !== null));
    this.stack.push(...gone.filter(block => this.hash[block] === null).reverse());   // the last one comes back first
    this.sequences.delete(name);
    return gone;
  }
  slots(name, positions) {
    const one = this.known(name);
    return positions.map(position => one.table[Math.floor(position / this.size)] * this.size + position % this.size);
  }
  refill(one) {
    one.table.forEach((block, i) => { this.fill[block] = Math.max(this.fill[block], Math.min(this.size, one.tokens - i * this.size)); });
  }
  state() {   // what the test compares
    return {
      tables: Object.fromEntries([...this.sequences].map(([name, one]) => [name, [...one.table]])),
      tokens: Object.fromEntries([...this.sequences].map(([name, one]) => [name, one.tokens])),
      refs: this.refs.slice(1), hash: this.hash.slice(1), queue: [...this.queue], free: this.free, next: this.stack.slice(-8).reverse(),
    };
  }
}
