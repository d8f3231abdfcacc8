// One sandbox for a whole conversation: variables and files stay between the steps.

import assert from "node:assert/strict";
import { Sandbox } from "@pandastack/sdk";
import { next } from "./scripted_model.mjs";

const REQUEST = "Count to three, one step at a time.";

const sandbox = await Sandbox.create({ template: "code-interpreter", ttlSeconds: 600 });
try {
  const context = await sandbox.createCodeContext();
  /** @type {string[]} */
  const seen = [];
  let reply = next(REQUEST, seen);
  while ("code" in reply) {
    seen.push((await context.runCode(reply.code)).stdout);
    reply = next(REQUEST, seen);
  }
  console.log(reply.text);
  assert.equal(reply.text, "I have counted to 3.");
  assert.equal(await sandbox.filesystem.read("/root/steps"), "one\ntwo\nthree\n");
} finally {
  await sandbox.kill();
}
