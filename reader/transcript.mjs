// Documents of a run, their tree and proofs (spec/transcript.md 1 to 6), and the fingerprint of a state (3).
import { compareBytes, concat, equal, must, parseHexFloat, taggedDigest, unhex, utf8 } from "./bytes.mjs";
import { asBoolean, asInteger, asList, asMap, asText, fieldsOf, parseCanonical, write } from "./json.mjs";
import { leafHash, rootOf, verifyConsistency, verifyInclusion } from "./merkle.mjs";

const KINDS = ["decision", "loss", "gradient", "state", "buffer", "activation", "activation_gradient"];
const DTYPES = ["BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "I64", "U64", "F64"];
const hash = (value) => unhex(asText(value), 32);
const hashOrNull = (value) => (value === null ? null : hash(value));
const texts = (value) => [...asMap(value).values()].forEach(asText);

function checkName(name) {
  must(name.length <= 240 && /^[ -~]+$/.test(name) && !/["*:<>?\\|]/.test(name), "a file's name breaks its rule");
  must(name.split("/").every((part) => part && !part.startsWith(".") && !/[. ]$/.test(part)), "a part of a file's name breaks its rule");
}

async function checkProgram(value, sourceDigest) {
  const names = ["distributions", "files", "main"];
  const held = fieldsOf(value, asMap(value).has("environment") ? [...names, "environment"] : names);
  const distributions = asMap(held.get("distributions"));
  must(distributions.size <= 4096, "more than 4,096 distributions");
  for (const [name, version] of distributions) {
    must(/^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$/.test(name), "a distribution's name breaks its rule");
    must(/^[!-~]{1,100}$/.test(asText(version)), "a version breaks its rule");
  }
  const files = asList(held.get("files"));
  must(files.length <= 4096, "more than 4,096 files");
  let [last, total] = ["", 0n];
  for (const item of files) {
    const file = fieldsOf(item, ["name", "sha256", "size"]);
    const name = asText(file.get("name"));
    checkName(name);
    hash(file.get("sha256"));
    const size = asInteger(file.get("size"), 0n);
    must(size <= 1n << 24n && (total += size) <= 1n << 26n, "files are too large");
    must(last < name, "files must ascend by name");
    last = name;
  }
  const main = asText(held.get("main"));
  must(files.some((file) => file.get("name") === main) || (!main && !files.length), "main is none of the files");
  for (const [name, said] of held.get("environment") ?? []) {
    must(/^[ -<>-~]{1,128}$/.test(name), "a variable's name breaks its rule");
    if (asText(said) !== "absent") hash(said);
  }
  const environment = held.get("environment");
  must(!environment || (environment.size > 0 && environment.size <= 64), "environment has 1 to 64 variables");
  if (files.length) {
    const own = await taggedDigest("tallystick/program/1", utf8(write({ files, main })));
    must(equal(own, sourceDigest), "source_digest is not that of the files");
  }
}

/** Return a specification's numbers, having checked its form. */
export async function readSpecification(data) {
  const held = fieldsOf(parseCanonical(data, 2 ** 26), [
    "accumulation", "checkpoint_every", "format", "initial_state", "job", "notes", "policy", "seed", "sites", "steps", "versions",
    "world_size",
  ]);
  must(held.get("format") === "tallystick/run/2", "another format");
  const job = fieldsOf(held.get("job"), ["dataset_digest", "path", "program", "settings", "source_digest"]);
  asText(job.get("path"));
  texts(job.get("settings"));
  hashOrNull(job.get("dataset_digest"));
  await checkProgram(job.get("program"), hash(job.get("source_digest")));
  const policy = fieldsOf(held.get("policy"), ["name", "parameters"]);
  asText(policy.get("name"));
  for (const value of asMap(policy.get("parameters")).values()) if (typeof value !== "string") asInteger(value);
  const notes = fieldsOf(held.get("notes"), ["densified", "lifted_casts"]);
  for (const name of ["densified", "lifted_casts"]) asList(notes.get(name)).forEach(asText);
  const seen = new Set();
  for (const item of asList(held.get("sites"))) {
    const site = fieldsOf(item, ["dtype", "kind", "name", "shape"]);
    const [kind, name] = [asText(site.get("kind")), asText(site.get("name"))];
    must(KINDS.includes(kind) && DTYPES.includes(asText(site.get("dtype"))), "an unknown kind or dtype");
    must(utf8(name).length > 0 && utf8(name).length <= 1024, "a name has 1 to 1024 bytes");
    const shape = asList(site.get("shape"));
    must(shape.length <= 64, "more than 64 dimensions");
    shape.forEach((size) => asInteger(size, 0n));
    must(!seen.has(`${kind}\0${name}`), "a site twice");
    seen.add(`${kind}\0${name}`);
  }
  texts(held.get("versions"));
  hash(held.get("initial_state"));
  asInteger(held.get("seed"), 0n);
  const [steps, every, accumulation, worldSize] = ["steps", "checkpoint_every", "accumulation", "world_size"].map((name) =>
    asInteger(held.get(name), 1n),
  );
  return { steps, every, accumulation, worldSize, data };
}

export const specificationLeaf = (data) => concat(utf8("tallystick/specification/1\0"), data);
const recordLeaf = (data) => concat(utf8("tallystick/step/1\0"), data);

/** Return a record's numbers and state root, having checked its form. */
export function readRecord(value) {
  const held = fieldsOf(value, [
    "batch", "fingerprint", "log", "log_bytes", "loss", "micro_batches", "rank", "schedule", "skipped", "state_root", "step",
  ]);
  hash(held.get("batch"));
  hash(held.get("log"));
  asInteger(held.get("log_bytes"), 0n);
  unhex(held.get("fingerprint"), 8);
  if (held.get("loss") !== null) parseHexFloat(held.get("loss"));
  asBoolean(held.get("skipped"));
  let last = null;
  for (const item of asList(held.get("schedule"))) {
    must(Array.isArray(item) && item.length === 3, "a scheduled value is [group, name, value]");
    const [group, name, value] = [asInteger(item[0], 0n), utf8(asText(item[1])), item[2]];
    if (typeof value === "string") parseHexFloat(value);
    else must(value === null || typeof value === "boolean" || typeof value === "bigint", "a scheduled value of no known type");
    must(!last || last[0] < group || (last[0] === group && compareBytes(last[1], name) < 0), "schedule must ascend");
    last = [group, name];
  }
  return {
    step: asInteger(held.get("step"), 0n),
    rank: asInteger(held.get("rank"), 0n),
    microBatches: asInteger(held.get("micro_batches"), 1n),
    stateRoot: hashOrNull(held.get("state_root")),
  };
}

export function readStatement(data) {
  const held = fieldsOf(parseCanonical(data, 2 ** 12), ["final_state", "format", "root", "steps", "tree_size"]);
  must(held.get("format") === "tallystick/run-statement/1", "another format");
  return {
    treeSize: asInteger(held.get("tree_size"), 2n),
    steps: asInteger(held.get("steps"), 1n),
    root: hash(held.get("root")),
    finalState: hash(held.get("final_state")),
  };
}

/** Return {specificationDigest, leafHashes, root} of documents that fit together (section 5). */
export async function verifyTranscript(specification, records, statement) {
  const stated = readStatement(statement); // 1
  const said = await readSpecification(specification); // 2
  must(!records.length || records[records.length - 1] === 10, "the last line has no newline"); // 3
  const lines = [];
  for (let at = 0; at < records.length; ) {
    const end = records.indexOf(10, at);
    lines.push(records.subarray(at, end));
    at = end + 1;
  }
  const parsed = lines.map((line) => readRecord(parseCanonical(line, 2 ** 20)));
  must(stated.steps === said.steps, "statement and specification differ in steps"); // 4
  const expected = said.steps * said.worldSize;
  must(BigInt(lines.length) === expected && stated.treeSize === expected + 1n, "a record is missing or too many"); // 5
  let root = null;
  parsed.forEach((record, at) => { // 6
    const step = BigInt(at) / said.worldSize;
    must(record.step === step && record.rank === BigInt(at) % said.worldSize, "a record out of order");
    must(record.microBatches <= said.accumulation, "more micro-batches than allowed");
    const checkpoint = (step + 1n) % said.every === 0n || step + 1n === said.steps;
    must((record.stateRoot !== null) === checkpoint, "a state root at another place than a checkpoint");
    if (checkpoint) {
      must(record.rank === 0n || equal(record.stateRoot, root), "ranks differ in their state");
      root = record.stateRoot;
    }
  });
  must(equal(root, stated.finalState), "the last state is not the final one"); // 7
  const leaves = [specificationLeaf(specification), ...lines.map(recordLeaf)];
  const leafHashes = await Promise.all(leaves.map(leafHash));
  const found = await rootOf(leafHashes);
  must(equal(found, stated.root), "the statement has another root"); // 8
  return { specificationDigest: await taggedDigest("tallystick/specification/1", specification), leafHashes, root: found };
}

const path = (value) => asList(value).map((node) => unhex(node, 32));

function readProof(data, format, names, limit) {
  const held = fieldsOf(parseCanonical(data, limit), [...names, "format", "path", "tree_size"]);
  must(held.get("format") === format, "another format");
  return { held, size: asInteger(held.get("tree_size")), nodes: path(held.get("path")) };
}

export async function verifyStepProof(data, root) {
  const { held, size, nodes } = readProof(data, "tallystick/step-proof/1", ["index", "record", "world_size"], 2 ** 20 + 2 ** 13);
  const record = readRecord(held.get("record"));
  const worldSize = asInteger(held.get("world_size"), 1n);
  const index = asInteger(held.get("index"));
  must(record.rank < worldSize && index === 1n + record.step * worldSize + record.rank, "another index than step and rank demand");
  await verifyInclusion(await leafHash(recordLeaf(utf8(write(held.get("record"))))), index, size, nodes, root);
}

export async function verifySpecificationProof(data, specification, root) {
  const { size, nodes } = readProof(data, "tallystick/specification-proof/1", [], 2 ** 13);
  await readSpecification(specification);
  await verifyInclusion(await leafHash(specificationLeaf(specification)), 0n, size, nodes, root);
  return size;
}

export async function verifyExtension(data, oldRoot, root) {
  const { held, size, nodes } = readProof(data, "tallystick/extension-proof/1", ["old_size"], 2 ** 13);
  await verifyConsistency(asInteger(held.get("old_size"), 1n), size, oldRoot, root, nodes);
}

// -- fingerprint

const MASK = (1n << 64n) - 1n;

/** Return the fingerprint of tensors, a Map from names to hexadecimal floats that FP32 has. */
export function fingerprint(tensors) {
  const names = [...tensors.keys()].sort((a, b) => compareBytes(utf8(a), utf8(b)));
  const view = new DataView(new ArrayBuffer(4));
  let total = 0n;
  names.forEach((name, ordinal) => {
    asList(tensors.get(name)).forEach((text, i) => {
      const value = parseHexFloat(text);
      must(Number.isNaN(value) || Object.is(Math.fround(value), value), "no FP32 value");
      view.setFloat32(0, value);
      const position = (BigInt(ordinal) << 40n) + BigInt(i);
      total += BigInt(view.getUint32(0) + 1) * (((position * 0x9e3779b97f4a7c15n) & MASK) | 1n);
    });
  });
  return (total & MASK).toString(16).padStart(16, "0");
}

