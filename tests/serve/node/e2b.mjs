// npm `e2b` and `@e2b/code-interpreter` against `pvmm serve`, whose address the environment gives.

import assert from 'node:assert/strict'

import { Sandbox as Interpreter } from '@e2b/code-interpreter'
import {
  AuthenticationError,
  CommandExitError,
  FileNotFoundError,
  FileType,
  FilesystemEventType,
  NotFoundError,
  Sandbox,
  SandboxNotFoundError,
  TimeoutError,
} from 'e2b'

import { runFlows } from './flows.mjs'

// Where guests run without hardware for it, everything takes long.
const PATIENCE = 180_000
const UNKNOWN = '00000000-0000-4000-8000-000000000000'
const options = { timeoutMs: 900_000, requestTimeoutMs: PATIENCE }
const run = (sandbox, line, more = {}) =>
  sandbox.commands.run(line, { timeoutMs: PATIENCE, ...more })

const flows = {
  async commands_have_output_codes_environment_and_place(sandbox) {
    const pieces = []
    const line = 'echo one; sleep 0.2; echo two; echo err >&2'
    const done = await run(sandbox, line, { onStdout: (piece) => pieces.push(piece) })
    assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['one\ntwo\n', 'err\n', 0])
    assert.equal(pieces.join(''), 'one\ntwo\n')
    await assert.rejects(run(sandbox, 'echo bad >&2; exit 3'), (error) => {
      assert.ok(error instanceof CommandExitError, error)
      return error.exitCode === 3 && error.stderr === 'bad\n'
    })
    const place = { envs: { B: 'b' }, cwd: '/usr', user: 'root' }
    const said = await run(sandbox, 'echo $A $B $(pwd) $(id -un)', place)
    assert.equal(said.stdout, 'a b /usr root\n')
    const long = await run(sandbox, "head -c 2000000 /dev/zero | tr '\\0' x")
    assert.equal(long.stdout.length, 2_000_000)
    await assert.rejects(sandbox.commands.run('sleep 100', { timeoutMs: 2000 }), TimeoutError)
  },

  async background_commands_are_listed_fed_and_killed(sandbox) {
    const sleeping = await run(sandbox, 'sleep 1000', { background: true })
    const pids = (await sandbox.commands.list()).map((process) => process.pid)
    assert.ok(pids.includes(sleeping.pid), pids)
    assert.equal(await sandbox.commands.kill(sleeping.pid), true)
    assert.equal(await sandbox.commands.kill(2 ** 22), false)
    await assert.rejects(sleeping.wait(), CommandExitError)
    const line = 'read a; read b; echo "$a-$b"'
    const reader = await run(sandbox, line, { background: true, stdin: true })
    await sandbox.commands.sendStdin(reader.pid, 'one\n')
    await reader.disconnect()
    const again = await sandbox.commands.connect(reader.pid, { timeoutMs: PATIENCE })
    await sandbox.commands.sendStdin(reader.pid, 'two\n')
    assert.equal((await again.wait()).stdout, 'one-two\n')
    const counter = await run(sandbox, 'wc -c', { background: true, stdin: true })
    await sandbox.commands.sendStdin(counter.pid, 'abcdef')
    await sandbox.commands.closeStdin(counter.pid)
    assert.equal((await counter.wait()).stdout.trim(), '6')
  },

  async files_are_written_read_listed_and_moved(sandbox) {
    const { files } = sandbox
    const written = await files.write('/srv/new/a.txt', 'hello é\n')
    assert.deepEqual([written.name, written.path], ['a.txt', '/srv/new/a.txt'])
    assert.equal(await files.read('/srv/new/a.txt'), 'hello é\n')
    const blob = Uint8Array.from({ length: 256 * 1024 }, (_, at) => at)
    await files.write('/srv/new/b.bin', blob.buffer, { useOctetStream: true })
    assert.deepEqual(await files.read('/srv/new/b.bin', { format: 'bytes' }), blob)
    const parts = []
    for await (const part of await files.read('/srv/new/b.bin', { format: 'stream' }))
      parts.push(part)
    assert.deepEqual(new Uint8Array(Buffer.concat(parts)), blob)
    await files.writeFiles([
      { path: '/srv/new/c', data: 'c' },
      { path: '/srv/new/d', data: 'd' },
    ])
    const names = (await files.list('/srv/new')).map((entry) => entry.name)
    assert.deepEqual(names, ['a.txt', 'b.bin', 'c', 'd'])
    const info = await files.getInfo('/srv/new/b.bin')
    assert.deepEqual([info.type, info.size, info.owner], [FileType.FILE, blob.length, 'root'])
    assert.equal(await files.makeDir('/srv/x/y'), true)
    assert.equal(await files.makeDir('/srv/x/y'), false)
    assert.equal((await files.rename('/srv/new/c', '/srv/x/y/z')).path, '/srv/x/y/z')
    await files.remove('/srv/x')
    assert.equal(await files.exists('/srv/x'), false)
    await assert.rejects(files.read('/not/there'), FileNotFoundError)
  },

  async signed_address_needs_no_other_credential(sandbox) {
    await sandbox.files.write('/srv/signed', 'signed\n')
    const url = await sandbox.downloadUrl('/srv/signed', { useSignatureExpiration: 600 })
    assert.equal(await (await fetch(url)).text(), 'signed\n')
    assert.equal((await fetch(`${url.slice(0, -3)}999`)).status, 401)
  },

  async changes_in_a_directory_are_seen(sandbox) {
    await sandbox.files.makeDir('/srv/watched')
    let saw
    const removed = new Promise((resolve) => (saw = resolve))
    const onEvent = (event) => event.type === FilesystemEventType.REMOVE && saw(event.name)
    const watch = await sandbox.files.watchDir('/srv/watched', onEvent, { timeoutMs: PATIENCE })
    await run(sandbox, 'touch /srv/watched/f; rm /srv/watched/f')
    assert.equal(await removed, 'f')
    await watch.stop()
  },

  async terminal_is_typed_into_and_resized(sandbox) {
    let shown = ''
    const onData = (data) => (shown += Buffer.from(data).toString())
    const size = { rows: 20, cols: 70, onData, timeoutMs: PATIENCE }
    const terminal = await sandbox.pty.create(size)
    await sandbox.pty.resize(terminal.pid, { rows: 30, cols: 90 })
    await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit 7\n'))
    await assert.rejects(terminal.wait(), (error) => error.exitCode === 7)
    assert.ok(shown.includes('30 90'), shown)
  },

  async code_shows_values_pictures_and_errors(sandbox) {
    const said = []
    const ran = await sandbox.runCode("x = 41; print('said')", {
      onStdout: (message) => said.push(message.line),
    })
    assert.deepEqual([ran.error, said.join('')], [undefined, 'said\n'])
    assert.equal((await sandbox.runCode('x + 1')).text, '42')
    const picture = "display({'image/png': b'\\x89PNG'}, raw=True)"
    const [shown] = (await sandbox.runCode(picture)).results
    assert.equal(shown.png, 'iVBORw==')
    assert.equal((await sandbox.runCode('1 / 0')).error.name, 'ZeroDivisionError')
    const envs = { K: 'k' }
    assert.equal((await sandbox.runCode("import os; os.environ['K']", { envs })).text, "'k'")
    const context = await sandbox.createCodeContext({ cwd: '/usr', language: 'python' })
    const where = await sandbox.runCode('import os; os.getcwd()', { context })
    assert.equal(where.text, "'/usr'")
    assert.equal((await sandbox.runCode('x', { context })).error.name, 'NameError')
    const known = (await sandbox.listCodeContexts()).map((it) => it.id)
    assert.ok(known.includes(context.id), known)
    await sandbox.restartCodeContext(context)
    await sandbox.removeCodeContext(context)
    await assert.rejects(sandbox.runCode('1', { context }), NotFoundError)
  },

  async sandbox_is_found_connected_to_and_measured(sandbox) {
    const query = { metadata: { k: 'v é&=' }, state: ['running'] }
    const found = await Sandbox.list({ query }).nextItems()
    assert.deepEqual(found.map((it) => it.sandboxId), [sandbox.sandboxId])
    const same = await Sandbox.connect(sandbox.sandboxId, options)
    assert.equal(await same.isRunning(), true)
    assert.equal((await run(same, 'echo $A')).stdout, 'a\n')
    await sandbox.setTimeout(3_000_000)
    const { endAt } = await sandbox.getInfo()
    assert.ok(endAt - Date.now() > 2_000_000, endAt)
    const [now] = await sandbox.getMetrics()
    assert.ok(now.memTotal > now.memUsed && now.cpuCount >= 1, now)
  },

  async paused_sandbox_goes_on_and_forks_and_snapshots_begin_there(sandbox) {
    await sandbox.files.write('/srv/state', 'then')
    await sandbox.runCode('x = 5')
    assert.equal(await sandbox.pause(), true)
    assert.equal((await sandbox.getInfo()).state, 'paused')
    await sandbox.connect(options)
    assert.equal((await sandbox.runCode('x')).text, '5')
    for (const fork of await sandbox.fork({ ...options, count: 2 })) {
      assert.equal(await fork.files.read('/srv/state'), 'then')
      assert.equal((await fork.runCode('x')).text, '5')
      assert.equal(await fork.kill(), true)
    }
    const { snapshotId } = await sandbox.createSnapshot()
    await sandbox.files.write('/srv/state', 'now')
    const other = await Interpreter.create(snapshotId, options)
    assert.equal(await other.files.read('/srv/state'), 'then')
    await other.kill()
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
  },

  async refusals_are_the_clients_own_errors(sandbox) {
    await assert.rejects(Sandbox.getInfo(UNKNOWN), SandboxNotFoundError)
    await assert.rejects(Sandbox.connect(UNKNOWN), SandboxNotFoundError)
    assert.equal(await Sandbox.kill(UNKNOWN), false)
    await assert.rejects(Sandbox.list({ apiKey: 'wrong' }).nextItems(), AuthenticationError)
    await assert.rejects(Sandbox.create('no-such-template'), /there are: .*base/)
    assert.equal(await sandbox.kill(), true)
    assert.equal(await sandbox.isRunning(), false)
  },
}

const wishes = { ...options, metadata: { k: 'v é&=' }, envs: { A: 'a' } }
await runFlows(flows, await Interpreter.create('base', wishes))
