// The agent loop: the model proposes code, the sandbox runs it, the model sees what came back.

import assert from "node:assert/strict";
import { Sandbox } from "@pandastack/sdk";
import { next } from "./scripted_model.mjs";

const MAX_STEPS = 8;

/** @param {string} request */
async function answer(request) {
  const sandbox = await Sandbox.create({ template: "code-interpreter", ttlSeconds: 300 });
  try {
    const context = await sandbox.createCodeContext("python");
    /** @type {string[]} */
    const seen = [];
    for (let step = 0; step < MAX_STEPS; step++) {
      const reply = next(request, seen);
      if ("text" in reply) return reply.text;
      const ran = await context.runCode(reply.code, { timeoutSeconds: 30 });
      // A failure is an observation like any other: the model can correct itself.
      seen.push(ran.error ?? ran.stdout);
    }
    throw new Error(`no answer within ${MAX_STEPS} steps`);
  } finally {
    await sandbox.kill();
  }
}

const said = await answer("Which of the numbers up to 50 are prime, and what is their sum?");
console.log(said);
assert.equal(said, "Their sum is 328.");
