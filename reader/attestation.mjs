// Signed statements: in-toto Statement v1 in a DSSE envelope (spec/attestation.md 1).
import { base64, concat, hex, must, refuse, sha256, subtle, unhex, utf8 } from "./bytes.mjs";
import { asList, asMap, asText, fieldsOf, parseBytes } from "./json.mjs";

const PAYLOAD_TYPE = "application/vnd.in-toto+json";
const ENVELOPE_LIMIT = 2 ** 24;
const PAYLOAD_LIMIT = 2 ** 23;

// A SubjectPublicKeyInfo of each kind of key is these bytes and the point's.
const KINDS = [
  { prefix: "302a300506032b6570032100", point: 32, name: "Ed25519" },
  { prefix: "3059301306072a8648ce3d020106082a8648ce3d03010703420004", point: 64, name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" },
  { prefix: "3076301006072a8648ce3d020106052b8104002203620004", point: 96, name: "ECDSA", namedCurve: "P-384", hash: "SHA-384" },
];

// Encodings of the Ed25519 points of small order, without the sign in the last bit.
const SMALL_ORDER = new Set([
  "00".repeat(32),
  `01${"00".repeat(31)}`,
  "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
  "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
  `ec${"ff".repeat(30)}7f`,
  `ed${"ff".repeat(30)}7f`,
  `ee${"ff".repeat(30)}7f`,
]);

/** Return {kind, key, id} of a SubjectPublicKeyInfo in DER; any other kind of key is refused. */
export async function readKey(spki) {
  const kind = KINDS.find((each) => {
    const prefix = unhex(each.prefix);
    return spki.length === prefix.length + each.point && prefix.every((byte, i) => byte === spki[i]);
  });
  must(kind, "a key is Ed25519, or ECDSA on P-256 or P-384, in DER");
  if (kind.name === "Ed25519") {
    const point = spki.slice(-32);
    point[31] &= 0x7f;
    must(!SMALL_ORDER.has(hex(point)), "a key of small order");
  }
  try {
    const { name, namedCurve } = kind;
    const key = await subtle.importKey("spki", spki, namedCurve ? { name, namedCurve } : { name }, false, ["verify"]);
    return { kind, key, id: hex(await sha256(spki)) };
  } catch (problem) {
    if (problem.name === "NotSupportedError") throw problem;
    return refuse("no point of its curve");
  }
}

/** Return r | s, each `width` bytes, of a DER signature in its one spelling, or null. */
function plainSignature(der, width) {
  if (der.length < 8 || der[0] !== 0x30 || der[1] !== der.length - 2 || der[1] >= 0x80) return null;
  const parts = [];
  let at = 2;
  for (let i = 0; i < 2; i++) {
    if (der[at] !== 0x02) return null;
    const length = der[at + 1];
    const number = der.subarray(at + 2, at + 2 + length);
    if (length === 0 || number.length !== length || number[0] & 0x80) return null;
    if (length > 1 && number[0] === 0 && !(number[1] & 0x80)) return null;
    const digits = number[0] === 0 ? number.subarray(1) : number;
    if (digits.length > width) return null;
    parts.push(concat(new Uint8Array(width - digits.length), digits));
    at += 2 + length;
  }
  return at === der.length ? concat(...parts) : null;
}

/** Return whether `signature` is the key's owner's over `data`. */
export async function isSigned({ kind, key }, signature, data) {
  if (kind.name === "Ed25519") return signature.length === 64 && subtle.verify("Ed25519", key, signature, data);
  const plain = plainSignature(signature, kind.point / 2);
  return plain !== null && subtle.verify({ name: "ECDSA", hash: kind.hash }, key, plain, data);
}

function readEnvelope(data) {
  const held = fieldsOf(parseBytes(data, ENVELOPE_LIMIT), ["payload", "payloadType", "signatures"]);
  must(held.get("payloadType") === PAYLOAD_TYPE, "another payloadType");
  const payload = base64(asText(held.get("payload")));
  must(payload.length <= PAYLOAD_LIMIT, "a payload of more than 2^23 bytes");
  const signatures = asList(held.get("signatures")).map((item) => {
    if (item instanceof Map && item.has("keyid") && item.get("keyid") !== null) asText(item.get("keyid"));
    return base64(asText(asMap(item).get("sig")));
  });
  must(signatures.length >= 1 && signatures.length <= 16, "1 to 16 signatures");
  return { payload, signatures };
}

function readStatement(payload) {
  const held = asMap(parseBytes(payload, PAYLOAD_LIMIT));
  must(held.get("_type") === "https://in-toto.io/Statement/v1", "another _type");
  const subjects = asList(held.get("subject")).map((item) => {
    const digest = asMap(asMap(item).get("digest"));
    must(digest.size > 0, "a subject without a digest");
    [...digest.values()].forEach(asText);
    if (item.has("name") && item.get("name") !== null) asText(item.get("name"));
    return { name: item.get("name") ?? "", digest };
  });
  must(subjects.length > 0, "no subject");
  return { subjects, predicateType: asText(held.get("predicateType")), predicate: asMap(held.get("predicate")) };
}

/** Return the statement in an envelope that one of the keys signed, and that key: verified first, then parsed. */
export async function openEnvelope(data, keys) {
  const { payload, signatures } = readEnvelope(data);
  const head = utf8(`DSSEv1 ${PAYLOAD_TYPE.length} ${PAYLOAD_TYPE} ${payload.length} `);
  const signed = concat(head, payload);
  for (const key of keys)
    for (const signature of signatures)
      if (await isSigned(key, signature, signed)) return { key, ...readStatement(payload) };
  return refuse("signed by none of the keys");
}

/** Return the DER bytes of a key in PEM, DER or hexadecimal text. */
export function keyBytes(text) {
  const pem = /^-----BEGIN PUBLIC KEY-----\n([A-Za-z0-9+/=\n]+)-----END PUBLIC KEY-----\n?$/.exec(text);
  return pem ? base64(pem[1].replaceAll("\n", "")) : unhex(text);
}

