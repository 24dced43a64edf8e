// A state's root, its documents and the proof of one chunk (spec/state-commitment.md).
import { compareBytes, concat, equal, frame, hex, must, refuse, u64, unhex, utf8 } from "./bytes.mjs";
import { asInteger, asList, asText, fieldsOf, parseCanonical, write } from "./json.mjs";
import { EMPTY, inclusionProof, leafHash, rootOf, verifyInclusion } from "./merkle.mjs";

const CHUNK = 65536;
const WIDTHS = {
  BOOL: 1, U8: 1, I8: 1, I16: 2, U16: 2, F16: 2, BF16: 2, I32: 4, U32: 4, F32: 4, I64: 8, U64: 8, F64: 8,
};
const SUMMARY_LIMIT = 2 ** 26;
const PROOF_LIMIT = 2 ** 17;

function checkForm(name, dtype, shape) {
  const length = utf8(name).length;
  must(0 < length && length <= 1024, "a name has 1 to 1024 bytes");
  must(Object.hasOwn(WIDTHS, dtype), "an unknown dtype");
  must(shape.length <= 64, "more than 64 dimensions");
  const elements = shape.reduce((n, size) => n * asInteger(size, 0n), 1n);
  return elements * BigInt(WIDTHS[dtype]);
}

async function chunkHashes(data) {
  const hashes = [];
  for (let at = 0; at < data.length; at += CHUNK) hashes.push(await leafHash(data.subarray(at, at + CHUNK)));
  return hashes;
}

/** Return {name, dtype, shape, nbytes, root} of an entry of bytes, having checked its form. */
async function summarise({ name, dtype, shape, data }) {
  const nbytes = checkForm(name, dtype, shape);
  must(nbytes === BigInt(data.length), "dtype and shape need another length");
  must(dtype !== "BOOL" || data.every((byte) => byte < 2), "a BOOL byte must be 0 or 1");
  return { name, dtype, shape, nbytes, root: await rootOf(await chunkHashes(data)) };
}

export function entryLeaf({ name, dtype, shape, nbytes, root }) {
  const dimensions = concat(...shape.map(u64));
  return frame("tallystick/state-entry/1", utf8(name), utf8(dtype), dimensions, u64(nbytes), u64(CHUNK), root);
}

function inOrder(entries) {
  const keyed = entries.map((entry) => [utf8(entry.name), entry]);
  keyed.sort((a, b) => compareBytes(a[0], b[0]));
  for (let i = 1; i < keyed.length; i++) must(!equal(keyed[i - 1][0], keyed[i][0]), "a name twice");
  return keyed.map(([, entry]) => entry);
}

export async function summariesOf(entries) {
  const found = [];
  for (const entry of inOrder(entries)) found.push(await summarise(entry));
  return found;
}

export async function rootOfSummaries(summaries) {
  return rootOf(await Promise.all(summaries.map((entry) => leafHash(entryLeaf(entry)))));
}

const entryObject = (entry) => ({
  chunk_bytes: BigInt(CHUNK), dtype: entry.dtype, name: entry.name, nbytes: entry.nbytes, shape: entry.shape,
  tensor_root: hex(entry.root),
});

export const writeSummary = (summaries) =>
  write({ entries: summaries.map(entryObject), format: "tallystick/state-summary/1" });

export function readEntry(value) {
  const held = fieldsOf(value, ["chunk_bytes", "dtype", "name", "nbytes", "shape", "tensor_root"]);
  must(held.get("chunk_bytes") === BigInt(CHUNK), "another chunk size");
  const entry = {
    name: asText(held.get("name")),
    dtype: asText(held.get("dtype")),
    shape: asList(held.get("shape")),
    nbytes: asInteger(held.get("nbytes"), 0n),
    root: unhex(held.get("tensor_root"), 32),
  };
  must(checkForm(entry.name, entry.dtype, entry.shape) === entry.nbytes, "dtype and shape need another length");
  must(entry.nbytes !== 0n || equal(entry.root, EMPTY), "an empty tensor has the empty tree's root");
  return entry;
}

/** Return the root that a state summary's bytes lead to. */
export async function rootOfSummary(data) {
  const held = fieldsOf(parseCanonical(data, SUMMARY_LIMIT), ["entries", "format"]);
  must(held.get("format") === "tallystick/state-summary/1", "another format");
  const entries = asList(held.get("entries")).map(readEntry);
  const names = entries.map((entry) => utf8(entry.name));
  for (let i = 1; i < names.length; i++) must(compareBytes(names[i - 1], names[i]) < 0, "entries must ascend by name");
  return rootOfSummaries(entries);
}

/** Return the bytes of the proof of one chunk, as text. */
export async function openChunk(entries, name, chunkIndex) {
  const summaries = await summariesOf(entries);
  const index = summaries.findIndex((entry) => entry.name === name);
  must(index >= 0, "no such entry");
  const leaves = await Promise.all(summaries.map((entry) => leafHash(entryLeaf(entry))));
  const chunks = await chunkHashes(entries.find((entry) => entry.name === name).data);
  return write({
    chunk_index: chunkIndex,
    chunk_path: (await inclusionProof(chunks, Number(chunkIndex))).map(hex),
    entry: entryObject(summaries[index]),
    entry_count: BigInt(leaves.length),
    entry_index: BigInt(index),
    entry_path: (await inclusionProof(leaves, index)).map(hex),
    format: "tallystick/chunk-proof/1",
  });
}

const path = (value) => asList(value).map((node) => unhex(node, 32));

/** Return if a chunk lies under a state's root where its proof says. */
export async function verifyChunk(data, chunk, root) {
  const names = ["chunk_index", "chunk_path", "entry", "entry_count", "entry_index", "entry_path", "format"];
  const held = fieldsOf(parseCanonical(data, PROOF_LIMIT), names);
  must(held.get("format") === "tallystick/chunk-proof/1", "another format");
  const entry = readEntry(held.get("entry"));
  const [chunkPath, entryPath] = [path(held.get("chunk_path")), path(held.get("entry_path"))];
  const [at, place, count] = ["chunk_index", "entry_index", "entry_count"].map((name) => asInteger(held.get(name)));
  const chunks = (entry.nbytes + BigInt(CHUNK) - 1n) / BigInt(CHUNK);
  must(0n <= at && at < chunks, "no such chunk");
  const left = entry.nbytes - at * BigInt(CHUNK);
  must(BigInt(chunk.length) === (left < BigInt(CHUNK) ? left : BigInt(CHUNK)), "a chunk of another length");
  await verifyInclusion(await leafHash(entryLeaf(entry)), place, count, entryPath, root);
  await verifyInclusion(await leafHash(chunk), at, chunks, chunkPath, entry.root);
}

/** Return {entries} of a question: names, dtypes, shapes and bytes. */
export function readEntries(value, bytesOf) {
  return asList(value).map((item) => ({
    name: asText(item.get("name")),
    dtype: asText(item.get("dtype")),
    shape: asList(item.get("shape")),
    data: bytesOf(item.get("data")) ?? refuse("no data"),
  }));
}
