// What the page says of an evidence bundle: each line is a document, what was checked of it and how that ended.
import { hex, refuse, utf8 } from "./bytes.mjs";
import { openEnvelope, readKey } from "./attestation.mjs";
import { readBundle } from "./bundle.mjs";
import { isRefused } from "./json.mjs";
import { readSpecification, readStatement, verifySpecificationProof } from "./transcript.mjs";

const PREDICATES = {
  "https://slsa.dev/provenance/v1": "provenance, by a trainer",
  "https://tallystick/replay-audit/v0.2": "replay audit, by an auditor",
  "https://tallystick/dispute-verdict/v0.1": "verdict, by a judge",
};

export const NOT_CHECKED = [
  "whose the keys are: compare the key ids with those that their owners gave you elsewhere",
  "whether the signers may say what they say, how many of them agree, and how old that is: an evidence policy (tally verify --policy)",
  "fields of statements against each other, publication in a log, verdicts and records of disputes, signatures of models",
  "that anybody repeated a step: that is the signers' word",
];

/** Return [subject, finding, "passed" | "failed" | "unread"] of each document of a bundle, and of what holds between them. */
export async function inspect(data) {
  const found = [];
  const check = async (subject, work) => {
    try {
      found.push([subject, await work(), "passed"]);
    } catch (problem) {
      if (!isRefused(problem)) throw problem;
      found.push([subject, problem.message, "failed"]);
    }
  };
  let members = [];
  await check("bundle", async () => {
    members = await readBundle(data);
    return `${members.length} documents, each with its SHA-256`;
  });
  const keys = [];
  for (const [, name, part] of members.filter(([kind]) => kind === "key"))
    await check(`key ${name.slice(0, 16)}`, async () => {
      const key = await readKey(part);
      if (key.id !== name) refuse("a key under another name");
      keys.push(key);
      return `${key.kind.namedCurve ?? key.kind.name}, in its one spelling`;
    });
  const roots = new Map();
  for (const [, name, part] of members.filter(([kind]) => kind === "run"))
    await check(`run ${name.slice(0, 16)}`, async () => {
      const run = readStatement(part);
      if (hex(run.root) !== name) refuse("a run under another name");
      roots.set(name, run);
      return `${run.steps} steps, final state ${hex(run.finalState).slice(0, 16)}`;
    });
  for (const [kind, name, part] of members) {
    if (kind === "statement")
      await check(`statement ${name.slice(0, 16)}`, async () => {
        const said = await openEnvelope(part, keys);
        const run = said.subjects.find((subject) => subject.name === "run")?.digest.get("tallystickRun");
        const result = said.predicate.get("result");
        return [
          PREDICATES[said.predicateType] ?? said.predicateType,
          `signed with key ${said.key.id.slice(0, 16)}`,
          run ? `about run ${String(run).slice(0, 16)}` : "about no run",
          ...(typeof result === "string" ? [`result "${result}"`] : []),
        ].join(", ");
      });
    else if (kind === "specification")
      await check(`specification ${name.slice(0, 16)}`, async () => `${(await readSpecification(part)).steps} steps, its program's digest fits its files`);
    else if (kind === "announcement") found.push([`announcement ${name.slice(0, 16)}`, "in the bundle, its draw is in an audit", "unread"]);
    else if (!["key", "run", "specification-proof"].includes(kind)) found.push([`${kind} ${name.slice(0, 16)}`, "not read by this page", "unread"]);
  }
  const specification = members.find(([kind]) => kind === "specification")?.[2];
  for (const [, name, part] of members.filter(([kind]) => kind === "specification-proof"))
    await check(`specification's proof ${name.slice(0, 16)}`, async () => {
      let last = null;
      for (const [root, run] of roots)
        try {
          const size = await verifySpecificationProof(part, specification ?? utf8(""), run.root);
          if (size === run.treeSize) return `the specification is leaf 0 of run ${root.slice(0, 16)}`;
        } catch (problem) {
          if (!isRefused(problem)) throw problem;
          last = problem;
        }
      if (last) throw last;
      return refuse("no run that it fits");
    });
  return found;
}
