// Best of N: one warm environment, a fork for each attempt, the tests decide.

import assert from "node:assert/strict";
import { Client, Sandbox } from "@pandastack/sdk";
import { fixes } from "./scripted_model.mjs";

const CHECK = "from stats import mean\nassert mean([2, 4, 6]) == 4\nassert mean([1, 2]) == 1.5\n";

// Five attempts at once may take longer than the 30 s that a client waits by default.
const client = new Client({ timeoutMs: 120_000 });
const base = await Sandbox.create({ template: "code-interpreter", ttlSeconds: 600 }, client);
try {
  await base.filesystem.write("/workspace/repo/stats.py", "def mean(values):\n    return 0\n");
  await base.filesystem.write("/workspace/repo/check.py", CHECK);

  const candidates = fixes(5).map((body, i) => ({
    label: `attempt ${i}`,
    cmd:
      `cd /workspace/repo && printf 'def mean(values):\\n    ${body}\\n' > stats.py` +
      " && python3 check.py",
  }));
  const result = await base.explore(candidates, { captureFiles: false, ttlSeconds: 300 });

  const passed = result.outcomes.filter((o) => o.ok).map((o) => o.label).sort();
  console.log(`${passed.length} of ${candidates.length} attempts pass`);
  assert.deepEqual(passed, ["attempt 1", "attempt 4"]);
  assert.deepEqual(result.errors, []);
  assert.equal(result.reaped.length, 4);
  assert.ok(result.winner);
  const again = await result.winner.exec("cd /workspace/repo && python3 check.py");
  assert.equal(again.exitCode, 0);
  await result.winner.kill();
  const untouched = await base.filesystem.read("/workspace/repo/stats.py");
  assert.equal(untouched, "def mean(values):\n    return 0\n");
} finally {
  await base.kill();
}
