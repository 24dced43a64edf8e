// One answer for each operation of the test vectors (spec/vectors.md 4) that this reader knows.
import { hex, hexFloat, must, parseHexFloat, refuse, unhex, utf8 } from "./bytes.mjs";
import { keyBytes, openEnvelope, readKey } from "./attestation.mjs";
import { readBundle } from "./bundle.mjs";
import { readDraw } from "./draw.mjs";
import { asInteger, asList, asMap, asText } from "./json.mjs";
import { consistencyProof, inclusionProof, leafHash, rootOf, verifyConsistency, verifyInclusion } from "./merkle.mjs";
import { bernoulli, block, integers, normalAt, permutation, streamKey, uniform, words } from "./philox.mjs";
import { readChange, readDecision, readDense, readEntries as readLogEntries, readFrame, readResidues, readTable } from "./rounding_log.mjs";
import { entryLeaf, openChunk, readEntries, rootOfSummaries, rootOfSummary, summariesOf, verifyChunk, writeSummary } from "./state.mjs";
import { fingerprint, verifyExtension, verifySpecificationProof, verifyStepProof, verifyTranscript } from "./transcript.mjs";
import { openNote, readPolicy, readVkey, verifyLogProof } from "./transparency_log.mjs";

const LONGEST_PAINTED = 2 ** 28;

/** Return the bytes of {"hex"}, {"text"} or {"painted"}. */
function bytesOf(value) {
  const [[kind, said]] = asMap(value);
  if (kind === "hex") return unhex(said);
  if (kind === "text") return utf8(asText(said));
  must(kind === "painted" && asInteger(said, 0n) <= LONGEST_PAINTED, "no bytes");
  return Uint8Array.from({ length: Number(said) }, (_, i) => i % 251);
}

const hashes = (value) => asList(value).map((text) => unhex(text));
const leafHashes = (leaves) => Promise.all(hashes(leaves).map(leafHash));
const small = (value) => Number(asInteger(value, 0n));
const key = (value) => asList(value).map(small);
const listed = ({ indexes, symbols }) => ({ indexes, symbols });
const big = (numbers) => numbers.map(BigInt);

function gridOf(value) {
  return {
    key: asList(value.get("key")), precision: value.get("precision"), band: value.get("band"), floor: value.get("floor"),
    dithered: value.get("dithered"), scales: asList(value.get("scales")), residue_bits: value.get("residue_bits") ?? 0n,
  };
}

async function consistency(q) {
  const leaves = await leafHashes(q.leaves);
  const old = small(q.old_size);
  const proof = await consistencyProof(leaves, old);
  return { proof: proof.map(hex), old_root: hex(await rootOf(leaves.slice(0, old))), root: hex(await rootOf(leaves)) };
}

async function state(q) {
  const summaries = await summariesOf(readEntries(q.entries, bytesOf));
  return {
    tensor_roots: summaries.map((entry) => hex(entry.root)),
    entry_leaves: summaries.map((entry) => hex(entryLeaf(entry))),
    summary: { text: writeSummary(summaries) },
    root: hex(await rootOfSummaries(summaries)),
  };
}

const isRoot = (found, stated) => void must(hex(found) === asText(stated), "another root");

/** By operation: a function from a question's fields to its values, or undefined where it has none. */
export const OPERATIONS = {
  roots: async (q) => {
    const leaves = await leafHashes(q.leaves);
    const roots = [];
    for (let n = 0; n <= leaves.length; n++) roots.push(hex(await rootOf(leaves.slice(0, n))));
    return { roots };
  },
  inclusion: async (q) => {
    const leaves = await leafHashes(q.leaves);
    return { proof: (await inclusionProof(leaves, small(q.index))).map(hex), root: hex(await rootOf(leaves)) };
  },
  "verify-inclusion": async (q) =>
    verifyInclusion(await leafHash(unhex(q.leaf)), asInteger(q.index), asInteger(q.size), hashes(q.proof), unhex(q.root)),
  consistency,
  "verify-consistency": async (q) =>
    verifyConsistency(asInteger(q.old_size), asInteger(q.size), unhex(q.old_root), unhex(q.root), hashes(q.proof)),
  state,
  "verify-state": async (q) => isRoot(await rootOfSummaries(await summariesOf(readEntries(q.entries, bytesOf))), q.root),
  summary: async (q) => isRoot(await rootOfSummary(bytesOf(q.document)), q.root),
  "open-chunk": async (q) => ({ proof: { text: await openChunk(readEntries(q.entries, bytesOf), q.name, asInteger(q.chunk_index, 0n)) } }),
  "verify-chunk": async (q) => verifyChunk(bytesOf(q.proof), bytesOf(q.chunk), unhex(q.root, 32)),
  "verify-transcript": async (q) => {
    const found = await verifyTranscript(bytesOf(q.specification), bytesOf(q.records), bytesOf(q.statement));
    return { specification_digest: hex(found.specificationDigest), leaf_hashes: found.leafHashes.map(hex), root: hex(found.root) };
  },
  "step-proof": async (q) => verifyStepProof(bytesOf(q.proof), unhex(q.root, 32)),
  "specification-proof": async (q) => {
    await verifySpecificationProof(bytesOf(q.proof), bytesOf(q.specification), unhex(q.root, 32));
  },
  "extension-proof": async (q) => verifyExtension(bytesOf(q.proof), unhex(q.old_root, 32), unhex(q.root, 32)),
  fingerprint: async (q) => ({ fingerprint: fingerprint(asMap(q.tensors)) }),
  envelope: async (q) => ({ predicate: (await openEnvelope(utf8(q.envelope), [await readKey(keyBytes(q.key))])).predicate }),
  "audit-draw": async (q) => ({ power: (await readDraw(utf8(q.draw))).power }),
  bundle: async (q) => ({ members: (await readBundle(unhex(q.bundle))).map(([kind, name, data]) => [kind, name, hex(data)]) }),
  entries: async (q) => listed(readLogEntries(unhex(q.data), asInteger(q.n), small(q.width))),
  decision: async (q) => readDecision(unhex(q.data), asInteger(q.n), small(q.width)),
  dense: async (q) => listed(readDense(unhex(q.data), asInteger(q.n))),
  parities: async (q) => ({ residues: readResidues(unhex(q.data), asInteger(q.n), small(q.bits)) }),
  frame: async (q) => ({ sites: readFrame(unhex(q.data)).map(([address, payload]) => [address, hex(payload)]) }),
  table: async (q) => ({ sites: readTable(unhex(q.data)) }),
  change: async (q) => ({ new: readChange(asList(q.old).map(gridOf), unhex(q.data)) }),
  note: async (q) => {
    const { signed } = await openNote(asText(q.note), await Promise.all(asList(q.vkeys).map((text) => readVkey(asText(text)))));
    return { signed: Object.fromEntries(signed) };
  },
  "log-policy": async (q) => void (await readPolicy(asText(q.policy))),
  "log-proof": async (q) => ({ seen_at: await verifyLogProof(asText(q.proof), asText(q.kind), asText(q.digest), asText(q.policy)) }),
  block: async (q) => ({ output: big(block(key(q.counter), key(q.key))) }),
  key: async (q) => ({
    key: big(await streamKey({ seed: q.seed, purpose: q.purpose, step: q.step, rank: q.rank, microBatch: q.micro_batch, call: q.call })),
  }),
  words: async (q) => ({ values: big(words(key(q.key), q.start, small(q.count))) }),
  uniform01: async (q) => ({ values: uniform(key(q.key), q.start, small(q.count)).map(hexFloat) }),
  bernoulli: async (q) => ({ values: bernoulli(key(q.key), q.start, small(q.count), parseHexFloat(q.p)) }),
  randint: async (q) => ({ values: integers(key(q.key), q.start, small(q.count), q.low, q.high) }),
  permutation: async (q) => ({ values: big(permutation(key(q.key), small(q.count))) }),
  normal: async (q) => ({ values: uniform(key(q.key), q.start, small(q.count)).map(normalAt).map(hexFloat) }),
  "normal-at": async (q) => ({ values: asList(q.u).map((u) => hexFloat(normalAt(parseHexFloat(u)))) }),
  quantiles: async (q) => ({ values: asList(q.u).map((u) => hexFloat(normalAt(parseHexFloat(u)))) }),
};

/** Return the answer to a question, a Map of its fields. */
export async function answer(question, isRefused) {
  const id = question.get("id") ?? refuse("a question without an id");
  const operation = OPERATIONS[question.get("operation")];
  if (!Object.hasOwn(OPERATIONS, question.get("operation"))) return { id, unsupported: true };
  try {
    const values = await operation(Object.fromEntries(question));
    return values === undefined ? { id, accepted: true } : { id, accepted: true, values };
  } catch (problem) {
    if (!isRefused(problem)) throw problem;
    return { id, accepted: false };
  }
}
