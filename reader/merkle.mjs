// The Merkle tree of RFC 9162, section 2.1, over SHA-256. Sizes and indexes are BigInt.
import { concat, equal, must, sha256 } from "./bytes.mjs";

const HASH = 32;
export const leafHash = (leaf) => sha256(concat(Uint8Array.of(0), leaf));
export const nodeHash = (left, right) => sha256(concat(Uint8Array.of(1), left, right));
export const EMPTY = await sha256(new Uint8Array());

const split = (n) => {
  let k = 1;
  while (2 * k < n) k *= 2;
  return k;
};

/** Return the root over leaf hashes. */
export async function rootOf(hashes) {
  if (hashes.length === 0) return EMPTY;
  if (hashes.length === 1) return hashes[0];
  const k = split(hashes.length);
  return nodeHash(await rootOf(hashes.slice(0, k)), await rootOf(hashes.slice(k)));
}

/** Return the inclusion proof of leaf `index` (2.1.3.1). */
export async function inclusionProof(hashes, index) {
  must(0 <= index && index < hashes.length, "no such leaf");
  if (hashes.length === 1) return [];
  const k = split(hashes.length);
  return index < k
    ? [...(await inclusionProof(hashes.slice(0, k), index)), await rootOf(hashes.slice(k))]
    : [...(await inclusionProof(hashes.slice(k), index - k)), await rootOf(hashes.slice(0, k))];
}

/** Return the proof that the tree begins with its first `old` leaves (2.1.4.1). */
export async function consistencyProof(hashes, old) {
  must(0 < old && old <= hashes.length, "no such older tree");
  const below = async (part, m, whole) => {
    if (m === part.length) return whole ? [] : [await rootOf(part)];
    const k = split(part.length);
    return m <= k
      ? [...(await below(part.slice(0, k), m, whole)), await rootOf(part.slice(k))]
      : [...(await below(part.slice(k), m - k, false)), await rootOf(part.slice(0, k))];
  };
  return below(hashes, old, true);
}

/** Return if a leaf hash lies at `index` of a tree of `size` leaves with `root` (2.1.3.2). */
export async function verifyInclusion(hash, index, size, proof, root) {
  must(0n <= index && index < size && size < 1n << 63n, "no such leaf");
  must([hash, root, ...proof].every((node) => node.length === HASH), "a hash is not 32 bytes");
  let [fn, sn, r] = [index, size - 1n, hash];
  for (const p of proof) {
    must(sn !== 0n, "a node too many");
    if (fn & 1n || fn === sn) {
      r = await nodeHash(p, r);
      while (!(fn & 1n) && fn !== 0n) [fn, sn] = [fn >> 1n, sn >> 1n];
    } else r = await nodeHash(r, p);
    [fn, sn] = [fn >> 1n, sn >> 1n];
  }
  must(sn === 0n, "a node is missing");
  must(equal(r, root), "leads to another root");
}

/** Return if the tree of `size` leaves and `root` begins with that of `old` leaves and `oldRoot` (2.1.4.2). */
export async function verifyConsistency(old, size, oldRoot, root, proof) {
  must(0n <= old && old <= size && size < 1n << 63n, "the older tree is larger");
  must([oldRoot, root, ...proof].every((node) => node.length === HASH), "a hash is not 32 bytes");
  if (old === 0n || old === size) {
    must(proof.length === 0, "a node too many");
    must(old === 0n ? equal(oldRoot, EMPTY) : equal(oldRoot, root), "leads to another root");
    return;
  }
  const path = (old & (old - 1n)) === 0n ? [oldRoot, ...proof] : [...proof];
  must(path.length > 0, "a node is missing");
  let [fn, sn] = [old - 1n, size - 1n];
  while (fn & 1n) [fn, sn] = [fn >> 1n, sn >> 1n];
  let fr = path[0];
  let sr = path[0];
  for (const c of path.slice(1)) {
    must(sn !== 0n, "a node too many");
    if (fn & 1n || fn === sn) {
      [fr, sr] = [await nodeHash(c, fr), await nodeHash(c, sr)];
      while (!(fn & 1n) && fn !== 0n) [fn, sn] = [fn >> 1n, sn >> 1n];
    } else sr = await nodeHash(sr, c);
    [fn, sn] = [fn >> 1n, sn >> 1n];
  }
  must(sn === 0n, "a node is missing");
  must(equal(fr, oldRoot) && equal(sr, root), "leads to another root");
}
