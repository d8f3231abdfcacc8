// A persistent workspace: the computer is thrown away, the user's files stay.

import assert from "node:assert/strict";
import { Client } from "@pandastack/sdk";

const client = new Client();
const name = `example-workspace-${process.pid}`;

/**
 * Runs a command in a fresh sandbox that has the volume at /workspace.
 * @param {string} command
 */
async function visit(command) {
  const sandbox = await client.sandboxes.create({
    template: "agent",
    ttlSeconds: 120,
    volumes: [{ name }],
  });
  try {
    return (await sandbox.exec(`cd /workspace && ${command}`, { check: true })).stdout;
  } finally {
    await sandbox.kill();
  }
}

await client.volumes.create({ name, size_mb: 1024 });
try {
  await visit("git init -q . && echo hello > note && git add note");
  const status = await visit("git status --short");
  console.log(status);
  assert.equal(status, "A  note\n");
} finally {
  await client.volumes.delete(name);
}
