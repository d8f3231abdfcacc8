// Both npm clients of the Model Context Protocol against `pvmm mcp` and `/mcp` of `pvmm serve`.
//
// The environment has PVMM, the program, and PVMM_API and PVMM_API_KEY of the server.

import assert from 'node:assert/strict'

import * as v2 from '@modelcontextprotocol/client'
import { StdioClientTransport as StdioV2 } from '@modelcontextprotocol/client/stdio'
import { Client as ClientV1 } from '@modelcontextprotocol/sdk/client/index.js'
import { StdioClientTransport as StdioV1 } from '@modelcontextprotocol/sdk/client/stdio.js'
import { StreamableHTTPClientTransport as HttpV1 } from '@modelcontextprotocol/sdk/client/streamableHttp.js'

import { runFlows } from './flows.mjs'

const { PVMM, PVMM_API, PVMM_API_KEY } = process.env
const TIME = { timeout: 600_000 }
const TOOLS = `create run_code exec read_file write_file list_files fork checkpoint rollback checkout log
diff list terminate`.split(/\s+/)
// One red pixel; the template has no library for images.
const PLOT = `
import struct, zlib
def chunk(kind, data):
    return (struct.pack(">I", len(data)) + kind + data
            + struct.pack(">I", zlib.crc32(kind + data)))
png = (b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
       + chunk(b"IDAT", zlib.compress(b"\\0\\xff\\0\\0")) + chunk(b"IEND", b""))
display({"image/png": png}, raw=True)
`

/** The tools of one conversation. */
class Tools {
  constructor(client, isV1) {
    Object.assign(this, { client, isV1 })
  }

  call(tool, wishes = {}) {
    const params = { name: `sandbox_${tool}`, arguments: wishes }
    return this.isV1
      ? this.client.callTool(params, undefined, TIME)
      : this.client.callTool(params, TIME)
  }

  async text(tool, wishes) {
    const { content, isError } = await this.call(tool, wishes)
    const text = content.map((block) => block.text ?? '').join('\n')
    assert.ok(!isError, text)
    return text
  }
}

/** Uses the tools of a new conversation, and ends it. */
async function converse(tools, transport) {
  await tools.client.connect(transport)
  const { tools: listed } = await tools.client.listTools()
  assert.deepEqual(listed.map((tool) => tool.name), TOOLS.map((name) => `sandbox_${name}`))
  await tools.text('run_code', { code: 'x = 1' })
  const plot = await tools.call('run_code', { code: PLOT })
  const image = plot.content.find((block) => block.type === 'image')
  assert.equal(image.mimeType, 'image/png')
  assert.ok(Buffer.from(image.data, 'base64').subarray(1, 4).equals(Buffer.from('PNG')))
  await tools.text('write_file', { path: 'f', content: 'then\n' })
  const [, fork] = (await tools.text('fork', { count: 1 })).split('\n')
  await tools.text('run_code', { code: 'x += 10', sandbox: fork })
  assert.equal(await tools.text('run_code', { code: 'x', sandbox: fork }), 'result:\n11')
  await tools.text('checkpoint')
  await tools.text('exec', { command: 'echo now > /root/f' })
  await tools.text('run_code', { code: 'x = 2' })
  await tools.text('rollback')
  assert.equal(await tools.text('read_file', { path: '/root/f' }), 'then\n')
  assert.equal(await tools.text('run_code', { code: 'x' }), 'result:\n1')
  const wrong = await tools.call('exec', { comand: 'true' })
  assert.ok(wrong.isError && wrong.content[0].text.includes('comand'), wrong)
}

const client = { name: 'test', version: '1' }
const command = { command: PVMM, args: ['mcp', '--ttl', '10m'], env: { ...process.env } }
const address = new URL(`${PVMM_API}/mcp?template=base&ttl_seconds=1200`)
const requestInit = { headers: { Authorization: `Bearer ${PVMM_API_KEY}` } }

async function sandboxes() {
  const answer = await fetch(`${PVMM_API}/v1/sandboxes`, requestInit)
  return (await answer.json()).filter((row) => row.metadata.made_by === 'mcp')
}

/** Ends a session; its sandboxes, which lived as long as the address says, end with it. */
async function endSession(tools, transport) {
  const before = await sandboxes()
  assert.deepEqual(before.map((row) => row.ttl_seconds), [1200, 1200])
  await transport.terminateSession()
  await tools.client.close()
  while ((await sandboxes()).length) await new Promise((resolve) => setTimeout(resolve, 200))
}

await runFlows({
  async client_of_version_2_over_stdio() {
    const tools = new Tools(new v2.Client(client), false)
    await converse(tools, new StdioV2(command))
    await tools.client.close()
  },

  async client_of_version_2_over_http() {
    const tools = new Tools(new v2.Client(client), false)
    const transport = new v2.StreamableHTTPClientTransport(address, { requestInit })
    await converse(tools, transport)
    await endSession(tools, transport)
  },

  async client_of_version_1_over_stdio() {
    const tools = new Tools(new ClientV1(client), true)
    await converse(tools, new StdioV1(command))
    await tools.client.close()
  },

  async client_of_version_1_over_http() {
    const tools = new Tools(new ClientV1(client), true)
    const transport = new HttpV1(address, { requestInit })
    await converse(tools, transport)
    await endSession(tools, transport)
  },

  async wish_that_the_address_cannot_have_is_refused_at_once() {
    for (const query of ['template=../x', 'ttl_seconds=0', 'ttl_seconds=x', 'tll=1']) {
      const post = { ...requestInit, method: 'POST', body: '{}' }
      const answer = await fetch(`${PVMM_API}/mcp?${query}`, post)
      assert.equal(answer.status, 400, query)
      assert.match((await answer.json()).error, /template|ttl|tll/)
    }
  },
})
