// Bytes, hashes and numbers of every format (spec/transcript.md 1).

/** A document, proof or value that the specification refuses. */
export class Refused extends Error {}

export const refuse = (why) => {
  throw new Refused(why);
};

export const must = (holds, why) => holds || refuse(why);

/** Hashes and signatures: the browser's own, and in Node 18 those of its module. */
export const { subtle } = globalThis.crypto ?? (await import("node:crypto")).webcrypto;

const TEXT = new TextEncoder();

/** Return the UTF-8 bytes of a text; a lone surrogate has none. */
export function utf8(text) {
  must(!/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text), "lone surrogate");
  return TEXT.encode(text);
}

/** Return the text of UTF-8 bytes, which must be that and nothing else. */
export function textOf(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
  } catch {
    return refuse("not UTF-8");
  }
}

/** Return the bytes that lower-case hexadecimal digits write; `length` of them, if given. */
export function unhex(text, length = null) {
  must(typeof text === "string" && /^([0-9a-f]{2})*$/.test(text), "not lower-case hexadecimal");
  must(length === null || text.length === 2 * length, `not ${length} bytes`);
  const data = new Uint8Array(text.length / 2);
  for (let i = 0; i < data.length; i++) data[i] = parseInt(text.slice(2 * i, 2 * i + 2), 16);
  return data;
}

export const hex = (data) => Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");

export function concat(...parts) {
  const whole = new Uint8Array(parts.reduce((n, part) => n + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

export const equal = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);

/** Return negative, 0 or positive: the order of two byte strings. */
export function compareBytes(a, b) {
  for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return a[i] - b[i];
  return a.length - b.length;
}

/** Return an integer (BigInt or number) as eight little-endian bytes. */
export function u64(value) {
  const data = new Uint8Array(8);
  new DataView(data.buffer).setBigUint64(0, BigInt(value), true);
  return data;
}

export const sha256 = async (data) => new Uint8Array(await subtle.digest("SHA-256", data));

/** Return `u8 length | tag | for each part: u64 length | part`. */
export function frame(tag, ...parts) {
  const name = utf8(tag);
  const pieces = parts.flatMap((part) => [u64(part.length), part]);
  return concat(Uint8Array.of(name.length), name, ...pieces);
}

export const taggedDigest = (tag, ...parts) => sha256(frame(tag, ...parts));

/** Return the bytes of RFC 4648 base64 in its one spelling. */
export function base64(text) {
  must(typeof text === "string" && /^[A-Za-z0-9+/]*={0,2}$/.test(text) && text.length % 4 === 0, "not base64");
  const data = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  must(toBase64(data) === text, "base64 in another spelling");
  return data;
}

export function toBase64(data) {
  let text = "";
  for (let at = 0; at < data.length; at += 0x6000) text += btoa(String.fromCharCode(...data.subarray(at, at + 0x6000)));
  return text;
}

const bits = (value) => {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  return view.getBigUint64(0);
};

/** Return the hexadecimal float of a number. */
export function hexFloat(value) {
  if (Number.isNaN(value)) return "nan";
  const word = bits(value);
  const sign = word >> 63n ? "-" : "";
  const exponent = Number((word >> 52n) & 0x7ffn);
  const fraction = (word & 0xfffffffffffffn).toString(16).padStart(13, "0");
  if (exponent === 0x7ff) return `${sign}inf`;
  if (value === 0) return `${sign}0x0.0p+0`;
  const power = exponent === 0 ? -1022 : exponent - 1023;
  return `${sign}0x${exponent === 0 ? 0 : 1}.${fraction}p${power < 0 ? "-" : "+"}${Math.abs(power)}`;
}

/** Return the number that a hexadecimal float writes, which has one spelling. */
export function parseHexFloat(text) {
  must(typeof text === "string", "not a hexadecimal float");
  const named = { inf: Infinity, "-inf": -Infinity, nan: NaN };
  if (Object.hasOwn(named, text)) return named[text];
  if (/^-?0x0\.0p\+0$/.test(text)) return text.startsWith("-") ? -0 : 0;
  const found = /^(-?)0x([01])\.([0-9a-f]{13})p([+-])([0-9]{1,4})$/.exec(text);
  must(found, "not a hexadecimal float");
  const [, sign, lead, fraction, way, digits] = found;
  const power = (way === "-" ? -1 : 1) * Number(digits);
  must(power >= -1022 && power <= 1023 && (lead === "1" || power === -1022), "not a hexadecimal float");
  const exponent = lead === "1" ? power + 1023 : 0;
  const view = new DataView(new ArrayBuffer(8));
  view.setBigUint64(0, (sign ? 1n << 63n : 0n) | (BigInt(exponent) << 52n) | BigInt(`0x${fraction}`));
  const value = view.getFloat64(0);
  must(hexFloat(value) === text, "a hexadecimal float in another spelling");
  return value;
}
