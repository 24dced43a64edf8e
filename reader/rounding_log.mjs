// The bytes of a step's rounding log (spec/rounding-log.md).
import { must } from "./bytes.mjs";

const MOST_ELEMENTS = 2n ** 48n;
const MOST_PRINTED = 2 ** 28; // elements of a form that has one place for each: more than its bytes can hold is refused before

class Reader {
  constructor(data) {
    Object.assign(this, { data, at: 0 });
  }

  byte() {
    must(this.at < this.data.length, "cut short");
    return this.data[this.at++];
  }

  varint() {
    let [value, shift] = [0n, 0n];
    for (;;) {
      const byte = this.byte();
      must(shift < 63n, "a varint of 2^63 or more");
      value |= BigInt(byte & 0x7f) << shift;
      shift += 7n;
      if (byte < 0x80) {
        must(byte !== 0 || shift === 7n, "a varint with more bytes than it needs");
        must(value < 1n << 63n, "a varint of 2^63 or more");
        return value;
      }
    }
  }

  zigzag() {
    return unzigzag(this.varint());
  }

  take(length) {
    must(length <= BigInt(this.data.length - this.at), "cut short");
    return this.data.subarray(this.at, (this.at += Number(length)));
  }

  end() {
    must(this.at === this.data.length, "bytes left over");
  }
}

const unzigzag = (value) => (value & 1n ? -((value + 1n) >> 1n) : value >> 1n);
const bitsOf = (value) => (value === 0n ? 0 : value.toString(2).length);

class Bits {
  constructor(reader) {
    Object.assign(this, { reader, start: reader.at, at: 0 });
  }

  bit() {
    const byte = this.reader.data[this.start + (this.at >> 3)];
    must(byte !== undefined, "cut short");
    return (byte >> (this.at++ & 7)) & 1;
  }

  field(width) {
    let value = 0n;
    for (let i = 0; i < width; i++) value |= BigInt(this.bit()) << BigInt(i);
    return value;
  }

  finish() {
    while (this.at & 7) must(this.bit() === 0, "padding that is not zero");
    this.reader.at = this.start + (this.at >> 3);
  }
}

/** Return {indexes, symbols} of a site's entries (section 2), as BigInt. */
function entriesFrom(reader, n, width) {
  must(0n <= n && n <= MOST_ELEMENTS && width >= 1 && width <= 32, "elements or width out of range");
  const m = reader.varint();
  must(m <= n, "more entries than elements");
  if (m === 0n) return { indexes: [], symbols: [] };
  const left = BigInt(reader.data.length - reader.at) * 8n;
  const quotient = (n * 63073n) / (m * 65536n);
  const k = quotient <= 1n ? 0 : bitsOf(quotient) - 1;
  must(m * BigInt(1 + k + width) <= left, "cut short");
  const bits = new Bits(reader);
  const most = m + ((n - m) >> BigInt(k));
  const gaps = [];
  let used = 0n;
  for (let i = 0n; i < m; i++) {
    let zeros = 0n;
    for (;;) {
      must(++used <= most, "quotients that go on for longer than any writer's");
      if (bits.bit()) break;
      zeros++;
    }
    gaps.push(zeros << BigInt(k));
  }
  for (let i = 0; i < gaps.length; i++) gaps[i] |= bits.field(k);
  const symbols = gaps.map(() => bits.field(width));
  bits.finish();
  let last = -1n;
  const indexes = gaps.map((gap) => (last += gap + 1n));
  must(last < n, "an index beyond the site");
  return { indexes, symbols };
}

export function readEntries(data, n, width) {
  const reader = new Reader(data);
  const found = entriesFrom(reader, n, width);
  reader.end();
  return found;
}

/** Return {band, indexes, symbols} of a decision (section 5). */
export function readDecision(data, n, width) {
  const reader = new Reader(data);
  const band = reader.zigzag();
  must(-1100n <= band && band <= 1000n, "a band out of range");
  must(reader.byte() === width, "another width than the operator's");
  const found = entriesFrom(reader, n, width);
  must(found.indexes.length > 0, "a decision without entries");
  must(width !== 2 || found.symbols.every((symbol) => symbol < 3n), "a symbol that no branch has");
  reader.end();
  return { band, ...found };
}

/** Return {indexes, symbols} of the dense form (section 9). */
export function readDense(data, n) {
  must(0n <= n && BigInt(data.length) === (n + 4n) / 5n, "another number of bytes");
  const [indexes, symbols] = [[], []];
  data.forEach((byte, place) => {
    must(byte <= 242, "a byte above 242");
    for (let [i, rest] = [0, byte]; i < 5; i++, rest = Math.floor(rest / 3)) {
      const [trit, index] = [rest % 3, BigInt(place) * 5n + BigInt(i)];
      if (index >= n) must(trit === 0, "a trit after the last element");
      else if (trit !== 1) {
        indexes.push(index);
        symbols.push(trit === 2 ? 1n : 0n);
      }
    }
  });
  return { indexes, symbols };
}

/** Return the residues of a site (section 6). */
export function readResidues(data, n, bits) {
  must(n > 0n && bits >= 1 && bits <= 8, "elements or bits out of range");
  const plane = (n + 7n) / 8n;
  must(BigInt(data.length) === plane * BigInt(bits), "another number of bytes");
  must(n <= BigInt(MOST_PRINTED), "more elements than are read");
  const found = new Array(Number(n)).fill(0n);
  for (let j = 0; j < bits; j++)
    for (let i = 0; i < Number(plane) * 8; i++) {
      const bit = (data[j * Number(plane) + (i >> 3)] >> (i & 7)) & 1;
      if (i < found.length) found[i] |= BigInt(bit << j);
      else must(bit === 0, "padding that is not zero");
    }
  return found;
}

/** Return a key's fields after those of the one before (section 3). */
function nextKey(reader, before) {
  const first = reader.varint();
  const fields = BigInt(before.length);
  const same = first % fields;
  const key = before.slice(0, Number(same));
  key.push(before[Number(same)] + first / fields + 1n);
  while (key.length < before.length) key.push(reader.varint());
  must(key.every((field) => field < 1n << 32n), "a field of a key is 2^32 or more");
  return key;
}

/** Return [address, payload] of each site of a frame (section 3). */
export function readFrame(data) {
  const reader = new Reader(data);
  must(reader.byte() === 1, "another version");
  const count = reader.varint();
  must(count * 2n <= BigInt(data.length - reader.at), "cut short");
  const sites = [];
  let key = [0n, 0n, 0n, -1n];
  for (let i = 0n; i < count; i++) {
    key = nextKey(reader, key);
    must(key[2] <= 8n, "an unknown kind");
    const length = reader.varint();
    must(length > 0n, "an empty payload");
    sites.push([key, length]);
  }
  const found = sites.map(([address, length]) => [address, reader.take(length)]);
  reader.end();
  return found;
}

// -- tables (section 4)

function readFields(reader) {
  const byte = reader.byte();
  const residue = byte >= 128;
  const number = (byte & 127) >> 1;
  const grid = {
    precision: residue ? 0n : BigInt(number),
    dithered: (byte & 1) === 1,
    residue_bits: residue ? BigInt(number + 1) : 0n,
    band: reader.zigzag(),
    floor: reader.zigzag(),
  };
  must(!residue || number < 8, "residues of more than 8 bits");
  must(grid.precision <= 53n && (grid.precision === 0n || !grid.dithered), "a precision out of range");
  must(-1100n <= grid.band && grid.band <= -1n, "a band out of range");
  must(-1100n <= grid.floor && grid.floor <= 1100n, "a floor out of range");
  return grid;
}

function checkGrid(grid) {
  const absolute = grid.scales.length > 0;
  must(absolute || (!grid.dithered && grid.residue_bits === 0n), "dither and residues need an absolute grid");
  must(grid.residue_bits === 0n || grid.band <= grid.floor + grid.residue_bits - 2n, "a band too wide for its residues");
  const most = grid.floor > grid.band ? grid.floor : grid.band;
  for (const scale of grid.scales) {
    must(-1100n <= scale && scale <= 1100n && scale + most <= 1000n, "a scale out of range");
  }
}

function allScales(reader) {
  const blocks = reader.varint();
  if (blocks === 0n) return [];
  const width = reader.byte();
  must(width >= 1 && width <= 32 && blocks * BigInt(width) <= BigInt(reader.data.length - reader.at) * 8n, "cut short");
  const bits = new Bits(reader);
  const symbols = Array.from({ length: Number(blocks) }, () => bits.field(width));
  bits.finish();
  must(widest(symbols) === width, "another width than the symbols need");
  return symbols.map(unzigzag);
}

const widest = (symbols) => Math.max(1, ...symbols.map(bitsOf));

function changedScales(reader, scales) {
  const width = reader.byte();
  must(scales.length > 0, "a site without scales has none that change");
  const { indexes, symbols } = entriesFrom(reader, BigInt(scales.length), width);
  must(indexes.length > 0, "nothing changes");
  must(widest(symbols) === width, "another width than the symbols need");
  const changed = [...scales];
  indexes.forEach((index, i) => (changed[Number(index)] += unzigzag(symbols[i] + 1n)));
  return changed;
}

const nameOf = (key) => key.join(",");
const FIELDS = ["precision", "dithered", "residue_bits", "band", "floor"];
const sameFields = (a, b) => FIELDS.every((name) => a[name] === b[name]);

/** Return the table (Map from "kind,ordinal" to its grid) after a change. */
function changedTable(reader, old) {
  const table = new Map(old);
  const count = reader.varint();
  let key = [0n, -1n];
  for (let i = 0n; i < count; i++) {
    key = nextKey(reader, key);
    must(key[0] <= 8n, "an unknown kind");
    const before = old.get(nameOf(key));
    const change = reader.byte();
    must(change <= 4, "an unknown change");
    must(change === 4 || before !== undefined, "a change of a site that is not there");
    if (change === 0) {
      table.delete(nameOf(key));
      continue;
    }
    const fields = change >= 2 ? readFields(reader) : Object.fromEntries(FIELDS.map((name) => [name, before[name]]));
    const scales = change === 4 ? allScales(reader) : change === 2 ? before.scales : changedScales(reader, before.scales);
    const grid = { key, ...fields, scales };
    checkGrid(grid);
    if (change === 4) must(before === undefined || before.scales.length !== scales.length, "written whole without need");
    if (change === 2 || change === 3) must(!sameFields(before, fields), "fields that do not differ");
    table.set(nameOf(key), grid);
  }
  return table;
}

const inOrder = (table) =>
  [...table.values()].sort((a, b) => Number(a.key[0] - b.key[0]) || Number(a.key[1] - b.key[1]));

/** Return the grids of a whole table, ascending by key. */
export function readTable(data) {
  const reader = new Reader(data);
  must(reader.byte() === 1, "another version");
  const table = changedTable(reader, new Map());
  reader.end();
  return inOrder(table);
}

/** Return the grids after a change of the table with the grids `old`. */
export function readChange(old, data) {
  const reader = new Reader(data);
  const table = changedTable(reader, new Map(old.map((grid) => [nameOf(grid.key), grid])));
  reader.end();
  return inOrder(table);
}

