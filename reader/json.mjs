// JSON without loss: integers are BigInt (spec/transcript.md 1).
import { Refused, equal, must, refuse, textOf, utf8 } from "./bytes.mjs";

const DEPTH = 32;
const LARGEST = 1n << 63n;

class Parser {
  constructor(text, floats) {
    Object.assign(this, { text, floats, at: 0 });
  }

  whole() {
    const value = this.value(0);
    this.space();
    must(this.at === this.text.length, "bytes left over");
    return value;
  }

  space() {
    while (" \t\n\r".includes(this.text[this.at] ?? "x")) this.at++;
  }

  take(token) {
    must(this.text.startsWith(token, this.at), `expected ${token}`);
    this.at += token.length;
  }

  value(depth) {
    this.space();
    const next = this.text[this.at];
    if (next === "{" || next === "[") {
      must(depth < DEPTH, "nested too deep");
      return next === "{" ? this.object(depth + 1) : this.list(depth + 1);
    }
    if (next === '"') return this.string();
    for (const [token, value] of [["null", null], ["true", true], ["false", false]])
      if (this.text.startsWith(token, this.at)) {
        this.at += token.length;
        return value;
      }
    return this.number();
  }

  number() {
    const found = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
    found.lastIndex = this.at;
    const [token, fraction, exponent] = found.exec(this.text) ?? refuse("not JSON");
    this.at += token.length;
    if (fraction !== undefined || exponent !== undefined) {
      must(this.floats, "a float");
      return Number(token);
    }
    must(token.length <= 20, "an integer of more than 20 characters");
    return BigInt(token);
  }

  string() {
    this.take('"');
    let from = this.at;
    const pieces = [];
    for (;;) {
      const next = this.text[this.at] ?? refuse("a string without an end");
      must(next >= " ", "a control character in a string");
      if (next === '"') break;
      if (next !== "\\") {
        this.at++;
        continue;
      }
      pieces.push(this.text.slice(from, this.at));
      const kind = this.text[this.at + 1];
      if (kind === "u") {
        const digits = this.text.slice(this.at + 2, this.at + 6);
        must(/^[0-9a-fA-F]{4}$/.test(digits), "not an escape");
        pieces.push(String.fromCharCode(parseInt(digits, 16)));
        this.at += 6;
      } else {
        const meant = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" }[kind];
        must(meant !== undefined, "not an escape");
        pieces.push(meant);
        this.at += 2;
      }
      from = this.at;
    }
    pieces.push(this.text.slice(from, this.at));
    this.take('"');
    return pieces.join("");
  }

  list(depth) {
    const items = [];
    this.take("[");
    this.space();
    if (this.text[this.at] !== "]")
      for (;;) {
        items.push(this.value(depth));
        this.space();
        if (this.text[this.at] !== ",") break;
        this.take(",");
      }
    this.take("]");
    return items;
  }

  object(depth) {
    const items = new Map();
    this.take("{");
    this.space();
    if (this.text[this.at] !== "}")
      for (;;) {
        this.space();
        const key = this.string();
        must(!items.has(key), "a key twice");
        this.space();
        this.take(":");
        items.set(key, this.value(depth));
        this.space();
        if (this.text[this.at] !== ",") break;
        this.take(",");
      }
    this.take("}");
    return items;
  }
}

/** Return the value of JSON text in any spelling; objects are Maps, integers BigInt. */
export function parse(text, { floats = true } = {}) {
  return new Parser(text, floats).whole();
}

/** Return the value of JSON bytes in any spelling, at most `limit` of them. */
export function parseBytes(data, limit) {
  must(data.length <= limit, "too long");
  return parse(textOf(data));
}

const byCodePoint = (a, b) => {
  const [left, right] = [Array.from(a), Array.from(b)];
  for (let i = 0; i < Math.min(left.length, right.length); i++)
    if (left[i] !== right[i]) return left[i].codePointAt(0) - right[i].codePointAt(0);
  return left.length - right.length;
};

const SHORT = { '"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function writeString(text) {
  utf8(text); // refuses a lone surrogate
  const escaped = text.replace(/[^ !#-[\]-~]/g, (c) => SHORT[c] ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return `"${escaped}"`;
}

/** Return the canonical JSON of a value, as text; a plain object is taken for a Map. */
export function write(value, depth = 0) {
  if (value === null || typeof value === "boolean") return String(value);
  if (typeof value === "bigint") return -LARGEST < value && value < LARGEST ? String(value) : refuse("an integer beyond 63 bits");
  if (typeof value === "string") return writeString(value);
  must(typeof value === "object", "a number that canonical JSON has not");
  must(depth < DEPTH, "nested too deep");
  if (Array.isArray(value)) return `[${value.map((item) => write(item, depth + 1)).join(",")}]`;
  const items = value instanceof Map ? value : new Map(Object.entries(value));
  const keys = [...items.keys()].sort(byCodePoint);
  return `{${keys.map((key) => `${writeString(key)}:${write(items.get(key), depth + 1)}`).join(",")}}`;
}

/** Return the value of canonical JSON bytes, at most `limit` of them: any other spelling is refused. */
export function parseCanonical(data, limit) {
  must(data.length <= limit, "too long");
  must(data.every((byte) => byte < 128), "not ASCII");
  const value = parse(textOf(data), { floats: false });
  must(equal(utf8(write(value)), data), "not the canonical encoding of its value");
  return value;
}

// -- fields of an object, read with the type each must have

/** Return a Map that has exactly these fields. */
export function fieldsOf(value, names) {
  must(value instanceof Map, "not an object");
  must(value.size === names.length && names.every((name) => value.has(name)), `fields must be ${names.join(", ")}`);
  return value;
}

export const asText = (value) => (typeof value === "string" ? value : refuse("not a text"));
export const asList = (value) => (Array.isArray(value) ? value : refuse("not a list"));
export const asMap = (value) => (value instanceof Map ? value : refuse("not an object"));
export const asBoolean = (value) => (typeof value === "boolean" ? value : refuse("not true or false"));

/** Return an integer of at least `least` and below 2^63. */
export function asInteger(value, least = -LARGEST) {
  must(typeof value === "bigint" && value >= BigInt(least) && value < LARGEST, `not an integer from ${least} on`);
  return value;
}

export const isRefused = (problem) => problem instanceof Refused;
