// Calls the flows of a module, one after the other, and ends the program.

/** Runs the functions of `flows` that have a wanted name; one that throws is a failure. */
export async function runFlows(flows, argument) {
  const wanted = process.argv.slice(2)
  let failed = 0
  for (const [name, flow] of Object.entries(flows)) {
    if (wanted.length && !wanted.some((word) => name.includes(word))) continue
    const start = performance.now()
    try {
      await flow(argument)
      console.log(`${name}: ok (${((performance.now() - start) / 1000).toFixed(1)} s)`)
    } catch (error) {
      failed += 1
      console.log(`${name}: failed`)
      console.error(error)
    }
  }
  process.exit(failed ? 1 : 0)
}
