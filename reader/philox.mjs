// The counter-based generator and what is drawn from it (spec/random.md).
import { frame, must, parseHexFloat, sha256, u64, utf8 } from "./bytes.mjs";

const LIMIT = 1n << 63n;

const multiply = (a, b) => {
  const product = BigInt(a) * BigInt(b);
  return [Number(product >> 32n), Number(product & 0xffffffffn)];
};

/** Return the four words of the cipher for a counter of four and a key of two 32-bit words (section 1). */
export function block(counter, key) {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < 10; round++) {
    const [highA, lowA] = multiply(0xd2511f53, c0);
    const [highB, lowB] = multiply(0xcd9e8d57, c2);
    [c0, c1, c2, c3] = [(highB ^ c1 ^ k0) >>> 0, lowB, (highA ^ c3 ^ k1) >>> 0, lowA];
    [k0, k1] = [(k0 + 0x9e3779b9) >>> 0, (k1 + 0xbb67ae85) >>> 0];
  }
  return [c0, c1, c2, c3];
}

const keyOf = (digest) => {
  const view = new DataView(digest.buffer);
  return [view.getUint32(0, true), view.getUint32(4, true)];
};

/** Return the key of a stream (section 2); numbers are BigInt. */
export async function streamKey({ seed, purpose, step, rank, microBatch, call }) {
  must(/^[\0-\x7f]*$/.test(purpose), "a purpose is ASCII");
  for (const number of [seed, step, rank, microBatch, call]) must(0n <= number && number < 1n << 64n, "a number is outside [0, 2^64)");
  const parts = [u64(seed), utf8(purpose), u64(step), u64(rank), u64(microBatch), u64(call)];
  return keyOf(await sha256(frame("tallystick/random-stream/1", ...parts)));
}

export const keyOfFrame = async (tag, ...parts) => keyOf(await sha256(frame(tag, ...parts)));

/** Return `count` words of a stream from word `start` (BigInt) on. */
export function words(key, start, count) {
  must(0n <= start && start + BigInt(count) <= LIMIT && count >= 0, "words outside [0, 2^63)");
  const found = [];
  let [number, output] = [-1n, []];
  for (let i = start; i < start + BigInt(count); i++) {
    const j = i >> 2n;
    if (j !== number) [number, output] = [j, block([Number(j & 0xffffffffn), Number(j >> 32n), 0, 0], key)];
    found.push(output[Number(i & 3n)]);
  }
  return found;
}

/** Return `count` wide words (BigInt) from wide word `start` on. */
export function wideWords(key, start, count) {
  const found = words(key, 2n * start, 2 * count);
  return Array.from({ length: count }, (_, i) => BigInt(found[2 * i]) + (BigInt(found[2 * i + 1]) << 32n));
}

export const uniform = (key, start, count) => words(key, start, count).map((w) => (w + 0.5) * 2 ** -32);

export function bernoulli(key, start, count, p) {
  must(p >= 0 && p <= 1, "a probability lies in [0, 1]");
  const below = Math.ceil(p * 2 ** 32);
  return words(key, start, count).map((w) => w < below);
}

export function integers(key, start, count, low, high) {
  const range = high - low;
  must(range >= 1n && range <= 1n << 64n, "an empty range, or one of more than 2^64");
  must(-LIMIT <= low && high <= LIMIT, "a range outside 63 bits");
  return wideWords(key, start, count).map((w) => low + ((w * range) >> 64n));
}

/** Return the positions of `count` elements in ascending order of their wide words. */
export function permutation(key, count) {
  const tickets = wideWords(key, 0n, count);
  return tickets.map((_, i) => i).sort((a, b) => (tickets[a] < tickets[b] ? -1 : tickets[a] > tickets[b] ? 1 : a - b));
}

// -- normal numbers (section 4); coefficients from the highest power down

const H = parseHexFloat;
const [A, B, C, D, E, F] = [
  ["0x1.b18d91e9eef75p+1", "0x1.0a4888b1a436ep+7", "0x1.ece5d2213c0ccp+10", "0x1.ad1d8cd4ee71dp+13", "0x1.66c3e869b752ap+15", "0x1.06c1c55b78f20p+16", "0x1.052d26b2e45e4p+15", "0x1.39a296f7d925ep+11"],
  ["0x1.0000000000000p+0", "0x1.5281b386e1ab5p+5", "0x1.5797efdc8b3f7p+9", "0x1.512322e75c89fp+12", "0x1.4b772d5d65266p+14", "0x1.3317caa64f4bep+15", "0x1.c0e457cb1ae76p+14", "0x1.46a7eca984b69p+12"],
  ["0x1.6c665fde9526ap+0", "0x1.2857748cab19bp+2", "0x1.713f71462256ap+2", "0x1.d2ecb1a3d02c4p+1", "0x1.453cc085375b2p+0", "0x1.ef2abb9b85c37p-3", "0x1.744eb6c45ec67p-6", "0x1.9615ac0b7ace9p-11"],
  ["0x1.0000000000000p+0", "0x1.06cefbb46a449p+1", "0x1.ad278e6526633p+0", "0x1.61292f23385c9p-1", "0x1.2f5123394f040p-3", "0x1.f207a7eab17bfp-7", "0x1.1f18cbfdf2728p-11", "0x1.20d3f686439e4p-30"],
  ["0x1.aa1b1c13ee526p+2", "0x1.5daea6e875003p+2", "0x1.c8ea6461fa445p+0", "0x1.2fad9315255cfp-2", "0x1.b2b41193b4ee7p-6", "0x1.45c1908425345p-10", "0x1.c6ec6cc59e02ap-16", "0x1.afb74d693bf93p-23"],
  ["0x1.0000000000000p+0", "0x1.331d34fc7d77fp-1", "0x1.186eb183443fbp-3", "0x1.e76f93215462ap-7", "0x1.9c8bc979dc5d7p-11", "0x1.35c2c496374bfp-16", "0x1.31446f740b9e0p-23", "0x1.269bff1f8c190p-49"],
].map((column) => column.map(H).reverse());
const horner = (column, x) => column.slice(1).reduce((sum, c) => sum * x + c, column[0]);
const ratio = (over, under, x) => horner(over, x) / horner(under, x);
const HALF_ROOT = H("0x1.6a09e667f3bcdp-1");
const [LOG2_HIGH, LOG2_LOW] = [H("0x1.62e42fee00000p-1"), H("0x1.a39ef35793c76p-33")];

function log(x) {
  let [m, e] = [x, 0];
  while (m >= 2 * HALF_ROOT) [m, e] = [m / 2, e + 1];
  while (m < HALF_ROOT) [m, e] = [m * 2, e - 1];
  const s = (m - 1) / (m + 1);
  const s2 = s * s;
  let h = 1 / 25;
  for (let i = 23; i >= 3; i -= 2) h = h * s2 + 1 / i;
  return e * LOG2_HIGH + (2 * s + (e * LOG2_LOW + 2 * s * s2 * h));
}

/** Return the normal number at a uniform one, bit for bit. */
export function normalAt(u) {
  must(u > 0 && u < 1, "a uniform number lies in (0, 1)");
  const q = u - 0.5;
  if (Math.abs(q) <= 0.425) return q * ratio(A, B, 0.180625 - q * q);
  const r = Math.sqrt(-log(Math.min(u, 1 - u)));
  const size = r <= 5 ? ratio(C, D, r - 1.6) : ratio(E, F, r - 5);
  return q < 0 ? -size : size;
}
