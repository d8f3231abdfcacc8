// A fresh sandbox for every task: nothing that one leaves behind reaches the next.

import assert from "node:assert/strict";
import { Sandbox } from "@pandastack/sdk";

const TASK = "test -e /root/trace && echo found || echo clean; echo mine > /root/trace";

async function run() {
  const sandbox = await Sandbox.create({
    template: "code-interpreter",
    ttlSeconds: 120,
    metadata: { kind: "task" },
  });
  try {
    return (await sandbox.exec(TASK, { timeoutSeconds: 30, check: true })).stdout.trim();
  } finally {
    await sandbox.kill();
  }
}

const found = await Promise.all([run(), run(), run(), run()]);
console.log(found);
assert.deepEqual(found, ["clean", "clean", "clean", "clean"]);
