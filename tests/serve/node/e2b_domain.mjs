// npm `@e2b/code-interpreter` with E2B_DOMAIN and E2B_API_KEY only, over TLS.

import assert from 'node:assert/strict'
import { appendFileSync } from 'node:fs'

import { Sandbox } from '@e2b/code-interpreter'

const sandbox = await Sandbox.create('base', { timeoutMs: 900_000, requestTimeoutMs: 180_000 })
for (const port of [49983, 49999, 8000])
  appendFileSync(process.env.HOSTS, `127.0.0.1 ${sandbox.getHost(port).split(':')[0]}\n`)
assert.equal(sandbox.getHost(8000), `8000-${sandbox.sandboxId}.${process.env.E2B_DOMAIN}`)
assert.equal((await sandbox.commands.run('echo on', { timeoutMs: 180_000 })).stdout, 'on\n')
await sandbox.files.write('/srv/index.html', 'page\n')
assert.equal((await sandbox.runCode('6 * 7')).text, '42')
assert.equal(await (await fetch(await sandbox.downloadUrl('/srv/index.html'))).text(), 'page\n')
await sandbox.commands.run('cd /srv && python3 -m http.server --bind 127.0.0.1 8000', { background: true })
const page = `https://${sandbox.getHost(8000)}/index.html`
assert.equal((await fetch(page)).status, 401)
const headers = { 'e2b-traffic-access-token': sandbox.trafficAccessToken }
let answer
do answer = await fetch(page, { headers })
while (answer.status === 503)
assert.equal(await answer.text(), 'page\n')
assert.equal(await sandbox.kill(), true)
console.log('e2b_domain, npm: ok')
process.exit(0)
