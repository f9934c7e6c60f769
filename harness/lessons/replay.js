// What each block held at each step of a recorded run. Nothing is decided here: the steps are what Python recorded.
class History {
  constructor(data) {
    Object.assign(this, data);
    this.steps = this.times.length;
    this.every = Math.max(1, Math.ceil(this.steps / 200));   // a key frame every so many steps
    this.frames = [];
    const state = new Uint32Array(this.num_blocks + 1);
    for (let step = 0; step < this.steps; step++) {
      this.apply(state, step);
      if (step % this.every === 0) this.frames.push(state.slice());
    }
    this.byBlock = null;
  }
  apply(state, step) { for (let i = this.offsets[step]; i < this.offsets[step + 1]; i++) state[this.blocks[i]] = this.codes[i]; }
  stepAt(seconds) {   // the last step that has begun by then; before the first one, the first
    let low = 0, high = this.steps - 1;
    while (low < high) { const middle = Math.ceil((low + high) / 2); if (this.times[middle] <= seconds) low = middle; else high = middle - 1; }
    return low;
  }
  at(step) {   // the codes of all blocks in this step; entry 0 is the null block
    const frame = Math.floor(step / this.every), state = this.frames[frame].slice();
    for (let i = frame * this.every + 1; i <= step; i++) this.apply(state, i);
    return state;
  }
  of(block) {   // [step, code] of every change of a block
    if (!this.byBlock) {
      this.byBlock = Array.from({length: this.num_blocks + 1}, () => []);
      for (let step = 0; step < this.steps; step++) for (let i = this.offsets[step]; i < this.offsets[step + 1]; i++) this.byBlock[this.blocks[i]].push([step, this.codes[i]]);
    }
    return this.byBlock[block];
  }
  held(request, step) {
    const state = this.at(step), found = [];
    state.forEach((code, block) => { if (code > 1 && this.owner(code) === request) found.push(block); });
    return found;
  }
  owner(code) { return code < 2 ? null : Math.floor((code - 2) / 2); }
  words(code) { return code === 0 ? "free" : code === 1 ? "cached" : `request ${this.owner(code)}${code % 2 ? " and others" : ""}`; }
}
