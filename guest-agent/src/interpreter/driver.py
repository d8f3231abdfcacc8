# The Python side of an interpreter session. It reads code from descriptor 3 and writes records there;
# standard output and error stay the code's own. Nothing but the standard library is used.

def _pvmm_main():
    import ast, builtins, importlib.machinery, io, json, linecache, os, signal, socket, struct
    import re, sys, threading, traceback, types

    DISPLAY, RESULT, ERROR, DONE, READY = 3, 4, 5, 6, 7
    ACK = 0x80
    MAX_RECORD = 16 << 20
    MAX_TEXT = 1 << 20
    CELL = '<cell '
    CO_COROUTINE = 0x80

    control = socket.socket(fileno=os.dup(3))
    os.close(3)
    control.set_inheritable(False)
    lock = threading.RLock()
    home = os.getpid()
    state = types.SimpleNamespace(running=False, held=0, late=False, thread=threading.get_ident())

    def interrupt(*_):
        # While nothing runs, an interrupt is for nobody.
        if state.running and state.held:
            state.late = True
        elif state.running:
            raise KeyboardInterrupt

    def receive(count):
        parts = []
        while count:
            part = control.recv(min(count, 1 << 16))
            if not part:
                os._exit(0)
            parts.append(part)
            count -= len(part)
        return b''.join(parts)

    def flush():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass

    def send(kind, parts):
        body = b''.join(struct.pack('<H', len(key)) + key + struct.pack('<I', len(data)) + data
                        for key, data in parts)
        flush()
        if os.getpid() != home:
            # A child that the code forked holds the same socket, and must not speak on it.
            return
        # An interrupt in the middle of a record would tear it: it waits until the record is out.
        mine = threading.get_ident() == state.thread
        state.held += mine
        try:
            with lock:
                # What is printed next must not overtake it: the agent says when it has taken it.
                ask = ACK if mine and state.running else 0
                control.sendall(struct.pack('<IB', len(body) + 1, kind | ask) + body)
                if ask:
                    receive(1)
        finally:
            state.held -= mine
            if mine and not state.held and state.late:
                state.late = False
                raise KeyboardInterrupt

    METHODS = (
        ('text/html', '_repr_html_'), ('text/markdown', '_repr_markdown_'),
        ('text/latex', '_repr_latex_'), ('image/svg+xml', '_repr_svg_'),
        ('image/png', '_repr_png_'), ('image/jpeg', '_repr_jpeg_'),
        ('application/json', '_repr_json_'),
    )

    def shown(method):
        """What a representation method gives, or None: one that fails must not end the code."""
        try:
            value = method()
        except Exception:
            traceback.print_exc()
            return None
        return value[0] if isinstance(value, tuple) and len(value) == 2 else value

    def encoded(mime, value):
        if isinstance(value, bytes):
            return value
        if mime == 'application/json' or mime.endswith('+json'):
            return json.dumps(value).encode()
        if isinstance(value, str):
            if mime.startswith('image/') and mime != 'image/svg+xml':
                import base64
                return base64.b64decode(value)
            return value.encode('utf-8', 'surrogatepass')
        return str(value).encode('utf-8', 'replace')

    def bundle_of(value):
        found = {}
        if not isinstance(value, type):
            whole = getattr(value, '_repr_mimebundle_', None)
            if callable(whole):
                given = shown(whole)
                if isinstance(given, dict):
                    found.update(given)
            for mime, name in METHODS:
                method = getattr(value, name, None)
                if mime not in found and callable(method):
                    given = shown(method)
                    if given is not None:
                        found[mime] = given
        if 'text/plain' not in found:
            try:
                found['text/plain'] = repr(value)
            except Exception as error:
                found['text/plain'] = '<%s whose repr failed: %s>' % (type(value).__name__, error)
        if type(value) in (dict, list, tuple) and 'application/json' not in found:
            try:
                text = json.dumps(value, allow_nan=False)
                if len(text) <= MAX_TEXT:
                    found['application/json'] = text.encode()
            except (TypeError, ValueError, RecursionError):
                pass
        parts, total = [], 0
        for mime, data in found.items():
            try:
                data = encoded(str(mime), data)
            except Exception:
                traceback.print_exc()
                continue
            if mime == 'text/plain' and len(data) > MAX_TEXT:
                data = data[:MAX_TEXT].decode('utf-8', 'ignore').encode() + '…'.encode()
            if total + len(data) > MAX_RECORD - 4096:
                note = '<%s of %d bytes left out>' % (mime, len(data))
                parts.append((b'text/plain', note.encode()) if mime != 'text/plain'
                             else (b'text/plain', b'<left out>'))
                continue
            total += len(data)
            parts.append((str(mime).encode()[:255], data))
        return parts

    def display(*values, raw=False, **_options):
        """Shows values, each in the forms it has; with raw=True each is a dict of MIME types."""
        for value in values:
            if raw and isinstance(value, dict):
                value = types.SimpleNamespace(_repr_mimebundle_=lambda value=value: value)
            send(DISPLAY, bundle_of(value))

    def show_figures():
        plt = sys.modules.get('matplotlib.pyplot')
        if plt is None or not hasattr(plt, 'get_fignums'):
            return
        for number in plt.get_fignums():
            figure = plt.figure(number)
            image = io.BytesIO()
            figure.savefig(image, format='png', bbox_inches='tight')
            send(DISPLAY, [(b'image/png', image.getvalue()), (b'text/plain', repr(figure).encode())])
        plt.close('all')

    class InlineBackend:
        """A matplotlib backend: Agg, with a show() that shows. Made when matplotlib asks for it."""
        NAME = 'pvmm_inline'

        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, cls) if name == cls.NAME else None

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            from matplotlib.backend_bases import FigureManagerBase
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            module.FigureCanvas = FigureCanvasAgg
            module.FigureManager = FigureManagerBase
            module.show = lambda *args, **options: show_figures()

    sys.meta_path.append(InlineBackend)
    os.environ.setdefault('MPLBACKEND', 'module://' + InlineBackend.NAME)

    # What the code sees as its own module.
    main = types.ModuleType('__main__')
    main.__builtins__ = builtins
    sys.modules['__main__'] = main
    sys.argv = ['']
    builtins.display = display
    space = main.__dict__
    loop = None
    count = 0

    def wait_for(coroutine):
        nonlocal loop
        import asyncio
        if loop is None or loop.is_closed():
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException:
                    pass
            raise

    def evaluate(code):
        value = eval(code, space)
        if code.co_flags & CO_COROUTINE:
            value = wait_for(value)
        return value

    def parse(text, name, flags):
        flags |= ast.PyCF_ONLY_AST
        try:
            return compile(text, name, 'exec', flags, dont_inherit=True)
        except SyntaxError:
            pass
        # Code for notebooks has lines that a shell runs.
        lines, line_of_shell = text.split('\n'), re.compile(r'(\s*)(?:!|%(?=pip ))(.+)')
        for at, line in enumerate(lines):
            if found := line_of_shell.fullmatch(line):
                call = '%s_exit_code = __import__("subprocess").call(%r, shell=True)'
                lines[at] = call % found.groups()
        return compile('\n'.join(lines), name, 'exec', flags, dont_inherit=True)

    def execute(text):
        name = '%s%d>' % (CELL, count)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = parse(text, name, flags)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not text.rstrip().endswith(';'):
            last = ast.Expression(tree.body.pop().value)
        if tree.body:
            evaluate(compile(tree, name, 'exec', flags, dont_inherit=True))
        if last is not None:
            value = evaluate(compile(last, name, 'eval', flags, dont_inherit=True))
            if value is not None:
                builtins._ = value
                show_figures()
                send(RESULT, bundle_of(value))
        show_figures()

    def report(error):
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith(CELL):
            frames = frames.tb_next
        last = frames
        while last is not None and last.tb_next is not None:
            if last.tb_next.tb_frame.f_code in (interrupt.__code__, send.__code__):
                last.tb_next = None
            last = last.tb_next
        try:
            text = ''.join(traceback.format_exception(type(error), error, frames))
            value = str(error)
        except BaseException:
            text, value = 'the traceback cannot be made', ''
        limit = lambda text, most: text.encode('utf-8', 'replace')[:most]
        send(ERROR, [(b'name', limit(type(error).__name__, 256)), (b'value', limit(value, MAX_TEXT)),
                     (b'traceback', limit(text, MAX_TEXT))])

    def run(text):
        signal.signal(signal.SIGINT, interrupt)
        error = None
        try:
            try:
                state.running = True
                execute(text)
            except BaseException as caught:
                error = caught
            state.running = False
        except KeyboardInterrupt as caught:
            state.running = False
            error = error or caught
        state.late = False
        if os.getpid() != home:
            # A child that the code forked and did not end: it must not answer for its parent.
            flush()
            os._exit(0)
        if error is not None:
            report(error)

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors='replace')
    signal.signal(signal.SIGINT, interrupt)
    version = '%d.%d.%d' % sys.version_info[:3]
    send(READY, [(b'version', version.encode())])
    if os.environ.pop('PVMM_SPARE', None):
        # Started before anybody asked: environment and working directory come with the first request.
        size, = struct.unpack('<I', receive(4))
        for record in receive(size).split(b'\0'):
            kind, _, value = record.partition(b' ')
            if kind == b'cwd':
                os.chdir(value)
            elif kind == b'env':
                name, _, value = value.partition(b'=')
                os.environb[name] = value
        # Packages may have been installed since, and the home directory may be another.
        import site
        sys.path[:] = [place for place in sys.path if place not in site.getsitepackages()]
        site.USER_BASE = site.USER_SITE = None
        site.addusersitepackages(None)
        site.addsitepackages(None)
        send(READY, [(b'version', version.encode())])
    while True:
        size, = struct.unpack('<I', receive(4))
        text = receive(size).decode('utf-8', 'replace')
        count += 1
        run(text)
        send(DONE, [])

_pvmm_main()
