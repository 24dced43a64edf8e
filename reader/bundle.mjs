// The file of an evidence bundle (spec/evidence-bundle.md 1).
import { equal, hex, must, sha256, unhex } from "./bytes.mjs";
import { asInteger, asList, asText, fieldsOf, parseCanonical } from "./json.mjs";

const LIMITS = {
  announcement: 2 ** 20, checkpoint: 2 ** 16, dispute: 2 ** 27, key: 2 ** 14, "log-proof": 2 ** 17, "model-signature": 2 ** 24,
  run: 2 ** 12, specification: 2 ** 26, "specification-proof": 2 ** 13, statement: 2 ** 24, verdict: 2 ** 24,
};
const NAMED_OTHERWISE = ["key", "log-proof", "run"];

/** Return the members, [kind, name, bytes], of a bundle's bytes. */
export async function readBundle(data) {
  must(data.length <= 2 ** 28, "more than 2^28 bytes");
  const end = data.subarray(0, 2 ** 20 + 1).indexOf(10);
  must(end >= 0, "no index in the first 2^20 bytes");
  const held = fieldsOf(parseCanonical(data.subarray(0, end), 2 ** 20), ["format", "members"]);
  must(held.get("format") === "tallystick/bundle/1", "another format");
  const index = asList(held.get("members"));
  must(index.length <= 4096, "more than 4,096 members");
  const members = [];
  let [at, last] = [end + 1, ""];
  for (const item of index) {
    must(asList(item).length === 4, "a member is [kind, name, size, sha256]");
    const [kind, name] = [asText(item[0]), asText(item[1])];
    const size = asInteger(item[2], 0n);
    const digest = unhex(item[3], 32);
    must(Object.hasOwn(LIMITS, kind), "an unknown kind");
    unhex(name, 32);
    must(last < `${kind} ${name}`, "members must ascend");
    last = `${kind} ${name}`;
    must(size <= BigInt(LIMITS[kind]) && BigInt(at) + size <= BigInt(data.length), "a member is longer than it may be");
    const part = data.subarray(at, (at += Number(size)));
    const own = await sha256(part);
    must(equal(own, digest), "a member has another SHA-256");
    must(NAMED_OTHERWISE.includes(kind) || hex(own) === name, "a member has another name than its SHA-256");
    members.push([kind, name, part]);
  }
  must(at === data.length, "bytes left over");
  return members;
}
