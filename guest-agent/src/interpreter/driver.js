// The Node side of an interpreter session. It reads code from descriptor 3 and writes records there;
// standard output and error stay the code's own. Nothing but what comes with Node is used.
'use strict';
(() => {
  const fs = require('fs'), net = require('net'), repl = require('repl'), util = require('util');
  const { PassThrough, Writable } = require('stream');
  const DISPLAY = 3, RESULT = 4, ERROR = 5, DONE = 6, READY = 7;
  const ACK = 0x80, MAX_RECORD = 16 << 20, MAX_TEXT = 1 << 20;
  let running = false, cells = 0;
  const nap = new Int32Array(new SharedArrayBuffer(4));

  let acksOwed = 0;

  function send(kind, parts) {
    const ask = running && kind !== DONE;
    const pieces = [];
    let total = 1;
    for (const [key, value] of parts) {
      const name = Buffer.from(key), data = Buffer.isBuffer(value) ? value : Buffer.from(value);
      const head = Buffer.alloc(name.length + 6);
      head.writeUInt16LE(name.length, 0);
      name.copy(head, 2);
      head.writeUInt32LE(data.length, name.length + 2);
      pieces.push(head, data);
      total += head.length + data.length;
    }
    const head = Buffer.alloc(5);
    head.writeUInt32LE(total, 0);
    head.writeUInt8(ask ? kind | ACK : kind, 4);
    let rest = Buffer.concat([head, ...pieces]);
    while (rest.length) {
      try {
        rest = rest.subarray(fs.writeSync(3, rest));
      } catch (error) {
        if (error.code !== 'EAGAIN') process.exit(1);
        Atomics.wait(nap, 0, 0, 1);
      }
    }
    // What is printed next must not overtake it: the agent says when it has taken it.
    if (ask) acksOwed += 1;
    while (acksOwed > 0) {
      try {
        if (fs.readSync(3, Buffer.alloc(1)) === 0) process.exit(0);
        acksOwed -= 1;
      } catch (error) {
        if (error.code !== 'EAGAIN') process.exit(1);
        Atomics.wait(nap, 0, 0, 1);
      }
    }
  }

  const cut = (text, most) => text.length > most ? text.slice(0, most) + '…' : text;

  function bundleOf(value) {
    const parts = [];
    let total = 0;
    const add = (mime, data) => {
      const size = Buffer.byteLength(data);
      if (total + size > MAX_RECORD - 4096) {
        parts.push(['text/plain', `<${mime} of ${size} bytes left out>`]);
      } else {
        total += size;
        parts.push([mime, data]);
      }
    };
    const attempt = (make) => {
      try { make(); } catch (error) { process.stderr.write(`${error && error.stack || error}\n`); }
    };
    attempt(() => {
      const whole = value && value._repr_mimebundle_;
      const given = typeof whole === 'function' ? whole.call(value) : {};
      for (const [mime, data] of Object.entries(given || {})) {
        const binary = mime.startsWith('image/') && mime !== 'image/svg+xml';
        if (Buffer.isBuffer(data) || data instanceof Uint8Array) add(mime, Buffer.from(data));
        else if (typeof data !== 'string') add(mime, JSON.stringify(data));
        else add(mime, binary ? Buffer.from(data, 'base64') : data);
      }
    });
    const methods = { 'text/html': '_repr_html_', 'image/png': '_repr_png_', 'image/svg+xml': '_repr_svg_',
                      'text/markdown': '_repr_markdown_' };
    for (const [mime, name] of Object.entries(methods)) {
      attempt(() => {
        if (value && typeof value[name] === 'function' && !parts.some(([key]) => key === mime)) {
          const given = value[name]();
          if (given instanceof Uint8Array) add(mime, Buffer.from(given));
          else if (typeof given === 'string') {
            add(mime, mime === 'image/png' ? Buffer.from(given, 'base64') : given);
          }
        }
      });
    }
    if (!parts.some(([key]) => key === 'text/plain')) {
      attempt(() => add('text/plain', cut(util.inspect(value), MAX_TEXT)));
    }
    const plain = value && typeof value === 'object' &&
      (Array.isArray(value) || Object.getPrototypeOf(value) === Object.prototype);
    if (plain && !parts.some(([key]) => key === 'application/json')) {
      try {
        const text = JSON.stringify(value);
        if (text && text.length <= MAX_TEXT) add('application/json', text);
      } catch { /* it has no JSON form */ }
    }
    return parts;
  }

  function report(error) {
    const thrown = error instanceof Error || (error && typeof error.stack === 'string');
    const interrupted = error && error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED';
    const name = interrupted ? 'Interrupted' : thrown ? String(error.name) : 'Error';
    const value = thrown ? String(error.message) : util.inspect(error);
    const stack = thrown ? String(error.stack) : `Uncaught ${value}`;
    const lines = stack.split('\n').filter((line) =>
      !/^\s+at .*(\[eval\]|node:|\(repl\.js|REPLServer)/.test(line));
    send(ERROR, [['name', cut(name, 256)], ['value', cut(value, 65536)],
                 ['traceback', cut(lines.join('\n'), MAX_TEXT)]]);
  }

  // The language's own prompt knows top-level await and what the last value is; it is fed by hand.
  const silent = new Writable({ write(chunk, encoding, done) { done(); } });
  const prompt = repl.start({
    prompt: '', input: new PassThrough(), output: silent, terminal: false, useGlobal: true,
    breakEvalOnSigint: true, ignoreUndefined: true,
  });
  global.display = (...values) => { for (const value of values) send(DISPLAY, bundleOf(value)); };
  const finish = (cell, error, value) => {
    // The answer of a call that was interrupted may come during the next one.
    if (!running || cell !== cells) return;
    if (error !== null && error !== undefined) report(error);
    else if (value !== undefined) send(RESULT, bundleOf(value));
    running = false;
    send(DONE, []);
  };
  // What a callback throws, or a promise that nobody awaits: told to the code that runs, else on stderr.
  const stray = (error) => {
    if (running) finish(cells, error);
    else process.stderr.write(`Uncaught ${error && error.stack || util.inspect(error)}\n`);
  };
  // The prompt throws into a domain where it has one, and that is where it would print.
  if (prompt._domain) {
    prompt._domain.removeAllListeners('error');
    prompt._domain.on('error', stray);
  }
  // Code that waits is interrupted as at the prompt; while nothing runs, an interrupt is for nobody.
  const onInterrupt = () => { if (running) prompt.emit('SIGINT'); };
  process.on('SIGINT', onInterrupt);
  process.removeAllListeners('uncaughtException');
  process.on('uncaughtException', stray);
  process.on('unhandledRejection', stray);

  function run(code) {
    running = true;
    cells += 1;
    const cell = cells;
    let text = code;
    // A line that begins with a brace is an object where it can be one, as at the prompt.
    if (/^\s*\{/.test(text) && !/;\s*$/.test(text)) {
      try { new (require('vm').Script)(`(${text.trim()}\n)`); text = `(${text.trim()}\n)`; } catch { }
    }
    // While it evaluates, Node itself watches for the interrupt, and a listener would undo that.
    process.removeListener('SIGINT', onInterrupt);
    try {
      prompt.eval(text, global, `cell-${cells}`, (error, value) => {
        if (error instanceof repl.Recoverable) error = error.err;
        finish(cell, error, value);
      });
    } catch (error) {
      finish(cell, error);
    } finally {
      process.on('SIGINT', onInterrupt);
    }
  }

  const control = new net.Socket({ fd: 3, readable: true, writable: false });
  let pending = Buffer.alloc(0);
  control.on('data', (chunk) => {
    const late = Math.min(acksOwed, chunk.length);
    acksOwed -= late;
    pending = Buffer.concat([pending, chunk.subarray(late)]);
    while (pending.length >= 4 && pending.length >= 4 + pending.readUInt32LE(0)) {
      const size = pending.readUInt32LE(0);
      const code = pending.subarray(4, 4 + size).toString();
      pending = pending.subarray(4 + size);
      run(code);
    }
  });
  control.on('close', () => process.exit(0));
  control.on('error', () => process.exit(0));
  send(READY, [['version', process.versions.node]]);
})();
