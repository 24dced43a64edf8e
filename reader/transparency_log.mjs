// Signed notes, checkpoints, policies and offline proofs of a transparency log (spec/transparency-log.md).
import { isSigned, readKey } from "./attestation.mjs";
import { base64, concat, hex, must, refuse, sha256, unhex, utf8 } from "./bytes.mjs";
import { leafHash, verifyInclusion } from "./merkle.mjs";

const NOTE_LIMIT = 65536;
const LOG = 1; // type of a key that signs the text
const WITNESS = 4; // type of a key that signs a time and the text
const ED25519 = unhex("302a300506032b6570032100");

function mustBeName(name) {
  must(name.length > 0 && [...name].length <= 255 && !/[\s+]/u.test(name), "no name of a signer");
  return name;
}

/** Return {text, name, type, id, key} of a verifier key `name+id+base64`, of one of the types. */
export async function readVkey(text, types = [LOG, WITNESS]) {
  const found = /^([^+]*)\+([0-9a-f]{8})\+(.*)$/s.exec(text) ?? refuse("not a verifier key");
  const name = mustBeName(found[1]);
  const data = base64(found[3]);
  must(data.length === 33 && types.includes(data[0]), "a key of another type");
  const id = hex((await sha256(concat(utf8(`${name}\n`), data))).subarray(0, 4));
  must(id === found[2], "the key has another id");
  return { text, name, id, type: data[0], key: await readKey(concat(ED25519, data.subarray(1))) };
}

/** Return {text, lines} of a note: its text, and {name, id, signature} of each signature line; nothing is verified. */
function readNote(note) {
  must(utf8(note).length <= NOTE_LIMIT, "a note of more than 65,536 bytes");
  must(!/[\u0000-\u0009\u000b-\u001f]/.test(note), "a control character");
  const cut = note.lastIndexOf("\n\n");
  must(cut >= 0 && note.endsWith("\n") && note.length > cut + 2, "no signature line");
  const rows = note.slice(cut + 2, -1).split("\n");
  must(rows.length <= 64, "more than 64 signature lines");
  const lines = rows.map((row) => {
    const found = /^\u2014 ([^ ]*) ([^ ]*)$/.exec(row) ?? refuse("not a signature line");
    const data = base64(found[2]);
    must(data.length > 4, "a signature without bytes");
    return { name: mustBeName(found[1]), id: hex(data.subarray(0, 4)), signature: data.subarray(4) };
  });
  must(new Set(lines.map((line) => `${line.name}+${line.id}`)).size === lines.length, "a key has two lines");
  return { text: note.slice(0, cut + 1), lines };
}

/** Return the text of a note and, by verifier key, the time at which its owner signed, or null where the key tells none. */
export async function openNote(note, keys) {
  const { text, lines } = readNote(note);
  const signed = new Map();
  for (const key of keys) {
    const line = lines.find((each) => each.name === key.name && each.id === key.id);
    if (!line) continue;
    let [message, signature, time] = [utf8(text), line.signature, null];
    if (key.type === WITNESS) {
      must(signature.length === 72, "a cosignature is a time and 64 bytes");
      time = new DataView(signature.buffer, signature.byteOffset).getBigUint64(0);
      message = utf8(`cosignature/v1\ntime ${time}\n${text}`);
      signature = signature.subarray(8);
    }
    must(await isSigned(key.key, signature, message), "a signature is not of its key");
    signed.set(key.text, time);
  }
  return { text, signed };
}

/** Return the integer below 2^63 that decimal digits write, without leading zeros. */
function decimal(text) {
  must(/^(0|[1-9][0-9]{0,18})$/.test(text) && BigInt(text) < 1n << 63n, "not a decimal number below 2^63");
  return BigInt(text);
}

/** Return {logs, witnesses, groups, quorum}: keys, {name: key}, {name: {k, members}}, and the quorum's name or "none". */
export async function readPolicy(text) {
  const policy = { logs: [], witnesses: new Map(), groups: new Map(), quorum: null };
  const keys = new Set();
  const taken = new Set();
  const isKnown = (name) => policy.witnesses.has(name) || policy.groups.has(name);
  const keyOf = async (vkey, type) => {
    const key = await readVkey(vkey, type);
    must(!keys.has(key.key.id), "a key is there already");
    keys.add(key.key.id);
    return key;
  };
  for (const row of text.split("\n")) {
    const words = row.trim().split(/[ \t]+/);
    if (row.trim() === "" || words[0].startsWith("#")) continue;
    const [what, ...rest] = words;
    if (what === "log") {
      must(rest.length === 1 || rest.length === 2, "log VKEY [URL]");
      policy.logs.push(await keyOf(rest[0], [LOG]));
    } else if (what === "witness") {
      must(rest.length === 2 || rest.length === 3, "witness NAME VKEY [URL]");
      must(rest[0] !== "none" && !isKnown(rest[0]), "a name is there already");
      policy.witnesses.set(rest[0], await keyOf(rest[1], [WITNESS]));
    } else if (what === "group") {
      const [name, size, ...members] = rest;
      must(members.length > 0 && name !== "none" && !isKnown(name), "group NAME all|any|K MEMBER..");
      for (const member of members) {
        must(isKnown(member), "a member is not known");
        must(!taken.has(member), "is a member already");
        taken.add(member);
      }
      const k = size === "all" ? members.length : size === "any" ? 1 : Number(decimal(size));
      must(k >= 1 && k <= members.length, "a group of fewer members");
      policy.groups.set(name, { k, members });
    } else if (what === "quorum") {
      must(rest.length === 1 && policy.quorum === null, "one quorum line, of one name");
      must(rest[0] === "none" || isKnown(rest[0]), "the quorum is not known");
      policy.quorum = rest[0];
    } else refuse("a line of another kind");
  }
  must(policy.quorum !== null, "no quorum line");
  return policy;
}

/** Return the time by which a witness or group had signed, or null if it had not. */
function seenBy({ witnesses, groups }, name, signed) {
  if (witnesses.has(name)) return signed.get(witnesses.get(name).text) ?? null;
  const { k, members } = groups.get(name);
  const times = members.map((member) => seenBy({ witnesses, groups }, member, signed)).filter((time) => time !== null);
  return times.length < k ? null : times.sort((a, b) => (a < b ? -1 : a > b ? 1 : 0))[k - 1];
}

/** Return when the policy's quorum had seen the entry of a document of this kind and SHA-256; null where the quorum is none. */
export async function verifyLogProof(proof, kind, digest, policyText) {
  const cut = proof.indexOf("\n\n");
  must(cut >= 0, "a proof has an empty line");
  const [header, place, ...rows] = proof.slice(0, cut).split("\n");
  must(header === "c2sp.org/tlog-proof@v1" && /^index [0-9]+$/.test(place ?? ""), "not a proof of version 1");
  must(rows.length <= 63, "more than 63 nodes");
  const nodes = rows.map(base64);
  must(["run", "statement", "draw"].includes(kind), "another kind of entry");
  unhex(digest, 32);
  const policy = await readPolicy(policyText);
  const { text, signed } = await openNote(proof.slice(cut + 2), [...policy.logs, ...policy.witnesses.values()]);
  const lines = text.split("\n");
  must(lines.length === 4 && lines[3] === "", "a checkpoint has three lines");
  const root = base64(lines[2]);
  const entry = utf8(`{"digest":"${digest}","format":"tallystick/log-entry/1","kind":"${kind}"}`);
  await verifyInclusion(await leafHash(entry), decimal(place.slice(6)), decimal(lines[1]), nodes, root);
  must(policy.logs.some((log) => log.name === lines[0] && signed.has(log.text)), "no log of the policy signed");
  if (policy.quorum === "none") return null;
  return seenBy(policy, policy.quorum, signed) ?? refuse("the quorum has not signed");
}
