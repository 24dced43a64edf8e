// The draw of a sampled audit (spec/evidence-bundle.md 3, spec/plan.md 7).
import { concat, equal, must, taggedDigest, u64, unhex, utf8 } from "./bytes.mjs";
import { asInteger, asList, asText, fieldsOf, parseCanonical, write } from "./json.mjs";
import { keyOfFrame, wideWords } from "./philox.mjs";

const LIMIT = 2 ** 24;

/** Return a share in (0, 1] as [numerator, denominator]. */
function share(text) {
  must(/^(0\.[0-9]{1,12}|1)$/.test(asText(text)), "a share is 1, or 0. and up to twelve digits");
  if (text === "1") return [1n, 1n];
  const digits = text.slice(2);
  must(!/^0+$/.test(digits), "a share is not zero");
  return [BigInt(digits), 10n ** BigInt(digits.length)];
}

const ceil = (a, b) => (a + b - 1n) / b;
const smaller = (a, b) => (a < b ? a : b);

function gcd(a, b) {
  while (b) [a, b] = [b, a % b];
  return a;
}

/** Return 1 - C(n - m, s) / C(n, s) in lowest terms. */
function detection(n, m, s) {
  const [few, many] = m < s ? [m, s] : [s, m];
  if (few + many > n) return few ? [1n, 1n] : [0n, 1n];
  let [top, bottom] = [1n, 1n];
  for (let i = 0n; i < few; i++) [top, bottom] = [top * (n - many - i), bottom * (n - i)];
  const [numerator, common] = [bottom - top, gcd(bottom - top, bottom)];
  return [numerator / common, bottom / common];
}

function readAnnouncement(value) {
  const held = fieldsOf(value, [
    "beacon", "checkpoint_every", "detect", "format", "fraction", "log", "run_root", "samples", "steps", "tree_size",
  ]);
  must(held.get("format") === "tallystick/audit-announcement/1", "another format");
  unhex(held.get("run_root"), 32);
  const [steps, every] = ["steps", "checkpoint_every"].map((name) => asInteger(held.get(name), 1n));
  asInteger(held.get("tree_size"), 1n);
  const fraction = share(held.get("fraction"));
  share(held.get("detect"));
  const segments = ceil(steps, every);
  const samples = asInteger(held.get("samples"), 1n);
  must(samples <= segments && segments < 1n << 24n, "samples lie within the segments, which are below 2^24");
  const beacon = fieldsOf(held.get("beacon"), ["round", "source", "time"]);
  must(/^[!-~]{1,200}$/.test(asText(beacon.get("source"))), "a beacon's source is 1 to 200 printable characters");
  asInteger(beacon.get("round"), 0n);
  const time = asInteger(beacon.get("time"), 0n);
  if (held.get("log") !== null) {
    const log = fieldsOf(held.get("log"), ["origin", "root", "seen_at", "size"]);
    const length = Array.from(asText(log.get("origin"))).length;
    must(length >= 1 && length <= 255, "a log's name has 1 to 255 characters");
    unhex(log.get("root"), 32);
    asInteger(log.get("size"), 1n);
    must(log.get("seen_at") === null || asInteger(log.get("seen_at"), 0n) < time, "the beacon must speak after the publication");
  }
  return { steps, every, segments, samples, fraction };
}

/** Return {power, segments} of a draw's bytes, having drawn again. */
export async function readDraw(data) {
  const held = fieldsOf(parseCanonical(data, LIMIT), ["announcement", "beacon_value", "digest", "format", "segments"]);
  must(held.get("format") === "tallystick/audit-draw/1", "another format");
  const said = readAnnouncement(held.get("announcement"));
  const beacon = unhex(held.get("beacon_value"));
  must(beacon.length >= 32 && beacon.length <= 64, "a beacon's value has 32 to 64 bytes");
  const seed = await taggedDigest("tallystick/draw-seed/1", utf8(write(held.get("announcement"))), beacon);
  const key = await keyOfFrame("tallystick/draw-stream/1", seed, utf8("segments"));
  const tickets = wideWords(key, 0n, Number(said.segments));
  const order = tickets.map((_, i) => i);
  order.sort((a, b) => (tickets[a] < tickets[b] ? -1 : tickets[a] > tickets[b] ? 1 : a - b));
  const positions = order.slice(0, Number(said.samples));
  const digest = await taggedDigest("tallystick/draw-sample/1", seed, utf8("segments"), concat(...positions.map(u64)));
  must(equal(digest, unhex(held.get("digest"), 32)), "the beacon's value leads to another digest");
  const starts = [...positions].sort((a, b) => a - b).map((i) => BigInt(i) * said.every);
  const drawn = starts.map((start) => [start, smaller(start + said.every, said.steps)]);
  must(write(drawn) === write(asList(held.get("segments"))), "the beacon's value leads to other segments");
  const falseSteps = ceil(said.fraction[0] * said.steps, said.fraction[1]);
  const fewest = smaller(ceil(falseSteps, said.every), said.segments);
  return { power: detection(said.segments, fewest, said.samples), segments: drawn };
}
