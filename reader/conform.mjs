#!/usr/bin/env node
// Answers questions on standard input, one JSON line each (spec/vectors.md 3):
//     tally conformance run --suite merkle -- node reader/conform.mjs
import { createInterface } from "node:readline";

import { isRefused, parse, write } from "./json.mjs";
import { answer } from "./operations.mjs";

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  if (line) process.stdout.write(`${write(await answer(parse(line), isRefused))}\n`);
}
