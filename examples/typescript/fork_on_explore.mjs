// Fork on explore: a data set is read once, and each approach works on its own copy of it.

import assert from "node:assert/strict";
import { Client, CodeContext } from "@pandastack/sdk";

const ROWS = 20_000;
const LOAD = `
import numpy, pandas
df = pandas.DataFrame({"x": numpy.arange(${ROWS}, dtype=float)})
df.loc[::10, "x"] = float("nan")
print(len(df), int(df.x.isna().sum()))
`;

// An import of pandas may take longer than the 30 s that a client waits by default.
const client = new Client({ timeoutMs: 120_000 });
const parent = await client.sandboxes.create({ template: "python-data", ttlSeconds: 600 });
try {
  const context = await parent.createCodeContext();
  const loaded = await context.runCode(LOAD);
  assert.equal(loaded.stdout, `${ROWS} ${ROWS / 10}\n`, loaded.error);

  /** @type {Record<string, string | undefined>} */
  const lengths = {};
  for (const approach of ["fillna(0)", "dropna()", "interpolate()"]) {
    const child = await parent.fork();
    try {
      // A fork has a copy of the parent's session under the same id.
      const copy = new CodeContext(client, child.id, context.id);
      const ran = await copy.runCode(`df = df.${approach}\nlen(df)`);
      lengths[approach] = ran.text;
    } finally {
      await child.kill();
    }
  }
  console.log(lengths);
  assert.deepEqual(lengths, {
    "fillna(0)": `${ROWS}`,
    "dropna()": `${(ROWS * 9) / 10}`,
    "interpolate()": `${ROWS}`,
  });
  const again = await context.runCode("print(len(df), int(df.x.isna().sum()))");
  assert.equal(again.stdout, loaded.stdout);
} finally {
  await parent.kill();
}
